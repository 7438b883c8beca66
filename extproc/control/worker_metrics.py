"""The fleet's gauges; a worker that is gone leaves no series behind."""

from __future__ import annotations

from collections import Counter

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
        up: Counter[tuple[str, str]] = Counter()
        load: Counter[tuple[str, str]] = Counter()
        for worker in self._registry:  # two of a URL while one is being removed; at most one of them is usable
            labels = worker.role.value, worker.name
            up[labels] += worker.usable
            load[labels] += worker.load
        for labels in up:
            self._up.labels(*labels).set(up[labels])
            self._load.labels(*labels).set(load[labels])
