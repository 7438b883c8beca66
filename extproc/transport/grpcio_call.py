"""One gRPC call on grpcio: one task reads for the handler, another writes for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from extproc.transport.grpc_framing import Status
from extproc.transport.methods import HIGH_WATER, LOW_WATER, RequestHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.transport.interface import CallHandler
    from extproc.transport.methods import Method

_log = logging.getLogger(__name__)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioCall:
    """Implements ``RpcCall``. :meth:`run` is the call's life as grpcio sees it."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._handler: CallHandler | None = None  # None before run() and after closed() was called
        self._open = True
        self._outcome: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._outbox: deque[bytes] = deque()
        self._queued = 0  # bytes in _outbox, the message being written included
        self._more = asyncio.Event()  # the writer has something to look at
        self.ended = asyncio.Event()  # nothing of the call is left
        self._watched = False  # _queued was above HIGH_WATER

    # the handler's side: Call

    def send(self, message: bytes) -> None:
        """See ``Call.send``."""
        if not self._open:
            return
        self._outbox.append(message)
        self._queued += len(message)
        self._watched = self._watched or self._queued > HIGH_WATER
        self._more.set()

    def abort(self, code: int, detail: str) -> None:
        """See ``Call.abort``."""
        if self._open:
            self._finish(code, detail)
            self._loop.call_soon(self._notify_closed)  # the handler is probably our caller

    def finish(self) -> None:
        """See ``RpcCall.finish``."""
        self.abort(Status.OK, "")

    def pause(self) -> None:
        """See ``Call.pause``: grpcio reads a message from the peer only when it is asked for one."""
        self._flowing.clear()

    def resume(self) -> None:
        """See ``Call.resume``."""
        self._flowing.set()

    @property
    def queued(self) -> int:
        """See ``Call.queued``."""
        return self._queued if self._open else 0

    # grpcio's side

    async def run(self, method: Method) -> None:
        """Serve the call; returns or raises when it is over."""
        tasks: list[asyncio.Task[None]] = []
        try:
            self._start(method)
            tasks = [self._loop.create_task(self._read()), self._loop.create_task(self._write())]
            code, detail = await self._outcome
            await tasks[1]  # what was sent leaves before the status does
            self._context.set_code(_CODES.get(code, grpc.StatusCode.UNKNOWN))
            self._context.set_details(detail)
        finally:
            self._open = False
            self._notify_closed()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, method: Method) -> None:
        try:
            self._handler = method(self)
        except Exception:  # noqa: BLE001 -- one call's failure stays its own
            _log.exception("a call could not be given a handler")
            self._finish(Status.INTERNAL, "internal error")

    async def _read(self) -> None:
        while self._open:
            await self._flowing.wait()
            try:
                message = await self._context.read()
            except grpc.aio.BaseError as error:
                self._broke(error)
                return
            if message is grpc.aio.EOF:
                self._half_closed()
                return
            if self._handler is not None:
                handler = self._handler
                self._guard(lambda: handler.received(message))  # noqa: B023 -- called at once

    async def _write(self) -> None:
        while True:
            while self._outbox:
                message = self._outbox.popleft()
                try:
                    await self._context.write(message)
                except grpc.aio.BaseError as error:
                    self._broke(error)
                    return
                self._queued -= len(message)
                self._check_drained()
            if self._outcome.done():
                return
            self._more.clear()
            await self._more.wait()

    def _broke(self, error: grpc.aio.BaseError) -> None:
        _log.debug("a call broke: %s", error)
        self._finish(Status.INTERNAL, "the call broke")
        self._notify_closed()

    def _half_closed(self) -> None:
        handler = self._handler
        if isinstance(handler, RequestHandler):
            self._guard(handler.half_closed)
            return
        self._finish(Status.OK, "")
        self._notify_closed()

    def _check_drained(self) -> None:
        if self._watched and self._queued <= LOW_WATER:
            self._watched = False
            if self._open and self._handler is not None:
                self._guard(self._handler.drained)

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 -- one call's failure stays its own
            _log.exception("the handler of a call failed")
            self._finish(Status.INTERNAL, "internal error")
            self._notify_closed()

    def _finish(self, code: int, detail: str) -> None:
        self._open = False
        if not self._outcome.done():
            self._outcome.set_result((code, detail))
        self._more.set()

    def _notify_closed(self) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        try:
            handler.closed()
        except Exception:  # noqa: BLE001 -- nothing more can be done for it
            _log.exception("the handler of a call failed in closed()")
