"""One entry of the registry: a worker, its registration, what it has said of itself, and how it is."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from extproc.workers.from_spec import describe, named_engines, registered_runtime, take_over
from extproc.workers.identity import new_worker_id
from extproc.workers.metadata import Metadata
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Status, Worker

_UNUSABLE = ("worker is not usable yet", "worker is still not usable")  # by whether it has been

_logger = logging.getLogger(__name__)


def named(worker: Worker) -> dict[str, object]:
    """A worker in a log line."""
    return {"worker": worker.name, "role": worker.role.value, "worker_id": worker.id}


@dataclass(slots=True, eq=False)
class Record:
    """See the module. Changes here are told to nobody."""

    worker: Worker
    spec: WorkerSpec
    changed: float = 0.0  # time.time() of the last change of status
    joined: bool = False  # it has been READY since it was registered
    replaced: bool = False  # registered anew under its id
    found: Metadata | None = None  # what it last said of itself
    told: tuple[Status, str] = (Status.PENDING, "")  # how its server is, and why
    held: str = ""  # why this rank is out while its server is READY

    @classmethod
    def of(cls, spec: WorkerSpec) -> Record:
        """A new worker, as registered."""
        worker = Worker(id=new_worker_id(), url=spec.url, role=spec.role)
        take_over(spec, worker)
        return cls(worker, spec, changed=time.time())

    def another(self, *, ranks_known: bool) -> Record:
        """A new entry for the same server: as registered, and as it says of itself, in the same state."""
        record = Record.of(self.spec)
        worker = record.worker
        worker.kv_engines = ()  # those that the server has are shared out to its ranks
        worker.status, worker.reason = record.told = self.told
        worker.endpoint, worker.ip = self.worker.endpoint, self.worker.ip
        worker.cordoned = self.worker.cordoned
        record.joined, record.replaced = self.joined, self.replaced
        if self.found is not None:
            record.describe(self.found, ranks_known=ranks_known)
        return record

    def change(self, spec: WorkerSpec) -> None:
        """Go by another registration; what the worker has said of itself must be told again (:meth:`describe`)."""
        worker, former, self.spec = self.worker, self.spec, spec
        engines = worker.kv_engines
        take_over(spec, worker)
        if spec.kv.connector == former.kv.connector and named_engines(spec) == named_engines(former):
            worker.kv_engines = engines  # what the bootstrap server has told, until it is asked again

    def replace(self, spec: WorkerSpec) -> None:
        """Go by another registration, as if the worker had said nothing of itself yet."""
        self.spec, self.found = spec, None
        self.joined, self.replaced = False, True
        take_over(spec, self.worker)
        self.worker.listed, self.worker.takes_token_ids = (), False

    def describe(self, found: Metadata, *, ranks_known: bool) -> None:
        """Take over what the worker said of itself; see :func:`extproc.workers.from_spec.describe`."""
        self.found = found.after(self.found)
        describe(self.worker, self.spec, self.found, ranks_known=ranks_known)

    @property
    def connector(self) -> str | None:
        """The connector in force; None: the server has yet to say whether it has one, which vLLM does over gRPC."""
        worker = self.worker
        may_say = worker.url.is_grpc and self.found is None and registered_runtime(self.spec) in (None, "vllm")
        return None if may_say and not worker.kv_connector else worker.kv_connector

    def set_status(self, status: Status, reason: str) -> bool:
        """The worker's server is in this state; whether the worker's own is another now. It is logged."""
        worker = self.worker
        self.told = status, reason
        if self.held and status is Status.READY:
            status, reason = Status.NOT_READY, self.held
        news = reason and reason != worker.reason
        worker.reason = reason
        if worker.status is status:
            if news and status is not Status.READY:  # a mistyped port must not show in /workers only
                _logger.warning(_UNUSABLE[self.joined], extra=named(worker) | {"reason": reason})
            return False
        before, worker.status, self.changed = worker.status, status, time.time()
        self.joined |= status is Status.READY
        level = logging.INFO if status in (Status.READY, Status.DRAINING) else logging.WARNING
        extra = named(worker) | {"was": before.value, "status": status.value, "reason": reason}
        _logger.log(level, "worker status", extra=extra)
        return True
