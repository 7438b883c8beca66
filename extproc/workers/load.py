"""How loaded an engine says it is: the records, and reading them out of SGLang's JSON. Pure.

Where an engine says it, as of SGLang 0.5.23 and vLLM 0.32:

========================================  ============================================================================
``/v1/loads`` (SGLang)                    ``entrypoints/v1_loads.py``, ``managers/load_snapshot.py``: an entry per rank
``/get_load`` (SGLang before 0.5.9)       requests and tokens per rank; older ones say one number of tokens
``/metrics`` (vLLM; SGLang: by option)    :mod:`extproc.workers.load_metrics`
========================================  ============================================================================

What an engine does not say is None, never zero: a worker of which nothing is known is not an idle one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from extproc.workers.figures import amount, count, count_in


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One data-parallel rank, or an engine that has only one.

    Attributes:
        rank: which.
        running: requests in the running batch.
        waiting: requests in its queues; SGLang's of a disaggregated worker are all counted: those that wait for their
            partner, for memory, for the KV cache.
        waiting_tokens: prompt tokens of the queue that are not in its prefix cache.
        used_tokens: tokens that the KV cache holds.
        total_tokens: those, and the ones that wait for a place in it.
        max_tokens: tokens that fit in.
        kv_usage: how full it is, 0 to 1.
        max_running: how many requests may run at once.
        throughput: tokens generated per second.
        cache_hit_rate: share of prompt tokens found in the prefix cache, 0 to 1.
        utilization: of SGLang's own making.
        prefill_queue: requests with a prefill worker that wait for their decode, or whose cache is on its way.
        decode_queue: requests with a decode worker that wait for memory, or whose cache is on its way.
        transfer_ms: how long a KV transfer takes.
        transfer_gb_s: how fast it is, in GB/s.
    """

    rank: int = 0
    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    used_tokens: int | None = None
    total_tokens: int | None = None
    max_tokens: int | None = None
    kv_usage: float | None = None
    max_running: int | None = None
    throughput: float | None = None
    cache_hit_rate: float | None = None
    utilization: float | None = None
    prefill_queue: int | None = None
    decode_queue: int | None = None
    transfer_ms: float | None = None
    transfer_gb_s: float | None = None

    @property
    def says_something(self) -> bool:
        """Whether any figure tells how busy it is; limits alone do not."""
        return any(figure is not None for figure in (self.running, self.waiting, self.kv_usage, self.total_tokens))


class EngineLoad:
    """What an engine said at one moment. Immutable: the next answer makes another one.

    Attributes:
        at: when, by ``time.monotonic()``.
        ranks: of which it spoke, in order.
        running, waiting, waiting_tokens, used_tokens, total_tokens, max_tokens, max_running, throughput: the sums over
            them; None where one does not say it.
        kv_usage: the mean over them; None where one does not say it.
        kv_peak: that of the fullest one.
    """

    __slots__ = (
        "at",
        "kv_peak",
        "kv_usage",
        "max_running",
        "max_tokens",
        "ranks",
        "running",
        "throughput",
        "total_tokens",
        "used_tokens",
        "waiting",
        "waiting_tokens",
    )

    def __init__(self, at: float, ranks: Sequence[RankLoad]) -> None:
        self.at = at
        self.ranks = tuple(sorted(ranks, key=lambda rank: rank.rank))
        self.running = _sum([rank.running for rank in ranks])
        self.waiting = _sum([rank.waiting for rank in ranks])
        self.waiting_tokens = _sum([rank.waiting_tokens for rank in ranks])
        self.used_tokens = _sum([rank.used_tokens for rank in ranks])
        self.total_tokens = _sum([rank.total_tokens for rank in ranks])
        self.max_tokens = _sum([rank.max_tokens for rank in ranks])
        self.max_running = _sum([rank.max_running for rank in ranks])
        throughputs = [rank.throughput for rank in ranks if rank.throughput is not None]
        self.throughput = sum(throughputs) if len(throughputs) == len(ranks) else None
        usages = [rank.kv_usage for rank in ranks if rank.kv_usage is not None]
        known = bool(usages) and len(usages) == len(ranks)
        self.kv_usage = sum(usages) / len(usages) if known else None
        self.kv_peak = max(usages) if known else None

    def of_rank(self, rank: int) -> EngineLoad | None:
        """What it said of one rank; None: nothing."""
        found = [each for each in self.ranks if each.rank == rank]
        return EngineLoad(self.at, found) if found else None


