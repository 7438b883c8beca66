"""How a worker looks in the control API: the peer's WorkerInfo."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.control.worker_query import WorkerQuery
from extproc.workers.kv_engines import shown_id
from extproc.workers.pairing import pairing_key
from extproc.workers.registration import said
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status, Worker

# Shown for the peer's clients: connecting is tried for as long as the worker is registered.
_MAX_CONNECTION_ATTEMPTS = 20


def worker_list(registry: Registry, wanted: WorkerQuery) -> dict[str, object]:
    """``GET /workers``: those that are asked for."""
    shown = wanted.among(registry)
    return {
        "workers": [worker_info(registry, worker) for worker in shown],
        "total": len(shown),
        "stats": {
            "prefill_count": _count(shown, Role.PREFILL),
            "decode_count": _count(shown, Role.DECODE),
            "regular_count": _count(shown, Role.REGULAR),
        },
    }


def worker_details(registry: Registry, worker: Worker) -> dict[str, object]:
    """``GET /workers/{id}``: as in the list, and what is being done with the worker."""
    info = worker_info(registry, worker)
    job = _job(worker, joined=registry.has_joined(worker), replaced=registry.is_replaced(worker))
    if job is not None:
        kind, state = job
        info["job_status"] = {
            "job_type": kind,
            "worker_url": worker.name,
            "status": state,
            "message": registry.trouble(worker) or None,
            "timestamp": int(registry.changed_at(worker)),
        }
    return info


def worker_info(registry: Registry, worker: Worker) -> dict[str, object]:
    """The worker's fields; those that say nothing are left out, and the API key always is."""
    spec = registry.spec(worker)
    engine_id = worker.kv_engine_id or spec.kv.engine_id
    optional: dict[str, object] = {
        "models": worker.cards,
        "labels": worker.labels,
        "bootstrap_host": spec.bootstrap_host,
        "bootstrap_port": worker.bootstrap_port,
        "kv_connector": worker.kv_connector,
        "kv_role": worker.kv_role,
        "kv_engine_id": (not worker.ranks and engine_id) or shown_id(worker.kv_engines),
        "health": said(spec.health),
        "resilience": said(spec.resilience),
        "overload": said(spec.overload),
        "load_monitor_interval_secs": spec.load_monitor_interval_secs,
        "kv_block_size": spec.kv_block_size,
        "http_pool": said(spec.http_pool),
        "multimodal_tensor_transport": spec.multimodal_tensor_transport,
        "multimodal_shm_min_bytes": spec.multimodal_shm_min_bytes,
        # Ours: the peer says nothing of why a worker is out.
        "status_reason": registry.trouble(worker),
        "pd_pairing": pairing_key(worker) if worker.role in (Role.PREFILL, Role.DECODE) else "",
    }
    ranked = {"dp_base_url": worker.base_url, "dp_rank": worker.dp_rank, "dp_size": worker.dp_size}
    return {
        "id": worker.id,
        **({"model_id": worker.model_ids[0]} if worker.model_ids else {}),
        "url": worker.name,
        "worker_type": worker.role.value,
        "connection_mode": worker.url.connection_mode,
        "runtime_type": worker.runtime,
        "priority": worker.priority,
        "cost": worker.cost,
        "max_connection_attempts": spec.max_connection_attempts or _MAX_CONNECTION_ATTEMPTS,
        **{name: value for name, value in optional.items() if value},
        **(ranked if worker.ranks else {}),
        "is_healthy": worker.sought,
        "status": worker.status.value,
        "load": worker.load,
        "http2": worker.url.is_grpc,
    }


def _count(workers: Iterable[Worker], role: Role) -> int:
    return sum(worker.role is role for worker in workers)


def _job(worker: Worker, *, joined: bool, replaced: bool) -> tuple[str, str] | None:
    """What is being done with the worker, in the peer's words; adding it goes on even after it has "failed"."""
    if worker.status is Status.DRAINING:
        return "RemoveWorker", "processing"
    if joined:
        return None
    return "UpdateWorker" if replaced else "AddWorker", "failed" if worker.status is Status.FAILED else "processing"
