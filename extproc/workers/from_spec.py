"""What a worker is by its registration alone, before it has said anything of itself."""

from __future__ import annotations

from extproc.workers.kv_engines import of_registration
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import MOONCAKE, KvEngine, Role, Worker


def take_over(spec: WorkerSpec, worker: Worker) -> None:
    """Make the worker what its registration says, as if it had said nothing of itself yet."""
    worker.model_ids = spec.model_ids
    worker.cards = spec.cards
    worker.bootstrap_port = spec.bootstrap_port
    worker.api_key = spec.api_key
    worker.priority = spec.priority
    worker.cost = spec.cost
    worker.labels = dict(spec.labels)
    worker.kv_connector = spec.kv.connector
    worker.kv_role = spec.kv.role
    worker.enforces_handshake = spec.kv.enforces_handshake
    # Only vLLM has connectors.
    worker.runtime = spec.runtime or ("vllm" if spec.kv.connector else "sglang")
    worker.update_pairing()
    worker.kv_engines = named_engines(spec)


def named_engines(spec: WorkerSpec) -> tuple[KvEngine, ...]:
    """The engine cores that a registration names."""
    if spec.role is not Role.PREFILL or spec.kv.connector != MOONCAKE:
        return ()
    return of_registration(spec.kv.engine_id, spec.labels)
