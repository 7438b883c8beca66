"""Data-parallel ranks and what else is told of workers: registrations, breakers, stalls, loads, orders to the fleet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from control_rig import Api, running
from fleet import FAST, FakeEnvoy, engine, eventually, fleet, until

from extproc.control.load_report import load_report
from extproc.control.schemas import Loads, WorkerInfo, WorkerList
from extproc.mock import SglangMock
from extproc.workers.breaker import BreakerSettings
from extproc.workers.client import WorkerClient
from extproc.workers.endpoints import Health
from extproc.workers.health_state import HealthSettings
from extproc.workers.load_poll import LoadMonitor
from extproc.workers.metadata import Metadata
from extproc.workers.registration import patched, registration
from extproc.workers.registry import Registry, WorkerLeavesError
from extproc.workers.stalls import Stalls
from extproc.workers.worker import KvEngine, Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
URL = "http://10.0.0.1:8000"


def of(size: int, **labels: str) -> Metadata:
    """What an SGLang server of so many ranks says."""
    return Metadata(model_ids=("tiny",), labels={"dp_size": str(size), **labels}, runtime="sglang", dp_size=size)


async def ready(registry: Registry, size: int, role: Role = D, url: str = URL, **fields: Any) -> Worker:
    """A server of so many ranks that is in use; its first entry."""
    worker = registry.add(registration({"url": url, "worker_type": role.value, **fields}))
    registry.place(worker, worker.url.host)
    registry.describe(worker, of(size))
    registry.set_status(worker, Status.READY)
    await until(registry, lambda: worker.usable)
    return worker


@pytest.fixture
async def envoy() -> FakeEnvoy:
    return FakeEnvoy()


@pytest.fixture
async def registry(envoy: FakeEnvoy) -> AsyncIterator[Registry]:
    breaker = BreakerSettings(failure_threshold=2, success_threshold=1, timeout=1000)
    made = Registry(envoy.publish, drain_poll=0.001, breaker=breaker, dp_aware=True)
    yield made
    await made.close()


# -- registrations -----------------------------------------------------------------------------------------------------


class TestChanges:
    async def test_a_change_of_any_rank_is_one_of_all(self, registry: Registry) -> None:
        worker = await ready(registry, 3)
        spec = patched(registry.spec(worker), {"labels": {"zone": "a"}, "api_key": "k", "priority": 7})
        registry.change(worker.ranks[2], spec)
        assert len(registry) == 3
        for entry in registry:
            assert (entry.labels["zone"], entry.labels["dp_size"]) == ("a", "3")
            assert (entry.api_key, entry.priority, entry.place.zone) == ("k", 7, "a")
            assert (registry.spec(entry), entry.usable) == (spec, True)
            assert entry.model_ids == ("tiny",)

    async def test_what_pairs_need_is_every_ranks(self, registry: Registry) -> None:
        worker = await ready(registry, 2)
        registry.describe(worker, replace(of(3), layout={"page_size": "64"}))
        assert len({entry.pairing for entry in registry}) == 1
        assert len({id(entry.breaker) for entry in registry}) == 3

    async def test_engine_cores_that_are_named_anew_are_shared_out(self, registry: Registry) -> None:
        fields = {"kv_connector": "mooncake", "kv_engine_id": "e", "dp_size": 2}
        worker = registry.add(registration({"url": URL, "worker_type": "prefill", **fields}))
        registry.describe(worker, Metadata(runtime="vllm"))
        before = registry.spec(worker)
        registry.change(worker, patched(before, {"kv_engine_id": "f"}))
        assert [entry.kv_engines for entry in registry] == [(KvEngine(0, "f_dp0"),), (KvEngine(1, "f_dp1"),)]
        registry.change(worker, patched(registry.spec(worker), {"dp_size": 3}))
        assert [entry.kv_engines[0].id for entry in registry] == ["f_dp0", "f_dp1", "f_dp2"]

    async def test_one_that_the_server_has_no_more_cannot_change(self, registry: Registry) -> None:
        worker = await ready(registry, 2)
        former = worker.ranks[1]
        former.load = 1
        registry.describe(worker, of(1))
        with pytest.raises(WorkerLeavesError):
            registry.change(former, registry.spec(worker))
        former.load = 0

    async def test_one_watch_goes_by_it(self) -> None:
        async with engine(extra_info={"dp_size": 2}) as server, fleet(FAST, dp_aware=True) as f:
            worker = f.registry.add(registration({"url": server.url, "worker_type": "prefill"}))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 2)
            f.registry.change(worker.ranks[1], patched(f.registry.spec(worker), {"api_key": "k"}))
            await eventually(lambda: server.requests[-1][1].get("authorization") == "Bearer k")
            assert list(f.monitor._watches) == [worker.id]


class TestApi:
    @pytest.fixture
    async def api(self) -> AsyncIterator[Api]:
        async with running(dp_aware=True) as made:
            yield made

    async def test_each_rank_is_shown(self, api: Api) -> None:
        worker = await ready(api.registry, 2)
        shown = await api.get("/workers")
        WorkerList.model_validate(shown.json)
        found = [
            (entry["url"], entry["dp_base_url"], entry["dp_rank"], entry["dp_size"]) for entry in shown.json["workers"]
        ]
        assert found == [(f"{URL}@0", URL, 0, 2), (f"{URL}@1", URL, 1, 2)]
        one = await api.get(f"/workers/{worker.ranks[1].id}")
        WorkerInfo.model_validate(one.json)

    async def test_of_a_server_as_a_whole_there_is_nothing_of_ranks(self, api: Api) -> None:
        worker = await ready(api.registry, 1)
        assert not {"dp_base_url", "dp_rank", "dp_size"} & set((await api.get(f"/workers/{worker.id}")).json)

    async def test_patch_is_for_all_and_put_for_none(self, api: Api) -> None:
        worker = await ready(api.registry, 2)
        path = f"/workers/{worker.ranks[1].id}"
        answer = await api.ask("PUT", path, json={"url": URL, "worker_type": "decode"})
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert "PUT is not supported for data-parallel workers" in answer.json["error"]
        assert (await api.ask("PATCH", path, json={"labels": {"zone": "a"}})).status == 202
        assert [entry.labels["zone"] for entry in api.registry] == ["a", "a"]

    async def test_a_server_is_given_an_order_once(self, api: Api) -> None:
        async with SglangMock("decode", dp_size=3) as mock:
            await ready(api.registry, 3, url=mock.url)
            answer = await api.ask("POST", "/flush_cache")
            assert (answer.status, answer.json["successful"]) == (200, [mock.url])
            assert [record.path for record in mock.requests if record.method == "POST"] == ["/flush_cache"]

    async def test_a_load_is_reported_for_each_rank(self, api: Api) -> None:
        worker = await ready(api.registry, 2)
        worker.ranks[1].load = 4
        shown = (await api.get("/get_loads")).json
        Loads.model_validate(shown)
        found = [(entry["worker"], entry["dp_rank"], entry["gateway_reqs"]) for entry in shown["loads"]]
        assert found == [(f"{URL}@0", 0, 0), (f"{URL}@1", 1, 4)]


# -- breakers ----------------------------------------------------------------------------------------------------------


def fail(worker: Worker, times: int = 2) -> None:
    for _ in range(times):
        turn = worker.begin()
        worker.breaker.failed(turn)
        worker.end(turn)


class TestBreakers:
    async def settled(self) -> None:
        """Let publications happen."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def test_a_ranks_breaker_keeps_that_rank_out_and_not_its_server(
        self, registry: Registry, envoy: FakeEnvoy
    ) -> None:
        worker = await ready(registry, 2)
        fail(worker.ranks[0])
        await self.settled()
        assert [entry.name for entry in registry.usable(D, "tiny")] == [f"{URL}@1"]
        assert {entry.status for entry in registry} == {Status.READY}
        assert [endpoint.health for endpoint in envoy.acknowledged.decode] == [Health.HEALTHY]
        fail(worker.ranks[1])
        await self.settled()
        assert [endpoint.health for endpoint in envoy.acknowledged.decode] == [Health.UNHEALTHY]

    async def test_a_new_rank_has_one_by_the_registration(self, registry: Registry) -> None:
        worker = await ready(registry, 2, resilience={"cb_failure_threshold": 5})
        registry.describe(worker, of(3))
        assert [entry.breaker.settings.failure_threshold for entry in registry] == [5, 5, 5]
        registry.change(worker, patched(registry.spec(worker), {"resilience": {"cb_failure_threshold": 6}}))
        assert [entry.breaker.settings.failure_threshold for entry in registry] == [6, 6, 6]

    async def test_a_server_that_comes_back_has_all_closed(self, registry: Registry) -> None:
        worker = await ready(registry, 2)
        fail(worker.ranks[1])
        registry.set_status(worker, Status.NOT_READY)
        registry.set_status(worker, Status.READY)
        assert not any(entry.breaker.shuts_out and entry.breaker.state.value == "open" for entry in registry)


