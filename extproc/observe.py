"""What the operator sees of requests: one log line each, and the metrics."""

from __future__ import annotations

import logging
from typing import Final

from extproc.exchange.record import Record

_log: Final = logging.getLogger("extproc.request")


class RequestLog:
    """An Observer that writes one line per request at info (error codes at warning when the gateway is at fault)."""

    def finished(self, record: Record) -> None:
        """See Observer."""
        outcome = _outcome(record)
        level = logging.WARNING if record.code and record.status >= 500 else logging.INFO
        if not _log.isEnabledFor(level):
            return
        started = record.started
        _log.log(
            level,
            "request",
            extra={
                "request_id": record.request_id,
                "api": record.api,
                "model": record.model or None,
                "stream": record.stream or None,
                "samples": record.samples if record.samples > 1 else None,
                "handoff": record.handoff or None,
                "prefill": record.prefill or None,
                "decode": record.decode or None,
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


def _outcome(record: Record) -> str:
    if record.code:
        return "failed" if record.status >= 500 else "rejected"
    if not record.status:
        return "left"  # the client went away before it was told anything
    return "answered"


def _ms(end: float, start: float) -> float | None:
    return (end - start) * 1000 if end and start else None
