"""How many legs each worker may have, kept up to date: what the request path reads of it is ``Worker.limit``.

A prefill worker may have as many as the operator says. A decode worker may have as many as its engine says that it
runs at once, less those that others have there; an engine that does not say it is not limited.

What others have is only known from time to time: how many requests the engine, and Envoy, said they had, less those
that were ours just then. The two numbers are not of quite the same moment, so the lower of the last two differences
counts: a request that has just come or gone must not keep a slot empty until the next answer.
"""

from __future__ import annotations

from collections.abc import Callable

from extproc.workers.load import limit_in
from extproc.workers.worker import Role, Worker


class _Others:
    """What others have under way on one worker, by one source."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._before = self._last = 0

    def said(self, count: int | None, ours: int) -> None:
        """The source has spoken of ``count`` requests; None: it does not know."""
        self._before, self._last = self._last, 0 if count is None else max(0, count - ours)

    @property
    def count(self) -> int:
        """Requests."""
        return min(self._before, self._last)


class Rooms:
    """See the module.

    Args:
        prefill: legs that a prefill worker may have; 0: any number.
        freed: is called with a worker that may have room now.
    """

    def __init__(self, prefill: int, freed: Callable[[Worker], None]) -> None:
        self._prefill = prefill
        self._freed = freed
        self._heard: dict[Worker, tuple[_Others, _Others]] = {}  # by engine, by Envoy

    def watch(self, worker: Worker) -> None:
        """``worker`` has come, or is another than it was."""
        worker.freed = self._freed
        if worker.role is Role.PREFILL:
            worker.limit = self._prefill or None
        else:
            self._set_window(worker)

    def forget(self, worker: Worker) -> None:
        """``worker`` is gone."""
        self._heard.pop(worker, None)

    def engine_spoke(self, worker: Worker) -> None:
        """``worker.engine_load`` is new."""
        load = worker.engine_load
        known = None if load is None or load.running is None else load.running + (load.waiting or 0)
        self._said(worker, 0, known)

    def envoy_spoke(self, worker: Worker) -> None:
        """``worker.envoy_active`` is new. Of one of several ranks Envoy knows nothing: it sees their server."""
        self._said(worker, 1, None if worker.dp_rank is not None else worker.envoy_active)

    def _said(self, worker: Worker, source: int, count: int | None) -> None:
        if worker.role is not Role.DECODE or window_of(worker) is None:
            if worker.role is Role.DECODE and worker.limit is not None:
                self._set_window(worker)
            return
        heard = self._heard.get(worker)
        if heard is None:
            heard = self._heard[worker] = (_Others(), _Others())
        heard[source].said(count, worker.load)
        self._set_window(worker)

    def _set_window(self, worker: Worker) -> None:
        window, before = window_of(worker), worker.limit
        if window is not None:
            others = [source.count for source in self._heard.get(worker, ())]
            window = max(0, window - max(others, default=0))
        if window != before:
            worker.limit = window
            if before is not None and (window is None or window > before):
                self._freed(worker)


def window_of(worker: Worker) -> int | None:
    """How many requests the engine of ``worker`` runs at once; None: nobody says.

    The least of what itself and its labels say: an operator can have it given fewer, but no engine runs more.
    """
    if worker.role is not Role.DECODE:
        return None
    load, label = worker.engine_load, limit_in(worker.labels)
    said = None if load is None else load.max_running
    if said is None or label is None:
        return label if said is None else said
    return min(said, label)
