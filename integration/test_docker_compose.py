"""The image and the compose file in a real Docker engine (docker_engine.py), as docs/deploy/docker.md has them used."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from docker_engine import BASE, IMAGE, ROOT, Engine, UnavailableError, compose_command, engine
from docker_stack import KEY, Stack, ask, until

SIDECAR_ONLY = f"{IMAGE}:sidecar"
LARGEST = 500_000_000  # bytes that the image may add to its base: Python packages, and Envoy
# Builds share the machine's network, as those before did, whose layers they find; and compose is which there is.
PROGRAM = """docker() {
  case $1 in
    build) command docker build --network host "${@:2}" ;;
    compose) $COMPOSE "${@:2}" ;;
    *) command docker "$@" ;;
  esac
}"""
ADMIN = "http://127.0.0.1:9901/ready"


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[Engine]:
    """An engine with our image, or no tests."""
    try:
        with engine() as running:
            running.import_base()
            running.build(IMAGE, "gateway")
            yield running
    except UnavailableError as reason:
        pytest.skip(f"no Docker engine: {reason}")


@pytest.fixture(scope="module")
def stack(docker_engine: Engine) -> Iterator[Stack]:
    """The compose file, up; and down with nothing left."""
    stack = Stack(docker_engine)
    try:
        stack.up()
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "20")
    assert stack.left() == []


def run(engine: Engine, image: str, *command: str, entrypoint: str = "sh", **options: Any) -> str:
    """What a program says that runs to its end in a container of its own."""
    said = engine.client.containers.run(
        image, list(command), entrypoint=[entrypoint], network_mode="none", remove=True, stderr=True, **options
    )
    return str(said.decode())


def test_the_image_has_what_it_needs_and_nothing_to_build_with(docker_engine: Engine) -> None:
    base, image = (docker_engine.client.images.get(name) for name in (BASE, IMAGE))
    assert image.attrs["Size"] - base.attrs["Size"] < LARGEST
    assert image.attrs["Config"]["User"] == "10001:10001"
    tools = "for tool in cc gcc g++ ld make pip git; do command -v $tool && exit 1; done; id -u; envoy --version"
    said = run(docker_engine, IMAGE, "-c", tools)
    assert said.startswith("10001\n")
    assert "/1.40." in said


def test_the_sidecar_alone_has_no_envoy(docker_engine: Engine) -> None:
    image = docker_engine.build(SIDECAR_ONLY, "sidecar")
    assert "PD_EXTPROC_NO_ENVOY=true" in image.attrs["Config"]["Env"]
    said = run(docker_engine, SIDECAR_ONLY, "-c", "command -v envoy || echo none")
    assert said == "none\n"


def test_tokenizers_load_without_what_was_left_out(docker_engine: Engine) -> None:
    load = (
        "from tokenizers import Tokenizer, models\n"
        "from transformers import AutoTokenizer, PreTrainedTokenizerFast\n"
        "from transformers.utils.chat_template_utils import render_jinja_template\n"
        "made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({'a': 0, 'b': 1}, [])))\n"
        "made.save_pretrained('/tmp/t')\n"
        "print(AutoTokenizer.from_pretrained('/tmp/t').encode('ab'))\n"
    )
    assert run(docker_engine, IMAGE, "-c", load, entrypoint="python3").splitlines()[-1] == "[0, 1]"


def test_the_whole_gateway_in_one_container(docker_engine: Engine, stack: Stack) -> None:
    container = docker_engine.client.containers.run(
        IMAGE,
        ["launch", "--pd-disaggregation", "--prefill", "http://prefill:8000", "8998", "--decode", "http://decode:8000"],
        detach=True,
        network=f"{stack.project}_workers",
        environment={"PD_EXTPROC_DRAIN_SETTLE_SECS": "0"},
    )
    try:
        until(lambda: state(container)["Health"]["Status"] == "healthy", "its health check")
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()
        address = (network["IPAddress"], 30000)
        until(lambda: ask(address, "GET", "/readiness").status == 200, "its workers")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]}
        assert ask(address, "POST", "/v1/chat/completions", body).status == 200
        container.stop(timeout=30)
        assert state(container)["ExitCode"] == 0
    finally:
        container.remove(force=True)


def state(container: Any) -> Any:
    container.reload()
    return container.attrs["State"]


@pytest.mark.parametrize(("model", "handoff"), [("tiny", "sglang"), ("tiny-vllm", "nixl")])
def test_requests_are_served_plain_and_streamed(stack: Stack, model: str, handoff: str) -> None:
    plain = stack.chat(model)
    assert (plain.status, plain.headers["x-pd-handoff"], plain.headers["x-pd-kv"]) == (200, handoff, "handed")
    assert plain.json["choices"][0]["message"]["content"]
    streamed = stack.chat(model, stream=True)
    events = [line for line in streamed.body.decode().splitlines() if line.startswith("data: ")]
    assert streamed.status == 200
    assert events[-1] == "data: [DONE]"
    assert len(events) > 10


def test_compose_takes_every_overlay(stack: Stack) -> None:
    overlays = sorted((ROOT / "compose").glob("*.yaml"))
    assert len(overlays) > 6
    for overlay in overlays:
        stack.compose("--file", f"compose/{overlay.name}", "config", "--quiet")


def test_envoys_admin_interface_is_for_its_own_container(stack: Stack) -> None:
    envoy, sidecar = stack.one("envoy"), stack.one("sidecar")
    assert envoy.exec_run(["pd-extproc", "health", ADMIN]).exit_code == 0
    assert list(envoy.attrs["NetworkSettings"]["Ports"].keys() - {"29000/tcp"}) == ["30000/tcp"]
    refused = sidecar.exec_run(["pd-extproc", "health", ADMIN.replace("127.0.0.1", "envoy")])
    assert (refused.exit_code, b"refused" in refused.output) == (1, True)
    for path, code in (("/ready", 0), ("/stats/prometheus", 0), ("/clusters", 0), ("/", 1), ("/quitquitquit", 1)):
        assert sidecar.exec_run(["pd-extproc", "health", f"http://envoy:9902{path}"]).exit_code == code, path


def test_the_sidecar_sees_what_envoy_has_under_way(stack: Stack) -> None:
    def loads() -> list[Any]:
        return list(stack.ask("GET", "/get_loads", key=KEY).json["loads"])

    until(lambda: all("envoy_reqs" in load for load in loads()), "Envoy's requests")


def test_without_the_key_nobody_registers_a_worker(stack: Stack) -> None:
    body = {"url": "http://decode:8000", "worker_type": "decode"}
    assert stack.ask("POST", "/workers", body).status == 401


def test_a_prefill_that_is_killed_is_missed_by_its_own_requests_only(stack: Stack) -> None:
    prefill = stack.one("prefill")
    prefill.kill()
    failed = until(lambda: (answer := stack.chat()).status != 200 and answer, "the prefill's end")
    assert failed.status in (502, 503)
    assert failed.headers["x-pd-error-code"]
    assert stack.chat("tiny-vllm").status == 200
    prefill.start()
    until(lambda: stack.chat().status == 200, "the prefill's return")


def test_a_decode_more_takes_its_share(stack: Stack) -> None:
    stack.scale("decode", 2)
    try:
        second = stack.containers("decode")[1]
        address = second.attrs["NetworkSettings"]["Networks"][f"{stack.project}_workers"]["IPAddress"]
        until(lambda: state(second)["Health"]["Status"] == "healthy", "the second decode")
        url = f"http://{address}:8000"
        told = stack.ask("POST", "/workers", {"url": url, "worker_type": "decode"}, key=KEY)
        assert told.status == 202, told.body
        seen: set[str] = set()

        def both() -> bool:
            seen.add(stack.chat().headers["x-pd-decode"])
            return len(seen) == 2

        until(both, f"both decodes, of which there was {seen}")
        assert url in seen
        assert stack.ask("DELETE", f"/workers/{told.json['worker_id']}", key=KEY).status == 202
    finally:
        stack.scale("decode", 1)


def test_the_sidecar_comes_back_while_envoy_stays(stack: Stack) -> None:
    envoy, sidecar = stack.one("envoy"), stack.one("sidecar")
    began = state(envoy)["StartedAt"]
    sidecar.stop(timeout=30)
    assert state(sidecar)["ExitCode"] == 0
    missed = stack.chat()
    assert (missed.status, missed.headers["x-pd-error-code"]) == (503, "extproc_unavailable")
    sidecar.start()
    until(lambda: stack.chat().status == 200, "the sidecar's return")
    until(lambda: stack.chat("tiny-vllm", stream=True).status == 200, "the other workers' return")
    assert state(envoy)["StartedAt"] == began


def test_nobody_logs_an_error(stack: Stack) -> None:
    """After all the others: what they did to the workers are warnings. Last words of ended processes do not count."""
    lines = list(stack.lines())
    wrong = [n for n, (who, line) in enumerate(lines) if "Traceback" in line or (who == "envoy" and "][error]" in line)]
    assert not wrong, "\n".join(f"{who}: {line}" for n in wrong for who, line in lines[max(0, n - 5) : n + 40])
    said = [json.loads(line) for service, line in lines if service == "sidecar"]
    assert len(said) > 5
    assert [line for line in said if line["level"] not in ("info", "warn")] == []


def test_the_documents_commands(stack: Stack) -> None:
    """As they stand in docs/deploy/docker.md, one after the other; last of all, since they end with the stack's end."""
    text = (ROOT / "docs/deploy/docker.md").read_text()
    parts = [text.split(f"## {name}\n")[1].split("\n## ")[0] for name in ("Image", "Compose")]
    commands = [line for part in parts for line in re.findall(r"^    (.*)$", part, re.MULTILINE)]
    address = "{}:{}".format(*stack.address)
    script = "\n".join(commands).replace("127.0.0.1:30000", address)
    environment = stack.environment | {"KEY": KEY, "GATEWAY_ADDRESS": address, "COMPOSE": " ".join(compose_command())}
    done = subprocess.run(
        ["/bin/bash", "-c", f"set -eu\n{PROGRAM}\n{script}"],
        cwd=stack.engine.context,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("data: [DONE]") == 2
    assert stack.left() == []
