"""What becomes of workers, telling it to whoever wants to know, and what cannot become of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

from extproc.workers.worker import Worker

Subscriber = Callable[[Worker, "Change"], None]

_logger = logging.getLogger(__name__)


class Change(Enum):
    """What a subscriber is told about a worker."""

    ADDED = "added"
    STATUS = "status"  # its status is another
    CIRCUIT = "circuit"  # its circuit breaker lets more or less through
    CORDON = "cordon"  # it is given no new requests for now, or is again
    OVERLOAD = "overload"  # its engine has too much to do, or not any more
    IDENTITY = "identity"  # its models, labels, ports, engine cores or runtime may be others
    SPEC = "spec"  # its registration is another: whoever goes by it reads it again
    ENDPOINT = "endpoint"  # Envoy acknowledged another address, or it has none any more
    RESTARTED = "restarted"  # it is another process, as its engine cores say, whether or not it was out meanwhile
    REMOVED = "removed"  # gone: no request is under way to it and Envoy does not know it


class WorkerLeavesError(Exception):
    """The worker is being removed; nothing of it can be changed any more."""


class WorkerExistsError(Exception):
    """There is already a worker with this URL and role, which is not being removed."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(f"Worker already exists at URL '{worker.url}' with ID {worker.id}")
        self.worker = worker


class Subscribers:
    """Who wants to know."""

    def __init__(self) -> None:
        self._callbacks: list[Subscriber] = []

    def add(self, callback: Subscriber) -> Callable[[], None]:
        """Call ``callback`` at every change, at once and synchronously. Returns what ends the subscription."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def tell(self, worker: Worker, change: Change) -> None:
        """Tell all; what fails with one of them is logged and no matter for the others."""
        for callback in tuple(self._callbacks):
            try:
                callback(worker, change)
            except Exception:
                _logger.exception("a subscriber of the worker registry failed")
