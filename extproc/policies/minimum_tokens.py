"""``--dp-minimum-tokens-scheduler``: of the chosen server's data-parallel ranks the one with the fewest tokens.

What: the policy chooses among all ranks of all servers, as always; then the request goes to that rank of the same
server which holds the fewest tokens: those in its KV cache when its engine was asked, less those of ours then, and
those of our prompts under way. Of equal ones the lowest. When to use: a policy that does not look at load (round_robin,
the hashing ones), where prompts differ much in length. Failure: a rank whose engine says nothing counts what we have
under way. Source: the peer's dp_min_token, which asks for reports under a name that its workers do not have, and so
sees none.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.policies.policy import RequestView
from extproc.policies.wrapper import Wrapper
from extproc.workers.worker import Worker


class MinimumTokens(Wrapper):
    """See the module."""

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        ranked = self._inner.rank(candidates, limit, request)
        first = ranked[0]
        if not first.ranks:
            return ranked
        fewest = min((rank for rank in first.ranks if rank in candidates), key=_tokens)
        if fewest is first:
            return ranked
        return (fewest, *[worker for worker in ranked if worker is not fewest][: limit - 1])


def _tokens(rank: Worker) -> int:
    load = rank.engine_load
    used = None if load is None else load.used_tokens
    return rank.tokens if used is None else rank.tokens + max(0, used - rank.tokens_then)
