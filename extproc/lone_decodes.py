"""Says which decode workers cannot do what conditional disaggregation asks of them."""

from __future__ import annotations

import logging

from extproc.handoff.table import Handoffs
from extproc.workers.registry import Change, Registry
from extproc.workers.worker import Role, Status, Worker

_log = logging.getLogger(__name__)


class LoneDecodeWarnings:
    """Warns, once for each server, of decode workers in use that serve nothing without a prefill leg.

    Args:
        registry: whose workers.
        handoffs: know who does.
        options: the options that are of no effect on them, as people know them.
    """

    def __init__(self, registry: Registry, handoffs: Handoffs, options: str) -> None:
        self._handoffs = handoffs
        self._options = options
        self._warned: set[str] = set()
        registry.subscribe(self._changed)

    def _changed(self, worker: Worker, change: Change) -> None:
        if change is Change.REMOVED:
            self._warned.discard(worker.id)
        elif change is Change.STATUS and worker.status is Status.READY and worker.server is worker:
            self._look_at(worker)

    def _look_at(self, worker: Worker) -> None:
        if worker.role is not Role.DECODE or worker.id in self._warned or self._handoffs.of(worker).waivable:
            return
        self._warned.add(worker.id)
        reason = f"a {worker.runtime} decode worker serves no request without a prefill leg"
        _log.warning("%s: not applied", self._options, extra={"worker": worker.name, "reason": reason})
