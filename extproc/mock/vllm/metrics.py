"""``/metrics`` by the engine's names: those that routers and dashboards read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from extproc.mock.vllm.engine import Engine, Totals


class Metric(NamedTuple):
    """One line, of one data-parallel rank; ``suffix`` makes it a part of a histogram."""

    family: str
    kind: str
    value: float
    labels: str = ""
    suffix: str = ""
    rank: int = 0


def text(engine: Engine, names: Collection[str] | None = None) -> bytes:
    """The exposition; only of ``names``, where there are any."""
    options = engine.options
    layout = (
        f',block_size="{options.block_size}",cache_dtype="{options.cache_dtype}",num_gpu_blocks="{engine.blocks.count}"'
    )
    ranks = range(options.dp_size)
    gauges = [engine.gauges(rank) for rank in ranks]
    found = [
        *(Metric("num_requests_running", "gauge", gauges[rank].running, rank=rank) for rank in ranks),
        *(Metric("num_requests_waiting", "gauge", gauges[rank].loading, rank=rank) for rank in ranks),
        *(Metric("num_requests_waiting_by_reason", "gauge", 0, ',reason="capacity"', rank=rank) for rank in ranks),
        *(
            Metric("num_requests_waiting_by_reason", "gauge", gauges[rank].loading, ',reason="deferred"', rank=rank)
            for rank in ranks
        ),
        # All ranks take their blocks from one pool here.
        *(Metric("kv_cache_usage_perc", "gauge", gauges[rank].usage, rank=rank) for rank in ranks),
        *(Metric("cache_config_info", "gauge", 1, layout, rank=rank) for rank in ranks),
    ]
    counters: tuple[tuple[str, Callable[[Totals], int]], ...] = (
        ("prefix_cache_queries_total", lambda totals: totals.local_queries),
        ("prefix_cache_hits_total", lambda totals: totals.local_hits),
        ("external_prefix_cache_queries_total", lambda totals: totals.queries),
        ("external_prefix_cache_hits_total", lambda totals: totals.hits),
        ("prompt_tokens_total", lambda totals: totals.prompt),
        ("generation_tokens_total", lambda totals: totals.generated),
    )
    for name, count in counters:
        found += [Metric(name, "counter", count(engine.totals[rank]), rank=rank) for rank in ranks]
    for reason in engine.totals[0].ends:
        label = f',finished_reason="{reason}"'
        found += [
            Metric("request_success_total", "counter", engine.totals[rank].ends[reason], label, rank=rank)
            for rank in ranks
        ]
    if engine.connector is not None:
        found += engine.connector.metrics()
    lines = []
    told = ""
    for metric in found:
        name = f"vllm:{metric.family}"
        if names is not None and name + metric.suffix not in names:
            continue
        if name != told:
            lines.append(f"# TYPE {name} {metric.kind}")
            told = name
        labels = f'engine="{metric.rank}",model_name="{options.model}"{metric.labels}'
        lines.append(f"{name}{metric.suffix}{{{labels}}} {float(metric.value)}")
    return ("\n".join(lines) + "\n").encode()
