"""Orders to prefill workers to have something to send: the oldest leg's first, one at a time.

A Mooncake prefill attends to 20 questions at a time, in the order they come (see handoff/mooncake.py). One that is to
be answered from what the prefill keeps may stand behind 20 that are asked in vain, and what is kept would be lost if
something new came for it before its turn. A decode fetches for its oldest requests first: those are asked for in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from extproc.exchange.clock import SETTLE_SECONDS, Clock
from extproc.workers.worker import Worker

_PACE: Final = 0.05  # seconds between two of one worker, for it to answer whoever had to wait for the first


class _Turn(NamedTuple):
    due: float
    since: float
    send: Callable[[], None]


class Releases:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, list[_Turn]] = {}  # by the worker's id

    def add(self, worker: Worker, since: float, send: Callable[[], None]) -> None:
        """Call ``send`` in SETTLE_SECONDS, or when its turn comes: ``since`` is when the decode leg began."""
        waiting = self._waiting.setdefault(worker.id, [])
        waiting.append(_Turn(self._clock.now() + SETTLE_SECONDS, since, send))
        if len(waiting) == 1:
            self._clock.after(SETTLE_SECONDS, partial(self._next, worker.id))

    def _next(self, worker: str) -> None:
        waiting, now = self._waiting[worker], self._clock.now()
        due = [release for release in waiting if release.due <= now]
        oldest = min(due, key=lambda release: release.since) if due else None
        if oldest is not None:
            waiting.remove(oldest)
        if waiting:
            pause = _PACE if due else min(release.due for release in waiting) - now
            self._clock.after(pause, partial(self._next, worker))
        else:
            del self._waiting[worker]
        if oldest is not None:
            oldest.send()
