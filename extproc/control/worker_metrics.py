"""The fleet's gauges; a worker that is gone leaves no series behind."""

from __future__ import annotations

from extproc.control.metrics import Metrics
from extproc.workers.registry import Registry

_LABELS = ("role", "worker")


class WorkerMetrics:
    """``pd_worker_up`` and ``pd_worker_load`` per registered worker, read from ``registry`` for each page."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._up = metrics.gauge("pd_worker_up", "Whether the worker is given requests (1) or not (0).", _LABELS)
        self._load = metrics.gauge("pd_worker_load", "Legs that this gateway has under way on the worker.", _LABELS)
        metrics.before_render(self._collect)

    def _collect(self) -> None:
        self._up.clear()
        self._load.clear()
        for worker in self._registry:
            labels = worker.role.value, str(worker.url)
            self._up.labels(*labels).set(worker.usable)
            self._load.labels(*labels).set(worker.load)
