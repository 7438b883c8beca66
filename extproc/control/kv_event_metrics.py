"""The series of KV cache events, for workers whose events are followed."""

from __future__ import annotations

from typing import Protocol

from extproc.control.metrics import Metrics
from extproc.workers.kv_event_feed import KvEventFeed
from extproc.workers.registry import Registry
from extproc.workers.worker import Worker

_LABELS = ("role", "worker")


class Known(Protocol):
    """What events have said."""

    def blocks(self, worker: Worker) -> int:
        """How many blocks it is known to hold."""

    def is_whole(self, worker: Worker) -> bool:
        """Whether all that it holds is known."""


class KvEventMetrics:
    """``pd_kv_events_...`` of each worker that is followed, read for each page."""

    def __init__(self, registry: Registry, feed: KvEventFeed, known: Known, metrics: Metrics) -> None:
        self._registry = registry
        self._feed = feed
        self._known = known
        self._connected = metrics.gauge(
            "pd_kv_events_connected", "Whether the worker's KV events are being heard (1) or not (0).", _LABELS
        )
        self._whole = metrics.gauge(
            "pd_kv_events_whole",
            "Whether all that the worker's cache holds is known by its events (1) or not (0).",
            _LABELS,
        )
        self._blocks = metrics.gauge("pd_kv_events_blocks", "Blocks that the worker's cache is known to hold.", _LABELS)
        self._batches = metrics.counter("pd_kv_events_batches_total", "Batches of KV events applied.", _LABELS)
        self._losses = metrics.counter(
            "pd_kv_events_losses_total", "How often KV events were missing and could not be had again.", _LABELS
        )
        metrics.before_render(self._collect)

    def _collect(self) -> None:
        for gauge in (self._connected, self._whole, self._blocks):
            gauge.clear()
        for counter in (self._batches, self._losses):
            counter.clear()
        for worker in self._registry:
            stream = self._feed.stream(worker)
            if stream is None:
                continue
            labels = worker.role.value, worker.name
            self._connected.labels(*labels).set(stream.connected)
            self._whole.labels(*labels).set(self._known.is_whole(worker))
            self._blocks.labels(*labels).set(self._known.blocks(worker))
            self._batches.labels(*labels).value += stream.batches
            self._losses.labels(*labels).value += stream.losses
