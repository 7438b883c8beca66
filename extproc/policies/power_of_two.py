"""power_of_two: of two random candidates the one with less to do.

What: two different candidates, each pair equally likely; the other one follows, then any.
``--power-of-two-load-metric`` is what is compared: ``expected_wait`` (:mod:`extproc.policies.expected_wait`, with
``--least-load-*``), ``requests`` (all that the worker has, whoever sent them: running and waiting as its engine said,
and ours since), ``least_requests`` (those of this gateway under way). When to use: a large fleet, or several gateways:
what they know is old, and whoever takes the least of all by old figures takes the same one as everybody else. Fields:
none. Failure: where an engine says nothing, requests under way count. Source: the peer's policy of this name; how its
two metrics of requests differ it does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.policies.least import any_place, any_that_fits, followed
from extproc.policies.least_load import expected_wait
from extproc.policies.names import LoadMetric
from extproc.policies.policy import Policy, RequestView
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Worker


class PowerOfTwoPolicy(Policy):
    """See the module."""

    def __init__(self, tuning: Tuning, now: Callable[[], float]) -> None:
        measures: dict[LoadMetric, Callable[[Sequence[Worker], int], float]] = {
            LoadMetric.EXPECTED_WAIT: expected_wait(tuning, now).of,
            LoadMetric.REQUESTS: _requests,
            LoadMetric.LEAST_REQUESTS: _own_requests,
        }
        self._measure = measures[tuning.power_of_two_load_metric]

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """See Policy."""
        size = len(candidates)
        if size == 1:
            return candidates
        one, other = any_place(size), any_place(size - 1)
        return self._better(candidates, one, other + 1 if other >= one else other, limit)

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """See Policy."""
        one = any_that_fits(candidates, fits)
        other = None if one is None else any_that_fits(candidates, fits, one)
        if one is None or other is None:
            return super().pass_over(candidates, limit, request, fits)
        return self._better(candidates, one, other, limit)

    def _better(self, candidates: Sequence[Worker], one: int, other: int, limit: int) -> Sequence[Worker]:
        """The one of two places with less to do, and who follows."""
        if self._measure(candidates, other) < self._measure(candidates, one):
            one, other = other, one
        if limit == 1:
            return (candidates[one],)
        return followed((candidates[one], candidates[other]), candidates, limit)


def _own_requests(candidates: Sequence[Worker], place: int) -> float:
    return candidates[place].load


def _requests(candidates: Sequence[Worker], place: int) -> float:
    """Ours now, and what others had there when the engine was asked, or else what Envoy says is more than ours."""
    worker = candidates[place]
    load = worker.engine_load
    if load is not None and load.running is not None and load.waiting is not None:
        return worker.load + max(0, load.running + load.waiting - worker.load_then)
    return max(worker.load, worker.envoy_active or 0)
