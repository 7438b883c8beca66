"""Where all workers of a role are overloaded: the least loaded of them, whatever the policy.

What: the worker with the fewest requests: legs of this gateway under way, and requests that waited in its engine's
queues when it last said so. When to use: not to be chosen; placement falls back on it. Fields: none. Failure: none.
Source: the peer routes to the least loaded where all are overloaded (``--worker-overload-protection``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from extproc.policies.policy import Policy, RequestView
from extproc.workers.worker import Worker


class LeastCrowded(Policy):
    """See the module. Workers that are not overloaded come before those that are."""

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """See Policy. Of equal ones those with the shorter prompts under way."""
        return tuple(heapq.nsmallest(limit, candidates, key=_crowd))


def _crowd(worker: Worker) -> tuple[bool, int, int]:
    load = worker.engine_load
    waiting = 0 if load is None or load.waiting is None else load.waiting
    return bool(worker.overloaded), worker.load + waiting, worker.tokens
