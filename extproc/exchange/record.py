"""What is remembered of a request for its log line and the metrics."""

from __future__ import annotations

from typing import Protocol

from extproc.transport.interface import Header


class Record:
    """One request, filled in on its way. Times are seconds of the exchange's clock; 0 means: did not happen.

    ``code`` is the error code when the gateway itself answered or cut the answer, ``message`` says why; ``status`` is
    what the client was told, 0 when it left before anything was.
    """

    __slots__ = (
        "api",
        "code",
        "decode",
        "ended",
        "handoff",
        "headed",
        "message",
        "model",
        "prefill",
        "prefill_ended",
        "request_id",
        "samples",
        "sent",
        "started",
        "status",
        "stream",
    )

    def __init__(self, started: float) -> None:
        self.started = started
        self.sent = self.prefill_ended = self.headed = self.ended = 0.0
        self.request_id = b""
        self.api = self.model = self.handoff = self.prefill = self.decode = self.code = self.message = ""
        self.stream = False
        self.samples = 1
        self.status = 0


def server_timing(record: Record) -> bytes:
    """The value of ``server-timing``, in milliseconds.

    ``route`` until the legs left, ``prefill`` until the prefill had answered (when it has), ``decode`` until the decode
    began to answer.
    """
    sent = record.sent
    route = (sent - record.started) * 1000
    if not record.decode:
        return b"route;dur=%.2f" % route
    decode = (record.headed - sent) * 1000
    if record.prefill_ended:
        return b"route;dur=%.2f, prefill;dur=%.2f, decode;dur=%.2f" % (
            route,
            (record.prefill_ended - sent) * 1000,
            decode,
        )
    return b"route;dur=%.2f, decode;dur=%.2f" % (route, decode)


def named(prefill: str, decode: str, handoff: str) -> list[Header]:
    """The headers that name who served, without those that are not known."""
    pairs = ((b"x-pd-prefill", prefill), (b"x-pd-decode", decode), (b"x-pd-handoff", handoff))
    return [(name, value.encode()) for name, value in pairs if value]


def naming_headers(record: Record) -> list[Header]:
    """The same of a request."""
    return named(record.prefill, record.decode, record.handoff)


class Observer(Protocol):
    """Is told of every request that is over."""

    def finished(self, record: Record) -> None:
        """``record`` is complete."""
