"""passthrough: always the first candidate.

What: the one that was registered first of those that can serve, then the others in this order. When to use: one worker,
or one that serves while the others stand by. Fields: none. Failure: none; when the first one cannot serve, the next
one does. Source: the peer's policy of this name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from extproc.policies.policy import Policy, RequestView
from extproc.workers.worker import Worker


class PassthroughPolicy(Policy):
    """See the module."""

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """The candidates as they come."""
        return candidates[:limit]

    def pass_over(
        self,
        candidates: Sequence[Worker],
        limit: int,
        request: RequestView,  # noqa: ARG002
        fits: Callable[[Worker], bool],
    ) -> Sequence[Worker]:
        """See Policy."""
        return tuple(islice(filter(fits, candidates), limit))
