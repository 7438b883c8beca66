"""round_robin: each candidate in turn.

What: the candidate after the one that was chosen last, by order of registration. When to use: equal workers and
requests of similar size. Fields: none. Failure: none; every set of candidates (a model's, a prefill worker's partners)
has a turn of its own. A set may change at any time: the turn goes on after the worker chosen last, or, when that one is
gone, at the place where it stood. Source: the peer's policy of this name, which counts modulo the number of candidates
and so skips or repeats workers whenever the set changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.policy import Policy, RequestView
from extproc.workers.worker import Worker

_TURNS: Final = 16  # sets whose turn is remembered; of another it is found by who of it was chosen last
_CHOSEN: Final = 4096  # workers of whom it is remembered when they were chosen


class _Turn:
    """The turn of one set of candidates, which it holds: no other object can have their identity meanwhile."""

    __slots__ = ("before", "candidates", "next", "rankings", "used")

    def __init__(self, candidates: Sequence[Worker], start: int) -> None:
        self.candidates = candidates
        self.next = start
        self.before = start  # what was next at the last call
        self.used = 0  # the call in which it was looked at last
        self.rankings: dict[tuple[int, int], Sequence[Worker]] = {}  # by start and limit


class RoundRobinPolicy(Policy):
    """See the module."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}  # by identity of the candidates
        self._chosen: dict[str, int] = {}  # when each was chosen last, in calls; by the id of a worker
        self._calls = 0
        self._last: _Turn | None = None  # of the set that was chosen of last
        self._before = 0  # when the one that was chosen of it had been chosen before that

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """The next candidate and those after it."""
        turn = self._turns.get(id(candidates))
        if turn is None:
            turn = self._begin(candidates)
        turn.used = self._calls = self._calls + 1
        turn.before = turn.next
        return self._take(turn, turn.next, limit)

    def take_back(self, request: RequestView) -> None:  # noqa: ARG002
        """See Policy."""
        turn = self._last
        assert turn is not None
        self._untake(turn)
        turn.next = turn.before

    def pass_over(
        self,
        candidates: Sequence[Worker],
        limit: int,
        request: RequestView,  # noqa: ARG002
        fits: Callable[[Worker], bool],
    ) -> Sequence[Worker]:
        """See Policy. The turn goes on: else every request would meet with the one that does not fit."""
        turn = self._turns[id(candidates)]
        self._untake(turn)
        size = len(candidates)
        for place in range(turn.next, turn.next + size - 1):
            if fits(candidates[place % size]):
                return self._take(turn, place % size, limit)
        turn.next = turn.before
        return ()

    def _take(self, turn: _Turn, start: int, limit: int) -> Sequence[Worker]:
        candidates = turn.candidates
        self._last = turn
        turn.next = start + 1 if start + 1 < len(candidates) else 0
        first = candidates[start].id
        self._before = self._chosen.get(first, 0)
        self._chosen[first] = self._calls
        ranking = turn.rankings.get((start, limit))
        if ranking is None:
            turned = (*candidates[start:], *candidates[:start])
            ranking = turn.rankings[start, limit] = turned[:limit]
        return ranking

    def _untake(self, turn: _Turn) -> None:
        first = turn.candidates[turn.next - 1].id
        if self._before:
            self._chosen[first] = self._before
        else:
            del self._chosen[first]

    def _begin(self, candidates: Sequence[Worker]) -> _Turn:
        """The turn of a set that was not seen before: it begins after the one of them that was chosen last."""
        turns, chosen = self._turns, self._chosen
        if len(turns) >= _TURNS:
            del turns[min(turns, key=lambda key: turns[key].used)]
        if len(chosen) >= _CHOSEN:
            chosen.clear()
        latest = max(range(len(candidates)), key=lambda place: chosen.get(candidates[place].id, 0))
        start = (latest + 1) % len(candidates) if candidates[latest].id in chosen else 0
        begun = turns[id(candidates)] = _Turn(candidates, start)
        return begun