# -- what requests meet with -------------------------------------------------------------------------------------------


class TestPassiveSignals:
    SETTINGS = HealthSettings(timeout=2.0, interval=3600.0, transport_threshold=3)

    async def test_refusals_of_several_ranks_are_their_servers(self) -> None:
        async with (
            engine(extra_info={"dp_size": 3}) as server,
            engine() as second,
            fleet(self.SETTINGS, dp_aware=True) as f,
        ):
            worker = f.registry.add(registration({"url": server.url, "worker_type": "prefill"}))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 3)
            ranks = worker.ranks
            for entry in ranks:
                f.monitor.report_unreachable(entry)
            assert worker.status is Status.READY, "its own ranks are no others to go to"
            f.registry.add(registration({"url": second.url, "worker_type": "prefill"}))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 4)
            ranks[0].answers += 1
            for entry in ranks[:2]:
                f.monitor.report_unreachable(entry)
            ranks[2].answers += 1  # so it is there
            f.monitor.report_unreachable(ranks[1])
            f.monitor.report_unreachable(ranks[0])
            assert worker.status is Status.READY
            f.monitor.report_failure(ranks[1])
            assert {entry.status for entry in ranks} == {Status.NOT_READY}

    async def test_an_answer_that_makes_doubt_is_no_refusal(self) -> None:
        async with engine(extra_info={"dp_size": 2}) as server, fleet(self.SETTINGS, dp_aware=True) as f:
            worker = f.registry.add(registration({"url": server.url, "worker_type": "prefill"}))
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 2)
            server.extra_info = {"dp_size": 3}
            f.monitor._watches[worker.id]._identity.identified_at -= 60
            for _ in range(9):
                f.monitor.report_doubt(worker.ranks[1])
            assert worker.usable
            await until(f.registry, lambda: len(f.registry.usable(P, "tiny")) == 3)


