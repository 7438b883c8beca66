"""The fleet's series; a worker that is gone leaves none behind."""

from __future__ import annotations

from collections import Counter
from typing import Final

from extproc.control.metrics import Metrics
from extproc.workers.breaker import BreakerState
from extproc.workers.registry import Registry

_LABELS = ("role", "worker")
# As the peer has them.
_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.OPEN: 1, BreakerState.HALF_OPEN: 2}


class WorkerMetrics:
    """The series of each registered worker, read from ``registry`` for each page."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._up = metrics.gauge("pd_worker_up", "Whether the worker is given requests (1) or not (0).", _LABELS)
        self._load = metrics.gauge("pd_worker_load", "Legs that this gateway has under way on the worker.", _LABELS)
        self._circuit = metrics.gauge(
            "pd_worker_circuit_state", "The worker's circuit breaker: 0 closed, 1 open, 2 half open.", _LABELS
        )
        self._transitions = metrics.counter(
            "pd_worker_circuit_transitions_total",
            "How often the worker's circuit breaker came into a state.",
            (*_LABELS, "state"),
        )
        self._pushbacks = metrics.counter(
            "pd_worker_pushbacks_total", "Legs that the worker turned away because it was busy (429, 503).", _LABELS
        )
        metrics.before_render(self._collect)

    def _collect(self) -> None:
        for family in (self._up, self._load, self._circuit, self._transitions, self._pushbacks):
            family.clear()
        up: Counter[tuple[str, str]] = Counter()
        load: Counter[tuple[str, str]] = Counter()
        for worker in self._registry:  # two of a URL while one is being removed; at most one of them is usable
            labels = worker.role.value, worker.name
            up[labels] += worker.sought
            load[labels] += worker.load
            breaker = worker.breaker
            self._circuit.labels(*labels).set(_STATES[breaker.state])
            self._pushbacks.labels(*labels).value += breaker.pushbacks
            for state, times in self._registry.circuits.transitions(worker).items():
                self._transitions.labels(*labels, state.value).value += times
        for labels in up:
            self._up.labels(*labels).set(up[labels])
            self._load.labels(*labels).set(load[labels])
