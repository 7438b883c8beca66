"""least_load: the candidate at which the request is expected to wait least.

What: the lowest expected wait (:mod:`extproc.policies.expected_wait`) of all candidates; of more than 256, of 256 from
a random place on. Of equal ones any. When to use: prompts of very different lengths, or workers of different strength.
Fields: none; ``--least-load-*``, and what the engines say of their load. A worker whose queue has
``--least-load-max-waiting-requests``, what was sent since it was asked among them, is taken only when all have.
Failure: where no engine says anything, the fewest requests under way. Source: the peer's policy of this name, which
gives no worker at all, and so a 503, when all queues are that long: refusing is admission's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.expected_wait import ExpectedWait
from extproc.policies.least import MOST_COMPARED, any_place, followed, least_first
from extproc.policies.policy import Policy, RequestView
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Worker

_LAST: Final = 1e9  # seconds: behind everyone whose queue is not too long


class LeastLoadPolicy(Policy):
    """See the module."""

    def __init__(self, tuning: Tuning, now: Callable[[], float]) -> None:
        self._wait = expected_wait(tuning, now)
        self._longest = tuning.least_load_max_waiting_requests

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """See Policy."""
        if len(candidates) == 1:
            return candidates
        return least_first(*self._scored(candidates), limit)

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """See Policy."""
        compared, scores = self._scored(candidates)
        for at in sorted(range(len(compared)), key=scores.__getitem__):
            if fits(compared[at]):
                return followed((compared[at],), candidates, limit)
        return super().pass_over(candidates, limit, request, fits)

    def _scored(self, candidates: Sequence[Worker]) -> tuple[Sequence[Worker], Sequence[float]]:
        """Those that are compared, and how long the request would wait at each."""
        size = len(candidates)
        compared, scores = self._wait.rows(candidates, any_place(size), min(size, MOST_COMPARED))
        if self._longest:
            scores = [
                score + _LAST if _waiting(worker) >= self._longest else score
                for worker, score in zip(compared, scores, strict=True)
            ]
        return compared, scores


def _waiting(worker: Worker) -> int:
    """Requests in its queue when it was asked, and what was sent to it since; 0 where it does not say."""
    load = worker.engine_load
    if load is None or load.waiting is None:
        return 0
    return load.waiting + max(0, worker.load - worker.load_then)


def expected_wait(tuning: Tuning, now: Callable[[], float]) -> ExpectedWait:
    """As ``--least-load-*`` say."""
    return ExpectedWait(
        now,
        tuning.least_load_kv_pressure_weight,
        tuning.least_load_default_throughput,
        tuning.least_load_mean_prefill_tokens,
    )
