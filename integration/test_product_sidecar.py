"""The sidecar and Envoy as separate programs (``--no-envoy``): either may go and come back while the other stays.

As in containers of their own: TCP between them, both ways, and no admin interface but what of it may be read.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from http_client import Client
from processes import PATIENCE, free_port, is_alive

from extproc.dataplane.process import EnvoyProcess
from extproc.dataplane.status import STATUS_PATHS
from extproc.envoy_config import dataplane_config
from extproc.mock import Fault, Point, SglangMock
from extproc.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

DASHBOARD = Path(__file__).parent.parent / "compose/monitoring/dashboards/pd-extproc.json"
PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class Apart:
    """A sidecar process and an Envoy that was started by somebody else, with two workers."""

    def __init__(self, directory: Path, prefill: SglangMock, decode: SglangMock, address: list[str]) -> None:
        self.prefill = prefill
        self.decode = decode
        self._options = ["--pd-disaggregation", "--no-envoy", "--run-dir", str(directory), "--prometheus-port", "0"]
        self._options += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url, *address]
        given = dict(zip((flag[2:].replace("-", "_") for flag in address[::2]), address[1::2], strict=True))
        self.status = free_port()
        self._options += ["--envoy-admin-address", f"127.0.0.1:{self.status}", "--load-monitor-interval", "0.05"]
        ports = {"host": "127.0.0.1", "port": 0, "envoy_admin_port": free_port(), "prometheus_port": 0}
        ports |= {"prometheus_host": "127.0.0.1", "envoy_status_port": self.status}
        ports |= {"envoy_concurrency": 2}
        self.envoy = EnvoyProcess(dataplane_config(Settings(run_dir=str(directory), **ports, **given)))

    async def start_sidecar(self) -> None:
        command = [sys.executable, "-m", "extproc", "launch", *self._options, "--log-level", "error"]
        self._sidecar = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)

    async def kill_sidecar(self) -> None:
        self._sidecar.kill()
        await self._sidecar.wait()

    async def stop_sidecar(self) -> int:
        self._sidecar.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE):
            return await self._sidecar.wait()

    @property
    def sidecar_is_alive(self) -> bool:
        return is_alive(self._sidecar.pid)

    async def until(self, path: str, status: int) -> None:
        """Wait until ``path`` answers with ``status``."""
        async with asyncio.timeout(PATIENCE):
            while True:
                if (await self.client.get(path)).status == status:
                    return
                await asyncio.sleep(0.02)

    async def until_served(self) -> None:
        """Wait until Envoy knows the workers, too: it may have waited a second until it asked the sidecar again."""
        async with asyncio.timeout(PATIENCE):
            while True:
                if (await self.client.post(PATH, CHAT)).status == 200:
                    return
                await asyncio.sleep(0.02)

    async def start_envoy(self) -> None:
        await self.envoy.start()
        self.client = Client(*self.envoy.client_address)


def _tcp() -> list[str]:
    flags = ("--extproc-address", "--ads-address", "--control-address", "--egress-address")
    ports = [free_port() for _ in flags]
    return [word for flag, port in zip(flags, ports, strict=True) for word in (flag, f"127.0.0.1:{port}")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart() -> AsyncIterator[Apart]:
    with tempfile.TemporaryDirectory(prefix="pd-") as directory:
        async with SglangMock("prefill") as prefill, SglangMock("decode") as decode:
            apart = Apart(Path(directory), prefill, decode, _tcp())
            await apart.start_sidecar()
            await apart.start_envoy()
            await apart.until("/readiness", 200)
            await apart.until_served()
            yield apart
            await apart.client.close()
            await apart.envoy.stop(0)
            if apart.sidecar_is_alive:
                assert await apart.stop_sidecar() == 0


async def test_requests_are_served(apart: Apart):
    for n in (1, 2):
        assert (await apart.client.post(PATH, {**CHAT, "n": n})).status == 200


async def test_what_envoy_has_under_way_is_known(apart: Apart):
    apart.decode.fail(Fault(delay_token=0.05, tokens=2000))
    stream = await apart.client.open(PATH, {**CHAT, "stream": True})
    await stream.until(b"data: ")
    async with asyncio.timeout(PATIENCE):
        while True:
            loads = {load["worker"]: load for load in (await apart.client.get("/get_loads")).json["loads"]}
            if (loads[apart.decode.url].get("envoy_reqs"), loads[apart.prefill.url].get("envoy_reqs")) == (1, 0):
                break
            await asyncio.sleep(0.02)
    assert loads[apart.decode.url]["gateway_reqs"] == 1
    stream.close()
    await apart.decode.idle()
    apart.decode.behave()


@pytest.mark.parametrize("path", STATUS_PATHS)
async def test_what_of_envoys_admin_interface_only_tells_may_be_read(apart: Apart, path: str):
    client = Client("127.0.0.1", apart.status)
    answer = await client.get(path)
    assert answer.status == 200
    assert {"/ready": b"LIVE", "/clusters": b"decode::", "/stats/prometheus": b"# TYPE envoy_"}[path] in answer.body
    assert (await (await client.open(path, {}, method="POST")).whole()).status == 404
    await client.close()


@pytest.mark.parametrize("path", ["/", "/quitquitquit", "/config_dump", "/stats", "/clusters/", "/ready/../help"])
async def test_nothing_else_of_it(apart: Apart, path: str):
    client = Client("127.0.0.1", apart.status)
    assert (await client.get(path)).status == 404
    await client.close()


async def test_every_metric_of_envoys_on_the_dashboard_is_there(apart: Apart):
    assert (await apart.client.post(PATH, CHAT)).status == 200
    client = Client("127.0.0.1", apart.status)
    page = (await client.get("/stats/prometheus")).body.decode()
    await client.close()
    shown = re.findall(r"\b(envoy_\w+)(?:\{([^}]*)\})?", DASHBOARD.read_text().replace('\\"', '"'))
    metrics = [
        (name, labels) for name, labels in shown if name not in ("envoy_cluster_name", "envoy_response_code_class")
    ]
    assert len(metrics) > 10
    for name, labels in metrics:
        lines = [line for line in page.splitlines() if re.match(rf"{name}[ {{]", line)]
        for label, values in re.findall(r'(\w+)=~?"([^"]+)"', labels):
            lines = [line for line in lines if re.search(rf'{label}="({values})"', line)]
        assert lines, (name, labels)


async def test_a_killed_sidecar_is_a_503_in_json_until_it_returns(apart: Apart):
    apart.decode.fail(Fault(delay_token=0.05, tokens=2000))
    streams = [await apart.client.open(PATH, {**CHAT, "stream": True, "n": n}) for n in (1, 2)]
    for stream in streams:
        await stream.until(b"data: ")
    waiting = await apart.client.connect()
    body = b'{"model":"tiny"'
    await waiting.send(apart.client.request_head("POST", PATH, [("content-length", "100")]) + body)

    await apart.kill_sidecar()
    for stream in streams:
        assert b"[DONE]" not in await stream.cut()  # nobody is left to say more
    answer = await waiting.whole()
    assert (answer.status, answer.code) == (503, "extproc_unavailable")
    await apart.decode.idle()
    await apart.prefill.idle()
    for path, method in ((PATH, "POST"), ("/readiness", "GET"), ("/workers", "GET"), ("/rerank", "POST")):
        exchange = await apart.client.open(path, CHAT if method == "POST" else None, method=method)
        answer = await exchange.whole()
        assert (answer.status, answer.code) == (503, "extproc_unavailable")
        assert answer.header("content-type") == "application/json"
        assert answer.header("retry-after") == "1"
        assert answer.json["error"]["type"] == "server_error"
    assert (await apart.client.get("/nonsense")).status == 404  # Envoy needs nobody for that

    apart.decode.behave()
    await apart.start_sidecar()
    await apart.until("/readiness", 200)
    for n in (1, 2):
        assert (await apart.client.post(PATH, {**CHAT, "n": n})).status == 200


async def test_a_sidecar_that_stops_in_order_lets_requests_finish(apart: Apart):
    go_on = asyncio.Event()
    apart.decode.fail(Fault(hang=Point.MID_BODY, until=go_on), times=1)
    stream = await apart.client.open(PATH, {**CHAT, "stream": True})
    await stream.until(b"data: ")
    stopping = asyncio.create_task(apart.stop_sidecar())
    await _until_refused(apart)
    assert not stopping.done()
    go_on.set()
    assert (await stream.whole()).events[-1] == "[DONE]"
    assert await stopping == 0
    apart.decode.behave()
    await apart.start_sidecar()
    await apart.until("/readiness", 200)


async def test_an_envoy_that_is_started_anew(apart: Apart):
    await apart.client.close()
    await apart.envoy.stop(0)
    await apart.start_envoy()
    await apart.until("/readiness", 200)
    for n in (1, 2):
        assert (await apart.client.post(PATH, {**CHAT, "n": n})).status == 200


async def _until_refused(apart: Apart) -> None:
    """Wait until the sidecar takes no new requests, which it says, or Envoy in its place."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = await apart.client.post(PATH, CHAT)
            if answer.status != 200:
                assert answer.status == 503
                assert answer.code in ("draining", "extproc_unavailable")
                return
