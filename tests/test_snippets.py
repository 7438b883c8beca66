"""What envoy-config renders for Envoys of others: the files in envoy/snippets/, and what must stand in them."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_objects import check

from extproc.cli import main
from extproc.dataplane.paths import DECODE_PATHS, DECODE_PREFIXES, PREFILL_PATHS
from extproc.dataplane.snippets import SNIPPETS
from extproc.flags import add_arguments, read_settings

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "envoy/snippets"
README = (FOLDER / "README.md").read_text()
OF_KUBERNETES = ("istio", "envoy-gateway", "inference-pool")
COMMANDS = {
    match[1]: shlex.split(match[0])[2:]
    for match in re.finditer(r"^\$ (?=pd-extproc envoy-config --snippet (\S+).*> (\S+)$).*", README, re.MULTILINE)
}


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["envoy-config", "--snippet", *arguments]) == 0
    return capsys.readouterr().out


def objects(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def test_there_is_a_file_and_a_command_for_each() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(SNIPPETS) == set(COMMANDS)


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_file_is_what_the_command_of_the_readme_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    *arguments, mark, file = COMMANDS[name]
    assert (mark, file) == (">", f"{name}.yaml")
    assert main(arguments) == 0
    assert capsys.readouterr().out == (FOLDER / file).read_text()


@pytest.mark.parametrize("name", SNIPPETS)
def test_each_says_what_it_needs_and_what_it_cannot(name: str) -> None:
    head = (FOLDER / f"{name}.yaml").read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "# - Needs " in head
    assert "# $ pd-extproc launch --no-envoy --egress direct " in head
    assert max(map(len, head.splitlines())) <= 120


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_sidecar_starts_with_what_each_says(name: str) -> None:
    head = (FOLDER / f"{name}.yaml").read_text().partition("\n\n")[0].replace("\n#   ", " ")
    (line,) = re.findall(r"^# \$ pd-extproc launch (.*)$", head, re.MULTILINE)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = read_settings(parser.parse_args(shlex.split(line.removesuffix(" --prefill ... --decode ..."))))
    assert settings.no_envoy
    assert settings.egress == "direct"
    assert settings.service_discovery is (name in OF_KUBERNETES)
    assert settings.retry_released is (name not in ("envoy-gateway", "inference-pool"))


@pytest.mark.parametrize("name", ["envoy-static", "envoy-xds", "istio"])
def test_every_filter_of_ours_fails_closed(name: str) -> None:
    ours = [each for each in walk(objects(name)) if str(each.get("@type")).endswith(".ExternalProcessor")]
    assert len(ours) == 2
    assert {each["failure_mode_allow"] for each in ours} == {False}
    assert {each["grpc_service"]["timeout"] for each in ours} == {"0s"}


def test_meshes_are_told_to_fail_closed() -> None:
    (policy,) = [each for each in objects("envoy-gateway") if each["kind"] == "EnvoyExtensionPolicy"]
    (pool,) = [each for each in objects("inference-pool") if each["kind"] == "InferencePool"]
    assert policy["spec"]["extProc"][0]["failOpen"] is False
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"


@pytest.mark.parametrize("name", OF_KUBERNETES)
def test_an_api_server_would_take_the_objects(name: str) -> None:
    for each in objects(name):
        check(each)
        assert each["metadata"]["namespace"] == "llm"


def test_what_an_api_server_would_not_take_is_found() -> None:
    (pool,) = [each for each in objects("inference-pool") if each["kind"] == "InferencePool"]
    pool["spec"]["endpointPickerRef"]["failuremode"] = "FailClose"
    with pytest.raises(jsonschema.ValidationError):
        check(pool)


@pytest.mark.parametrize("name", OF_KUBERNETES)
def test_the_routes_are_those_of_our_own_envoy(name: str) -> None:
    (routes,) = [each["spec"] for each in objects(name) if each["kind"] in ("HTTPRoute", "VirtualService")]
    if name == "istio":
        matches = routes["http"][0]["match"]
        exact = {match["uri"]["exact"] for match in matches if match.get("method") == {"exact": "POST"}}
        prefixes = {match["uri"]["prefix"] for match in matches if "method" not in match}
    else:
        matches = routes["rules"][0]["matches"]
        exact = {match["path"]["value"] for match in matches if match.get("method") == "POST"}
        prefixes = {f"{match['path']['value']}/" for match in matches if "method" not in match}
    assert exact == {*DECODE_PATHS, *PREFILL_PATHS}
    assert prefixes == set(DECODE_PREFIXES)


@pytest.mark.parametrize("name", ["istio", "envoy-gateway"])
def test_limits_are_those_of_the_settings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, name, "--max-payload-size", "1000000", "--request-timeout-secs", "60")
    found = list(walk(list(yaml.safe_load_all(text))))
    limits = [each["request_body_buffer_limit"] for each in found if "request_body_buffer_limit" in each]
    limits += [each["value"] for each in found if each.get("path") == "/request_body_buffer_limit"]
    assert limits == [1_000_000 + 2**20]
    assert "65s" in text  # the request's time and a margin
    assert "connect-failure" in text
    assert "connectTimeout: 2s" in text


@pytest.mark.parametrize("name", OF_KUBERNETES)
def test_names_are_the_operators(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--snippet-namespace", "prod", "--snippet-gateway", "edge", "--snippet-service", "picker")
    more = ("--snippet-workers", "gpus", "--snippet-worker-port", "9000", "--extproc-address", "0.0.0.0:7000")
    text = rendered(capsys, name, *names, *more)
    for other in ("inference-gateway", "pd-workers", "namespace: llm", "50051", "8000"):
        assert other not in text
    for each in yaml.safe_load_all(text):
        check(each)
        assert each["metadata"]["namespace"] == "prod"


def test_without_late_answers_istio_has_no_second_filter(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, "istio", "--no-retry-released")
    assert "name: late" not in text
    assert "name: ext_proc" in text


def test_static_workers_are_the_given_ones(capsys: pytest.CaptureFixture[str]) -> None:
    workers = ("--prefill", "https://p.test:8443", "none", "--decode", "http://10.0.0.1:8000", "--decode", "grpc://d:1")
    document = yaml.safe_load(rendered(capsys, "envoy-static", *workers))
    clusters = {each["name"]: each for each in document["static_resources"]["clusters"]}
    assert {name: clusters[name]["type"] for name in ("prefill", "decode", "decode_grpc")} == {
        "prefill": "STRICT_DNS",
        "decode": "STATIC",
        "decode_grpc": "STRICT_DNS",
    }
    (endpoint,) = clusters["prefill"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["hostname"] == "p.test"
    assert endpoint["metadata"]["filter_metadata"] == {"envoy.transport_socket_match": {"tls": True}}
    assert "endpoints" not in clusters["prefill_grpc"]["load_assignment"]


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["envoy-config", "--snippet", "linkerd"])
    assert stopped.value.code == 2
    assert "envoy-static" in capsys.readouterr().err
