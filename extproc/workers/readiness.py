"""Can the fleet serve anything at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.workers.worker import Role, Worker


@dataclass(frozen=True, slots=True)
class Readiness:
    """``reason`` says in one line what is missing; empty when ready."""

    ready: bool
    reason: str
    usable_workers: int
    total_workers: int


def assess(workers: Sequence[Worker]) -> Readiness:
    """Ready means: one usable prefill worker and one usable decode worker have a model in common."""
    usable = [worker for worker in workers if worker.usable]
    reason = _missing_role(workers) or _missing_model(usable)
    return Readiness(not reason, reason, len(usable), len(workers))


def _missing_role(workers: Sequence[Worker]) -> str:
    missing = []
    for role in (Role.PREFILL, Role.DECODE):
        of_role = [worker for worker in workers if worker.role is role]
        if not any(worker.usable for worker in of_role):
            missing.append(f"no usable {role.value} worker (of {len(of_role)} registered)")
    return ", ".join(missing)


def _missing_model(usable: Sequence[Worker]) -> str:
    prefill = [worker.model_ids for worker in usable if worker.role is Role.PREFILL]
    decode = [worker.model_ids for worker in usable if worker.role is Role.DECODE]
    if () in prefill or () in decode:
        return ""
    if {model for ids in prefill for model in ids} & {model for ids in decode for model in ids}:
        return ""
    return "no model is served by both a usable prefill worker and a usable decode worker"
