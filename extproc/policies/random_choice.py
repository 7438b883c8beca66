"""random: every candidate is equally likely, every time.

What: a uniform sample without repetition. When to use: many equal workers and several gateways that know nothing of
each other. Fields: none. Failure: none; load is even on average only. Source: the peer's policy of this name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from extproc.policies.least import any_that_fits, followed
from extproc.policies.policy import Policy, RequestView
from extproc.workers.worker import Worker


class RandomPolicy(Policy):
    """See the module."""

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """A random selection in random order."""
        if len(candidates) == 1:
            return candidates
        return random.sample(candidates, min(limit, len(candidates)))

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """See Policy."""
        place = any_that_fits(candidates, fits)
        if place is None:
            return super().pass_over(candidates, limit, request, fits)
        return followed((candidates[place],), candidates, limit)
