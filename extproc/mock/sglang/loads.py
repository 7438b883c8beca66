"""How loaded the engine says it is: ``/v1/loads`` and ``/metrics``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from extproc.mock.sglang.engine import Mode
from extproc.mock.sglang.info import CAPACITY, MAX_RUNNING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from extproc.mock.sglang.engine import Engine

SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


def loads(engine: Engine, version: str, include: Collection[str], rank: int | None) -> dict[str, Any]:
    """``/v1/loads``; ``include`` empty: every section. A ``rank`` that the engine has not: no entry."""
    found = [_entry(engine, each, include) for each in range(engine.dp_size) if rank in (None, each)]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": found,
    }


def _entry(engine: Engine, rank: int, include: Collection[str]) -> dict[str, Any]:
    waiting, used = engine.waiting(rank), engine.used_tokens(rank)
    pending = sum(s.prompt.length for s in engine.on(rank) if s.waiting and engine.mode is not Mode.DECODE)
    entry: dict[str, Any] = {
        "timestamp": engine.hangs_since(rank) or time.time(),
        "dp_rank": rank,
        "num_running_reqs": engine.running[rank] - waiting,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": used,
        "num_total_tokens": used + pending,
        "num_active_tokens": used + pending,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": CAPACITY,
        "max_running_requests": MAX_RUNNING,
        "token_usage": round(used / CAPACITY, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": 0,
        "total_prefill_busy_us": 0,
        "decode_moments": None,
    }
    sections = {
        "memory": ("memory", {"weight_gb": 0.02, "kv_cache_gb": 0.031, "graph_gb": 0.0, "token_capacity": CAPACITY}),
        "disagg": ("disaggregation", _disaggregation(engine.mode, waiting)),
        "queues": ("queues", {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}),
    }
    wanted = {key: section for name, (key, section) in sections.items() if not include or {"all", name} & set(include)}
    return entry | wanted


def _disaggregation(mode: Mode, waiting: int) -> dict[str, Any]:
    return {
        "mode": mode.value,
        "prefill_bootstrap_queue_reqs": waiting if mode is Mode.PREFILL else 0,
        "prefill_inflight_queue_reqs": 0,
        "decode_prealloc_queue_reqs": 0,
        "decode_transfer_queue_reqs": waiting if mode is Mode.DECODE else 0,
        "decode_retracted_queue_reqs": 0,
        "kv_transfer_speed_gb_s": 0.0,
        "kv_transfer_latency_ms": 0.0,
    }


def metrics(engine: Engine, model: str) -> bytes:
    """``/metrics`` (the engine has it only with ``--enable-metrics``)."""
    common = f'engine_type="{engine.mode.value}",model_name="{model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    ranks = range(engine.dp_size)
    labels = [common + (f',dp_rank="{rank}"' if len(ranks) > 1 else "") for rank in ranks]
    used = [engine.used_tokens(rank) for rank in ranks]
    figures: tuple[tuple[str, str, Sequence[float]], ...] = (
        ("num_running_reqs", "gauge", [engine.running[rank] - engine.waiting(rank) for rank in ranks]),
        ("num_queue_reqs", "gauge", [0 for _ in ranks]),  # those that wait for their other leg are in other queues
        ("num_used_tokens", "gauge", used),
        ("token_usage", "gauge", [round(tokens / CAPACITY, 4) for tokens in used]),
        ("max_total_num_tokens", "gauge", [CAPACITY for _ in ranks]),
        ("num_requests_total", "counter", [engine.admitted]),  # of the HTTP server's process
    )
    lines = []
    for name, kind, values in figures:
        lines.append(f"# TYPE sglang:{name} {kind}")
        lines += [f"sglang:{name}{{{labels[rank]}}} {float(value)}" for rank, value in enumerate(values)]
    return ("\n".join(lines) + "\n").encode()
