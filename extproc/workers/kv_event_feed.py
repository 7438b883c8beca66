"""Follows the KV cache events of all workers that publish them: which, from when, and until when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from extproc.workers.kv_event_source import Common, Source, SourceError, source_of
from extproc.workers.kv_event_stream import Stream
from extproc.workers.kv_events import Event
from extproc.workers.registry import Change, Registry
from extproc.workers.worker import Worker

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Knows what workers hold; see :class:`extproc.policies.event_prefixes.EventPrefixes`."""

    def begin(self, worker: Worker) -> None:
        """The events of ``worker`` are followed from now on."""

    def apply(self, worker: Worker, events: Sequence[Event]) -> None:
        """These have happened in its cache."""

    def lose(self, worker: Worker) -> None:
        """Nothing is known of its cache."""

    def restart(self, worker: Worker) -> None:
        """All that has ever happened in its cache follows."""

    def renew(self, worker: Worker) -> None:
        """It is another process, whose cache began empty."""

    def end(self, worker: Worker) -> None:
        """Its events are followed no more."""


@dataclass(frozen=True, slots=True)
class _OfOne:
    """The part of a Sink that is about one worker: a kv_event_stream.Sink."""

    sink: Sink
    worker: Worker

    def apply(self, events: Sequence[Event]) -> None:
        self.sink.apply(self.worker, events)

    def lose(self) -> None:
        self.sink.lose(self.worker)

    def restart(self) -> None:
        self.sink.restart(self.worker)

    def renew(self) -> None:
        self.sink.renew(self.worker)


class KvEventFeed:
    """Tells ``sink`` of the events of the registry's usable workers, from :meth:`start` to :meth:`stop`.

    A worker that is out is not followed: when it comes back it may be another process. ``common`` is for those that say
    nothing of their own.
    """

    def __init__(self, registry: Registry, sink: Sink, common: Common) -> None:
        self._registry = registry
        self._sink = sink
        self._common = common
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._streams: dict[Worker, tuple[Source, Stream]] = {}
        self._complaints: dict[Worker, str] = {}
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to follow. Needs a running event loop."""
        self._context = zmq.Context()
        self._unsubscribe = self._registry.subscribe(self._changed)
        for worker in self._registry:
            self._look_at(worker)

    def stop(self) -> None:
        """Follow nobody any more."""
        self._unsubscribe()
        for worker in tuple(self._streams):
            self._drop(worker)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def stream(self, worker: Worker) -> Stream | None:
        """That of a worker, if it is followed."""
        found = self._streams.get(worker)
        return None if found is None else found[1]

    def _changed(self, worker: Worker, change: Change) -> None:
        if change is not Change.CIRCUIT and change is not Change.OVERLOAD:
            self._look_at(worker)

    def _look_at(self, worker: Worker) -> None:
        source = self._source_of(worker) if worker.works else None
        known = self._streams.get(worker)
        if known is not None and known[0] != source:
            self._drop(worker)
            known = None
        if known is None and source is not None:
            self._follow(worker, source)
        if not worker.works:
            self._complaints.pop(worker, None)

    def _source_of(self, worker: Worker) -> Source | None:
        try:
            return source_of(worker, self._common)
        except SourceError as error:
            self._complain(worker, str(error))
            return None

    def _follow(self, worker: Worker, source: Source) -> None:
        assert self._context is not None
        self._sink.begin(worker)
        try:
            stream = Stream(self._context, source, _OfOne(self._sink, worker), worker.name)
        except zmq.ZMQError as error:
            self._sink.end(worker)
            self._complain(worker, f"{source.endpoint}: {error}")
            return
        self._streams[worker] = source, stream

    def _drop(self, worker: Worker) -> None:
        self._streams.pop(worker)[1].close()
        self._sink.end(worker)

    def _complain(self, worker: Worker, reason: str) -> None:
        if self._complaints.get(worker) != reason:
            self._complaints[worker] = reason
            _logger.warning("KV events: not followed", extra={"worker": worker.name, "reason": reason})
