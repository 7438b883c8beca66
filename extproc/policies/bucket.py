"""bucket: short prompts to some workers, long ones to others. For prefill workers only.

What: each candidate, in order of registration, has a range of prompt lengths. The ranges are cut anew every
``--bucket-adjust-interval-secs`` so that each had an equal share of the tokens of the last 4,096 prompts; the first are
equal parts of 0 to 4,096 tokens, and the last has no end. A length that several ranges begin or end with goes to
whoever of them had least. When one candidate's tokens are more than ``--balance-rel-threshold`` times another's and
``--balance-abs-threshold`` above them, the one with the fewest is taken, whatever the length; tokens of the past count
half as much after each interval. When to use: prefill workers, where a short prompt would wait behind long ones.
Fields: none. Failure: none; a worker that comes counts as having had the mean, and is not flooded. Source: the peer's
policy of this name, which knows only prefill workers that were given at start, and chooses among them whether they can
serve or not, so that requests of one range fail while another's worker idles; a split made before the first requests
lasts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from extproc.policies.policy import Policy, RequestView
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Worker

_FIRST_RANGE: Final = 4096  # tokens
_SAMPLE: Final = 4096  # prompts
_FADED: Final = 1.0  # tokens of the past that are no more counted


class BucketPolicy(Policy):
    """See the module."""

    def __init__(self, tuning: Tuning, now: Callable[[], float]) -> None:
        self._now = now
        self._interval = tuning.bucket_adjust_interval_secs
        self._above = tuning.balance_abs_threshold
        self._times = tuning.balance_rel_threshold
        self._due = now() + self._interval
        self._sizes: deque[int] = deque(maxlen=_SAMPLE)
        self._sorted: list[int] = []  # as they were when the ranges were cut
        self._volumes: list[int] = []  # of these, added up
        self._ends: dict[int, list[int]] = {}  # of the ranges, by how many there are; but the last, which has none
        self._tokens: dict[Worker, float] = {}  # that each has had
        self._last: Worker | None = None  # who was chosen last, if that was counted

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        if self._now() >= self._due:
            self._adjust()
        if len(candidates) == 1:
            self._last = None
            return candidates
        size = request.prompt_tokens()
        self._sizes.append(size)
        place = self._place(candidates, size)
        self._last = candidates[place]
        self._tokens[self._last] += size
        # Who is next to it has lengths that are most like it.
        order = sorted(
            range(max(0, place - limit + 1), min(len(candidates), place + limit)), key=lambda at: abs(at - place)
        )
        return [candidates[at] for at in order[:limit]]

    def take_back(self, request: RequestView) -> None:
        """See Policy."""
        if self._last is not None:
            self._tokens[self._last] -= request.prompt_tokens()
            self._sizes.pop()

    def forget(self, worker: Worker) -> None:
        """See Policy."""
        self._tokens.pop(worker, None)

    def _place(self, candidates: Sequence[Worker], size: int) -> int:
        had = self._had(candidates)
        least, most = min(had), max(had)
        if most - least > self._above and most > self._times * least:
            return had.index(least)
        ends = self._ends.get(len(candidates))
        if ends is None:
            ends = self._ends[len(candidates)] = self._cut(len(candidates))
        first, last = bisect_left(ends, size), bisect_right(ends, size)
        return first if first == last else min(range(first, last + 1), key=had.__getitem__)

    def _had(self, candidates: Sequence[Worker]) -> list[float]:
        tokens = self._tokens
        try:
            return [tokens[worker] for worker in candidates]
        except KeyError:
            known = [tokens[worker] for worker in candidates if worker in tokens]
            mean = sum(known) / len(known) if known else 0.0
            return [tokens.setdefault(worker, mean) for worker in candidates]

    def _adjust(self) -> None:
        self._due = self._now() + self._interval
        self._tokens = {worker: half for worker, had in self._tokens.items() if (half := had / 2) >= _FADED}
        if self._sizes:
            self._sorted = sorted(self._sizes)
            self._volumes = list(accumulate(self._sorted))
            self._ends.clear()

    def _cut(self, count: int) -> list[int]:
        """The longest prompt of each of ``count`` ranges but the last."""
        if len(self._sorted) < count:
            return [_FIRST_RANGE * number // count for number in range(1, count)]
        total = self._volumes[-1]
        return [self._sorted[bisect_left(self._volumes, total * number / count)] for number in range(1, count)]
