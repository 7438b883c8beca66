"""A large fleet that changes all the time is told to Envoy at intervals, a change after a quiet time at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from extproc.workers import publication
from extproc.workers.endpoints import Endpoint, Snapshot
from extproc.workers.publication import FREE, Publisher, spacing


class _Time:
    """Passes when told to: what is to happen within a time, or not, does so on a machine that stops, too."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        due = self.now + seconds, asyncio.Event()
        self._sleepers.append(due)
        await due[1].wait()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for when, woken in self._sleepers:
            if when <= self.now:
                woken.set()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Time:
    made = _Time()
    monkeypatch.setattr(publication, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(publication, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": made.sleep}))
    return made


class _Envoy:
    """Takes everything at once, and says when."""

    def __init__(self, size: int, time: _Time) -> None:
        self.size = size
        self.time = time
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
        self.times.append(self.time.now)

    async def change(self) -> None:
        self.changes += 1
        await self.publisher.round()


async def test_changes_that_follow_each_other_wait_for_the_spacing_and_none_is_lost(time: _Time) -> None:
    envoy = _Envoy(500, time)
    await envoy.change()
    for _ in range(50):
        envoy.changes += 1
        envoy.publisher.request()
        await asyncio.sleep(0)
    last = asyncio.create_task(envoy.publisher.round())
    time.advance(0.9 * spacing(500))
    for _ in range(10):
        await asyncio.sleep(0)
    assert envoy.times == [0]
    time.advance(0.2 * spacing(500))
    await last
    assert envoy.times == [0, time.now]
    assert envoy.taken == envoy.build()
    await envoy.publisher.close()


async def test_a_change_after_a_quiet_time_is_told_at_once(time: _Time) -> None:
    envoy = _Envoy(300, time)
    await envoy.change()
    time.advance(spacing(300))
    async with asyncio.timeout(60):
        await envoy.change()
    assert envoy.times == [0, time.now]
    await envoy.publisher.close()


async def test_what_changes_nothing_is_not_told_and_begins_no_spacing(time: _Time) -> None:
    envoy = _Envoy(300, time)
    await envoy.change()
    time.advance(spacing(300))
    async with asyncio.timeout(60):
        for _ in range(3):
            await envoy.publisher.round()
    assert envoy.times == [0]
    await envoy.publisher.close()


async def test_a_small_fleet_is_told_at_once(time: _Time) -> None:
    envoy = _Envoy(FREE, time)
    assert spacing(FREE) == 0
    async with asyncio.timeout(60):
        for _ in range(5):
            await envoy.change()
    assert envoy.times == [0] * 5
    await envoy.publisher.close()
