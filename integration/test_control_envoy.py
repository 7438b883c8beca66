"""Workers coming and going behind a real Envoy: what the control API promises is what Envoy does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.control.api import ControlApi
from extproc.dataplane.ads import AdsServer
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.process import EnvoyProcess
from extproc.mock import SglangMock
from extproc.workers.client import WorkerClient
from extproc.workers.endpoints import PREFILL_CLUSTER
from extproc.workers.health import Monitor
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.registry import Registry
from extproc.workers.resolver import Resolver
from extproc.workers.worker import Role, Status, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

P, D = Role.PREFILL, Role.DECODE
LONG = 60.0  # seconds


class Gateway:
    """Registry, monitor, ADS and control API behind an Envoy; there is no ext_proc, for no control path needs it."""

    def __init__(self, directory: Path) -> None:
        self.names: dict[str, Sequence[str]] = {}
        self.config = DataplaneConfig(
            extproc=f"unix:{directory}/extproc.sock",
            ads=f"unix:{directory}/ads.sock",
            control=f"unix:{directory}/control.sock",
            egress=f"unix:{directory}/egress.sock",
            client_host="127.0.0.1",
            client_port=0,
            admin_port=0,
            concurrency=1,
        )
        self.ads = AdsServer(self.config.ads)
        self.registry = Registry(self.ads.publish, drain_poll=0.005)
        self.client = WorkerClient()
        self.monitor = Monitor(
            self.registry,
            self.client,
            settings=HealthSettings(interval=60),
            resolver=Resolver(self._lookup),
            pace=Pace(seek=0.02, confirm=0.02, report=0.05, resolve=0.05),
        )
        self.api = ControlApi(self.registry, self.client, self.config.control)
        self.envoy = EnvoyProcess(self.config)

    async def start(self) -> None:
        await self.ads.start()
        await self.api.start()
        await self.envoy.start()
        self.monitor.start()

    async def stop(self) -> None:
        await self.monitor.stop()
        await self.registry.close()
        await self.client.close()
        await self.envoy.stop(0)
        await self.api.stop()
        await self.ads.stop()

    async def forget(self) -> None:
        """Remove every worker; Envoy must not know one afterwards."""
        for worker in self.registry:
            worker.load = 0
            self.registry.remove(worker)
        await self.until(lambda: not len(self.registry))
        assert await self.known() == []

    async def _lookup(self, host: str, _port: int) -> Sequence[str]:
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[host]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a change of the registry that makes ``condition`` true."""
        changed = asyncio.Event()
        unsubscribe = self.registry.subscribe(lambda _worker, _change: changed.set())
        async with asyncio.timeout(LONG):
            while not condition():
                await changed.wait()
                changed.clear()
        unsubscribe()

    async def known(self, cluster: str = PREFILL_CLUSTER) -> list[str]:
        """The addresses that Envoy itself has in a role cluster."""
        clusters = (await self.envoy.admin.clusters())["cluster_statuses"]
        hosts = next((entry.get("host_statuses", []) for entry in clusters if entry["name"] == cluster), [])
        sockets = [host["address"]["socket_address"] for host in hosts]
        return [f"{socket['address']}:{socket['port_value']}" for socket in sockets]

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, Mapping[str, str], Any]:
        """A client's request through Envoy: status, headers, JSON or text."""
        host, port = self.envoy.client_address
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://{host}:{port}{path}", **more) as response,
        ):
            is_json = response.content_type == "application/json"
            return response.status, response.headers, await (response.json() if is_json else response.text())

    async def add(self, role: Role, url: str) -> Worker:
        """Register a worker as an operator does, and wait until it is usable."""
        status, _, answer = await self.ask("POST", "/workers", json={"url": url, "worker_type": role.value})
        assert status == 202
        worker = self.registry.get(answer["worker_id"])
        assert worker is not None
        await self.until(lambda: worker.usable)
        return worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("control"))
    await gateway.start()
    yield gateway
    await gateway.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(running: Gateway) -> AsyncIterator[Gateway]:
    yield running
    await running.forget()


async def test_a_fleet_comes_and_goes(gateway: Gateway) -> None:
    async with SglangMock("prefill") as prefill, SglangMock("decode") as decode:
        assert (await gateway.ask("GET", "/readiness"))[0] == 503
        worker = await gateway.add(P, prefill.url)
        assert worker.bootstrap_port == prefill.bootstrap_port
        await gateway.add(D, decode.url)
        assert await gateway.known() == [f"127.0.0.1:{prefill.port}"]
        status, _, answer = await gateway.ask("GET", "/readiness")
        assert (status, answer["healthy_workers"]) == (200, 2)
        assert (await gateway.ask("GET", "/v1/models"))[2]["data"][0]["id"] == "tiny"
        assert (await gateway.ask("GET", "/get_server_info"))[2]["disaggregation_mode"] == "prefill"
        worker.load = 1
        assert (await gateway.ask("DELETE", f"/workers/{worker.id}"))[0] == 202
        assert (await gateway.ask("GET", f"/workers/{worker.id}"))[2]["status"] == "draining"
        assert (await gateway.ask("GET", "/readiness"))[0] == 503
        assert await gateway.known() == [f"127.0.0.1:{prefill.port}"]
        worker.load = 0
        await gateway.until(lambda: gateway.registry.get(worker.id) is None)
        assert await gateway.known() == []
        assert (await gateway.ask("GET", f"/workers/{worker.id}"))[0] == 404