async def test_a_server_is_silent_when_all_its_ranks_are(registry: Registry) -> None:
    worker = await ready(registry, 2)
    now, asked, of_rank = [0.0], [], []

    async def ask(silent: Worker) -> None:
        asked.append(silent)

    async def ask_rank(silent: Worker) -> None:
        of_rank.append(silent)

    stalls = Stalls(registry, ask, ask_rank, 10, lambda: now[0])
    worker.ranks[1].begin()
    stalls.look()
    now[0] = 11
    worker.ranks[0].answers += 1  # the other one
    stalls.look()
    await asyncio.sleep(0)
    assert (asked, of_rank) == ([], [worker.ranks[1]])
    now[0] = 22
    stalls.look()
    await asyncio.sleep(0)
    assert (asked, of_rank) == ([worker], [worker.ranks[1]])
    await stalls.stop()


# -- loads -------------------------------------------------------------------------------------------------------------


def loads(*running: int) -> bytes:
    """An SGLang's ``/v1/loads``."""
    entries = [
        {"timestamp": 1.0, "dp_rank": rank, "num_running_reqs": count, "num_waiting_reqs": 0}
        for rank, count in enumerate(running)
    ]
    return json.dumps({"loads": entries}).encode()


async def test_a_server_is_asked_once_for_the_loads_of_its_ranks_new_ones_too(registry: Registry) -> None:
    client = WorkerClient()
    monitor = LoadMonitor(registry, client, 3600)
    monitor.start()
    async with engine(mode="decode", pages={"/v1/loads": loads(3, 5, 7)}) as server:
        worker = await ready(registry, 2, url=server.url)
        await eventually(lambda: worker.engine_load)
        assert [entry.engine_load and entry.engine_load.running for entry in registry] == [3, 5]
        registry.describe(worker, of(3))
        assert [entry.engine_load and entry.engine_load.running for entry in registry] == [3, 5, 7]
        assert load_report(registry)["aggregate"]["total_running_reqs"] == 15  # type: ignore[index]
        registry.describe(worker, of(1))
        assert worker.engine_load is not None
        assert worker.engine_load.running == 15  # by what was said, until it is asked again
        registry.set_status(worker, Status.NOT_READY)
        registry.describe(worker, of(2))
        assert [entry.engine_load for entry in worker.ranks] == [None, None]
        assert server.count("/v1/loads") == 1
    await monitor.stop()
    await client.close()
