"""A large fleet that changes all the time is told to Envoy at intervals, a change after a quiet time at once."""

from __future__ import annotations

import asyncio
import time

from extproc.workers.endpoints import Endpoint, Snapshot
from extproc.workers.publication import FREE, Publisher, spacing


class _Envoy:
    """Takes everything at once, and says when."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changes = 0
        self.times: list[float] = []
        self.taken = Snapshot()
        self.publisher = Publisher(self._publish, self.build, acknowledged=lambda _: None, refused=self.fail)

    def fail(self, why: str) -> None:
        raise AssertionError(why)

    def build(self) -> Snapshot:
        return Snapshot(decode=tuple(Endpoint("127.0.0.1", self.changes, "h") for _ in range(self.size)))

    async def _publish(self, snapshot: Snapshot) -> None:
        self.taken = snapshot
        self.times.append(time.monotonic())

    async def change(self) -> None:
        self.changes += 1
        await self.publisher.round()


async def test_changes_that_follow_each_other_wait_for_the_spacing_and_none_is_lost() -> None:
    envoy = _Envoy(500)
    start = time.monotonic()
    await envoy.change()
    for _ in range(50):
        envoy.changes += 1
        envoy.publisher.request()
        await asyncio.sleep(0)
    await envoy.publisher.round()
    assert len(envoy.times) == 2
    assert envoy.times[1] - start >= spacing(500)
    assert envoy.taken == envoy.build()
    await envoy.publisher.close()


async def test_a_change_after_a_quiet_time_is_told_at_once() -> None:
    envoy = _Envoy(300)
    await envoy.change()
    await asyncio.sleep(spacing(300))
    start = time.monotonic()
    await envoy.change()
    assert len(envoy.times) == 2
    assert envoy.times[1] - start < spacing(300)
    await envoy.publisher.close()


async def test_what_changes_nothing_is_not_told_and_costs_no_wait() -> None:
    envoy = _Envoy(300)
    await envoy.change()
    for _ in range(3):
        await envoy.publisher.round()
    assert len(envoy.times) == 1
    await envoy.publisher.close()


async def test_a_small_fleet_is_told_at_once() -> None:
    envoy = _Envoy(FREE)
    assert spacing(FREE) == 0
    for _ in range(5):
        await envoy.change()
    assert len(envoy.times) == 5
    await envoy.publisher.close()
