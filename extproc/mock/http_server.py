"""A small HTTP/1.1 server on asyncio for mock workers.

It is fast, because the benchmark's workers must cost little beside what they measure, and it tells at once when a peer
left. It behaves as the engine's uvicorn does: ``server`` and ``date`` headers, idle connections closed after
``keep_alive`` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import cast

from extproc.mock.connection import Connection
from extproc.mock.exchange import Exchange
from extproc.mock.faults import HEADER, Fault, Faults
from extproc.mock.recorder import Outcome, Record, Recorder

Handler = Callable[[Exchange], Awaitable[None]]


class HttpServer:
    """Listens, keeps the connections, and gives complete requests to ``handler``."""

    def __init__(
        self,
        handler: Handler,
        recorder: Recorder,
        faults: Faults,
        *,
        inference_paths: frozenset[str],
        keep_alive: float,
        on_error: Callable[[Exchange, Exception], None],
        is_probe: Callable[[Record], bool] = lambda _: False,
    ) -> None:
        self.handler = handler
        self.recorder = recorder
        self.faults = faults
        self.inference_paths = inference_paths
        self.is_probe = is_probe
        self.on_error = on_error
        self.on_injected: Callable[[Record], None] = lambda _: None  # is told of requests that a fault has answered
        self.connections: set[Connection] = set()
        self.ending: Outcome | None = None
        self.accepting = True
        self.answering = 0  # handlers of legs that run, also for a moment after the peer has left
        self.loop: asyncio.AbstractEventLoop = cast("asyncio.AbstractEventLoop", None)
        self._keep_alive = keep_alive
        self._listener: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._gone: asyncio.Future[None] | None = None  # done when the last connection has ended

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self.loop = asyncio.get_running_loop()
        self._listener = await self.loop.create_server(lambda: Connection(self), host, port, backlog=2048)
        self._sweep = self.loop.call_later(self._keep_alive / 4, self._close_idle)
        return int(self._listener.sockets[0].getsockname()[1])

    def fault_of(self, record: Record) -> Fault | None:
        """The fault that applies to a complete request; raises FaultError for an unreadable header."""
        header = record.header(HEADER) if record.inference else None
        fault = self.faults.from_header(header) if header is not None else None
        return fault or self.faults.on_request(record.path, record.body, inference=record.inference)

    async def refuse(self) -> None:
        """Close the listener and idle connections: new ones are refused, requests under way go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.close_when_idle()

    async def accept(self, host: str, port: int) -> None:
        """Listen again after ``refuse``."""
        if self._listener is None:
            self._listener = await self.loop.create_server(lambda: Connection(self), host, port, backlog=2048)

    def abort(self, outcome: Outcome) -> None:
        """End like a killed process: everything breaks at once."""
        self.ending = outcome
        self._stop_listening()
        for connection in list(self.connections):
            connection.break_off()

    async def stop(self, grace: float) -> None:
        """Let what is under way finish for at most ``grace`` seconds, then break it."""
        self.accepting = False
        self._stop_listening()
        for connection in list(self.connections):
            connection.close_when_idle()
        with contextlib.suppress(TimeoutError):
            await self.recorder.until(lambda: self.recorder.live == 0, grace)
        self.abort(Outcome.STOPPED)
        self._gone = self.loop.create_future()
        if self.connections:
            await self._gone

    def answered(self, task: asyncio.Task[None]) -> None:  # noqa: ARG002 - a task's callback
        """The handler of a leg has ended."""
        self.answering -= 1
        self.recorder.changed()

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        if self._gone is not None and not self.connections and not self._gone.done():
            self._gone.set_result(None)

    def _stop_listening(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _close_idle(self) -> None:
        oldest = self.loop.time() - self._keep_alive
        for connection in [entry for entry in self.connections if not entry.busy and entry.idle_since < oldest]:
            connection.close_when_idle()
        self._sweep = self.loop.call_later(self._keep_alive / 4, self._close_idle)
