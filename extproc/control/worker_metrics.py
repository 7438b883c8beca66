"""The fleet's series; a worker that is gone leaves none behind, and neither does a figure that is not known."""

from __future__ import annotations

from collections import Counter
from typing import Final

from extproc.control.metrics import Metrics
from extproc.workers.breaker import BreakerState
from extproc.workers.load import RankLoad
from extproc.workers.registry import Registry
from extproc.workers.worker import Worker

_LABELS = ("role", "worker")
_RANK_LABELS = (*_LABELS, "dp_rank")
# As the peer has them.
_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.OPEN: 1, BreakerState.HALF_OPEN: 2}
# What an engine says of each of its ranks: figure of RankLoad, name, help.
_ENGINE = (
    ("running", "pd_engine_running_requests", "Requests that the engine runs."),
    ("waiting", "pd_engine_waiting_requests", "Requests in the engine's queues."),
    ("waiting_tokens", "pd_engine_waiting_tokens", "Prompt tokens in the queue that the engine has not cached."),
    ("kv_usage", "pd_engine_kv_usage", "How full the engine's KV cache is, 0 to 1."),
    ("max_running", "pd_engine_max_running_requests", "How many requests the engine may run at once."),
    ("throughput", "pd_engine_generation_tokens_per_second", "Tokens that the engine generates per second."),
)


class WorkerMetrics:
    """The series of each registered worker, read from ``registry`` for each page.

    That is ``pd_worker_...`` of this gateway and Envoy, and ``pd_engine_...`` of the engine's ranks.
    """

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._up = metrics.gauge("pd_worker_up", "Whether the worker is given requests (1) or not (0).", _LABELS)
        self._load = metrics.gauge("pd_worker_load", "Legs that this gateway has under way on the worker.", _LABELS)
        self._tokens = metrics.gauge("pd_worker_prompt_tokens", "Tokens of their prompts, about.", _LABELS)
        self._envoy = metrics.gauge(
            "pd_worker_envoy_requests", "Requests that Envoy has under way to the worker, whoever sent them.", _LABELS
        )
        self._limit = metrics.gauge(
            "pd_worker_legs_limit",
            "How many legs the worker may have at once; missing where it may have any number.",
            _LABELS,
        )
        self._engine = {figure: metrics.gauge(name, text, _RANK_LABELS) for figure, name, text in _ENGINE}
        self._circuit = metrics.gauge(
            "pd_worker_circuit_state", "The worker's circuit breaker: 0 closed, 1 open, 2 half open.", _LABELS
        )
        self._transitions = metrics.counter(
            "pd_worker_circuit_transitions_total",
            "How often the worker's circuit breaker came into a state.",
            (*_LABELS, "state"),
        )
        self._overloaded = metrics.gauge(
            "pd_worker_overloaded", "Whether the worker's engine has too much to do (1) or not (0).", _LABELS
        )
        self._overloads = metrics.counter(
            "pd_worker_overloads_total", "How often the worker's engine began to have too much to do.", _LABELS
        )
        self._pushbacks = metrics.counter(
            "pd_worker_pushbacks_total", "Legs that the worker turned away because it was busy (429, 503).", _LABELS
        )
        metrics.before_render(self._collect)

    def _collect(self) -> None:
        for gauge in (
            self._up,
            self._load,
            self._tokens,
            self._envoy,
            self._limit,
            self._circuit,
            self._overloaded,
            *self._engine.values(),
        ):
            gauge.clear()
        for counter in (self._transitions, self._pushbacks, self._overloads):
            counter.clear()
        up: Counter[tuple[str, str]] = Counter()
        load: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        for worker in self._registry:  # two of a URL while one is being removed; at most one of them is usable
            labels = worker.role.value, worker.name
            up[labels] += worker.sought
            load[labels] += worker.load
            tokens[labels] += worker.tokens
            self._show_circuit(worker)
            self._show_others_figures(worker)
        for labels in up:
            self._up.labels(*labels).set(up[labels])
            self._load.labels(*labels).set(load[labels])
            self._tokens.labels(*labels).set(tokens[labels])

    def _show_circuit(self, worker: Worker) -> None:
        labels, breaker = (worker.role.value, worker.name), worker.breaker
        self._circuit.labels(*labels).set(_STATES[breaker.state])
        self._pushbacks.labels(*labels).value += breaker.pushbacks
        self._overloaded.labels(*labels).set(bool(worker.overloaded))
        self._overloads.labels(*labels).value += self._registry.overloads.times(worker)
        transitions = self._registry.circuits.transitions(worker)
        for state in BreakerState:  # from 0 on: Prometheus takes what a series begins with for no increase
            self._transitions.labels(*labels, state.value).value += transitions[state]

    def _show_others_figures(self, worker: Worker) -> None:
        if worker.envoy_active is not None:
            self._envoy.labels(worker.role.value, worker.name).set(worker.envoy_active)
        if worker.limit is not None:
            self._limit.labels(worker.role.value, worker.name).set(worker.limit)
        for rank in () if worker.engine_load is None else worker.engine_load.ranks:
            self._show_rank(worker, rank)

    def _show_rank(self, worker: Worker, rank: RankLoad) -> None:
        for figure, gauge in self._engine.items():
            value = getattr(rank, figure)
            if value is not None:
                gauge.labels(worker.role.value, worker.name, str(rank.rank)).set(value)
