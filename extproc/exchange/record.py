"""What is remembered of a request for its log line and the metrics."""

from __future__ import annotations

from typing import Final, Protocol

from extproc.errors import GatewayError
from extproc.names import NAMING
from extproc.transport.interface import Header

NO_PARAMS: Final = "the prefill's answer has no usable kv_transfer_params"
WAIVED: Final = "the prefill failed, and --on-prefill-failure is decode-only"


class Record:
    """One request, filled in on its way. Times are seconds of the exchange's clock; 0 means: did not happen.

    ``code`` is the error code when the gateway itself answered or cut the answer, ``message`` says why; ``status`` is
    what the client was told, 0 when it left before anything was. ``leg_id`` is what workers are told
    for ``request_id``. ``kv`` is a value of handoff.Kv, ``note`` says why a
    KV cache was computed by the decode; ``attempts`` counts the pairs that were tried.
    """

    __slots__ = (
        "api",
        "attempts",
        "code",
        "decode",
        "ended",
        "handoff",
        "headed",
        "kv",
        "leg_id",
        "message",
        "model",
        "note",
        "prefill",
        "prefill_ended",
        "queued",
        "request_id",
        "samples",
        "sent",
        "started",
        "status",
        "stream",
    )

    def __init__(self, started: float) -> None:
        self.started = started
        self.queued = 0.0  # seconds that it has waited for admission
        self.sent = self.prefill_ended = self.headed = self.ended = 0.0
        self.request_id = self.leg_id = b""
        self.api = self.model = self.handoff = self.prefill = self.decode = self.code = self.message = ""
        self.kv = self.note = ""
        self.attempts = 1
        self.stream = False
        self.samples = 1
        self.status = 0

    def told(self, error: GatewayError) -> None:
        """The client was told of ``error``."""
        self.status, self.code, self.message = error.status, error.fault.code, error.message


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


def named(prefill: str, decode: str, handoff: str, kv: str, attempts: int) -> list[Header]:
    """The headers that name who served and how, without those that are not known or go without saying."""
    values = (prefill, decode, handoff, kv, str(attempts) if attempts > 1 else "")
    return [(name.encode(), value.encode()) for name, value in zip(NAMING, values, strict=True) if value]


def naming_headers(record: Record) -> list[Header]:
    """The same of a request."""
    return named(record.prefill, record.decode, record.handoff, record.kv, record.attempts)


class Observer(Protocol):
    """Is told of every request that is over."""

    def finished(self, record: Record) -> None:
        """``record`` is complete."""
