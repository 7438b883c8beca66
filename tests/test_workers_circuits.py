"""Circuit breakers in the registry: who gets requests, what Envoy is told, what people are shown."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fleet import FakeEnvoy, add_ready, spec

from extproc.control.metrics import Metrics
from extproc.control.worker_info import worker_info
from extproc.control.worker_metrics import WorkerMetrics
from extproc.workers.breaker import BreakerSettings, BreakerState
from extproc.workers.endpoints import Health
from extproc.workers.registry import Change, Registry
from extproc.workers.spec import Resilience
from extproc.workers.worker import Role, Status, Worker

P, D = Role.PREFILL, Role.DECODE
SETTINGS = BreakerSettings(failure_threshold=2, success_threshold=1, timeout=1000)


class Rig:
    """A registry behind an Envoy that acknowledges at once."""

    def __init__(self, settings: BreakerSettings = SETTINGS) -> None:
        self.envoy = FakeEnvoy()
        self.registry = Registry(self.envoy.publish, drain_poll=0.001, breaker=settings)

    async def workers(self, *urls: str, role: Role = D) -> list[Worker]:
        made = [add_ready(self.registry, role, url, "tiny") for url in urls]
        await self.settle()
        assert all(worker.usable for worker in made)
        return made

    async def settle(self) -> None:
        """Let publications happen."""
        for _ in range(10):
            await asyncio.sleep(0)

    def usable(self, model: str | None = "tiny", role: Role = D) -> list[str]:
        return [worker.name for worker in self.registry.usable(role, model)]

    def health(self) -> dict[str, Health]:
        return {endpoint.address: endpoint.health for endpoint in self.envoy.acknowledged.decode}


def fail(worker: Worker, times: int = 2) -> None:
    for _ in range(times):
        turn = worker.begin()
        worker.breaker.failed(turn)
        worker.end(turn)


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    await rig.registry.close()


async def test_a_worker_whose_breaker_is_open_gets_no_requests(rig: Rig) -> None:
    bad, good = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    before = rig.registry.usable(D, "tiny")
    fail(bad, 1)
    assert rig.registry.usable(D, "tiny") is before
    fail(bad, 1)
    for model in ("tiny", None):
        assert rig.usable(model) == [good.name]
    assert bad.status is Status.READY
    assert rig.registry.healthy(D) == (bad, good)


async def test_envoy_is_told(rig: Rig) -> None:
    bad, _ = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    assert set(rig.health().values()) == {Health.HEALTHY}
    fail(bad)
    await rig.settle()
    assert rig.health() == {"10.0.0.1:1": Health.UNHEALTHY, "10.0.0.2:1": Health.HEALTHY}
    assert bad.endpoint == "10.0.0.1:1"
    bad.breaker.rested()
    await rig.settle()
    assert set(rig.health().values()) == {Health.HEALTHY}


async def test_envoy_is_told_of_health_and_drain(rig: Rig) -> None:
    ill, goes, _ = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1")
    turn = goes.begin()
    rig.registry.set_status(ill, Status.NOT_READY, "down")
    rig.registry.remove(goes)
    await rig.settle()
    assert rig.health() == {
        "10.0.0.1:1": Health.UNHEALTHY,
        "10.0.0.2:1": Health.DRAINING,
        "10.0.0.3:1": Health.HEALTHY,
    }
    published = len(rig.envoy.published)
    rig.registry.set_status(ill, Status.FAILED, "still down")
    await rig.settle()
    assert len(rig.envoy.published) == published  # it knew
    goes.end(turn)


async def test_a_worker_that_moves_while_it_is_ill_is_placed_all_the_same(rig: Rig) -> None:
    worker = rig.registry.add(spec(D, "http://engine:1"))
    rig.registry.place(worker, "10.0.0.1")
    await rig.settle()
    rig.registry.set_status(worker, Status.NOT_READY, "down")
    rig.registry.place(worker, "10.0.0.2")
    await rig.settle()
    assert worker.endpoint == "10.0.0.2:1"
    assert rig.health() == {"10.0.0.2:1": Health.UNHEALTHY}


async def test_trials_are_limited_and_come_back_to_the_others(rig: Rig) -> None:
    bad, good = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    fail(bad)
    bad.breaker.rested()
    assert rig.usable() == [bad.name, good.name]
    turn = bad.begin()
    assert rig.usable() == [good.name]
    bad.end(turn)
    assert rig.usable() == [bad.name, good.name]
    turn = bad.begin()
    bad.answered(turn)
    bad.end(turn)
    assert bad.breaker.state is BreakerState.CLOSED
    assert rig.usable() == [bad.name, good.name]


async def test_the_last_of_a_kind_is_used_though_its_breaker_is_open(rig: Rig) -> None:
    first, second = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    fail(first)
    fail(second)
    assert rig.usable() == [first.name, second.name]
    for _ in range(SETTINGS.success_threshold):
        second.answered(second.begin())
    assert rig.usable() == [second.name]


async def test_a_kind_is_what_may_be_paired_alike_and_serves_the_model(rig: Rig) -> None:
    mine, other = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    other.labels = {"pairing_protocol": "x"}
    other.update_pairing()
    fail(mine)
    assert rig.usable() == [mine.name, other.name]
    third = add_ready(rig.registry, D, "http://10.0.0.3:1", "other-model")
    await rig.settle()
    assert rig.usable() == [mine.name, other.name]  # the third serves something else
    assert rig.usable("other-model") == [third.name]
    assert rig.usable(None) == [other.name, third.name]


async def test_a_workers_own_settings_count_and_may_change(rig: Rig) -> None:
    own = Resilience(5, 4, 3.0, 2.0, disable_circuit_breaker=False, capacity_status_codes=(529,))
    worker = rig.registry.add(spec(D, "http://10.0.0.1:1", resilience=own))
    assert worker.breaker.settings == BreakerSettings(5, 4, 3.0, 2.0, enabled=True, capacity=frozenset({529}))
    fail(worker, 5)
    assert worker.breaker.state is BreakerState.OPEN
    rig.registry.change(worker, spec(D, "http://10.0.0.1:1", resilience=own, priority=7))
    assert worker.breaker.state is BreakerState.OPEN  # this is about something else
    rig.registry.change(worker, spec(D, "http://10.0.0.1:1"))
    assert worker.breaker.settings == SETTINGS
    assert worker.breaker.state is BreakerState.CLOSED
    off = Resilience(disable_circuit_breaker=True)
    rig.registry.replace(worker, spec(D, "http://10.0.0.1:1", resilience=off))
    fail(worker, 50)
    assert worker.breaker.state is BreakerState.CLOSED


async def test_its_time_is_over_by_itself() -> None:
    rig = Rig(BreakerSettings(failure_threshold=1, timeout=0.01))
    bad, _ = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    told = asyncio.Event()
    rig.registry.subscribe(lambda _, change: told.set() if change is Change.CIRCUIT else None)
    fail(bad, 1)
    told.clear()
    async with asyncio.timeout(60):
        await told.wait()
    assert bad.breaker.state is BreakerState.HALF_OPEN
    await rig.registry.close()


async def test_one_that_was_out_and_is_healthy_again_is_tried_at_once(rig: Rig) -> None:
    bad, _ = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    fail(bad)
    rig.registry.set_status(bad, Status.NOT_READY, "down")
    rig.registry.set_status(bad, Status.READY)
    assert bad.breaker.state is BreakerState.HALF_OPEN


async def test_a_removed_worker_leaves_no_timer(rig: Rig) -> None:
    bad, _ = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    turn = bad.begin()
    fail(bad)
    rig.registry.remove(bad)
    bad.end(turn)
    async with asyncio.timeout(60):
        while bad in rig.registry:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    fail(bad, 5)  # legs that it still had
    assert rig.registry.circuits.transitions(bad) == {}
    assert bad.breaker.state is BreakerState.CLOSED


async def test_people_are_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    bad, _ = await rig.workers("http://10.0.0.1:1", "http://10.0.0.2:1")
    metrics = Metrics()
    WorkerMetrics(rig.registry, metrics)
    mine = f'role="decode",worker="{bad.name}"'
    page = metrics.render().decode()
    for state in ("closed", "open", "half_open"):  # what Prometheus measures the first increase by
        assert f'pd_worker_circuit_transitions_total{{{mine},state="{state}"}} 0' in page
    with caplog.at_level(logging.INFO):
        fail(bad)
    (record,) = [record for record in caplog.records if record.message == "circuit breaker"]
    assert (record.levelname, record.worker, record.was, record.state) == ("WARNING", bad.name, "closed", "open")
    info = worker_info(rig.registry, bad)
    assert (info["is_healthy"], info["status"]) == (False, "ready")
    assert info["status_reason"] == "circuit breaker open: too many of its requests failed; tried again in 1000 s"
    bad.breaker.pushbacks += 3
    page = metrics.render().decode()
    assert f"pd_worker_up{{{mine}}} 0" in page
    assert f"pd_worker_circuit_state{{{mine}}} 1" in page
    assert f'pd_worker_circuit_transitions_total{{{mine},state="open"}} 1' in page
    assert f"pd_worker_pushbacks_total{{{mine}}} 3" in page
    bad.breaker.rested()
    assert "half open: 0 of 1 trials" in str(worker_info(rig.registry, bad)["status_reason"])
    assert f"pd_worker_circuit_state{{{mine}}} 2" in metrics.render().decode()
