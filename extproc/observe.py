"""What the operator sees of requests: one log line each, and the metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from extproc.control.metrics import Counter, Metrics
from extproc.exchange.record import Record

if TYPE_CHECKING:
    from extproc.exchange.gateway import Gateway

_log: Final = logging.getLogger("extproc.request")


class RequestLog:
    """An Observer that writes one line per request: at info, or at warning where the gateway failed it."""

    def finished(self, record: Record) -> None:
        """See Observer."""
        outcome = outcome_of(record)
        level = logging.WARNING if outcome == "failed" else logging.INFO
        if not _log.isEnabledFor(level):
            return
        started = record.started
        _log.log(
            level,
            "request",
            extra={
                "request_id": record.request_id.decode("latin-1"),
                "api": record.api,
                "model": record.model or None,
                "stream": record.stream or None,
                "samples": record.samples if record.samples > 1 else None,
                "handoff": record.handoff or None,
                "kv": record.kv or None,
                "kv_note": record.note or None,
                "attempts": record.attempts if record.attempts > 1 else None,
                "prefill": record.prefill or None,
                "decode": record.decode or None,
                "queued_ms": record.queued * 1000 if record.queued else None,
                "route_ms": _ms(record.sent, started),
                "prefill_ms": _ms(record.prefill_ended, record.sent),
                "head_ms": _ms(record.headed, started),
                "total_ms": _ms(record.ended, started),
                "status": record.status or None,
                "code": record.code or None,
                "reason": record.message or None,
                "outcome": outcome,
            },
        )


class RequestMetrics:
    """An Observer that counts. Series are looked up once per combination and kept."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(
            "pd_requests_total",
            "Requests that are over, by what the client was told; code is empty when a worker answered.",
            ("api", "handoff", "status", "code", "outcome"),
        )
        self._caches = metrics.counter(
            "pd_kv_caches_total",
            "Requests by what became of the prompt's KV cache: handed over, recomputed by the decode, computed there "
            "by the operator's rule (local), or none needed.",
            ("handoff", "kv"),
        )
        self._retries = metrics.counter(
            "pd_retries_total", "Attempts after a request's first, each on another pair.", ("handoff",)
        )
        self._counters: dict[tuple[str, str, int, str], Counter] = {}
        self._duration = metrics.histogram(
            "pd_request_duration_seconds", "From the request's head to the end of its answer.", ("api",)
        )
        self._prefill = metrics.histogram(
            "pd_prefill_duration_seconds", "From sending the prefill leg to the end of its answer.", ("handoff",)
        )
        self._head = metrics.histogram(
            "pd_time_to_head_seconds", "From the request's head to the head of its answer.", ("api",)
        )
        self._waits = metrics.histogram(
            "pd_admission_wait_seconds", "How long requests waited for admission, of those that did.", ("api",)
        )
        self._admission = AdmissionMetrics(metrics)
        self._in_flight = metrics.gauge("pd_requests_in_flight", "Requests under way.").labels()
        self._rooms = metrics.gauge("pd_rooms_live", "Rooms in which legs may still meet.").labels()
        self._metrics = metrics

    def watch(self, gateway: Gateway) -> None:
        """Show what ``gateway`` holds on every page."""

        def collect() -> None:
            self._in_flight.set(gateway.alive)
            self._rooms.set(gateway.rooms)
            self._admission.show(gateway)

        self._metrics.before_render(collect)

    def finished(self, record: Record) -> None:
        """See Observer."""
        key = (record.api, record.handoff, record.status, record.code)
        counter = self._counters.get(key)
        if counter is None:
            labels = (record.api, record.handoff, str(record.status), record.code, outcome_of(record))
            counter = self._counters[key] = self._requests.labels(*labels)
        counter.value += 1
        if record.kv:
            self._caches.labels(record.handoff, record.kv).value += 1
        # From 0 on: Prometheus takes what a series begins with for no increase.
        if record.handoff or record.attempts > 1:
            self._retries.labels(record.handoff).value += record.attempts - 1
        started = record.started
        self._duration.labels(record.api).observe(record.ended - started)
        if record.queued:
            self._waits.labels(record.api).observe(record.queued)
        if record.prefill_ended:
            self._prefill.labels(record.handoff).observe(record.prefill_ended - record.sent)
        if record.headed:
            self._head.labels(record.api).observe(record.headed - started)


class AdmissionMetrics:
    """What waits, and what may."""

    def __init__(self, metrics: Metrics) -> None:
        self._slots = metrics.gauge("pd_admission_in_flight", "Requests that hold a slot of the gateway.").labels()
        self._limit = metrics.gauge("pd_admission_limit", "How many may; 0: any number.").labels()
        self._queued = metrics.gauge(
            "pd_admission_queued",
            "Requests that wait: for a slot, by class of priority, or for a prefill or a decode worker.",
            ("queue",),
        )

    def show(self, gateway: Gateway) -> None:
        """Of ``gateway``, now."""
        gate, legs = gateway.gate, gateway.legs
        self._slots.set(gate.in_flight)
        self._limit.set(gateway.config.gate.limit)
        for priority in gate.priorities:
            self._queued.labels(priority.name.lower()).set(gate.queued_of(priority))
        for role, count in legs.queued.items():
            self._queued.labels(f"{role.value}_worker").set(count)


class Observers:
    """Several Observers as one."""

    def __init__(self, *observers: RequestLog | RequestMetrics) -> None:
        self._observers = observers

    def finished(self, record: Record) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.finished(record)


def outcome_of(record: Record) -> str:
    """``answered`` by a worker, ``rejected`` (4xx) or ``failed`` by the gateway, ``left`` before any of these.

    ``failed``: a 5xx, or an answer that was cut.
    """
    if record.code:
        return "rejected" if 400 <= record.status < 500 else "failed"
    return "answered" if record.status else "left"


def _ms(end: float, start: float) -> float | None:
    return (end - start) * 1000 if end and start else None
