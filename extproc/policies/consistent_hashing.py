"""consistent_hashing: requests with the same key to the same worker.

What: by a routing key, on a ring (:mod:`extproc.policies.ring`) of the candidates alone: who comes or goes moves only
its own keys. When to use: sessions or tenants whose prompts share much, and several gateways, which all choose the same
worker without telling each other. Fields: ``x-smg-target-worker``, else the first of ``--routing-key-headers``, else
``authorization`` (unless it is the gateway's own key, which all clients bear), ``x-forwarded-for`` (the first address),
``cookie``; a request without any goes to a random one. Failure: a key whose worker cannot serve goes to the next on the
ring, and back later; load is not looked at (prefix_hash does), so a key with much traffic makes its worker busy.

``x-smg-target-worker`` names workers by URL, ``URL@RANK`` or id, with commas where both roles are meant, or is a
number: the place among the candidates in order of registration. Whom it names comes first if it is a candidate; if not,
the request goes where it would without, which ``x-pd-prefill`` and ``x-pd-decode`` of the answer show.

Source: the peer's policy of this name. It takes numbers only, which shift when a worker fails, and answers 503 to one
that is not there; its ring is of all workers of a model, and the key of an ``authorization`` that all share is one key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.least import followed
from extproc.policies.policy import Policy, RequestView
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.ring import Rings
from extproc.policies.routing_key import RoutingKeys
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Worker

TARGET: Final = "x-smg-target-worker"
_MOST_TARGETS: Final = 8  # names in one header that are looked at
_IMPLICIT: Final = ("authorization", "x-forwarded-for", "cookie")


class ConsistentHashingPolicy(Policy):
    """See the module."""

    def __init__(self, tuning: Tuning) -> None:
        self._keys = RoutingKeys(tuning.routing_key_headers)
        self._implicit = _IMPLICIT if tuning.api_key is None else _IMPLICIT[1:]
        self._rings = Rings()
        self._random = RandomPolicy()

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        if len(candidates) == 1:
            return candidates
        fields, key = request.fields, self._key(request)
        ranked = self._rings.of(candidates).order(key, limit) if key else self._random.rank(candidates, limit, request)
        if TARGET in fields and (target := _named(fields[TARGET], candidates)) is not None:
            return followed((target, *(worker for worker in ranked if worker is not target)), candidates, limit)
        return ranked

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """See Policy. By the circle of all: one of its own for those that fit would take milliseconds."""
        fields, key = request.fields, self._key(request)
        chosen = _named(fields[TARGET], candidates, fits) if TARGET in fields else None
        if chosen is None and key:
            chosen = self._rings.of(candidates).first_of(key, fits)
        elif chosen is None:
            return self._random.pass_over(candidates, limit, request, fits)
        return () if chosen is None else followed((chosen,), candidates, limit)

    def _key(self, request: RequestView) -> bytes | None:
        """What the request belongs together with others by; None where it belongs to nobody."""
        return self._keys.of(request) or self._implied(request)

    def _implied(self, request: RequestView) -> bytes | None:
        """What tells clients apart that give no key."""
        fields = request.fields
        for name in self._implicit:
            value = fields.get(name)
            if value:
                return value.partition(b",")[0].strip() if name == "x-forwarded-for" else value
        return None


def _named(
    value: bytes, candidates: Sequence[Worker], fits: Callable[[Worker], bool] = lambda _: True
) -> Worker | None:
    """Whom the header means of ``candidates`` that fit: of several ranks of a server the one with the least to do."""
    for part in value.split(b",", _MOST_TARGETS)[:_MOST_TARGETS]:
        name = part.strip().decode("latin-1")
        if name.isascii() and name.isdigit() and len(name) < 10:
            if int(name) < len(candidates) and fits(candidates[int(name)]):
                return candidates[int(name)]
            continue
        name = name.rstrip("/")
        meant = [worker for worker in candidates if name in (worker.name, worker.base_url, worker.id) and fits(worker)]
        if meant:
            return min(meant, key=lambda worker: worker.load)
    return None
