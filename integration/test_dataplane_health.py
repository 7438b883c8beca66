"""What a real Envoy makes of the health that it is told of its hosts, and what it tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from dataplane_rig import Rig, answer, hang_up, unreachable

from extproc.dataplane.hosts import HostPage, HostWatch
from extproc.names import UPSTREAM
from extproc.workers.endpoints import Health
from extproc.workers.worker import Role, Worker, WorkerUrl

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    directory: Path = tmp_path_factory.mktemp("rig")
    rig = Rig(directory)
    await rig.start()
    yield rig
    await rig.stop()


@pytest.mark.parametrize("health", [Health.UNHEALTHY, Health.DRAINING])
async def test_a_request_under_way_and_one_that_names_the_host_are_not_disturbed(rig: Rig, health: Health) -> None:
    told = asyncio.Event()

    async def behave(request, writer):  # type: ignore[no-untyped-def]
        await told.wait()
        return await answer(b"done")(request, writer)

    worker, other = await rig.worker(behave), await rig.worker()
    await rig.know(worker.endpoint, other.endpoint)
    under_way = asyncio.create_task(rig.post(worker.address))
    await worker.arrived.wait()
    await rig.know(replace(worker.endpoint, health=health), other.endpoint)
    shown = [
        host["health_status"]["eds_health_status"]
        for cluster in (await rig.envoy.admin.clusters())["cluster_statuses"]
        for host in cluster.get("host_statuses", ())
        if host["address"].get("socket_address", {}).get("port_value") == worker.port
    ]
    assert health.value in shown
    told.set()
    assert (await under_way).body == b"done"
    assert (await rig.post(worker.address)).body == b"done"  # override_host does not look at it
    assert worker.connections == 1  # nor was the connection given up
    await rig.know(worker.endpoint)
    assert (await rig.post(worker.address)).body == b"done"


async def test_a_host_that_cannot_be_connected_to_is_conspicuous(rig: Rig) -> None:
    with unreachable(refuses=True) as dead:
        fine = await rig.worker()
        await rig.know(dead.endpoint, fine.endpoint)
        workers = []
        for endpoint in (dead.endpoint, fine.endpoint):
            worker = Worker(endpoint.address, WorkerUrl("http", "w", 1), Role.DECODE)
            worker.endpoint = endpoint.address
            workers.append(worker)
        seen: list[Worker] = []
        watch = HostWatch(rig.envoy.admin, workers, seen.append, 60)
        await watch.look()
        await rig.post(f"{dead.address},{fine.address}")
        await watch.look()
        assert seen == workers[:1]
        page = HostPage()
        await rig.envoy.admin.clusters_as_text(page.feed)
        hosts = page.hosts()
        assert hosts[Role.DECODE, dead.address].failed_connects >= 1
        assert hosts[Role.DECODE, fine.address].failed_connects == 0


async def test_envoys_own_answer_says_whose_connection_broke_after_a_fail_over(rig: Rig) -> None:
    with unreachable(refuses=True) as dead:
        breaks = await rig.worker(hang_up)
        await rig.know(dead.endpoint, breaks.endpoint)
        reply = await rig.post(f"{dead.address},{breaks.address}")
        assert reply.error[1] == "decode_connection_lost"
        assert rig.extproc.responses[-1][UPSTREAM] == breaks.address
