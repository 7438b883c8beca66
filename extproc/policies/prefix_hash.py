"""prefix_hash: prompts that begin alike to the same worker, as long as that has no more to do than others.

What: by a routing key, or else by the beginning of the prompt: ``--prefix-token-count`` token ids, or four times as
many bytes of it as it stands in the body (the peer: characters of its text). On the ring of consistent_hashing, the
first one whose requests under way are not more than ``--prefix-hash-load-factor`` times the average, or than
``--prefix-hash-balance-abs-threshold`` above it; of the next few on the ring none, the one with the fewest. When to
use: long prompts of a few kinds (system prompts, documents), several gateways, no memory to spend on cache_aware.
Fields: ``--routing-key-headers``. Failure: a request without a prompt goes to the one with the fewest requests. Source:
the peer's policy of this name; "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam 2016). The
average counts the request itself, as with the peer. It goes from an overloaded worker straight to the least loaded one,
here to the next of the key's own, so that its spill finds a cache, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.least import LeastRequests, followed
from extproc.policies.policy import Policy, RequestView
from extproc.policies.ring import Rings
from extproc.policies.routing_key import RoutingKeys
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Worker

_WALK: Final = 4  # workers of the ring that are looked at for one request
_BYTES_PER_TOKEN: Final = 4
_BYTES_PER_ID: Final = 8  # of a list of token ids: six digits, a comma, a blank


class PrefixHashPolicy(Policy):
    """See the module."""

    def __init__(self, tuning: Tuning) -> None:
        self._keys = RoutingKeys(tuning.routing_key_headers)
        self._tokens = tuning.prefix_token_count
        self._factor = tuning.prefix_hash_load_factor
        self._margin = tuning.prefix_hash_balance_abs_threshold
        self._rings = Rings()
        self._least = LeastRequests()

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        if len(candidates) == 1:
            return candidates
        key = self._keys.of(request) or self._beginning(request)
        if not key:
            return self._least.rank(candidates, limit, request)
        ring = self._rings.of(candidates)
        ranked = ring.order(key, limit)
        first = ranked[0]
        # Whoever has no more than the margin has no more than any average and the margin.
        if first.load <= self._margin:
            return ranked
        most = self._most(candidates)
        if first.load <= most:
            return ranked
        if limit < _WALK:
            ranked = ring.order(key, _WALK)
        taken = next((worker for worker in ranked if worker.load <= most), None)
        if taken is None:
            taken = min(candidates, key=lambda worker: worker.load)
        return followed((taken, *(worker for worker in ranked if worker is not taken)), candidates, limit)

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """See Policy. By the circle of all: one of its own for those that fit would take milliseconds."""
        key = self._keys.of(request) or self._beginning(request)
        if not key:
            return self._least.pass_over(candidates, limit, request, fits)
        taken = self._rings.of(candidates).first_of(key, fits)
        if taken is None:
            return ()
        if taken.load > self._margin and taken.load > (most := self._most(candidates)):
            least = self._rings.of(candidates).first_of(key, lambda worker: worker.load <= most and fits(worker))
            taken = least or min(filter(fits, candidates), key=lambda worker: worker.load)
        return followed((taken,), candidates, limit)

    def _most(self, candidates: Sequence[Worker]) -> float:
        """How many requests a worker may have under way and be given another."""
        average = (sum([worker.load for worker in candidates]) + 1) / len(candidates)
        return max(average * self._factor, average + self._margin)

    def _beginning(self, request: RequestView) -> bytes:
        """What prompts must have in common to go to the same worker; empty where there is no prompt."""
        start = request.prompt_bytes(self._tokens * _BYTES_PER_ID)
        ids = start.split(b",", self._tokens) if start[:1] == b"[" and b'"' not in start else ()
        if ids:
            return b",".join([one.strip(b"[] \t\r\n") for one in ids[: self._tokens]])
        return start[: self._tokens * _BYTES_PER_TOKEN]
