"""Whatever happens to the fleet, in whatever order: nobody unusable is ever handed out, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fleet import FakeEnvoy, eventually, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.workers.addresses import EndpointTakenError
from extproc.workers.endpoints import Snapshot
from extproc.workers.metadata import Metadata
from extproc.workers.registry import Registry, WorkerExistsError
from extproc.workers.worker import Role, Status, Worker

ROLES = (Role.PREFILL, Role.DECODE)
MODELS: tuple[tuple[str, ...], ...] = ((), ("a",), ("b",), ("a", "b"))
STATUSES = (Status.PENDING, Status.READY, Status.NOT_READY, Status.FAILED)

small = st.integers(0, 3)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(ROLES), small),
        st.tuples(st.just("status"), small, st.sampled_from(STATUSES)),
        st.tuples(st.just("ready"), small, small),
        st.tuples(st.just("ready"), small, small),
        st.tuples(st.just("place"), small, small),
        st.tuples(st.just("describe"), small, st.sampled_from(MODELS)),
        st.tuples(st.just("cordon"), small, st.sampled_from(("", "", "its pod is not ready"))),
        st.tuples(st.just("load"), small, st.sampled_from((0, 0, 1))),
        st.tuples(st.just("remove"), small, small),
        st.tuples(st.just("envoy"), st.sampled_from(("hold", "release", "release", "refuse", "accept")), small),
        st.tuples(st.just("pass time"), small, small),
        st.tuples(st.just("pass time"), small, small),
    ),
    min_size=40,  # hypothesis likes short lists, and short histories show nothing
    max_size=80,
)


class Scenario:
    """One random history."""

    def __init__(self) -> None:
        self.envoy = FakeEnvoy()
        self.registry = Registry(self.envoy.publish, drain_limit=60, drain_poll=0, publish_retry=0.001)
        for role in ROLES:
            self.registry.add(spec(role, "http://w0:8000"))

    def worker(self, number: int) -> Worker | None:
        workers = list(self.registry)
        return workers[number % len(workers)] if workers else None

    async def take(self, step: tuple[str, object, object]) -> None:
        kind, first, second = step
        if kind == "add":
            assert isinstance(first, Role)
            with suppress(WorkerExistsError):
                self.registry.add(spec(first, f"http://w{second}:8000"))
        elif kind == "envoy":
            self.control_envoy(str(first))
        elif kind == "pass time":
            for _ in range(5):
                await asyncio.sleep(0)
        else:
            assert isinstance(first, int)
            worker = self.worker(first)
            if worker is not None:
                self.change(kind, worker, second)

    def change(self, kind: str, worker: Worker, value: object) -> None:
        match kind, value:
            case "status", Status():
                self.registry.set_status(worker, value)
            case "ready", int():
                self.place(worker, value)
                self.registry.set_status(worker, Status.READY)
            case "place", int():
                self.place(worker, value)
            case "describe", tuple():
                self.registry.describe(worker, Metadata(model_ids=value))
            case "cordon", str():
                self.registry.cordon(worker, value)
            case "load", int():
                worker.load = value
            case "remove", _:
                self.registry.remove(worker)

    def place(self, worker: Worker, number: int) -> None:
        with suppress(EndpointTakenError):
            self.registry.place(worker, f"10.0.0.{number}")

    def control_envoy(self, what: str) -> None:
        match what:
            case "hold":
                self.envoy.hold()
            case "release":
                self.envoy.release()
            case "refuse":
                self.envoy.refusal = ValueError("no")
            case "accept":
                self.envoy.refusal = None

    def check(self) -> None:
        for role in ROLES:
            of_role = [worker for worker in self.registry if worker.role is role]
            for model in (None, "a", "b", "nobody's"):
                usable = self.registry.usable(role, model)
                assert list(usable) == [
                    worker
                    for worker in of_role
                    if worker.status is Status.READY
                    and worker.endpoint is not None
                    and not worker.cordoned
                    and (model is None or not worker.model_ids or model in worker.model_ids)
                ]
                pairs = self.registry.pairs(model)
                assert usable in (pairs.usable_prefills, pairs.usable_decodes)
                addresses = [worker.endpoint for worker in usable]
                assert len(set(addresses)) == len(addresses)
                if not self.envoy.refusal:  # after a refusal nobody knows what Envoy has; those it had stay usable
                    assert set(addresses) <= set(self.envoy.addresses(role))
            busy = {worker.endpoint for worker in of_role if worker.status is Status.DRAINING and worker.load}
            if not self.envoy.refusal:  # their requests may still name it
                assert busy - {None} <= set(self.envoy.addresses(role))
        assert not self.envoy.overlapped

    def is_empty(self) -> bool:
        self.check()
        return not len(self.registry) and self.envoy.acknowledged == Snapshot()

    async def finish(self) -> None:
        self.envoy.refusal = None
        self.envoy.release()
        for worker in list(self.registry):
            worker.load = 0
            self.registry.remove(worker)
        await eventually(self.is_empty)
        assert not self.registry.knows_model("a")


async def _without_leftovers(run: Callable[[], Awaitable[None]]) -> None:
    before = asyncio.all_tasks()
    await run()
    await eventually(lambda: asyncio.all_tasks() == before)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_any_history(history: list[tuple[str, object, object]]) -> None:
    async def run() -> None:
        scenario = Scenario()
        for step in history:
            await scenario.take(step)
            scenario.check()
        await scenario.finish()

    asyncio.run(_without_leftovers(run))
