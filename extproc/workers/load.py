"""How loaded an engine says it is: the records, and reading them out of what engines answer. Pure.

Where an engine says it, as of SGLang 0.5.23 and vLLM 0.32:

========================================  ============================================================================
``/v1/loads`` (SGLang)                    ``entrypoints/v1_loads.py``, ``managers/load_snapshot.py``: an entry per rank
``/get_load`` (SGLang before 0.5.9)       requests and tokens per rank; older ones say one number of tokens
``/metrics`` (vLLM; SGLang: by option)    ``v1/metrics/loggers.py``: label ``engine`` is the rank;
                                          ``observability/metrics_collector.py``: ``dp_rank``, and others besides
========================================  ============================================================================

What an engine does not say is None, never zero: a worker of which nothing is known is not an idle one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson


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
        rank=_count(entry.get("dp_rank")) or 0,
        running=_count(entry.get("num_running_reqs")),
        waiting=_count(entry.get("num_waiting_reqs")),
        waiting_tokens=_count(entry.get("num_waiting_uncached_tokens")),
        used_tokens=_count(entry.get("num_used_tokens")),
        total_tokens=_count(entry.get("num_total_tokens")),
        max_tokens=_count(entry.get("max_total_num_tokens")) or None,
        kv_usage=_figure(entry.get("token_usage")),
        max_running=_count(entry.get("max_running_requests")) or None,
        throughput=_figure(entry.get("gen_throughput")),
        cache_hit_rate=_figure(entry.get("cache_hit_rate")),
        utilization=_figure(entry.get("utilization")),
        prefill_queue=_queued(disagg, _PREFILL_QUEUES) if mode == "prefill" else None,
        decode_queue=_queued(disagg, _DECODE_QUEUES) if mode == "decode" else None,
        # Zero until there was a transfer.
        transfer_ms=_figure(disagg.get("kv_transfer_latency_ms")) or None,
        transfer_gb_s=_figure(disagg.get("kv_transfer_speed_gb_s")) or None,
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
    known = [count for name in names if (count := _count(section.get(name))) is not None]
    return sum(known) if known else None


def of_get_load(body: bytes) -> list[RankLoad] | None:
    """Read an answer to ``/get_load``; None when it is none.

    ``num_reqs`` there is of all requests, those that wait among them; ``num_tokens`` of those in the KV cache and those
    that wait for a place in it.
    """
    answer = _json(body)
    if isinstance(answer, dict):  # before 0.5.3
        tokens = _count(answer.get("load"))
        return None if tokens is None else [RankLoad(total_tokens=tokens)]
    if not isinstance(answer, list) or not answer:
        return None
    if not all(isinstance(entry, dict) and "num_tokens" in entry for entry in answer):
        return None
    ranks = []
    for entry in answer:
        requests, waiting = _count(entry.get("num_reqs")), _count(entry.get("num_waiting_reqs"))
        tokens, pending = _count(entry["num_tokens"]), _count(entry.get("num_pending_tokens"))
        ranks.append(
            RankLoad(
                rank=_count(entry.get("dp_rank")) or 0,
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


# -- Prometheus text ----------------------------------------------------------------------------------------------

_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_Labels = dict[bytes, bytes]
# Figure of RankLoad, how its value is read, and the metrics that have it, of which the first that is there counts.
_Metrics = Sequence[tuple[str, Callable[[float], float | None], tuple[str, ...]]]


def _whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) and value >= 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) and value >= 0 else None


VLLM_METRICS: Final[_Metrics] = (
    ("running", _whole, ("vllm:num_requests_running",)),
    ("waiting", _whole, ("vllm:num_requests_waiting",)),
    ("kv_usage", _finite, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),  # 0 to 1, whatever the name
)
VLLM_INFO: Final = "vllm:cache_config_info"
# Behind a colon since 0.4.4.
SGLANG_METRICS: Final[_Metrics] = tuple(
    (figure, read, (f"sglang:{name}", f"sglang_{name}"))
    for figure, read, name in (
        ("running", _whole, "num_running_reqs"),
        ("waiting", _whole, "num_queue_reqs"),
        ("kv_usage", _finite, "token_usage"),
        ("used_tokens", _whole, "num_used_tokens"),
        ("max_tokens", _whole, "max_total_num_tokens"),
        ("throughput", _finite, "gen_throughput"),
        ("cache_hit_rate", _finite, "cache_hit_rate"),
        ("utilization", _finite, "utilization"),
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
    if tokens.isdigit():
        return int(tokens) or None
    blocks, size = labels.get(b"num_gpu_blocks", b""), labels.get(b"block_size", b"")
    return int(blocks) * int(size) or None if blocks.isdigit() and size.isdigit() else None


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
    rank = labels.get(rank_label, b"")
    return int(rank) if rank.isdigit() else 0


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


# -- numbers ------------------------------------------------------------------------------------------------------


def _figure(value: object) -> float | None:
    """A number that may be believed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _finite(float(value))


def _count(value: object) -> int | None:
    known = _figure(value)
    return None if known is None else int(known)
