"""The pod of deploy/kubernetes/base: its two containers, run as the processes that they say, on other ports."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_client import Client, CutError
from processes import PATIENCE, free_port

from extproc.dataplane.process import find_envoy
from extproc.mock import Fault, Point, SglangMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE = Path(__file__).parent.parent / "deploy/kubernetes/base"
PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PORTS = ("30000", "9901", "50051", "50052", "50053")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Pod:
    """Envoy and the sidecar; ``prefill`` and ``decode`` are given instead of found."""

    def __init__(self, directory: Path, prefill: SglangMock, decode: SglangMock) -> None:
        self.decode = decode
        self._directory = directory
        self._ports = {port: str(free_port()) for port in PORTS}
        spec = yaml.safe_load((BASE / "deployment.yaml").read_text())["spec"]["template"]["spec"]
        (self._envoy,), (self._sidecar,) = spec["initContainers"], spec["containers"]
        (directory / "envoy.yaml").write_text(self._here((BASE / "envoy.yaml").read_text()))
        options: dict[str, Any] = yaml.safe_load(self._here((BASE / "gateway.yaml").read_text()))
        found = [name for name in options if "selector" in name or "service_discovery" in name]
        assert len(found) == 4
        for name in found:
            del options[name]
        options |= {"prefill": [f"{prefill.url} {prefill.bootstrap_port}"], "decode": [decode.url]}
        options |= {"prometheus_port": 0, "drain_settle_secs": 0.2, "log_level": "error"}
        (directory / "gateway.yaml").write_text(yaml.safe_dump(options))

    def _here(self, text: str) -> str:
        for port, ours in self._ports.items():
            text = text.replace(f":{port}", f":{ours}").replace(f"port_value: {port}", f"port_value: {ours}")
        return text.replace("/run/pd-extproc", str(self._directory))

    async def start(self) -> None:
        """First the init container, as the kubelet does."""
        program, *arguments = self._envoy["command"]
        assert program == "envoy"
        self.envoy = await self._run(find_envoy(None), *self._paths(arguments))
        self.sidecar = await self._run(sys.executable, "-m", "extproc", *self._paths(self._sidecar["args"]))
        self.client = Client("127.0.0.1", int(self._ports["30000"]))

    def _paths(self, arguments: list[str]) -> list[str]:
        return [
            argument.replace("/etc/envoy", str(self._directory)).replace("/etc/pd-extproc", str(self._directory))
            for argument in arguments
        ]

    async def _run(self, *command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)

    async def probe(self, name: str) -> int | None:
        """What the kubelet's gRPC probe of that name is told; None: nobody answers."""
        said = self._sidecar[name]["grpc"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._ports[str(said['port'])]}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=said["service"])
                )
            except grpc.aio.AioRpcError:
                return None
        return int(answer.status)

    async def until(self, name: str, status: int) -> None:
        """Wait until that probe says so."""
        async with asyncio.timeout(PATIENCE):
            while True:
                if await self.probe(name) == status:
                    return
                await asyncio.sleep(0.02)

    async def until_envoy_says(self, status: int) -> None:
        """Wait until the probe of Envoy's container is answered so."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    if (await self.client.get(self._envoy["readinessProbe"]["httpGet"]["path"])).status == status:
                        return
                except (ConnectionError, CutError):
                    pass
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Kill what is left."""
        await self.client.close()
        for process in (self.sidecar, self.envoy):
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pod(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pod]:
    async with AsyncExitStack() as stack:
        prefill, decode = [await stack.enter_async_context(SglangMock(role)) for role in ("prefill", "decode")]
        pod = Pod(tmp_path_factory.mktemp("pod"), prefill, decode)
        await pod.start()
        stack.push_async_callback(pod.stop)
        yield pod


async def test_both_containers_get_ready(pod: Pod):
    await pod.until("startupProbe", SERVING)
    await pod.until("readinessProbe", SERVING)
    await pod.until_envoy_says(200)
    assert await pod.probe("livenessProbe") == SERVING


@pytest.mark.parametrize("n", [1, 2])
async def test_requests_are_served(pod: Pod, n):
    answer = await pod.client.post(PATH, {**CHAT, "n": n})
    assert answer.status == 200, answer.body


async def test_a_pod_that_is_to_end_finishes_its_requests(pod: Pod):
    """The kubelet ends the main container first; Envoy, which has the connections, after it."""
    go_on = asyncio.Event()
    pod.decode.fail(Fault(hang=Point.MID_BODY, until=go_on))
    stream = await pod.client.open(PATH, {**CHAT, "stream": True})
    await stream.until(b"data: ")
    pod.sidecar.send_signal(signal.SIGTERM)
    await pod.until("readinessProbe", NOT_SERVING)
    go_on.set()
    assert (await stream.whole()).events[-1] == "[DONE]"
    async with asyncio.timeout(PATIENCE):
        assert await pod.sidecar.wait() == 0
    assert pod.envoy.returncode is None
    await pod.until_envoy_says(503)
    pod.envoy.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE):
        assert await pod.envoy.wait() == 0