async def test_a_worker_may_be_removed_and_registered_again_at_once(gateway: Gateway) -> None:
    async with SglangMock("prefill") as prefill:
        worker = await gateway.add(P, prefill.url)
        for _ in range(20):
            status, _, _ = await gateway.ask("DELETE", f"/workers/{worker.id}")
            assert status == 202
            worker = await gateway.add(P, prefill.url)
            assert await gateway.known() == [f"127.0.0.1:{prefill.port}"]
        await gateway.until(lambda: list(gateway.registry) == [worker])
        assert worker.usable
        assert await gateway.known() == [f"127.0.0.1:{prefill.port}"]


async def test_the_wrong_kind_of_worker_is_kept_out_with_the_reason(gateway: Gateway) -> None:
    async with SglangMock("decode") as decode, SglangMock("regular") as regular:
        for mock, reason in ((decode, "disaggregation_mode is decode"), (regular, "not disaggregated")):
            _, _, answer = await gateway.ask("POST", "/workers", json={"url": mock.url, "worker_type": "prefill"})
            worker = gateway.registry.get(answer["worker_id"])
            assert worker is not None
            await gateway.until(partial(_is_out, worker))
            shown = (await gateway.ask("GET", answer["location"]))[2]
            assert shown["status"] == "failed"
            assert reason in shown["job_status"]["message"]
        assert gateway.registry.usable(P, None) == ()


async def test_a_crashed_worker_that_is_reported_is_out_and_returns(gateway: Gateway) -> None:
    mock = SglangMock("decode")
    await mock.start()
    worker = await gateway.add(D, mock.url)
    mock.crash()
    gateway.monitor.report_unreachable(worker)
    await gateway.until(lambda: not worker.usable)
    async with SglangMock("decode", port=mock.port):
        await gateway.until(lambda: worker.usable)
    await mock.stop()


async def test_a_worker_that_moves_is_followed(gateway: Gateway) -> None:
    async with (
        SglangMock("prefill", host="127.0.0.1") as here,
        SglangMock("prefill", host="127.0.0.2", port=here.port),
    ):
        old, new = f"127.0.0.1:{here.port}", f"127.0.0.2:{here.port}"
        gateway.names["engine"] = ["127.0.0.1"]
        worker = await gateway.add(P, f"http://engine:{here.port}")
        assert await gateway.known() == [old]
        worker.load = 1
        gateway.names["engine"] = ["127.0.0.2"]
        await gateway.until(lambda: worker.endpoint == new)
        assert set(await gateway.known()) == {old, new}
        worker.load = 0
        async with asyncio.timeout(LONG):
            while await gateway.known() != [new]:  # noqa: ASYNC110 - nobody tells when Envoy has dropped one
                await asyncio.sleep(0.01)
        await gateway.until(lambda: worker.usable)  # it is asked there how and what it is, which may take a while


async def test_many_workers_at_once(gateway: Gateway) -> None:
    mocks = [SglangMock("prefill") for _ in range(20)]
    for mock in mocks:
        await mock.start()
    workers = await asyncio.gather(*(gateway.add(P, mock.url) for mock in mocks))
    assert set(await gateway.known()) == {worker.endpoint for worker in workers}
    for mock in mocks:
        await mock.stop()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PUT", "/workers", 405, "method_not_allowed"),
        ("DELETE", "/readiness", 405, "method_not_allowed"),
        ("GET", "/nonexistent", 404, "not_found"),
        ("GET", "/v1/models/nobody's", 404, "model_not_found"),
    ],
)
async def test_errors_look_alike_from_both_sides(
    gateway: Gateway, method: str, path: str, status: int, code: str
) -> None:
    got, headers, answer = await gateway.ask(method, path)
    assert (got, answer["error"]["code"]) == (status, code)
    assert headers["x-pd-error-code"] == code


async def test_the_clients_request_id_comes_back(gateway: Gateway) -> None:
    _, headers, _ = await gateway.ask("GET", "/health", headers={"x-request-id": "mine"})
    assert headers["x-request-id"] == "mine"
    _, headers, _ = await gateway.ask("GET", "/health")
    assert headers["x-request-id"]


async def test_an_envoy_that_starts_later_gets_the_endpoints(gateway: Gateway) -> None:
    async with SglangMock("prefill") as prefill:
        await gateway.add(P, prefill.url)
        await gateway.envoy.stop(0)
        async with asyncio.timeout(LONG):
            while gateway.ads.connected:  # noqa: ASYNC110 - nobody tells when the server has noticed
                await asyncio.sleep(0.01)
        async with SglangMock("prefill") as other:
            body = {"url": other.url, "worker_type": "prefill"}
            status, _, _ = await _direct(gateway.config.control, "/workers", body)
            assert status == 202
            await gateway.until(lambda: len(gateway.registry.usable(P, None)) == 2)
            gateway.envoy = EnvoyProcess(gateway.config)
            await gateway.envoy.start()
            assert set(await gateway.known()) == {f"127.0.0.1:{prefill.port}", f"127.0.0.1:{other.port}"}


def _is_out(worker: Worker) -> bool:
    return worker.status is Status.FAILED


async def _direct(address: str, path: str, body: dict[str, Any]) -> tuple[int, Any, Any]:
    """A POST to the control API past Envoy."""
    connector = aiohttp.UnixConnector(address.removeprefix("unix:"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://control{path}", json=body) as response,
    ):
        return response.status, response.headers, await response.json()
