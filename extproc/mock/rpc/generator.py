"""The way of a ``Generate`` through a mock worker: recorded, with the faults asked for, as messages.

As the engines' Python servers do it, the call's initial metadata goes out with the first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from extproc.mock.engine import AnySequence, Batch, CrashError, Engine, Pace, RequestError
from extproc.mock.exchange import CutError
from extproc.mock.faults import HEADER, Fault, FaultError, Point
from extproc.mock.observed import Observed
from extproc.mock.recorder import Outcome, Record
from extproc.mock.rpc.api import Api, code_of
from extproc.mock.runner import cancel, merged, paced

Result = TypeVar("Result")
_LEAVING = 0.02  # seconds in which gRPC has written what it was given: it does not say when


@dataclass(slots=True, eq=False)
class Leg(Record):
    """One ``Generate``. ``status`` is the gRPC status's number, ``message`` the request."""

    message: Any = None


class Generator(Generic[AnySequence]):
    """``Generate`` of one worker.

    Args:
        observed: whose requests and faults these are.
        path: of the method.
        read: makes a message of a request's bytes.
        api: words the answer to one.
        crash: ends the process.
        cut: resets the connection of a peer.

    Attributes:
        pace: how fast tokens come, where a fault does not say otherwise.
        answering: how many calls there are.
        ending: why they end, when the worker does.
    """

    def __init__(
        self,
        observed: Observed,
        engine: Engine[AnySequence],
        pace: Pace,
        *,
        path: str,
        read: Callable[[bytes], Any],
        api: Callable[[Any, Leg], Api[AnySequence]],
        crash: Callable[[], None],
        cut: Callable[[str], None],
    ) -> None:
        self.pace = pace
        self.answering = 0
        self.ending: Outcome | None = None
        self._observed = observed
        self._engine = engine
        self._path = path
        self._read = read
        self._api = api
        self._crash = crash
        self._cut = cut

    async def __call__(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        """Answer one."""
        recorder = self._observed.recorder
        headers = [(str(name), _text(value)) for name, value in context.invocation_metadata()]
        leg = Leg("POST", self._path, headers, dict(headers), inference=True, body=data, message=self._read(data))
        leg.received = leg.arrived
        recorder.open(leg)
        call = _Call(leg, context, self._cut)
        outcome = Outcome.COMPLETED
        self.answering += 1
        try:
            call.fault = await self._fault(call)
            if call.fault is not None and call.fault.status is not None:
                self._turn_away(call.leg, call.fault.status)
            await call.begin()
            async for message in self._messages(call):
                data = await call.framed(message)
                if call.sent == 1:
                    recorder.changed()
                yield data
            await call.end()
            leg.status = 0
        except CutError:
            outcome = Outcome.FAULT
        except grpc.aio.AbortError:
            raise
        except BaseException:
            outcome = self.ending or (Outcome.FAULT if call.cut else Outcome.CLIENT_CLOSED)
            raise
        finally:
            self.answering -= 1
            recorder.close(leg, outcome)
            recorder.changed()

    async def _fault(self, call: _Call) -> Fault | None:
        leg, faults = call.leg, self._observed.faults
        header = leg.header(HEADER)
        if header is None:
            return faults.on_request(self._path, leg.body, inference=True)
        try:
            return faults.from_header(header)
        except FaultError as error:
            await call.fail(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    def _turn_away(self, leg: Leg, status: int) -> None:
        """What a server does with a request that it fails itself, which is not so where it cannot be reached."""
        if code_of(status) is grpc.StatusCode.UNAVAILABLE:
            return
        api = self._api(leg.message, leg)
        with contextlib.suppress(RequestError, CrashError):
            api.batch()
        api.rejected()

    async def _messages(self, call: _Call) -> AsyncIterator[Any]:
        """What the engine answers."""
        api = self._api(call.leg.message, call.leg)
        try:
            batch = api.batch()
            self._engine.admit(batch)
        except RequestError as problem:
            api.rejected()
            await call.fail(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
            return
        except CrashError:
            await self._die()
        call.leg.rank = batch.sequences[0].rank
        pace = paced(self.pace, call.fault)
        try:
            messages = self._stream(call, api, batch, pace) if api.stream else self._whole(call, api, batch, pace)
            async for message in messages:
                yield message
        except CrashError:
            await self._die()
        except (asyncio.CancelledError, GeneratorExit):
            if not call.sent:
                api.rejected()
            raise
        finally:
            self._engine.release(batch)

    async def _stream(
        self, call: _Call, api: Api[AnySequence], batch: Batch[AnySequence], pace: Pace
    ) -> AsyncIterator[Any]:
        steps = self._steps(api, batch.sequences[0], pace) if batch.single else merged(self._engine, batch, pace)
        told = [0] * len(batch.sequences)
        async for sequence in steps:
            await self._check(call, api, batch, sequence)
            before, told[sequence.index] = told[sequence.index], sequence.written
            if (chunk := api.chunk(sequence, before)) is not None:
                yield chunk
            if sequence.finish is not None:
                yield api.complete(sequence, before)

    async def _whole(
        self, call: _Call, api: Api[AnySequence], batch: Batch[AnySequence], pace: Pace
    ) -> AsyncIterator[Any]:
        await asyncio.gather(
            *(_unless_aborted(partial(self._engine.complete, each, pace), api, each) for each in batch.sequences)
        )
        for sequence in batch.sequences:
            await self._check(call, api, batch, sequence)
        for sequence in batch.sequences:
            yield api.complete(sequence, 0)

    async def _steps(self, api: Api[AnySequence], sequence: AnySequence, pace: Pace) -> AsyncIterator[AnySequence]:
        """A sequence after each token; also once an abort has ended what its engine goes on with."""
        run = self._engine.run(sequence, pace)
        yield await _unless_aborted(partial(anext, run), api, sequence) or sequence
        if sequence.finish is None:
            async for _ in run:
                yield sequence

    async def _check(
        self, call: _Call, api: Api[AnySequence], batch: Batch[AnySequence], sequence: AnySequence
    ) -> None:
        """End the call where a sequence has failed, or go silent where it was aborted."""
        if sequence.stopped and not api.ends_when_aborted:
            self._engine.release(batch)
            await asyncio.Event().wait()
        if (failure := api.failed(sequence)) is not None:
            if not call.sent:
                api.rejected()
            await call.fail(*failure)

    async def _die(self) -> NoReturn:
        self._crash()
        await asyncio.Event().wait()
        raise AssertionError


class _Call:
    """One call: what it has sent, and the faults that happen meanwhile."""

    def __init__(self, leg: Leg, context: Any, cut: Callable[[str], None]) -> None:
        self.leg = leg
        self.fault: Fault | None = None
        self.sent = 0
        self.cut = False
        self._context = context
        self._reset = cut
        self._headed = False

    async def begin(self) -> None:
        """The faults before the engine sees the request."""
        fault = self.fault
        if fault is None:
            return
        if fault.early_head:
            await self._head()
        if fault.status is not None:
            code = code_of(fault.status)
            body = f"mock fault: {code.name}" if fault.body is None else fault.body
            await self._before_head(fault)
            await self.fail(code, body, fault.headers)

    async def framed(self, message: Any) -> bytes:
        """A message's bytes, when it is time to send them."""
        data: bytes = message.SerializeToString()
        leg, fault = self.leg, self.fault
        if fault is not None:
            if self.sent == 0:
                await self._before_head(fault)
                if Point.AFTER_HEAD in (fault.drop, fault.hang):
                    await self._head()
                    await self._point(fault, Point.AFTER_HEAD)
            if self.sent == fault.after_chunks or (self.sent > fault.after_chunks and fault.until is not None):
                await self._point(fault, Point.MID_BODY)
            if fault.garbage:
                data = b"\xff\x00{" + data[::-1]
        if self.sent == 0:
            leg.head_sent = leg.first_byte = time.time()
        self.sent += 1
        return data

    async def end(self) -> None:
        """Everything was sent."""
        if self.fault is not None and self.fault.after_chunks >= self.sent:
            await self._point(self.fault, Point.MID_BODY)

    async def fail(self, code: Any, message: str, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        """End with a status; never returns."""
        self.leg.status = code.value[0]
        await self._context.abort(code, message, trailers)

    async def _head(self) -> None:
        if not self._headed:
            self._headed = True
            self.leg.head_sent = time.time()
            await self._context.send_initial_metadata(())

    async def _before_head(self, fault: Fault) -> None:
        if fault.delay_head:
            await asyncio.sleep(fault.delay_head)
        if fault.until is not None and fault.hang is None:
            await fault.until.wait()
        await self._point(fault, Point.BEFORE_HEAD)

    async def _point(self, fault: Fault, point: Point) -> None:
        hangs = fault.hang is point
        if hangs and fault.until is not None:
            await fault.until.wait()
            hangs = False
        if hangs or fault.drop is point:
            self.cut = True
            if fault.drop is point:
                await asyncio.sleep(_LEAVING)
                self._reset(self._context.peer())
            await asyncio.Event().wait()
        if fault.truncate and point is Point.MID_BODY:
            raise CutError


async def _unless_aborted(
    work: Callable[[], Awaitable[Result]], api: Api[AnySequence], sequence: AnySequence
) -> Result | None:
    """The work's result; None where a sequence is aborted in what its engine brings to an end all the same."""
    stopper = sequence.stopper
    if stopper is None:
        return await work()
    task = asyncio.ensure_future(work())
    try:
        await asyncio.wait((task, stopper), return_when=asyncio.FIRST_COMPLETED)
        if task.done() or not api.goes_on(sequence):
            return await task
    finally:
        await cancel([task])
    sequence.finish = {"type": "abort"}
    return None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
