"""Data-parallel ranks: one entry for each rank of a server (``--dp-aware``), so that requests are balanced over them.

All ranks of a server share its URL, endpoint, probes, identity and state, and come and go together. The first one's
entry is the one that was registered; the others are made when the server has said how many ranks it has. A request
names the rank that it is for: SGLang in its body (handoff/sglang.py), vLLM in a header.

Source: sglang 0.5.9, 0.5.10 and 0.5.23, srt/managers/data_parallel_controller.py, srt/disaggregation/decode.py; vllm
0.32, v1/engine/input_processor.py, v1/engine/core_client.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from extproc.workers.kv_engines import dp_size
from extproc.workers.metadata import Metadata
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import KvEngine, Role, Worker

RANK_HEADER: Final = "x-data-parallel-rank"  # vLLM's; SGLang (0.5.10) reads it too, but not for /generate
MOST_RANKS: Final = 1024  # of one server; more is taken for nonsense, and the server for one without ranks
_LABEL: Final = "dp_size"
_VERSION: Final = re.compile(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})")
_TWO_FIELDS: Final = (0, 5, 10)  # SGLang pull request 19268


@lru_cache(256)
def has_two_fields(version: str) -> bool:
    """Whether SGLang of ``version`` tells a leg's own rank (``routed_dp_rank``) from its prefill's.

    Before 0.5.10 there is one field, ``data_parallel_rank``, which a decode takes for both. What has no version that
    can be read, such as a build of one's own, is taken for a new one.
    """
    match = _VERSION.match(version)
    if match is None:
        return True
    parts = tuple(int(part) for part in match.groups())
    return parts >= _TWO_FIELDS or parts == (0, 0, 0)


def count(worker: Worker, found: Metadata) -> int:
    """How many entries there should be for the server of ``worker``, which said ``found`` of itself.

    As many as there are where nobody says. One where requests could not name a rank: an SGLang decode with one field
    for two ranks.
    """
    said = found.dp_size
    if said is None:
        said = dp_size(worker.labels) if _LABEL in worker.labels else worker.dp_size
    one_field = worker.runtime == "sglang" and not has_two_fields(worker.labels.get("version", ""))
    if said > MOST_RANKS or (one_field and worker.role is Role.DECODE):
        return 1
    return max(1, said)


def count_of(worker: Worker, engines: Sequence[KvEngine]) -> int:
    """How many entries there should be for the server of ``worker``, which has these ``engines`` (at least one).

    As many as there are where it, or its registration, has said how many.
    """
    said = engines[-1].rank + 1
    return worker.dp_size if said > MOST_RANKS or _LABEL in worker.labels else said


def doubt(spec: WorkerSpec, found: Metadata) -> str:
    """What should be said of the ranks of a server, if anything."""
    said = spec.labels.get(_LABEL)
    if said is None or found.dp_size is None or said == str(found.dp_size):
        return ""
    return f"registered with dp_size {said}, but the server says {found.dp_size}"


def form(entries: Sequence[Worker]) -> None:
    """Make ``entries``, in this order, the ranks of their server; a single one stands for the whole server."""
    engines = dict.fromkeys(engine for entry in entries for engine in entry.kv_engines)
    group = tuple(entries) if len(entries) > 1 else ()
    for rank, entry in enumerate(entries):
        entry.ranks = group
        entry.dp_rank = rank if group else None
        entry.dp_size = len(entries)
        entry.name = f"{entry.base_url}@{rank}" if group else entry.base_url
        entry.kv_engines = engines_of(entry, engines)


def engines_of(worker: Worker, engines: Iterable[KvEngine]) -> tuple[KvEngine, ...]:
    """Those of a server's engine cores that ``worker`` stands for."""
    return tuple(engine for engine in engines if worker.dp_rank in (None, engine.rank))


def entries(worker: Worker) -> tuple[Worker, ...]:
    """All entries of the server of ``worker``."""
    return worker.ranks or (worker,)


def load(worker: Worker) -> int:
    """How many legs are under way to the server of ``worker``."""
    return sum(entry.load for entry in worker.ranks) if worker.ranks else worker.load


def answers(worker: Worker) -> int:
    """How many answers legs had of the server of ``worker``; another number after one more, or with other ranks."""
    return sum(entry.answers for entry in worker.ranks) if worker.ranks else worker.answers
