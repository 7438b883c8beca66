"""Runs the sequences of one request and sends what its ``Api`` makes of them, in one piece or as a stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from extproc.mock.engine import AnySequence, Batch, Engine, InternalError, Pace, RequestError
from extproc.mock.tasks import looked_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from extproc.mock.api import Api, Reply
    from extproc.mock.exchange import Exchange
    from extproc.mock.faults import Fault


Result = TypeVar("Result")


class Runner(Generic[AnySequence]):
    """The way of a request through one engine. ``pace`` holds where a fault does not say otherwise.

    ``disconnect_delay``: seconds until the engine notices that a client left to which it has sent nothing yet; so long
    it works on, unless ``/abort_request`` ends it. ``on_refusal`` is told of each request that the engine refuses or
    fails, and of each whose client leaves before a whole answer.
    """

    def __init__(
        self,
        engine: Engine[AnySequence],
        pace: Pace,
        disconnect_delay: float,
        on_refusal: Callable[[Api[AnySequence]], None] | None = None,
    ) -> None:
        self.pace = pace
        self._engine = engine
        self._disconnect_delay = disconnect_delay
        self._on_refusal = on_refusal
        self._unheard: set[asyncio.Future[Any]] = set()  # work whose client has left

    def kill(self) -> None:
        """End the work whose clients have left."""
        for work in self._unheard:
            work.cancel()

    async def stop(self) -> None:
        """The same, and wait for it."""
        await cancel(self._unheard)

    async def run(self, exchange: Exchange, api: Api[AnySequence]) -> None:
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
            exchange.record.rank = batch.sequences[0].rank if batch.sequences else None
        except RequestError as problem:
            self._refused(api)
            if early:
                await exchange.chunk(api.refusal_events(str(problem)))
                await exchange.finish()
            else:
                await send(exchange, api.refused(problem))
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
        except asyncio.CancelledError:
            if not api.stream:
                self._refused(api)
            raise
        finally:
            if not batch.unheard:
                self._engine.release(batch)

    def _refused(self, api: Api[AnySequence]) -> None:
        if self._on_refusal is not None:
            self._on_refusal(api)

    async def _complete(self, exchange: Exchange, api: Api[AnySequence], batch: Batch[AnySequence]) -> None:
        pace = paced(self.pace, exchange.fault)
        one = batch.single
        work = self._engine.complete(batch.sequences[0], pace) if one else self._complete_all(batch, pace)
        await (self._outlive(batch, work) if self._disconnect_delay else work)
        for sequence in batch.sequences:
            status = sequence.failure
            if status is not None:
                self._refused(api)
                await send(exchange, api.failed(status, sequence.message))
                return
        await exchange.reply(200, api.answer(batch))

    async def _complete_all(self, batch: Batch[AnySequence], pace: Pace) -> None:
        """Write all sequences at once, until the first fails."""
        tasks = {asyncio.ensure_future(self._engine.complete(sequence, pace)) for sequence in batch.sequences}
        try:
            while tasks and not any(sequence.failure for sequence in batch.sequences):
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # passes a crash on
        finally:
            await cancel(tasks)

    async def _stream(self, exchange: Exchange, api: Api[AnySequence], batch: Batch[AnySequence]) -> None:
        pace = paced(self.pace, exchange.fault)
        steps = self._engine.run(batch.sequences[0], pace) if batch.single else merged(self._engine, batch, pace)
        if api.prompt_head:
            if exchange.fault is not None and exchange.fault.holds_head:
                steps = await _late_head(exchange, api, steps)
            await exchange.start(headers=api.stream_headers)
            if opening := api.opening():
                await exchange.chunk(opening)
        if self._disconnect_delay and not exchange.started:
            steps = self._held(batch, steps)
        async for sequence in steps:
            try:
                events = api.step(sequence)
            except InternalError:
                exchange.abandon()
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

    async def _held(self, batch: Batch[AnySequence], steps: AsyncIterator[AnySequence]) -> AsyncIterator[AnySequence]:
        """The steps, waiting for the first of which outlives the client for a while."""
        yield await self._outlive(batch, anext(steps))
        async for sequence in steps:
            yield sequence

    async def _outlive(self, batch: Batch[AnySequence], work: Awaitable[Result]) -> Result:
        """The work's result; if the client leaves before, the work goes on until the engine notices."""
        future = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            batch.unheard = True
            self._unheard.add(future)
            future.add_done_callback(self._unheard.discard)
            future.add_done_callback(looked_at)
            future.add_done_callback(lambda _: self._engine.release(batch))
            asyncio.get_running_loop().call_later(self._disconnect_delay, future.cancel)
            raise


def paced(own: Pace, fault: Fault | None) -> Pace:
    """A worker's pace, where a fault does not say otherwise."""
    if fault is None:
        return own
    return Pace(
        own.first_token if fault.delay_first_token is None else fault.delay_first_token,
        own.token if fault.delay_token is None else fault.delay_token,
        own.tokens if fault.tokens is None else fault.tokens,
    )


async def _late_head(
    exchange: Exchange, api: Api[AnySequence], steps: AsyncIterator[AnySequence]
) -> AsyncIterator[AnySequence]:
    """Send the head of a stream, for which the engine does not wait: it has begun. Returns its steps."""
    first = asyncio.ensure_future(anext(steps))
    try:
        await exchange.start(headers=api.stream_headers)
    except BaseException:
        await cancel([first])
        raise
    return _following(first, steps)


async def _following(first: Awaitable[AnySequence], others: AsyncIterator[AnySequence]) -> AsyncIterator[AnySequence]:
    yield await first
    async for sequence in others:
        yield sequence


async def merged(engine: Engine[AnySequence], batch: Batch[AnySequence], pace: Pace) -> AsyncIterator[AnySequence]:
    """The steps of all sequences, as they come."""
    runs = [engine.run(sequence, pace) for sequence in batch.sequences]
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
        await cancel(set(waits))


async def cancel(futures: Iterable[asyncio.Future[Any]]) -> None:
    """End what is under way, and wait for its end."""
    tasks = list(futures)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def send(exchange: Exchange, reply: Reply) -> None:
    """Send an answer in one piece."""
    await exchange.reply(reply.status, reply.body, reply.content_type)
