"""Which workers ``GET /workers`` is asked for: the peer's three parameters, and no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from multidict import MultiMapping

from extproc.control.worker_spec import SpecError
from extproc.workers.worker import Role, Worker

ROLES: Final = tuple(role.value for role in Role)
MODES: Final = ("http", "grpc")


class WorkerQuery(NamedTuple):
    """What a worker must be; None: anything.

    Attributes:
        model: which it must serve.
        role: in which role, as ``worker_type``.
        mode: how it must be reached, as ``connection_mode``.
    """

    model: str | None = None
    role: str | None = None
    mode: str | None = None

    def among(self, workers: Iterable[Worker]) -> list[Worker]:
        """Those that are asked for."""
        return [worker for worker in workers if self._fits(worker)]

    def _fits(self, worker: Worker) -> bool:
        return (
            (self.model is None or self.model in worker.model_ids)
            and self.role in (None, worker.role.value)
            and self.mode in (None, worker.url.connection_mode)
        )


def parse_worker_query(query: MultiMapping[str]) -> WorkerQuery:
    """Read the query string. Raises SpecError: an answer to something else than was asked is worse than none."""
    names = ("model", "worker_type", "connection_mode")
    for name in query:
        if name not in names:
            raise SpecError(f"Unknown query parameter '{name[:64]}', expected one of {', '.join(names)}")
        if len(query.getall(name)) > 1:
            raise SpecError(f"Query parameter '{name}' is given more than once")
    role, mode = query.get("worker_type"), query.get("connection_mode")
    for name, given, known in (("worker_type", role, ROLES), ("connection_mode", mode, MODES)):
        if given is not None and given not in known:
            raise SpecError(f"Query parameter '{name}': '{given[:64]}' is none of {', '.join(known)}")
    return WorkerQuery(query.get("model"), role, mode)
