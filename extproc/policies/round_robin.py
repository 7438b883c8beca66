"""round_robin: each candidate in turn.

What: the candidate after the one that was chosen last, by order of registration. When to use: equal workers and
requests of similar size. Fields: none. Failure: none; the set may change at any time: the turn goes on after the worker
chosen last, or, when that one is gone, at the place where it stood. Source: the peer's policy of this name, which
counts modulo the number of candidates and so skips or repeats workers whenever the set changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.workers.worker import Worker


class RoundRobinPolicy:
    """See the module."""

    def __init__(self) -> None:
        self._seen: Sequence[Worker] = ()
        self._next = 0
        self._rankings: dict[tuple[int, int], Sequence[Worker]] = {}  # of the candidates seen last, by start and limit

    def rank(self, candidates: Sequence[Worker], limit: int) -> Sequence[Worker]:
        """The next candidate and those after it."""
        if candidates is not self._seen:
            self._next = self._resume(candidates)
            self._seen = candidates
            self._rankings.clear()
        start = self._next
        self._next = start + 1 if start + 1 < len(candidates) else 0
        ranking = self._rankings.get((start, limit))
        if ranking is None:
            turned = (*candidates[start:], *candidates[:start])
            ranking = self._rankings[start, limit] = turned[:limit]
        return ranking

    def _resume(self, candidates: Sequence[Worker]) -> int:
        """Where the turn goes on in a changed set: at the first one after the last chosen that is still there."""
        for worker in (*self._seen[self._next :], *self._seen[: self._next]):
            if worker in candidates:
                return candidates.index(worker)
        return 0
