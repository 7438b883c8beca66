"""Can the fleet serve anything at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.workers.identify import CANNOT_LEARN
from extproc.workers.pairing import PairingMode, of_one_model, why_none
from extproc.workers.worker import Role, Worker


@dataclass(frozen=True, slots=True)
class Readiness:
    """``reason`` says in one line what is missing; empty when ready."""

    ready: bool
    reason: str
    usable_workers: int
    total_workers: int


def assess(workers: Sequence[Worker], mode: PairingMode) -> Readiness:
    """Ready means: a usable prefill and a usable decode worker may be paired and have a model in common.

    ``mode`` is how they are compared.
    """
    usable = [worker for worker in workers if worker.usable]
    reason = _missing_role(workers) or _missing_pair(usable, mode) or _missing_tokenizer(usable, mode)
    return Readiness(not reason, reason, len(usable), len(workers))


def _missing_role(workers: Sequence[Worker]) -> str:
    missing = []
    for role in (Role.PREFILL, Role.DECODE):
        of_role = [worker for worker in workers if worker.role is role]
        if not any(worker.usable for worker in of_role):
            missing.append(f"no usable {role.value} worker (of {len(of_role)} registered{_why(of_role)})")
    return ", ".join(missing)


def _why(workers: Sequence[Worker]) -> str:
    """Why the first of these is not used that cannot be: ``GET /workers`` tells which, and what is wrong with others.

    It is told to whoever asks, without a key. Other reasons may hold addresses of workers.
    """
    reasons = (
        worker.reason if worker.reason.startswith(CANNOT_LEARN) else worker.unserved or worker.cordoned
        for worker in workers
    )
    return next((f"; {reason}" for reason in reasons if reason), "")


def _missing_tokenizer(usable: Sequence[Worker], mode: PairingMode) -> str:
    """With the peer's words. Which model's it is, ``GET /workers`` tells; others may be served."""
    if not any(worker.no_tokenizer for worker in usable):
        return ""
    return "tokenizer not yet registered" if _missing_pair([w for w in usable if not w.no_tokenizer], mode) else ""


def _missing_pair(usable: Sequence[Worker], mode: PairingMode) -> str:
    prefills = [worker for worker in usable if worker.role is Role.PREFILL]
    decodes = [worker for worker in usable if worker.role is Role.DECODE]
    pairs = of_one_model(prefills, decodes)
    if not pairs:
        return "no model is served by both a usable prefill worker and a usable decode worker"
    return why_none(pairs, mode)
