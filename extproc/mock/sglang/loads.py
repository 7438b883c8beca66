"""How loaded the engine says it is: ``/v1/loads`` and ``/metrics``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from extproc.mock.sglang.engine import Mode
from extproc.mock.sglang.info import CAPACITY, MAX_RUNNING, VERSION

if TYPE_CHECKING:
    from collections.abc import Collection

    from extproc.mock.sglang.engine import Engine

SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


def loads(engine: Engine, include: Collection[str], rank: int | None) -> dict[str, Any]:
    """``/v1/loads``; ``include`` empty: every section. A ``rank`` that the engine has not: no entry."""
    found = [] if rank not in (None, 0) else [_entry(engine, include)]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": found,
    }


def _entry(engine: Engine, include: Collection[str]) -> dict[str, Any]:
    waiting, used = engine.waiting, engine.used_tokens
    pending = sum(s.prompt.length for s in engine.live.values() if s.waiting and engine.mode is not Mode.DECODE)
    entry: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": len(engine.live) - waiting,
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
    labels = f'engine_type="{engine.mode.value}",model_name="{model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    figures = (
        ("num_running_reqs", "gauge", len(engine.live) - engine.waiting),
        ("num_queue_reqs", "gauge", 0),  # those that wait for their other leg are in other queues
        ("num_used_tokens", "gauge", engine.used_tokens),
        ("token_usage", "gauge", round(engine.used_tokens / CAPACITY, 4)),
        ("max_total_num_tokens", "gauge", CAPACITY),
        ("num_requests_total", "counter", engine.admitted),
    )
    lines = (f"# TYPE sglang:{name} {kind}\nsglang:{name}{{{labels}}} {float(value)}" for name, kind, value in figures)
    return ("\n".join(lines) + "\n").encode()
