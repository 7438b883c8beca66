"""``/metrics`` by the engine's names: those that routers and dashboards read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from extproc.mock.vllm.engine import Engine


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
    totals, options = engine.totals, engine.options
    layout = (
        f',block_size="{options.block_size}",cache_dtype="{options.cache_dtype}",num_gpu_blocks="{engine.blocks.count}"'
    )
    ranks = range(options.dp_size)
    running, loading = zip(*(engine.requests(rank) for rank in ranks), strict=True)
    found = [
        *(Metric("num_requests_running", "gauge", running[rank], rank=rank) for rank in ranks),
        *(Metric("num_requests_waiting", "gauge", loading[rank], rank=rank) for rank in ranks),
        *(Metric("num_requests_waiting_by_reason", "gauge", 0, ',reason="capacity"', rank=rank) for rank in ranks),
        *(
            Metric("num_requests_waiting_by_reason", "gauge", loading[rank], ',reason="deferred"', rank=rank)
            for rank in ranks
        ),
        # All ranks take their blocks from one pool here.
        *(Metric("kv_cache_usage_perc", "gauge", engine.blocks.usage, rank=rank) for rank in ranks),
        *(Metric("cache_config_info", "gauge", 1, layout, rank=rank) for rank in ranks),
        Metric("prefix_cache_queries_total", "counter", totals.local_queries),
        Metric("prefix_cache_hits_total", "counter", totals.local_hits),
        Metric("external_prefix_cache_queries_total", "counter", totals.queries),
        Metric("external_prefix_cache_hits_total", "counter", totals.hits),
        Metric("prompt_tokens_total", "counter", totals.prompt),
        Metric("generation_tokens_total", "counter", totals.generated),
    ]
    for reason, count in totals.ends.items():
        found.append(Metric("request_success_total", "counter", count, f',finished_reason="{reason}"'))
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
