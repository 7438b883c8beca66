"""Runs the sequences of one request and sends what its ``Api`` makes of them, in one piece or as a stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from extproc.mock.sglang.engine import Engine, InternalError, Pace, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from extproc.mock.exchange import Exchange
    from extproc.mock.faults import Fault
    from extproc.mock.sglang.api import Api, Reply
    from extproc.mock.sglang.engine import Batch, Sequence


class Runner:
    """The way of a request through one engine. ``pace`` holds where a fault does not say otherwise."""

    def __init__(self, engine: Engine, pace: Pace) -> None:
        self.pace = pace
        self._engine = engine

    async def run(self, exchange: Exchange, api: Api) -> None:
        """Answer a request; raises CrashError where the engine's process ends."""
        if (objection := api.objection()) is not None:
            await send(exchange, objection)
            return
        early = api.stream and api.early_head
        if early:
            await exchange.start(headers=api.stream_headers)
            if opening := api.opening():
                await exchange.chunk(opening)
        try:
            batch = api.batch()
            self._engine.admit(batch)
        except RequestError as problem:
            if early:
                await exchange.chunk(api.refusal_events(str(problem)))
                await exchange.finish()
            else:
                await send(exchange, api.refusal(str(problem)))
            return
        except InternalError as problem:
            if early:
                exchange.abandon()
            await send(exchange, api.stumble(str(problem)))
            return
        try:
            if api.stream:
                await self._stream(exchange, api, batch)
            else:
                await self._complete(exchange, api, batch)
        finally:
            self._engine.release(batch)

    async def _complete(self, exchange: Exchange, api: Api, batch: Batch) -> None:
        pace = self._pace(exchange.fault)
        if batch.single:
            await self._engine.complete(batch.sequences[0], pace)
        else:
            await self._complete_all(batch, pace)
        for sequence in batch.sequences:
            status = sequence.failure
            if status is not None:
                await send(exchange, api.failed(status, sequence.message))
                return
        await exchange.reply(200, api.answer(batch))

    async def _complete_all(self, batch: Batch, pace: Pace) -> None:
        """Write all sequences at once, until the first fails."""
        tasks = {asyncio.ensure_future(self._engine.complete(sequence, pace)) for sequence in batch.sequences}
        try:
            while tasks and not any(sequence.failure for sequence in batch.sequences):
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # passes a crash on
        finally:
            await _cancel(tasks)

    async def _stream(self, exchange: Exchange, api: Api, batch: Batch) -> None:
        pace = self._pace(exchange.fault)
        steps = self._engine.run(batch.sequences[0], pace) if batch.single else self._merged(batch, pace)
        async for sequence in steps:
            events = api.step(sequence)
            if not exchange.started:
                await exchange.start(headers=api.stream_headers)
            if events:
                await exchange.chunk(events)
            if sequence.failure is not None and api.stops_at_failure:
                break
        await exchange.start(headers=api.stream_headers)
        if end := api.end(batch):
            await exchange.chunk(end)
        await exchange.finish()

    async def _merged(self, batch: Batch, pace: Pace) -> AsyncIterator[Sequence]:
        """The steps of all sequences, as they come."""
        runs = [self._engine.run(sequence, pace) for sequence in batch.sequences]
        waits = {asyncio.ensure_future(anext(run)): run for run in runs}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    run = waits.pop(wait)
                    sequence = wait.result()
                    yield sequence
                    if sequence.finish is None:
                        waits[asyncio.ensure_future(anext(run))] = run
        finally:
            await _cancel(set(waits))

    def _pace(self, fault: Fault | None) -> Pace:
        own = self.pace
        if fault is None:
            return own
        return Pace(
            own.first_token if fault.delay_first_token is None else fault.delay_first_token,
            own.token if fault.delay_token is None else fault.delay_token,
            own.tokens if fault.tokens is None else fault.tokens,
        )


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def send(exchange: Exchange, reply: Reply) -> None:
    """Send an answer in one piece."""
    await exchange.reply(reply.status, reply.body, reply.content_type)
