"""The soak's workers: they refuse, die, are removed, and come back."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Self

from product import Product
from soak_requests import BODY_LIMIT, REQUEST_SECONDS

from extproc.mock import Record, SglangMock
from extproc.workers.changes import Change
from extproc.workers.worker import Role, Worker

AFTERMATH = 0.5  # seconds after a worker's return in which requests may still feel that it was away


class Moment:
    """What the gateway began to think of a worker."""

    def __init__(self, when: float, worker: Worker, change: Change) -> None:
        self.when = when
        self._text = (
            f"{when:.3f} {worker.name} {change.value}: {worker.status.value} {worker.reason!r}, "
            f"breaker {worker.breaker.state.value}, load {worker.load}, endpoint {worker.endpoint}"
        )

    def __str__(self) -> str:
        return self._text


class SoakedProduct(Product):
    """Two prefill workers and three decode workers, which remember little, behind an Envoy with two threads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            0,
            0,
            envoy_concurrency=2,
            request_timeout_secs=REQUEST_SECONDS,
            max_payload_size=BODY_LIMIT,
            health_check_interval_secs=0.5,
            health_check_timeout_secs=10,
            health_failure_threshold=3,
            health_success_threshold=1,
            worker_transport_failures=3,
            worker_stall_secs=1,
            worker_wedge_secs=10,
            disable_circuit_breaker=False,
            cb_failure_threshold=5,
            cb_timeout_duration_secs=0.5,
            shutdown_grace_period_secs=5,
            **settings,
        )
        self.history: deque[Moment] = deque(maxlen=1000)
        self.prefills = [worker("prefill") for _ in range(2)]
        self.decodes = [worker("decode") for _ in range(3)]

    async def __aenter__(self) -> Self:
        for mock in (*self.prefills, *self.decodes):
            await mock.start()
        await super().__aenter__()
        self.mocks = [*self.prefills, *self.decodes]
        self.registered = set(self.service.registry)  # all that there have been
        self.service.registry.subscribe(self._changed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mock in self.mocks:
            await mock.stop()
        await super().__aexit__(kind, error, trace)

    def _changed(self, worker: Worker, change: Change) -> None:
        self.registered.add(worker)
        self.history.append(Moment(time.time(), worker, change))

    def happened(self, began: float, ended: float) -> str:
        """What the gateway made of its workers around a time, a line each."""
        return "\n".join(str(moment) for moment in self.history if began - 3 <= moment.when <= ended)

    async def restart(self, dead: SglangMock) -> None:
        """Start a worker in the place of one that has died, as its supervisor would."""
        await dead.stop()
        mock = worker(dead.role, port=dead.port, bootstrap_port=dead.bootstrap_port)
        await mock.start()
        for mocks in (self.mocks, self.prefills if mock.role == "prefill" else self.decodes):
            mocks[mocks.index(dead)] = mock


def worker(role: str, **where: int) -> SglangMock:
    """A worker. Half a second passes until it notices that a client left, unless it is told."""
    return SglangMock(role, record_limit=100, connect_timeout=1.5, disconnect_delay=0.5, **where)


class Why(Enum):
    """Why a worker is absent."""

    REFUSES = "refuses"
    DEAD = "dead"
    REMOVED = "removed"


@dataclass(slots=True)
class Absence:
    """The time in which a worker could not be counted on: until the gateway uses it again."""

    url: str
    role: str
    why: Why
    began: float
    ended: float = math.inf
    # Under way when it began to refuse. When they are answered it closes their connections, on which Envoy may by then
    # have sent another request: their heads went out before, and announce no end.
    legs: list[Record] = field(default_factory=list)

    def settle(self) -> None:
        """Forget the legs that have ended since, but not when."""
        for leg in [leg for leg in self.legs if leg.ended is not None]:
            self.legs.remove(leg)
            self.ended = max(self.ended, leg.ended or 0.0)

    def felt(self, began: float, ended: float) -> bool:
        """Whether a request may have felt it."""
        return self.began <= ended and (bool(self.legs) or began <= self.ended + AFTERMATH)


class Turnover:
    """While entered, takes workers away and brings them back: of each role one, the next when all are in use again."""

    def __init__(self, product: SoakedProduct, chance: random.Random) -> None:
        self.absences: list[Absence] = []
        self._product = product
        self._chance = chance
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._over.clear()
        self._tasks = [asyncio.create_task(self._go_on(role)) for role in (Role.PREFILL, Role.DECODE)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _go_on(self, role: Role) -> None:
        mocks = self._product.prefills if role is Role.PREFILL else self._product.decodes
        while not self._over.is_set():
            await self._pause(0.1, 0.8)
            mock = self._chance.choice(mocks)
            absence = Absence(mock.url, mock.role, self._chance.choice(list(Why)), time.time())
            self.absences.append(absence)
            if absence.why is Why.REFUSES:
                absence.legs = mock.live
            await self._be_absent(mock, absence.why)
            await self._product.fleet(lambda workers: all(each.usable for each in workers if each.role is role))
            absence.ended = time.time()

    async def _be_absent(self, mock: SglangMock, why: Why) -> None:
        match why:
            case Why.REFUSES:
                await mock.refuse()
                await self._pause(0.05, 1.5)
                await mock.accept()
            case Why.DEAD:
                mock.crash()
                await self._pause(0.05, 1.5)
                await self._product.restart(mock)
            case Why.REMOVED:
                await self._product.remove(mock)
                await self._pause(0, 0.3)
                await self._product.add(mock)

    async def _pause(self, least: float, most: float) -> None:
        try:
            async with asyncio.timeout(self._chance.uniform(least, most)):
                await self._over.wait()
        except TimeoutError:
            return
