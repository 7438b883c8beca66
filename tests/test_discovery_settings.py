"""The options of discovery: their forms, and what goes with what."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from extproc.discovery.pod_workers import Annotations, ModelIdSource
from extproc.discovery.selectors import Selector
from extproc.discovery.source import FileSource, KubernetesSource
from extproc.flags import add_arguments, read_settings, split_prefill
from extproc.settings import Settings
from extproc.sources import SettingsError, load_settings
from extproc.workers.worker import Role

PD = "--pd-disaggregation --service-discovery"
ROLES = "--prefill-selector app=x role=prefill --decode-selector app=x role=decode"


def launch(options: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return read_settings(parser.parse_args(split_prefill(options.split())))


def complaint(options: str) -> str:
    with pytest.raises(SettingsError) as refused:
        launch(options)
    (problem,) = refused.value.problems
    return problem


def pods(settings: Settings) -> KubernetesSource:
    source = settings.source("key")
    assert isinstance(source, KubernetesSource)
    return source


def test_the_command_of_the_peers_guide() -> None:
    settings = launch(
        "--service-discovery --pd-disaggregation --prefill-selector app=sglang role=prefill --decode-selector "
        "app=sglang role=decode --service-discovery-namespace inference --service-discovery-port 8000"
    )
    source = pods(settings)
    assert source.rules.selectors == {
        Role.PREFILL: Selector.parse(["app=sglang", "role=prefill"]),
        Role.DECODE: Selector.parse(["role=decode", "app=sglang"]),
    }
    assert (source.namespace, source.rules.port, source.rules.api_key) == ("inference", 8000, "key")


def test_the_defaults_are_the_peers() -> None:
    assert Settings().source(None) is None
    source = pods(launch(f"{PD} {ROLES}"))
    assert (source.namespace, source.rules.port, source.renewal) == ("", 80, 30)
    assert source.rules.annotations == Annotations(
        "sglang.ai/bootstrap-port", "smg.ai/worker-ports", "smg.ai/kv-connector", "smg.ai/kv-engine-id"
    )
    assert source.rules.model_id is None


def test_every_option_reaches_its_place() -> None:
    settings = launch(
        f"--pd-disaggregation --discovery-provider kubernetes {ROLES} --encode-selector app=x role=encode "
        "--selector app=x role=all --model-id-from label:model --bootstrap-port-annotation a/b "
        "--worker-ports-annotation a/p --kv-connector-annotation a/c --kv-engine-id-annotation a/e "
        "--discovery-check-interval-secs 7"
    )
    source = pods(settings)
    assert set(source.rules.selectors) == set(Role)
    assert source.rules.annotations == Annotations("a/b", "a/p", "a/c", "a/e")
    assert source.rules.model_id == ModelIdSource.parse("label:model")
    assert source.renewal == 7


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    settings = launch(
        f"--pd-disaggregation --discovery-provider file --discovery-file {file} --discovery-check-interval-secs 5"
    )
    assert settings.source("key") == FileSource(file, 5, "key")


@pytest.mark.parametrize(
    "yaml_text",
    ["app=x role=a", "[app=x, role=a]", "{app: x, role: a}", "app=x,role=a", "'role=a, app=x'"],
)
def test_forms_of_a_selector(tmp_path: Path, yaml_text: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(f"service_discovery: true\npd_disaggregation: true\nprefill_selector: {yaml_text}\n")
    assert load_settings({}, {}, str(file)).prefill_selector == Selector.parse(["app=x", "role=a"])


def test_environment() -> None:
    environ = {
        "PD_EXTPROC_SERVICE_DISCOVERY": "true",
        "PD_EXTPROC_PD_DISAGGREGATION": "true",
        "PD_EXTPROC_DECODE_SELECTOR": "app=x role=decode",
        "PD_EXTPROC_MODEL_ID_FROM": "annotation:example.org/model",
    }
    settings = load_settings({}, environ)
    assert settings.decode_selector == Selector.parse(["app=x", "role=decode"])
    assert str(settings.model_id_from) == "annotation:example.org/model"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (PD, "PD mode with service discovery requires at least one non-empty selector (prefill or decode)"),
        (f"{PD} --encode-selector a=b", "PD mode with service discovery requires at least one non-empty selector"),
        ("--service-discovery", "Regular mode with service discovery requires a non-empty selector"),
        (f"{PD} {ROLES} --discovery-provider kubernetes", "Give --service-discovery or --discovery-provider, not both"),
        (f"{PD} {ROLES} --discovery-file /x", "--discovery-provider file and --discovery-file belong together"),
        ("--discovery-file /x", "--discovery-provider file and --discovery-file belong together"),
        ("--discovery-provider file", "--discovery-provider file and --discovery-file belong together"),
        (
            "--discovery-provider file --discovery-file /x --service-discovery-port 8",
            "--service-discovery-port: only with --service-discovery (or --discovery-provider kubernetes)",
        ),
        (
            "--prefill-selector a=b --model-id-from namespace",
            "--prefill-selector, --model-id-from: only with --service-discovery",
        ),
        (
            f"{PD} --prefill-selector app=x --decode-selector app=x role=decode",
            "--decode-selector selects nothing that --prefill-selector does not select, too, which goes first",
        ),
        (f"{PD} --prefill-selector app=x --selector app=x", "--selector selects nothing that --prefill-selector"),
        (f"{PD} {ROLES} --kv-connector-annotation smg.ai/kv-engine-id", "name the same annotation"),
        (f"{PD} --prefill-selector app", "--prefill-selector: 'app': expected KEY=VALUE"),
        (f"{PD} --prefill-selector app!=x", "--prefill-selector: 'app!=x': expected KEY=VALUE"),
        (f"{PD} --prefill-selector app==x", "--prefill-selector: 'app==x': expected KEY=VALUE"),
        (f"{PD} --prefill-selector app=x app=y", "no pod can have both app=x and app=y"),
        (f"{PD} --prefill-selector a/b/c=x", "'a/b/c' cannot be the name of a label"),
        (f"{PD} --prefill-selector app=-x", "'-x' cannot be the value of a label"),
        (f"{PD} {ROLES} --service-discovery-port 0", "Port must be between 1 and 65535"),
        (f"{PD} {ROLES} --service-discovery-namespace A_b", "Must be the name of a namespace"),
        (f"{PD} {ROLES} --model-id-from pod", "expected namespace, label:KEY or annotation:KEY"),
        (f"{PD} {ROLES} --model-id-from label:", "'' cannot be the name of a label or an annotation"),
        (f"{PD} {ROLES} --bootstrap-port-annotation a/b/c", "Must be the name of an annotation"),
    ],
)
def test_what_does_not_go_together(options: str, says: str) -> None:
    assert says in complaint(options)


def test_discovery_can_be_turned_off_where_a_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("service_discovery: true\npd_disaggregation: true\nprefill_selector: app=x\n")
    flags: dict[str, Any] = {"service_discovery": False}
    assert load_settings(flags, {}, str(file)).source(None) is None


def test_policies_of_roles_are_as_given() -> None:
    settings = launch(f"{PD} {ROLES} --prefill-policy cache_aware --decode-policy power_of_two")
    assert (settings.prefill_policy.value, settings.decode_policy.value) == ("cache_aware", "power_of_two")
