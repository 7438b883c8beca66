"""Overload protection: a worker whose engine says that it has too much is not given more, as long as there are others.

An engine has too much when at least so many requests wait in its queues, or so much of its KV cache is in use. It has
enough again when both are well below that, so that one at the border does not come and go. What it does not say, or
said too long ago, is never too much. Who is left out is :mod:`extproc.workers.index`'s to decide, what happens when all
have too much :mod:`extproc.policies.placement`'s.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from extproc.workers.load import EngineLoad
from extproc.workers.spec import Overload
from extproc.workers.worker import Worker

WAITING: Final = 8  # requests; this and the next are the peer's
USAGE: Final = 0.8
# What is below these parts of the limits is enough again. A queue empties faster than a cache.
_WAITING_AGAIN: Final = 0.75
_USAGE_AGAIN: Final = 0.9

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """What holds for all workers. ``enabled``: also for those without limits of their own.

    ``shed``: where all have too much, requests are turned away instead of going to the one that has least.
    """

    enabled: bool = False
    waiting_requests: int = WAITING
    token_usage: float = USAGE
    shed: bool = False


class Limits(NamedTuple):
    """From where on one worker has too much; None: however much."""

    waiting: int | None = None
    usage: float | None = None


def excess(limits: Limits, load: EngineLoad | None, *, before: bool) -> str:
    """In what an engine has too much, for people; empty when it has not, or nothing is known.

    Args:
        limits: what is too much.
        load: what it said of all its ranks together: the sum of their queues, the mean of their caches.
        before: it had too much when it was last looked at.
    """
    if load is None:
        return ""
    found = []
    if limits.waiting is not None and load.waiting is not None:
        most = limits.waiting * (_WAITING_AGAIN if before else 1)
        if load.waiting >= most:
            found.append(f"{load.waiting} requests wait (limit {limits.waiting})")
    if limits.usage is not None and load.kv_usage is not None:
        most = limits.usage * (_USAGE_AGAIN if before else 1)
        if load.kv_usage >= most:
            found.append(f"{load.kv_usage:.0%} of its KV cache is in use (limit {limits.usage:.0%})")
    return ", ".join(found)


class Overloads:
    """Keeps ``overloaded`` of every worker. ``changed`` is told of those that begin or cease to have too much."""

    def __init__(self, settings: OverloadSettings, changed: Callable[[Worker], None]) -> None:
        self._settings = settings
        self._changed = changed
        self._limits: dict[str, Limits] = {}
        self._times: Counter[str] = Counter()

    def watch(self, worker: Worker, own: Overload) -> None:
        """``worker`` has these limits of its ``own`` from now on."""
        self._limits[worker.id] = _limits(self._settings, own)
        self.judge(worker)

    def forget(self, worker: Worker) -> None:
        """The worker is gone."""
        self._limits.pop(worker.id, None)
        self._times.pop(worker.id, None)

    def judge(self, worker: Worker) -> None:
        """Something else is known of its load."""
        was = worker.overloaded
        limits = self._limits.get(worker.id, Limits())
        worker.overloaded = excess(limits, worker.engine_load, before=bool(was))
        if bool(was) is bool(worker.overloaded):
            return
        extra = {"worker": worker.name, "role": worker.role.value, "worker_id": worker.id}
        if worker.overloaded:
            self._times[worker.id] += 1
            _logger.warning("worker is overloaded", extra=extra | {"reason": worker.overloaded})
        else:
            _logger.info("worker is not overloaded any more", extra=extra)
        self._changed(worker)

    def times(self, worker: Worker) -> int:
        """How often it has begun to have too much."""
        return self._times[worker.id]


def _limits(common: OverloadSettings, own: Overload) -> Limits:
    if not common.enabled:
        return Limits(own.waiting_requests, own.token_usage)
    return Limits(
        common.waiting_requests if own.waiting_requests is None else own.waiting_requests,
        common.token_usage if own.token_usage is None else own.token_usage,
    )
