"""What a prompt costs at each worker, in bytes, of which a token is a few: what cache_aware compares. Pure.

This runs for each candidate of each request, and is written for that: one pass, and nothing is made but the list of
costs. What changes with an answer only is worked out then (:mod:`extproc.policies.worker_cache`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from extproc.policies.worker_cache import WorkerCache
from extproc.workers.worker import Worker

# Tuned with ``python -m bench.simulate``; figures in docs/policies.md.
# What a byte costs that a cache lacks, beside itself: at least so much, so much more where the cache has been filled
# once of late, and no more than so much for a whole prompt.
LEAST_TOLL: Final = 0.5
TOLL: Final = 3.0
MOST_TOLL: Final = 131_072.0  # bytes
_SLOWEST: Final = 32.0
_FASTEST: Final = 0.25
# A decode worker's: what one more request costs beside its tokens, and what a held token spares.
_DECODE_REQUEST: Final = 256
_DECODE_SPARED: Final = 0.1


def decode_costs(workers: Sequence[Worker], held: Mapping[Worker, float], per_token: float) -> list[float]:
    """At decode workers. (Measured: 0.06 µs for each.)

    Args:
        workers: these.
        held: bytes of the prompt, by those that hold some.
        per_token: bytes that count as one token.
    """
    costs = [per_token * (worker.tokens + _DECODE_REQUEST * worker.load) for worker in workers]
    if held:
        costs = [cost - _DECODE_SPARED * held.get(worker, 0) for cost, worker in zip(costs, workers, strict=True)]
    return costs


def prefill_costs(
    workers: Sequence[Worker],
    held: Mapping[Worker, float],
    size: int,
    caches: Mapping[Worker, WorkerCache],
    *,
    per_token: float,
    pace: float,
    growth: float,
) -> list[float]:
    """At prefill workers. (Measured: 0.1 µs for each; 0.05 more where some hold something, 0.1 for one that is busy.)

    Args:
        workers: these.
        held: bytes of the prompt, by those that hold some.
        size: of the prompt, in bytes.
        caches: what is known of the workers' caches.
        per_token: bytes that count as one token.
        pace: bytes per second that all workers prefill, of what they have been sent; 1 as long as nobody has.
        growth: how much more than it is ``filled`` of the caches says.
    """
    costs = []
    cache_of, least, more = caches.get, 1 + LEAST_TOLL, TOLL / growth
    lacks = float(size)  # Python multiplies a float by a float in half the time that it takes by an int
    most = lacks + MOST_TOLL
    for worker in workers:
        if held:
            lacks = size - held.get(worker, 0.0)
            most = lacks + MOST_TOLL
        cache = cache_of(worker)
        if cache is None:  # it was sent nothing by this policy: whatever it has is on its way
            costs.append(min(lacks * least, most) + per_token * worker.tokens)
            continue
        cost = lacks * (least + more * cache.filled)
        if cost > most:
            cost = most
        waits: float = cache.pending
        if waits:
            if waits > per_token * worker.tokens:  # what failed, or was released, is not there any more
                waits = per_token * worker.tokens
            if cache.done:
                # What it holds may be less than is known, or the worker slower than others.
                slow = cache.slowness * pace
                if slow > _SLOWEST:
                    slow = _SLOWEST
                elif slow < _FASTEST:
                    slow = _FASTEST
                waits *= slow
            cost += waits
        costs.append(cost)
    return costs
