"""``GET /get_loads``: an entry per worker and rank, made of what is known; no worker is asked for it.

The engines' figures have the peer's names, which are SGLang's (``SchedulerLoadSnapshot`` and
``EngineAggregateMetricsSnapshot`` in smg ``crates/protocols/src/worker.rs``). There a figure that is not known is 0;
here it is left out. Ours are called ``gateway_...`` and ``envoy_...``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

from extproc import __version__
from extproc.workers.load import RankLoad
from extproc.workers.worker import Worker

_COUNTS = (
    # in the answer, in RankLoad
    ("num_running_reqs", "running"),
    ("num_waiting_reqs", "waiting"),
    ("num_waiting_uncached_tokens", "waiting_tokens"),
    ("num_used_tokens", "used_tokens"),
    ("num_total_tokens", "total_tokens"),
    ("max_total_num_tokens", "max_tokens"),
    ("token_usage", "kv_usage"),
    ("gen_throughput", "throughput"),
    ("cache_hit_rate", "cache_hit_rate"),
    ("utilization", "utilization"),
    ("max_running_requests", "max_running"),
    ("prefill_queue_reqs", "prefill_queue"),
    ("decode_queue_reqs", "decode_queue"),
    ("kv_transfer_latency_ms", "transfer_ms"),
    ("kv_transfer_speed_gb_s", "transfer_gb_s"),
)


def load_report(workers: Iterable[Worker]) -> dict[str, object]:
    """The whole answer for ``workers``."""
    workers = list(workers)
    entries = [entry for worker in workers for entry in _entries(worker)]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": f"pd-extproc-{__version__}",
        "dp_rank_count": len(entries),
        "loads": entries,
        "aggregate": _aggregate(workers),
    }


def _entries(worker: Worker) -> list[dict[str, object]]:
    """An entry for each rank that the engine spoke of; what is ours is known of the worker as a whole, in the first."""
    load = worker.engine_load
    ours: dict[str, object] = {"gateway_reqs": worker.load, "gateway_prompt_tokens": worker.tokens}
    if worker.envoy_active is not None:
        ours["envoy_reqs"] = worker.envoy_active
    named: dict[str, object] = {"worker": worker.name, "worker_type": worker.role.value}
    if load is None:
        return [{**named, "dp_rank": worker.dp_rank or 0, **ours}]
    when = time.time() - (time.monotonic() - load.at)
    entries = [{**named, "dp_rank": rank.rank, "timestamp": when, **_figures(rank)} for rank in load.ranks]
    entries[0].update(ours)
    return entries


def _figures(rank: RankLoad) -> dict[str, object]:
    known = {name: value for name, figure in _COUNTS if (value := getattr(rank, figure)) is not None}
    if rank.running is not None and rank.waiting is not None:
        known["num_total_reqs"] = rank.running + rank.waiting
    return known


def _aggregate(workers: Iterable[Worker]) -> dict[str, object]:
    """Of the ranks that said each figure; one that none said is left out."""
    workers = list(workers)
    ranks = [rank for worker in workers if worker.engine_load is not None for rank in worker.engine_load.ranks]
    running = [rank.running for rank in ranks if rank.running is not None]
    waiting = [rank.waiting for rank in ranks if rank.waiting is not None]
    found: dict[str, object] = {
        "gateway_reqs": sum(worker.load for worker in workers),
        "gateway_prompt_tokens": sum(worker.tokens for worker in workers),
    }
    if running:
        found["total_running_reqs"] = sum(running)
    if waiting:
        found["total_waiting_reqs"] = sum(waiting)
    if running and waiting:
        found["total_reqs"] = sum(running) + sum(waiting)
    for name, figures, digits in (
        ("avg_token_usage", [rank.kv_usage for rank in ranks], 4),
        ("avg_throughput", [rank.throughput for rank in ranks], 2),
        ("avg_utilization", [rank.utilization for rank in ranks], 4),
    ):
        known = [figure for figure in figures if figure is not None]
        if known:
            found[name] = round(sum(known) / len(known), digits)
    return found
