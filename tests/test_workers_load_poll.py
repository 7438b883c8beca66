"""Asking workers how loaded they are: whom, where, how often, and how long an answer counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fleet import LONG, Engine, FakeEnvoy, add_ready, engine, eventually, spec, until

from extproc.workers import envoy_load, load_poll
from extproc.workers.client import WorkerClient
from extproc.workers.envoy_load import EnvoyLoadMonitor
from extproc.workers.load_poll import LoadMonitor
from extproc.workers.metadata import Metadata
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
DATA = Path(__file__).parent / "data" / "load"
SGLANG = (DATA / "sglang-0.5.23-decode.json").read_bytes()
VLLM = (DATA / "vllm-0.32.0-metrics.txt").read_bytes()
OLD = b'[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":900}]'


class Rig:
    """A registry whose workers are asked all the time."""

    def __init__(self, interval: float) -> None:
        self.registry = Registry(FakeEnvoy().publish, drain_poll=0.001)
        self.client = WorkerClient()
        self.monitor = LoadMonitor(self.registry, self.client, interval)

    async def add(self, server: Engine, role: Role = D, runtime: str = "sglang", **more: Any) -> Worker:
        """A usable worker."""
        worker = self.registry.add(spec(role, server.url, runtime=runtime, **more))
        self.registry.place(worker, "127.0.0.1")
        self.registry.set_status(worker, Status.READY)
        await until(self.registry, lambda: worker.usable)
        return worker


@asynccontextmanager
async def asking(interval: float = 0.01) -> AsyncIterator[Rig]:
    rig = Rig(interval)
    rig.monitor.start()
    try:
        yield rig
    finally:
        await rig.monitor.stop()
        await rig.registry.close()
        await rig.client.close()
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("load-")] == []


async def test_what_of_ours_was_under_way_then_is_kept_beside_it() -> None:
    """For policies: its figures have our own requests in them."""
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking(interval=0.05) as rig:
        worker = await rig.add(server)
        await eventually(lambda: worker.engine_load)
        worker.begin(700)
        before = worker.engine_load
        await eventually(lambda: worker.engine_load not in (None, before))
        assert (worker.load_then, worker.tokens_then) == (1, 700)
        worker.end(0, 700)


async def test_sglang_is_asked_for_its_loads_with_its_key() -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking() as rig:
        worker = await rig.add(server, api_key="s3cret")
        await eventually(lambda: worker.engine_load)
        assert worker.engine_load is not None
        assert (worker.engine_load.waiting, worker.engine_load.max_running) == (1, 2048)
        path, headers = server.requests[0]
        assert path == "/v1/loads"
        assert headers["authorization"] == "Bearer s3cret"
        assert headers["accept-encoding"] == "identity"


async def test_vllm_is_asked_for_a_few_metrics() -> None:
    pages: dict[str, bytes | int] = {"/metrics/": VLLM}
    async with engine(owner="vllm", pages=pages) as server, asking() as rig:
        worker = await rig.add(server, runtime="vllm")
        await eventually(lambda: server.count("/metrics/") > 2 and worker.engine_load)
        assert worker.engine_load is not None
        assert (worker.engine_load.running, worker.engine_load.waiting) == (16, 3)
        assert {path for path, _ in server.requests} == {"/metrics/"}


async def test_vllm_whose_few_metrics_are_none_is_asked_for_the_whole_page() -> None:
    pages: dict[str, bytes | int] = {"/metrics/": b"# EOF\n", "/metrics": VLLM}
    async with engine(owner="vllm", pages=pages) as server, asking() as rig:
        worker = await rig.add(server, runtime="vllm")
        await eventually(lambda: server.count("/metrics") > 2 and worker.engine_load)
        assert server.count("/metrics/") == 1, "what was tried in vain is not tried again"


@pytest.mark.parametrize("absent", [404, 405, 501, b"<html>a page for people</html>"])
async def test_what_is_not_there_is_remembered(absent: bytes | int) -> None:
    async with engine(pages={"/v1/loads": absent, "/get_load": OLD}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: server.count("/get_load") > 2 and worker.engine_load)
        assert worker.engine_load is not None
        assert (worker.engine_load.running, worker.engine_load.waiting) == (3, 2)
        assert server.count("/v1/loads") == 1


async def test_one_that_was_not_identified_is_asked_everywhere() -> None:
    async with engine(owner="vllm", pages={"/metrics": VLLM}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: worker.engine_load)
        assert [path for path, _ in server.requests[:4]] == ["/v1/loads", "/get_load", "/metrics/", "/metrics"]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_failure_is_not_an_absence(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "extproc.workers.load_poll")
    async with engine(pages={"/v1/loads": status}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: server.count("/v1/loads") > 2)
        assert worker.engine_load is None
        server.pages["/v1/loads"] = SGLANG
        await eventually(lambda: worker.engine_load)
        assert {path for path, _ in server.requests} == {"/v1/loads"}
    assert [record.__dict__["reason"] for record in caplog.records] == [f"GET /v1/loads: HTTP {status}"]


async def test_an_engine_that_says_nothing_is_asked_less_often_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "extproc.workers.load_poll"):
        async with engine() as server, asking() as rig:
            worker = await rig.add(server)
            await eventually(lambda: server.count("/metrics") > 1)
            assert worker.engine_load is None
            server.pages["/get_load"] = OLD
            await eventually(lambda: worker.engine_load)
    assert [(record.message, record.__dict__["reason"]) for record in caplog.records] == [
        ("how loaded the engine is, is not known", "it says it nowhere")
    ]


async def test_ranks_that_have_not_reported_yet_are_no_load() -> None:
    async with engine(pages={"/v1/loads": b'{"loads": []}'}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: server.count("/v1/loads") > 2)
        assert worker.engine_load is None
        assert server.count("/get_load") == 0


async def test_only_usable_workers_are_asked() -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: worker.engine_load)
        rig.registry.set_status(worker, Status.NOT_READY)
        assert worker.engine_load is None, "what it said before does not count any more"
        await rig.client.get(worker, "/health", within=LONG)  # comes after a question that was on its way
        asked = len(server.requests)
        await asyncio.sleep(0.05)
        assert len(server.requests) == asked
        rig.registry.set_status(worker, Status.READY)
        await eventually(lambda: worker.engine_load)
        rig.registry.remove(worker)
        assert worker.engine_load is None


async def test_workers_that_were_there_before_are_asked() -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server:
        rig = Rig(0.01)
        worker = await rig.add(server)
        rig.monitor.start()
        await eventually(lambda: worker.engine_load)
        await rig.monitor.stop()
        assert worker.engine_load is None
        await rig.registry.close()
        await rig.client.close()


async def test_an_answer_counts_for_three_intervals() -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking(0.05) as rig:
        worker = await rig.add(server)
        await eventually(lambda: worker.engine_load)
        server.hang = True
        said = worker.engine_load
        assert said is not None
        await eventually(lambda: worker.engine_load is None)
        assert asyncio.get_running_loop().time() - said.at >= 3 * 0.05


async def test_another_identity_is_asked_anew() -> None:
    async with engine(pages={"/get_load": OLD}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: worker.engine_load)
        assert server.count("/v1/loads") == 1
        server.pages["/v1/loads"] = SGLANG
        rig.registry.describe(worker, Metadata(model_ids=("tiny",)))
        await eventually(lambda: worker.engine_load is not None and worker.engine_load.max_running == 2048)


async def test_ranks_of_one_server_share_a_question() -> None:
    two = SGLANG.replace(b'"dp_rank":0', b'"dp_rank":1').split(b'"loads":[', 1)[1]
    async with engine(pages={"/v1/loads": SGLANG.replace(b"]}\n", b",") + two}) as server, asking(10) as rig:
        entries = [rig.registry.add(spec(role, server.url, runtime="sglang")) for role in (P, D)]
        for rank, worker in enumerate(entries):
            worker.dp_rank = rank
            rig.registry.place(worker, "127.0.0.1")
            rig.registry.set_status(worker, Status.READY)
        await eventually(lambda: all(worker.engine_load for worker in entries))
        loads = [worker.engine_load for worker in entries]
        assert [[rank.rank for rank in load.ranks] for load in loads if load is not None] == [[0], [1]]
        assert server.count("/v1/loads") == 1


async def test_a_rank_of_which_nothing_is_said_has_no_load() -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking() as rig:
        worker = await rig.add(server)
        worker.dp_rank = 1
        await eventually(lambda: server.count("/v1/loads") > 2)
        assert worker.engine_load is None


async def test_what_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_poll, "LARGEST", 2000)
    async with engine(pages={"/v1/loads": SGLANG + b" " * 2000}) as server, asking() as rig:
        worker = await rig.add(server)
        await eventually(lambda: server.count("/v1/loads") > 2)
        assert worker.engine_load is None


async def test_a_defect_does_not_end_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking() as rig:
        with monkeypatch.context() as patch:
            patch.setattr(load_poll, "with_limit", None)
            worker = await rig.add(server)
            await eventually(lambda: server.count("/v1/loads") > 2)
        await eventually(lambda: worker.engine_load)


@pytest.mark.parametrize("label", ["max_num_seqs", "max_running_requests"])
async def test_a_label_says_how_many_requests_may_run(label: str) -> None:
    pages: dict[str, bytes | int] = {"/metrics/": VLLM}
    async with engine(owner="vllm", pages=pages) as server, asking() as rig:
        worker = await rig.add(server, runtime="vllm", labels={label: "16"})
        await eventually(lambda: worker.engine_load)
        assert worker.engine_load is not None
        assert worker.engine_load.max_running == 16


async def test_a_large_fleet_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_poll, "MOST_PER_SECOND", 100)
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking() as rig:
        registry = rig.registry
        await rig.add(server)
        (target,) = rig.monitor._targets.values()
        assert rig.monitor._period(target) == pytest.approx(0.01)
        for number in range(2, 5):
            registry.place(registry.add(spec(D, f"http://127.0.0.{number}:{server.port}")), f"127.0.0.{number}")
        for worker in registry:
            registry.set_status(worker, Status.READY)
        await until(registry, lambda: all(worker.usable for worker in registry))
        assert rig.monitor._period(target) == pytest.approx(0.04)


async def test_a_worker_may_have_an_interval_of_its_own() -> None:
    async with engine(pages={"/v1/loads": SGLANG}) as server, asking(60) as rig:
        await rig.add(server, load_monitor_interval_secs=0.01)
        await eventually(lambda: server.count("/v1/loads") > 3)


class TestEnvoy:
    async def test_what_envoy_has_under_way(self) -> None:
        registry = Registry(FakeEnvoy().publish)
        prefill, decode = add_ready(registry, P, "http://10.0.0.1:1"), add_ready(registry, D, "http://10.0.0.1:1")
        elsewhere = registry.add(spec(D, "http://10.0.0.2:1"))
        await until(registry, lambda: prefill.usable and decode.usable)
        counts = {("prefill", "10.0.0.1:1"): 3, ("decode", "10.0.0.1:1"): 0, ("decode", "10.0.0.2:1"): 5}

        async def ask() -> dict[tuple[str, str], int]:
            return counts

        monitor = EnvoyLoadMonitor(registry, ask, 0.01)
        monitor.start()
        await eventually(lambda: prefill.envoy_active == 3)
        assert decode.envoy_active == 0
        assert elsewhere.envoy_active is None, "Envoy has not acknowledged it"
        counts.clear()
        await eventually(lambda: prefill.envoy_active is None)
        await monitor.stop()
        await registry.close()

    @pytest.mark.parametrize("trouble", [aiohttp.ClientError("gone"), TimeoutError(), ValueError("defect")])
    async def test_an_envoy_that_does_not_answer(self, trouble: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(envoy_load, "time", SimpleNamespace(monotonic=lambda: now[0]))
        registry = Registry(FakeEnvoy().publish)
        worker = add_ready(registry, P, "http://10.0.0.1:1")
        await until(registry, lambda: worker.usable)
        trouble_now: list[Exception] = []
        asked = 0

        async def ask() -> dict[tuple[str, str], int]:
            nonlocal asked
            asked += 1
            if trouble_now:
                raise trouble_now[0]
            return {("prefill", "10.0.0.1:1"): 3}

        monitor = EnvoyLoadMonitor(registry, ask, interval := 0.01)
        monitor.start()
        await eventually(lambda: worker.envoy_active == 3)
        trouble_now.append(trouble)
        now[0] += 1.9 * interval
        before = asked
        await eventually(lambda: asked > before + 2)
        assert worker.envoy_active == 3, "the last answer still counts"
        now[0] += 0.2 * interval
        await eventually(lambda: worker.envoy_active is None)
        trouble_now.clear()
        await eventually(lambda: worker.envoy_active == 3)
        await monitor.stop()
        assert worker.envoy_active is None
        await registry.close()
