"""Overload protection: when a worker has too much, who gets requests then, and what people are shown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import Asked
from fleet import Engine, FakeEnvoy, add_ready, engine, eventually, spec, until
from hypothesis import given
from hypothesis import strategies as st

from extproc.control.metrics import Metrics
from extproc.control.worker_info import worker_info
from extproc.control.worker_metrics import WorkerMetrics
from extproc.errors import GatewayError
from extproc.exchange.placed import still_sought
from extproc.policies.placement import Placer
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers.client import WorkerClient
from extproc.workers.kv_config import KvConfig
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.load_poll import LoadMonitor
from extproc.workers.metadata import Metadata
from extproc.workers.overload import Limits, OverloadSettings, excess
from extproc.workers.pairing import PairingMode
from extproc.workers.registry import Change, Registry
from extproc.workers.spec import Overload
from extproc.workers.worker import Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
ON = OverloadSettings(enabled=True)
SHED = OverloadSettings(enabled=True, shed=True)
TINY = Asked("tiny")
PAGE = 'vllm:num_requests_running{{engine="0"}} 1.0\nvllm:num_requests_waiting{{engine="0"}} {}\n'


def said(*waiting: int | None, usage: float | None = None) -> EngineLoad:
    """What an engine says of its ranks."""
    return EngineLoad(0, [RankLoad(rank, waiting=count, kv_usage=usage) for rank, count in enumerate(waiting)])


class Rig:
    """A registry behind an Envoy that acknowledges at once, and a placer with turns."""

    def __init__(self, settings: OverloadSettings = ON, pairing: PairingMode = PairingMode.LENIENT) -> None:
        self.registry = Registry(FakeEnvoy().publish, drain_poll=0.001, overload=settings, pairing=pairing)
        self.placer = Placer(self.registry, RoundRobinPolicy(), RoundRobinPolicy())
        self._ports = iter(range(1, 100))

    async def add(self, role: Role, *, runtime: str = "", connector: str = "", own: Overload | None = None) -> Worker:
        url = f"http://10.0.0.{next(self._ports)}:1"
        kv = KvConfig(connector=connector)
        worker = self.registry.add(spec(role, url, runtime=runtime or None, kv=kv, overload=own or Overload()))
        self.registry.describe(worker, Metadata(model_ids=("tiny",)))
        self.registry.place(worker, worker.url.host)
        self.registry.set_status(worker, Status.READY)
        for _ in range(10):
            await asyncio.sleep(0)
        assert worker.usable
        return worker

    def says(self, worker: Worker, load: EngineLoad | None) -> None:
        worker.engine_load = load
        self.registry.overloads.judge(worker)

    def burden(self, *workers: Worker) -> None:
        for worker in workers:
            self.says(worker, said(8))

    def chosen(self, times: int = 8) -> set[tuple[Worker, Worker]]:
        pairs = [self.placer.pair(TINY) for _ in range(times)]
        return {(pair.prefill, pair.decodes[0]) for pair in pairs}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.registry.close()


# -- when it is too much ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "before", "over"),
    [
        (None, False, False),
        (None, True, False),
        (said(7), False, False),
        (said(8), False, True),
        (said(4, 4), False, True),  # of a server: its ranks together
        (said(7), True, True),
        (said(6), True, True),
        (said(5), True, False),
        (said(None, usage=0.79), False, False),
        (said(None, usage=0.8), False, True),
        (said(None, usage=0.73), True, True),
        (said(None, usage=0.71), True, False),
        (said(0, usage=0.9), False, True),
        (said(100, None), False, False),  # a rank does not say it: nobody knows how many wait
        (EngineLoad(0, [RankLoad(running=1000)]), True, False),
    ],
)
def test_when_an_engine_has_too_much(load: EngineLoad | None, *, before: bool, over: bool) -> None:
    assert bool(excess(Limits(8, 0.8), load, before=before)) is over
    assert not excess(Limits(), load, before=before)


@given(limit=st.integers(1, 50), waiting=st.integers(0, 100))
def test_who_begins_to_have_too_much_has_not_enough_at_once(limit: int, waiting: int) -> None:
    limits = Limits(limit)
    if excess(limits, said(waiting), before=False):
        assert excess(limits, said(waiting), before=True)
    assert not excess(limits, said(0), before=True)


async def test_a_workers_own_limits(rig: Rig) -> None:
    strict = await rig.add(D, own=Overload(waiting_requests=2))
    rig.says(strict, said(2))
    assert strict.overloaded == "2 requests wait (limit 2)"
    rig.says(strict, said(0, usage=0.8))  # the other is the fleet's
    assert strict.overloaded == "80% of its KV cache is in use (limit 80%)"


async def test_limits_of_its_own_count_though_protection_is_off() -> None:
    rig = Rig(OverloadSettings())
    common, own = await rig.add(D), await rig.add(D, own=Overload(token_usage=0.5))
    for worker in (common, own):
        rig.says(worker, said(100, usage=0.6))
    assert not common.overloaded
    assert own.overloaded == "60% of its KV cache is in use (limit 50%)"
    rig.registry.change(own, spec(D, str(own.url)))
    assert not own.overloaded
    await rig.registry.close()


# -- who gets requests ------------------------------------------------------------------------------------------------


async def test_who_has_too_much_gets_none_while_there_are_others(rig: Rig) -> None:
    p1, p2 = await rig.add(P), await rig.add(P)
    d1, d2 = await rig.add(D), await rig.add(D)
    before = rig.registry.pairs("tiny")
    rig.burden(p1, d2)
    assert rig.chosen() == {(p2, d1)}
    for model in ("tiny", None, "unknown"):
        assert p1 not in rig.registry.usable(P, model)
    assert rig.registry.healthy(P) == (p1, p2)
    assert rig.registry.readiness().ready
    rig.says(p1, said(0))
    rig.says(d2, None)
    assert {worker for pair in rig.chosen() for worker in pair} == {p1, p2, d1, d2}
    assert rig.registry.pairs("tiny") is not before


async def test_the_least_loaded_of_all_that_have_too_much(rig: Rig) -> None:
    prefills = [await rig.add(P) for _ in range(3)]
    decodes = [await rig.add(D) for _ in range(2)]
    rig.burden(*prefills, decodes[0])
    prefills[0].load = prefills[2].load = 2
    assert rig.chosen() == {(prefills[1], decodes[1])}
    prefills[1].load = 3
    rig.says(prefills[2], said(20))
    assert rig.chosen() == {(prefills[0], decodes[1])}
    rig.burden(decodes[1])
    decodes[0].load = 1
    assert rig.placer.pair(TINY).decodes == (decodes[1], decodes[0])


async def test_then_requests_are_turned_away_if_that_is_wanted() -> None:
    rig = Rig(SHED)
    prefill, other = await rig.add(P), await rig.add(P)
    decode = await rig.add(D)
    rig.burden(prefill)
    assert rig.chosen() == {(other, decode)}
    rig.burden(other)
    with pytest.raises(GatewayError, match="All prefill workers") as shed:
        rig.placer.pair(TINY)
    assert (shed.value.status, shed.value.fault.code) == (503, "worker_overload_protection_shed")
    assert (b"retry-after", b"1") in shed.value.headers
    with pytest.raises(GatewayError, match="All prefill workers") as shed:
        rig.placer.prefills(TINY)
    rig.says(other, said(0))
    rig.burden(decode)
    with pytest.raises(GatewayError, match="All decode workers"):
        rig.placer.pair(TINY)
    assert rig.placer.decodes(TINY) == ()
    assert rig.placer.alike(TINY, decode) == ()
    assert not rig.placer.has_pair(TINY, (), other)
    rig.registry.set_status(decode, Status.NOT_READY)
    with pytest.raises(GatewayError, match="No decode worker"):
        rig.placer.pair(TINY)
    await rig.registry.close()


async def test_pairing_is_kept(rig: Rig) -> None:
    """The only partner of a prefill worker is used although it has too much, if there is no better pair."""
    nixl = [await rig.add(role, runtime="vllm", connector="NixlConnector") for role in (P, D)]
    mooncake = [await rig.add(role, runtime="vllm", connector="MooncakeConnector") for role in (P, D)]
    rig.burden(nixl[1])
    assert rig.chosen() == {tuple(mooncake)}
    assert "no usable" not in rig.registry.trouble(nixl[0])
    rig.burden(mooncake[0])
    assert rig.chosen() in ({tuple(mooncake)}, {tuple(nixl)})  # one has too much in either pair
    rig.registry.set_status(mooncake[1], Status.NOT_READY)
    assert rig.chosen() == {tuple(nixl)}


async def test_another_attempt_goes_to_who_has_too_much_rather_than_nowhere(rig: Rig) -> None:
    p1, p2 = await rig.add(P), await rig.add(P)
    d1, d2 = await rig.add(D), await rig.add(D)
    rig.burden(p2, d2)
    assert rig.placer.pair(TINY, (p1,), p1).prefill is p2
    assert rig.placer.has_pair(TINY, (p1,), p1)
    assert rig.placer.pair(TINY, (d1,), p1).decodes == (d2,)
    assert rig.placer.alike(TINY, d1, (d1,)) == (d2,)
    assert rig.placer.alike(TINY, d1) == (d1,)


async def test_one_worker_alone_is_chosen_so_too(rig: Rig) -> None:
    p1, p2, d1 = await rig.add(P), await rig.add(P), await rig.add(D)
    rig.burden(p1)
    assert rig.placer.prefills(TINY) == (p2,)
    rig.burden(p2, d1)
    p1.load = 1
    assert rig.placer.prefills(TINY) == (p2, p1)
    assert rig.placer.decodes(TINY) == (d1,)


async def test_decodes_that_got_too_much_during_the_prefill_are_passed_over(rig: Rig) -> None:
    d1, d2 = await rig.add(D), await rig.add(D)
    rig.burden(d1)
    assert still_sought((d1, d2)) == (d2,)
    rig.burden(d2)
    assert still_sought((d1, d2)) == (d1, d2)


# -- what people see --------------------------------------------------------------------------------------------------


async def test_it_is_shown_and_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    worker = await rig.add(D)
    await rig.add(P)
    told: list[Change] = []
    rig.registry.subscribe(lambda _, change: told.append(change))
    metrics = Metrics()
    WorkerMetrics(rig.registry, metrics)
    caplog.set_level(logging.INFO, "extproc.workers.overload")
    for waiting in (8, 9, 12):
        rig.says(worker, said(waiting))
    shown = worker_info(rig.registry, worker)
    assert shown["status_reason"] == "overloaded: 12 requests wait (limit 8)"
    assert (shown["status"], shown["is_healthy"]) == ("ready", True)
    named = f'{{role="decode",worker="{worker.name}"}}'
    page = metrics.render().decode()
    assert f"pd_worker_overloaded{named} 1" in page
    assert f"pd_worker_overloads_total{named} 1" in page
    assert f"pd_worker_up{named} 1" in page
    rig.says(worker, said(0))
    assert "status_reason" not in worker_info(rig.registry, worker)
    assert f"pd_worker_overloaded{named} 0" in metrics.render().decode()
    assert [record.message for record in caplog.records] == [
        "worker is overloaded",
        "worker is not overloaded any more",
    ]
    assert told == [Change.OVERLOAD] * 2


# -- by asking --------------------------------------------------------------------------------------------------------


async def _asked(server: Engine, interval: float, settings: OverloadSettings) -> tuple[Registry, LoadMonitor, Any]:
    registry, client = Registry(FakeEnvoy().publish, drain_poll=0.001, overload=settings), WorkerClient()
    worker = add_ready(registry, D, server.url, ip="127.0.0.1")
    worker.runtime = "vllm"
    await until(registry, lambda: worker.usable)
    monitor = LoadMonitor(registry, client, interval)
    monitor.start()
    return registry, monitor, client


async def test_by_asking_and_sooner_while_it_has_too_much() -> None:
    """A worker that has too much is asked ten times as often; what it says counts as long as ever."""
    async with engine(owner="vllm", pages={"/metrics/": PAGE.format("9.0").encode()}) as server:
        registry, monitor, client = await _asked(server, 1.0, ON)
        (worker,) = registry
        await eventually(lambda: worker.overloaded)
        expiry = next(iter(monitor._targets.values())).expiry
        assert expiry is not None
        assert worker.engine_load is not None
        assert expiry.when() - worker.engine_load.at > 2, "what it says must count as long as ever"
        server.pages["/metrics/"] = PAGE.format("0.0").encode()
        before = server.count("/metrics/")
        await eventually(lambda: not worker.overloaded)
        assert server.count("/metrics/") == before + 1
        await monitor.stop()
        await registry.close()
        await client.close()


async def test_what_was_said_too_long_ago_is_not_too_much() -> None:
    async with engine(owner="vllm", pages={"/metrics/": PAGE.format("9.0").encode()}) as server:
        registry, monitor, client = await _asked(server, 0.05, ON)
        (worker,) = registry
        await eventually(lambda: worker.overloaded)
        server.pages["/metrics/"] = 500
        await eventually(lambda: not worker.overloaded)
        assert worker.engine_load is None
        await monitor.stop()
        await registry.close()
        await client.close()
