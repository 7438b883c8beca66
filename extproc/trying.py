"""Has a pair answer a request of the gateway's own: between the control API and the request path."""

from __future__ import annotations

import asyncio

from extproc.control.trial_routes import Trial as TrialResult
from extproc.exchange.gateway import Gateway
from extproc.exchange.record import Record
from extproc.exchange.trial import Trial


async def try_pair(gateway: Gateway, model: str | None, within: float) -> TrialResult:
    """See :data:`extproc.control.trial_routes.Try`."""
    over: asyncio.Future[Record] = asyncio.get_running_loop().create_future()

    def tell(record: Record) -> None:
        if not over.done():
            over.set_result(record)

    trial = Trial(gateway, model, tell)
    try:
        async with asyncio.timeout(within):
            record = await over
    except TimeoutError:
        return TrialResult(ok=False, code="request_timeout", message=f"no answer within {within:g} s")
    finally:
        trial.leave()
    return TrialResult(
        record.status == 200 and not record.code,
        record.code,
        record.message,
        record.prefill,
        record.decode,
        record.handoff,
        record.kv,
        record.attempts,
        record.ended - record.started,
    )
