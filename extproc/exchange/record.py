"""What is remembered of a request for its log line and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Record:
    """One request, filled in on its way. Times are seconds of the exchange's clock; 0 means: did not happen.

    ``code`` is the error code when the gateway itself answered or cut the answer; ``status`` what the client was told,
    0 when it left before anything was.
    """

    request_id: str
    api: str
    started: float
    model: str = ""
    stream: bool = False
    samples: int = 1
    handoff: str = ""
    prefill: str = ""
    decode: str = ""
    status: int = 0
    code: str = ""
    message: str = ""
    sent: float = 0.0
    prefill_ended: float = 0.0
    headed: float = 0.0
    ended: float = 0.0


def naming_headers(record: Record) -> list[tuple[bytes, bytes]]:
    """The response headers that name what happened: ``x-pd-prefill``, ``x-pd-decode``, ``x-pd-handoff``, timings.

    ``server-timing`` counts milliseconds: ``route`` until the legs left, ``prefill`` until the prefill had answered
    (when it has), ``decode`` until the decode began to answer.
    """
    timing = b"route;dur=%.2f" % ((record.sent - record.started) * 1000)
    if record.prefill_ended:
        timing += b", prefill;dur=%.2f" % ((record.prefill_ended - record.sent) * 1000)
    if record.decode:
        timing += b", decode;dur=%.2f" % ((record.headed - record.sent) * 1000)
    named = ((b"x-pd-prefill", record.prefill), (b"x-pd-decode", record.decode), (b"x-pd-handoff", record.handoff))
    return [*((name, value.encode()) for name, value in named if value), (b"server-timing", timing)]


class Observer(Protocol):
    """Is told of every request that is over."""

    def finished(self, record: Record) -> None:
        """``record`` is complete."""
