"""Of several workers the one with least to do, and where else a request may go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.policy import Policy, RequestView
from extproc.workers.worker import Worker

# More workers than these are not compared for one request, but so many from a random place on: the least of 256 is
# nearly the least of all, and a request pays for no more than it gains.
MOST_COMPARED: Final = 256
_TRIES: Final = 32
_random: Final = random.random


def any_place(size: int) -> int:
    """A random number below ``size`` (measured: 0.1 µs, a tenth of ``random.randrange``)."""
    return int(_random() * size)


def any_that_fits(candidates: Sequence[Worker], fits: Callable[[Worker], bool], but: int = -1) -> int | None:
    """The place of any of those that fit, each as likely, other than ``but``; None: not found in a few tries."""
    for _ in range(_TRIES):
        place = any_place(len(candidates))
        if place != but and fits(candidates[place]):
            return place
    return None


def turned(candidates: Sequence[Worker]) -> Sequence[Worker]:
    """Those to be compared: from a random place on, so that of equal ones it is not always the same."""
    start = any_place(len(candidates))
    return (*candidates[start:], *candidates[:start])[:MOST_COMPARED]


def least_first(compared: Sequence[Worker], scores: Sequence[float], limit: int) -> Sequence[Worker]:
    """The one with the lowest score, and ``limit`` - 1 others.

    Those are the best of a few beside it, not the next best of all: when many requests meet with a dead worker at once,
    they must not all go on to the same one.
    """
    at = scores.index(min(scores))
    first = compared[at]
    if limit == 1:
        return (first,)
    size = len(compared)
    beside = [place % size for place in range(at + 1, at + min(size, 2 * limit - 1))]
    beside.sort(key=scores.__getitem__)
    return (first, *[compared[place] for place in beside[: limit - 1]])


def followed(first: Sequence[Worker], candidates: Sequence[Worker], limit: int) -> Sequence[Worker]:
    """``first`` and, up to ``limit``, other candidates from a random place on."""
    size = len(candidates)
    found = list(first[:limit])
    wanted = min(limit, size)
    place = any_place(size)
    while len(found) < wanted:
        worker = candidates[place % size]
        if worker not in found:
            found.append(worker)
        place += 1
    return found


class LeastRequests(Policy):
    """The candidate with the fewest requests of this gateway under way."""

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """See Policy."""
        if len(candidates) == 1:
            return candidates
        compared = turned(candidates)
        return least_first(compared, [worker.load for worker in compared], limit)
