"""manual: each routing key keeps the worker it was given.

What: sticky sessions (:mod:`extproc.policies.sticky`) by ``--routing-key-headers`` alone and without a limit to a key's
requests under way. A new key gets, by ``--assignment-mode``, a random worker (``random``, the default), the one with
the fewest requests under way (``min_load``; ``delegate`` is the same, as there is nobody to delegate to) or the fewest
keys (``min_group``). A request without a key goes by the same rule and is not remembered. When to use: a client that
knows what belongs together, and where a session must stay whatever the load. Fields: ``--routing-key-headers``,
``--max-idle-secs``. Failure: a key whose worker cannot serve gets another one, and keeps that. Source: the peer's
policy of this name, which goes back to the former worker as soon as that serves again, though it has nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.least import LeastRequests, least_first, turned
from extproc.policies.names import AssignmentMode
from extproc.policies.policy import Policy, RequestView
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.routing_key import RoutingKeys
from extproc.policies.sticky import MOST_UNDER_WAY, StickyPolicy
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Worker


class FewestKeys(Policy):
    """The candidate with the fewest keys. ``groups``: how many each worker has; none for those not in it."""

    def __init__(self, groups: dict[Worker, int]) -> None:
        self._groups = groups

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:  # noqa: ARG002
        """See Policy."""
        compared = turned(candidates)
        keys = self._groups
        return least_first(compared, [keys.get(worker, 0) for worker in compared], limit)


_BY_MODE: Final[dict[AssignmentMode, Callable[[dict[Worker, int]], Policy]]] = {
    AssignmentMode.RANDOM: lambda _: RandomPolicy(),
    AssignmentMode.MIN_LOAD: lambda _: LeastRequests(),
    AssignmentMode.DELEGATE: lambda _: LeastRequests(),
    AssignmentMode.MIN_GROUP: FewestKeys,
}


def manual(tuning: Tuning, now: Callable[[], float]) -> Policy:
    """The policy manual."""
    groups: dict[Worker, int] = {}
    chosen = _BY_MODE[tuning.assignment_mode or AssignmentMode.RANDOM](groups)
    return StickyPolicy(chosen, RoutingKeys(tuning.routing_key_headers), now, tuning.max_idle_secs, None, groups)


def sticky(inner: Policy, tuning: Tuning, now: Callable[[], float]) -> Policy:
    """``inner`` with sticky sessions. A new key goes where ``inner`` says, unless ``--assignment-mode`` is another."""
    groups: dict[Worker, int] = {}
    keys = RoutingKeys(tuning.routing_key_headers, lineage=True)
    mode = tuning.assignment_mode or AssignmentMode.DELEGATE
    chosen = None if mode is AssignmentMode.DELEGATE else _BY_MODE[mode](groups)
    return StickyPolicy(inner, keys, now, tuning.max_idle_secs, MOST_UNDER_WAY, groups, chosen)
