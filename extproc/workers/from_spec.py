"""What a worker is: by its registration alone, and by what it then says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from extproc.workers import token_ids
from extproc.workers.connectors import BY_FIELDS
from extproc.workers.kv_engines import of_registration
from extproc.workers.metadata import Metadata
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import MOONCAKE, KvEngine, Role, Worker

_LIKELY: Final = "sglang"  # an engine of which nobody says what it is


def take_over(spec: WorkerSpec, worker: Worker) -> None:
    """Make the worker what its registration says, as if it had said nothing of itself yet."""
    worker.model_ids = spec.model_ids
    worker.cards = spec.cards
    worker.bootstrap_port = spec.bootstrap_port
    worker.bootstrap_host = spec.bootstrap_host or spec.url.bracketed_host
    worker.unserved = spec.unserved
    worker.api_key = spec.api_key
    worker.priority = spec.priority
    worker.cost = spec.cost
    worker.labels = _labels(spec, {})
    worker.kv_connector = spec.kv.connector
    worker.kv_role = spec.kv.role
    worker.enforces_handshake = spec.kv.enforces_handshake
    worker.runtime = registered_runtime(spec) or _LIKELY
    worker.kv_engine_id = ""
    worker.update_pairing()
    worker.kv_engines = named_engines(spec)


def registered_runtime(spec: WorkerSpec) -> str | None:
    """The engine by its registration: only vLLM has connectors. None: it does not say."""
    return spec.runtime or ("vllm" if spec.kv.connector else None)


def named_engines(spec: WorkerSpec) -> tuple[KvEngine, ...]:
    """The engine cores that a registration names."""
    if spec.role is not Role.PREFILL or spec.kv.connector != MOONCAKE:
        return ()
    return of_registration(spec.kv.engine_id, spec.labels)


def describe(worker: Worker, spec: WorkerSpec, found: Metadata, *, ranks_known: bool) -> None:
    """Add what the worker said of itself, where its registration does not say otherwise.

    ``ranks_known``: how many data-parallel ranks it says it has counts more than what is registered.
    """
    kv = spec.kv.or_else(found.kv)
    worker.kv_connector, worker.kv_role, worker.kv_engine_id = kv.connector, kv.role, found.kv.engine_id
    layout = found.layout if worker.kv_connector in BY_FIELDS else {}
    worker.labels = _labels(spec, {**found.labels, **layout})
    if ranks_known and found.dp_size is not None:
        worker.labels["dp_size"] = str(found.dp_size)
    worker.runtime = registered_runtime(spec) or found.runtime or _LIKELY
    worker.takes_token_ids = bool(found.takes_token_ids)
    if worker.takes_token_ids:
        worker.labels.setdefault(token_ids.LABEL, "true")
    worker.listed = found.listed
    if not spec.cards:
        worker.cards = found.cards
        worker.model_ids = found.model_ids
    elif spec.engine_models_too:
        worker.model_ids = tuple(dict.fromkeys((*spec.model_ids, *found.model_ids)))
    if worker.role is Role.PREFILL and spec.bootstrap_port is None:
        worker.bootstrap_port = found.bootstrap_port
    worker.update_pairing()


def _labels(spec: WorkerSpec, said: Mapping[str, str]) -> dict[str, str]:
    """What is registered wins over what the engine has ``said``, but for a block size: that is a stopgap.

    The peer has ``kv_block_size`` for its prefix cache, where a wrong one costs little; here it decides pairs.
    """
    labels = {**said, **spec.labels}
    if spec.kv_block_size is not None and "page_size" not in labels:
        labels.setdefault("block_size", str(spec.kv_block_size))
    return labels
