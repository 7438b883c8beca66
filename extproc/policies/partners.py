"""Which decode workers serve with a prefill worker, and in what order Envoy is to try them.

See :mod:`extproc.policies.placement` for when a near one is passed over.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Final

from extproc.policies.policy import Policy, RequestView
from extproc.policies.room import Room
from extproc.workers.pairs import Tiers
from extproc.workers.worker import Worker

# Envoy tries the hosts of the list in order while they refuse the connection; dataplane's retry policy allows as many.
CANDIDATES: Final = 4
# A near decode worker is passed over when it has more requests under way than so many times those of the farther one
# and the new one.
NEAR_FACTOR: Final = 2


def ranked(
    policy: Policy,
    decodes: Sequence[Worker],
    without: Collection[Worker],
    request: RequestView,
    room: Room | None,
    legs: int,
) -> Sequence[Worker]:
    """As many of ``decodes`` as Envoy may try, best first; none when nobody is left, or has what is needed."""
    left = tuple(worker for worker in decodes if worker not in without) if without else decodes
    if not left:
        return ()
    best = policy.rank(left, CANDIDATES, request)
    if room is None or room.on(best[0], legs):
        return best
    fits = room.on if legs == 1 else lambda worker: room.on(worker, legs)
    return policy.pass_over(left, CANDIDATES, request, fits)


def nearest(
    policy: Policy, tiers: Tiers, without: Collection[Worker], request: RequestView, room: Room | None, legs: int
) -> Sequence[Worker]:
    """The same, of several groups the nearest first: see the module.

    The policy is told to take back each ranking of which nothing comes, so that its last one is of the group chosen.
    """
    chosen: Sequence[Worker] = ()
    group: Sequence[Worker] = ()  # whose ``chosen`` is
    last: Sequence[Worker] = ()  # of which the policy's last ranking is, if that counts
    passed: list[Worker] = []  # of nearer groups, which are busy
    for tier in tiers:
        if chosen and chosen[0].load <= NEAR_FACTOR:  # then nobody far can have less than half
            break
        if last:
            policy.take_back(request)
        best = ranked(policy, tier, without, request, room, legs)
        last = tier if best else ()
        if best and (not chosen or chosen[0].load > NEAR_FACTOR * (best[0].load + 1)):
            passed, chosen, group = [*chosen, *passed], best, tier
    if not chosen:
        return ()
    if last is not group:
        if last:
            policy.take_back(request)
        chosen = ranked(policy, group, without, request, room, legs)
    return _filled([*chosen, *passed], tiers, without)


def _filled(found: list[Worker], tiers: Tiers, without: Collection[Worker]) -> Sequence[Worker]:
    """``found``, and as many others, the nearest first, as Envoy may try."""
    for tier in tiers:
        if len(found) >= CANDIDATES:
            break
        # Not by the policy: its turn is for those who are meant to serve.
        start = random.getrandbits(32)
        for place in range(start, start + len(tier)):
            worker = tier[place % len(tier)]
            if worker not in found and worker not in without:
                found.append(worker)
                if len(found) >= CANDIDATES:
                    break
    return tuple(found[:CANDIDATES])
