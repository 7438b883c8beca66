"""Pauses of many end together, none early."""

from __future__ import annotations

import asyncio
import time

import pytest

from extproc.workers import rounds
from extproc.workers.rounds import Rounds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "EVERY", 0.05)
    monkeypatch.setattr(rounds, "LEAST", 0.01)


async def test_what_is_due_in_one_round_is_called_at_once_and_nothing_early() -> None:
    own, woken = Rounds(), []

    async def sleeper(seconds: float) -> None:
        due = time.monotonic() + seconds
        await own.sleep(seconds)
        now = time.monotonic()
        assert now >= due
        woken.append((int(now / 0.05), seconds))

    await asyncio.gather(*(sleeper(0.02 + 0.001 * number) for number in range(60)))
    assert len(woken) == 60
    assert len({number for number, _ in woken}) < 8


async def test_a_short_pause_does_not_wait_for_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "EVERY", 3600.0)
    async with asyncio.timeout(60):
        await Rounds().sleep(0.009)
        await Rounds().sleep(0)


async def test_a_cancelled_call_is_not_made() -> None:
    own, calls = Rounds(), []
    cancel = own.call_later(0.02, lambda: calls.append("cancelled"))
    own.call_later(0.02, lambda: calls.append("made"))
    cancel()
    cancel()
    await own.sleep(0.12)
    assert calls == ["made"]
    cancel()


async def test_a_cancelled_sleeper_leaves_the_others_asleep() -> None:
    own = Rounds()
    first, second = asyncio.create_task(own.sleep(0.03)), asyncio.create_task(own.sleep(0.03))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first, second], timeout=60)
    assert first.cancelled()
    assert second.exception() is None


async def test_a_sleeper_cancelled_as_its_round_comes_does_not_keep_the_others_asleep() -> None:
    every = Rounds()
    first = asyncio.create_task(every.sleep(0.02))
    second = asyncio.create_task(every.sleep(0.02))
    await asyncio.sleep(0)
    (number,) = every._rounds
    first.cancel()
    every._go(number)  # before the cancelled one had its turn
    await second
    assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError
