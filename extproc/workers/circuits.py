"""The circuit breakers of all workers: made, given their time, logged and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from extproc.workers.breaker import Breaker, BreakerSettings, BreakerState
from extproc.workers.spec import Resilience
from extproc.workers.worker import Worker

_Number = TypeVar("_Number", int, float)

_logger = logging.getLogger(__name__)


class Circuits:
    """Gives each worker its breaker. ``changed`` is told of workers that requests should begin or cease to go to."""

    def __init__(self, settings: BreakerSettings, changed: Callable[[Worker], None]) -> None:
        self._settings = settings
        self._changed = changed
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._transitions: dict[str, Counter[BreakerState]] = {}

    def watch(self, worker: Worker, own: Resilience) -> None:
        """Give ``worker`` a breaker, with settings of its ``own`` on top of the common ones."""
        worker.breaker = Breaker(_overridden(self._settings, own), time.monotonic, partial(self._moved, worker))

    def change(self, worker: Worker, own: Resilience) -> None:
        """The worker's own settings are others. Its breaker begins anew, closed, unless they come to the same."""
        worker.breaker.settings = _overridden(self._settings, own)

    def forget(self, worker: Worker) -> None:
        """The worker is gone; legs that it may still have are of no interest."""
        self._transitions.pop(worker.id, None)
        self._stop(worker)
        worker.breaker = Breaker(BreakerSettings(enabled=False))

    def close(self) -> None:
        """Wait for nothing any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def transitions(self, worker: Worker) -> Counter[BreakerState]:
        """How often the worker's breaker came into each state."""
        return self._transitions.get(worker.id) or Counter()

    def _moved(self, worker: Worker, before: BreakerState) -> None:
        breaker = worker.breaker
        if breaker.state is not before:
            self._note(worker, before)
            self._stop(worker)
            if breaker.state is BreakerState.OPEN:
                wait = breaker.settings.timeout
                self._timers[worker.id] = asyncio.get_running_loop().call_later(wait, breaker.rested)
        self._changed(worker)

    def _note(self, worker: Worker, before: BreakerState) -> None:
        state = worker.breaker.state
        self._transitions.setdefault(worker.id, Counter())[state] += 1
        level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
        extra = {
            "worker": worker.name,
            "role": worker.role.value,
            "worker_id": worker.id,
            "was": before.value,
            "state": state.value,
        }
        _logger.log(level, "circuit breaker", extra=extra)

    def _stop(self, worker: Worker) -> None:
        if timer := self._timers.pop(worker.id, None):
            timer.cancel()


def _overridden(common: BreakerSettings, own: Resilience) -> BreakerSettings:
    """The common settings with one worker's own on top."""
    off, codes = own.disable_circuit_breaker, own.capacity_status_codes
    return BreakerSettings(
        failure_threshold=_first(own.cb_failure_threshold, common.failure_threshold),
        success_threshold=_first(own.cb_success_threshold, common.success_threshold),
        timeout=_first(own.cb_timeout_secs, common.timeout),
        window=_first(own.cb_window_secs, common.window),
        enabled=common.enabled if off is None else not off,
        capacity=common.capacity if codes is None else frozenset(codes),
    )


def _first(own: _Number | None, common: _Number) -> _Number:
    return common if own is None else own