def _sum(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known and len(known) == len(figures) else None


def with_limit(ranks: Sequence[RankLoad], limit: int | None) -> Sequence[RankLoad]:
    """``ranks``, each of which may run ``limit`` requests at once where it does not say how many."""
    if limit is None:
        return ranks
    return [rank if rank.max_running is not None else replace(rank, max_running=limit) for rank in ranks]


# Labels that say how many requests may run at once, for engines that do not tell it with their load (vLLM).
_LIMIT_LABELS: Final = ("max_running_requests", "max_num_seqs")


def limit_in(labels: Mapping[str, str]) -> int | None:
    """How many requests an engine with these labels may run at once; None: they do not say."""
    return next((limit for label in _LIMIT_LABELS if (limit := count_in(labels.get(label, "")))), None)


# -- SGLang's JSON ------------------------------------------------------------------------------------------------


def of_v1_loads(body: bytes) -> list[RankLoad] | None:
    """Read an answer to ``/v1/loads``: an entry per rank that has reported; None when it is no such answer.

    A rank that has not said anything yet is in the real answer with zeros and the time 0: it is left out.
    """
    answer = _json(body)
    entries = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return None
    if entries and not any("num_running_reqs" in entry for entry in entries):
        return None
    return [_of_entry(entry) for entry in entries if entry.get("timestamp") != 0]


def _of_entry(entry: Mapping[str, Any]) -> RankLoad:
    section = entry.get("disaggregation")
    disagg: Mapping[str, Any] = section if isinstance(section, dict) else {}
    mode = disagg.get("mode")
    return RankLoad(
        rank=count(entry.get("dp_rank")) or 0,
        running=count(entry.get("num_running_reqs")),
        waiting=count(entry.get("num_waiting_reqs")),
        waiting_tokens=count(entry.get("num_waiting_uncached_tokens")),
        used_tokens=count(entry.get("num_used_tokens")),
        total_tokens=count(entry.get("num_total_tokens")),
        max_tokens=count(entry.get("max_total_num_tokens")) or None,
        kv_usage=amount(entry.get("token_usage")),
        max_running=count(entry.get("max_running_requests")) or None,
        throughput=amount(entry.get("gen_throughput")),
        cache_hit_rate=amount(entry.get("cache_hit_rate")),
        utilization=amount(entry.get("utilization")),
        prefill_queue=_queued(disagg, _PREFILL_QUEUES) if mode == "prefill" else None,
        decode_queue=_queued(disagg, _DECODE_QUEUES) if mode == "decode" else None,
        # Zero until there was a transfer.
        transfer_ms=amount(disagg.get("kv_transfer_latency_ms")) or None,
        transfer_gb_s=amount(disagg.get("kv_transfer_speed_gb_s")) or None,
    )


# The first was called prefill_prealloc_... in older versions.
_PREFILL_QUEUES: Final = (
    "prefill_bootstrap_queue_reqs",
    "prefill_prealloc_queue_reqs",
    "prefill_inflight_queue_reqs",
)
_DECODE_QUEUES: Final = (
    "decode_prealloc_queue_reqs",
    "decode_transfer_queue_reqs",
    "decode_retracted_queue_reqs",
)


def _queued(section: Mapping[str, Any], names: Sequence[str]) -> int | None:
    known = [queued for name in names if (queued := count(section.get(name))) is not None]
    return sum(known) if known else None


def of_get_load(body: bytes) -> list[RankLoad] | None:
    """Read an answer to ``/get_load``; None when it is none.

    Before 0.5.3 it is ``{"load": TOKENS}``; then a list of ``dp_rank``, ``num_reqs``,
    ``num_waiting_reqs``, ``num_tokens`` for each rank, later ``num_pending_tokens`` and ``ts_tic`` besides (SGLang
    ``managers/io_struct.py``, ``GetLoadReqOutput``). Deprecated, a shim over ``/v1/loads`` of the same fields since
    sglang#23010 (April 2026); 0.5.23 has no such route.

    ``num_reqs`` there is of all requests, those that wait among them; ``num_tokens`` of those in the KV cache and those
    that wait for a place in it.
    """
    answer = _json(body)
    if isinstance(answer, dict):
        tokens = count(answer.get("load"))
        return None if tokens is None else [RankLoad(total_tokens=tokens)]
    if not isinstance(answer, list) or not answer:
        return None
    if not all(isinstance(entry, dict) and "num_tokens" in entry for entry in answer):
        return None
    ranks = []
    for entry in answer:
        requests, waiting = count(entry.get("num_reqs")), count(entry.get("num_waiting_reqs"))
        tokens, pending = count(entry["num_tokens"]), count(entry.get("num_pending_tokens"))
        ranks.append(
            RankLoad(
                rank=count(entry.get("dp_rank")) or 0,
                running=None if requests is None or waiting is None else max(0, requests - waiting),
                waiting=waiting,
                used_tokens=None if tokens is None or pending is None else max(0, tokens - pending),
                total_tokens=tokens,
            )
        )
    return ranks


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
