"""Reading how loaded an engine is out of its Prometheus text. Pure.

vLLM's (0.32, ``v1/metrics/loggers.py``): label ``engine`` is the rank. SGLang's (0.5.23,
``observability/metrics_collector.py``): ``dp_rank``, and others besides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from extproc.workers.figures import amount, count, count_in
from extproc.workers.load import RankLoad

_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_Labels = dict[bytes, bytes]
# Figure of RankLoad, how its value is read, and the metrics that have it, of which the first that is there counts.
_Metrics = Sequence[tuple[str, Callable[[float], float | None], tuple[str, ...]]]


VLLM_METRICS: Final[_Metrics] = (
    ("running", count, ("vllm:num_requests_running",)),
    ("waiting", count, ("vllm:num_requests_waiting",)),
    ("kv_usage", amount, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),  # 0 to 1, whatever the name
)
VLLM_INFO: Final = "vllm:cache_config_info"
# Behind a colon since 0.4.4.
SGLANG_METRICS: Final[_Metrics] = tuple(
    (figure, read, (f"sglang:{name}", f"sglang_{name}"))
    for figure, read, name in (
        ("running", count, "num_running_reqs"),
        ("waiting", count, "num_queue_reqs"),
        ("kv_usage", amount, "token_usage"),
        ("used_tokens", count, "num_used_tokens"),
        ("max_tokens", count, "max_total_num_tokens"),
        ("throughput", amount, "gen_throughput"),
        ("cache_hit_rate", amount, "cache_hit_rate"),
        ("utilization", amount, "utilization"),
    )
)
_FAMILIES: Final = ((b"\nvllm:", VLLM_METRICS, b"engine"), (b"\nsglang", SGLANG_METRICS, b"dp_rank"))
METRIC_NAMES: Final = (*(name for _, _, names in (*VLLM_METRICS, *SGLANG_METRICS) for name in names), VLLM_INFO)


def of_metrics(page: bytes) -> list[RankLoad] | None:
    """Read a page of metrics, the engine's whole one or a few of them; None when it says nothing of its load.

    Only the lines that are needed are looked at. Measured: a vLLM's whole page, 52 KB with one rank and 13 KB for each
    further one, takes 0.1 ms, and a few lines of it 0.03.
    """
    page = b"\n" + page
    ranks: dict[int, dict[str, Any]] = {}
    for prefix, family, rank_label in _FAMILIES:
        if page.find(prefix) < 0:
            continue
        for figure, read, names in family:
            for name in names:
                found = _by_rank(page, name, rank_label)
                for rank, value in found.items():
                    ranks.setdefault(rank, {})[figure] = read(value)
                if found:
                    break
    for labels, _ in _samples(page, VLLM_INFO) if ranks else ():
        figures = ranks.get(_rank_of(labels, b"engine"))
        if figures is not None:
            figures["max_tokens"] = _capacity(labels)
    loads = [RankLoad(rank, **known) for rank, known in ranks.items()]
    return loads if any(load.says_something for load in loads) else None


def _capacity(labels: _Labels) -> int | None:
    """How many tokens fit into a vLLM's KV cache; older ones only say how many blocks."""
    tokens = labels.get(b"kv_cache_size_tokens", b"")
    if tokens:
        return count_in(tokens) or None
    blocks, size = count_in(labels.get(b"num_gpu_blocks", b"")), count_in(labels.get(b"block_size", b""))
    return count(blocks * size) or None if blocks and size else None


def _by_rank(page: bytes, name: str, rank_label: bytes) -> dict[int, float]:
    """The value of a metric by rank.

    SGLang's ranks of tensor, pipeline and expert parallelism may each have a line: they serve the same requests, so the
    first one's counts. With priorities there is a line for each besides the one for all, whose label is empty.
    """
    found: dict[int, float] = {}
    for labels, value in _samples(page, name):
        if not labels.get(b"priority"):
            found.setdefault(_rank_of(labels, rank_label), value)
    return found


def _rank_of(labels: _Labels, rank_label: bytes) -> int:
    return count_in(labels.get(rank_label, b"")) or 0


def _samples(page: bytes, name: str) -> Iterator[tuple[_Labels, float]]:
    """The lines of one metric in a page that begins with a line break."""
    wanted = b"\n" + name.encode()
    at = page.find(wanted)
    while at >= 0:
        begin = at + len(wanted)
        end = page.find(b"\n", begin)
        line = page[begin : end if end >= 0 else len(page)]
        labels, closing, rest = line.rpartition(b"}")
        if line.startswith(b"{" if closing else b" "):  # else it is a longer name
            with suppress(IndexError, ValueError):  # not a sample
                yield dict(_LABEL.findall(labels)), float(rest.split()[0])
        at = page.find(wanted, begin)
