"""The engine ids of a Mooncake prefill worker, which a decode must be told: registered, or asked for.

A vLLM engine with data parallelism runs one core per rank, each with an id of its own: the configured one and
``_dp{rank}``; without, the id is as configured (vLLM 0.32, ``v1/engine/core.py``, ``run_engine_core``). The Mooncake
bootstrap server of the prefill answers ``GET /query`` with ``{rank: {"engine_id", "worker_addr"}}`` (``kv_connector/v1/
mooncake/mooncake_utils.py``). Unless it is configured, vLLM makes the id anew at every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import orjson

from extproc.workers.worker import MOONCAKE_BOOTSTRAP_PORT, KvEngine, Worker

QUERY: Final = "/query"


class QueryError(ValueError):
    """The answer to ``/query`` cannot be understood; the message says why."""


class Told(NamedTuple):
    """An answer to ``/query``.

    Attributes:
        engines: the engine cores in order of their ranks.
        addresses: where the workers of each listen, by engine id: ``{tp_rank: {pp_rank: address}}``, unread. They are
            others after every start.
    """

    engines: tuple[KvEngine, ...]
    addresses: Mapping[str, object]


def bootstrap_address(prefill: Worker) -> str:
    """What a decode must be told of a Mooncake prefill's bootstrap server: ``http://host:port``."""
    return f"http://{prefill.bootstrap_host}:{prefill.bootstrap_port or MOONCAKE_BOOTSTRAP_PORT}"


def dp_size(labels: Mapping[str, str]) -> int:
    """How many engine cores a worker with these labels has: its label ``dp_size``, else 1."""
    size = labels.get("dp_size", "")
    return max(1, int(size)) if size.isascii() and size.isdigit() and len(size) < 5 else 1


def of_registration(engine_id: str, labels: Mapping[str, str]) -> tuple[KvEngine, ...]:
    """The engine cores of a worker registered with ``engine_id``; their number is its label ``dp_size``."""
    if not engine_id:
        return ()
    ranks = dp_size(labels)
    if ranks == 1:
        return (KvEngine(0, engine_id),)
    return tuple(KvEngine(rank, _of_rank(engine_id, rank)) for rank in range(ranks))


def of_answer(body: bytes) -> Told:
    """What an answer to ``/query`` says. Raises QueryError."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise QueryError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise QueryError("not a JSON object")
    found = []
    addresses: dict[str, object] = {}
    for rank, entry in value.items():
        engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
        if not (rank.isascii() and rank.isdigit() and isinstance(engine_id, str) and engine_id):
            raise QueryError("not of the form {rank: {engine_id}}")
        found.append(KvEngine(int(rank), engine_id))
        addresses[engine_id] = entry.get("worker_addr")
    return Told(tuple(sorted(found)), addresses)


def agree(engine_id: str, registered: tuple[KvEngine, ...], asked: tuple[KvEngine, ...]) -> bool:
    """Whether what was ``asked`` is what was registered, or the ranks of the engine whose id was."""
    return asked == registered or all(engine.id == _of_rank(engine_id, engine.rank) for engine in asked)


def shown_id(engines: tuple[KvEngine, ...]) -> str:
    """One text for the ids of a worker's engine cores: what they have in common, else all."""
    if not engines:
        return ""
    if len(engines) == 1:
        return engines[0].id
    common = engines[0].id.removesuffix(_of_rank("", engines[0].rank))
    if all(engine.id == _of_rank(common, engine.rank) for engine in engines):
        return common
    return ", ".join(engine.id for engine in engines)


def _of_rank(engine_id: str, rank: int) -> str:
    return f"{engine_id}_dp{rank}"
