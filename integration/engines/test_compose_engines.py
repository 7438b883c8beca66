"""compose/vllm-cpu.yaml (docs/deploy/docker.md): its image is built, and real vLLM workers run in containers."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import servers
from docker_engine import UnavailableError, engine
from docker_stack import CHAT, Answer, Stack, ask, until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines"),
]

OVERLAY = "compose/vllm-cpu.yaml"
WORKERS_IMAGE = "pd-extproc-vllm-cpu"
# Where others kept both cores busy, a build took 15 minutes and a start 10.
BUILD_SECONDS, START_SECONDS = 2400, 900.0
LARGEST = 4_000_000_000  # bytes that the workers' image may add to its base
TORCH = re.compile(r"^torch==\S+$", re.MULTILINE)
MODEL_IN_IMAGE = "/opt/engines/model"
# Builds share the machine's network: the packages' indexes may be reached from there only.
BUILD = """services:
  sidecar: &build {build: {network: host}}
  envoy-config: *build
  cpu-prefill: *build
  cpu-decode: *build
"""
MARK = "a-model"
COUNTERS = ("vllm:external_prefix_cache_hits_total", "vllm:nixl_bytes_transferred_sum")


@contextmanager
def torch_index(directory: Path) -> Iterator[str]:
    """An index with the CPU build of torch alone, wherever this machine's pip has found it."""
    (needed,) = TORCH.findall((Path(__file__).parent / "vllm-requirements.txt").read_text())
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory / "torch")]
    done = subprocess.run([*download, needed], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise UnavailableError(f"no CPU build of torch: {done.stderr.splitlines()[-1]}")
    handler = partial(QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    """Lists directories as pip wants an index."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The compose file with the overlay: built, up, and down with nothing left."""
    try:
        with engine(on_disk=True) as running, torch_index(tmp_path_factory.mktemp("index")) as index:
            running.import_base()
            running.copy_context()
            (running.context / "build.yaml").write_text(BUILD)
            models = tmp_path_factory.mktemp("models")
            (models / MARK).touch()
            stack = Stack(running, OVERLAY, "build.yaml", MODEL="", MODELS=str(models), PIP_EXTRA_INDEX_URL=index)
            stack.compose("build", timeout=BUILD_SECONDS)
            try:
                stack.up(workers=2, patience=START_SECONDS)
                yield stack
            finally:
                stack.compose("down", "--volumes", "--timeout", "20")
            assert stack.left() == []
    except UnavailableError as reason:
        pytest.skip(f"no Docker engine: {reason}")


def address(stack: Stack, container: Any) -> tuple[str, int]:
    """Where a worker listens, as seen from the host."""
    container.reload()
    return container.attrs["NetworkSettings"]["Networks"][f"{stack.project}_workers"]["IPAddress"], 8000


def counters(stack: Stack) -> tuple[float, ...]:
    """COUNTERS of the decode worker."""
    text = ask(address(stack, stack.one("cpu-decode")), "GET", "/metrics").body.decode()
    return tuple(sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))) for name in COUNTERS)


def chat(where: tuple[str, int], words: str, **members: object) -> Answer:
    """A greedy chat completion whose prompt fills several blocks."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{words} " * 40}], "temperature": 0}
    return ask(where, "POST", CHAT, body | {"max_tokens": 24} | members)


@contextmanager
def aggregated(stack: Stack) -> Iterator[tuple[str, int]]:
    """A worker as the stack's, but without a connector; its address."""
    decode = stack.one("cpu-decode")
    command = list(decode.attrs["Config"]["Cmd"])
    place = command.index("--kv-transfer-config")
    container = stack.engine.client.containers.run(
        WORKERS_IMAGE,
        command[:place] + command[place + 2 :],
        detach=True,
        network=f"{stack.project}_workers",
        volumes_from=[decode.id],
    )

    def serves() -> bool:
        container.reload()
        assert container.status == "running", container.logs(tail=20).decode()
        return ask(address(stack, container), "GET", "/health").status == 200

    try:
        until(serves, "its start", START_SECONDS)
        yield address(stack, container)
    finally:
        container.remove(force=True)


def test_the_cache_moves_and_answers_are_those_of_one_server(stack: Stack) -> None:
    before = counters(stack)
    plain = chat(stack.address, "plain")
    assert (plain.status, plain.headers["x-pd-handoff"], plain.headers["x-pd-kv"]) == (200, "nixl", "handed")
    moved = counters(stack)
    assert all(now > then for now, then in zip(moved, before, strict=True)), (before, moved)
    streamed = chat(stack.address, "streamed", stream=True)
    events = [line for line in streamed.body.decode().splitlines() if line.startswith("data: ")]
    assert streamed.status == 200
    assert events[-1] == "data: [DONE]"
    assert len(events) > 5
    assert all(now > then for now, then in zip(counters(stack), moved, strict=True))
    with aggregated(stack) as alone:
        assert chat(alone, "plain").json["choices"] == plain.json["choices"]


def test_a_directory_of_this_machine_is_the_workers(stack: Stack) -> None:
    for service in ("cpu-prefill", "cpu-decode"):
        assert stack.one(service).exec_run(["ls", "/models"]).output.split() == [MARK.encode()]


@pytest.mark.parametrize("service", ["cpu-prefill", "cpu-decode"])
def test_a_worker_that_is_killed_is_missed_at_once_and_comes_back_by_itself(stack: Stack, service: str) -> None:
    worker = stack.one(service)
    worker.kill()
    failed = chat(stack.address, "missed")
    assert failed.status in (502, 503)
    assert failed.headers["x-pd-error-code"]
    worker.start()
    until(lambda: chat(stack.address, "again").status == 200, "its return", START_SECONDS)
    before = counters(stack)
    assert chat(stack.address, f"after {service}").headers["x-pd-kv"] == "handed"
    assert all(now > then for now, then in zip(counters(stack), before, strict=True))
