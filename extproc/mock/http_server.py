"""A small HTTP/1.1 server on asyncio: requests in, exchanges out, faults in between.

aiohttp costs some 150 µs a request here and hides when a peer left; this costs a tenth and tells at once. It behaves as
the engine's uvicorn does: ``server`` and ``date`` headers, idle connections closed after ``keep_alive`` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from extproc.mock.faults import HEADER, Fault, FaultError, Faults, Point
from extproc.mock.recorder import Outcome, Record, Recorder

if TYPE_CHECKING:
    from asyncio import Task, Transport

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_MAX_HEAD = 64 * 1024
_NO_FAULT = Fault()
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
TEXT = "text/plain; charset=utf-8"


class ProtocolError(Exception):
    """Bytes that are no HTTP/1.1 request."""


class _CutError(Exception):
    """A fault has ended the exchange."""


class _Clock:
    """The ``date`` header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._line = b"date: " + formatdate(now, usegmt=True).encode() + b"\r\nserver: uvicorn\r\n"
        return self._line


_clock = _Clock()


class Exchange:
    """One request and the answer being made to it. The engine's code is unaware of faults: they happen in here."""

    __slots__ = ("_chunks", "_connection", "_early", "fault", "record", "started")

    def __init__(self, record: Record, connection: Connection, fault: Fault | None) -> None:
        self.record = record
        self.fault = fault
        self.started = False
        self._connection = connection
        self._chunks = 0
        self._early = False

    async def reply(
        self, status: int, body: bytes = b"", content_type: str | None = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Answer in one piece; where a stream has begun early, as its only chunk."""
        if self._early:
            await self.chunk(b"data: " + body + b"\n\n")
            await self.finish()
            return
        fault = self.fault
        if fault is not None:
            await self._before_head(fault)
            if fault.garbage:
                body = b"<<<" + body[: len(body) // 2]
        lines = [f"content-length: {len(body)}\r\n"] if status not in {204, 304} else []
        if content_type is not None:
            lines.append(f"content-type: {content_type}\r\n")
        lines.extend(f"{name}: {value}\r\n" for name, value in headers)
        head = self._head(status, lines)
        self.started = True
        if fault is not None and (fault.drop or fault.hang or fault.truncate):
            await self._cut_in_reply(fault, head, body)
        self._connection.write(head + body)
        self.record.first_byte = time.time()

    async def start(
        self, status: int = 200, content_type: str = EVENTS, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Send the head of a stream; a second call does nothing."""
        if self.started:
            return
        if self.fault is not None:
            await self._before_head(self.fault)
        self._send_stream_head(status, content_type, headers)
        if self.fault is not None:
            await self._cut(self.fault, Point.AFTER_HEAD)

    async def chunk(self, data: bytes) -> None:
        """Send a piece of the stream; waits while the peer reads too slowly."""
        fault = self.fault
        if fault is not None:
            if self._chunks == fault.after_chunks:
                await self._cut(fault, Point.MID_BODY)
                if fault.truncate:
                    self._connection.close_gently()
                    raise _CutError
            if fault.garbage:
                data = b"\x00\xff{" + data[::-1]
        if self._chunks == 0:
            self.record.first_byte = time.time()
        self._chunks += 1
        connection = self._connection
        connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        if connection.congested:
            await connection.drained()

    async def finish(self) -> None:
        """End the stream."""
        fault = self.fault
        if fault is not None and fault.after_chunks >= self._chunks:
            await self._cut(fault, Point.MID_BODY)
            if fault.truncate:
                self._connection.close_gently()
                raise _CutError
        self._connection.write(b"0\r\n\r\n")

    async def apply_request_faults(self) -> bool:
        """The faults that come before the engine sees the request; True: the request is answered."""
        fault = self.fault
        if fault is None:
            return False
        if fault.early_head:
            self._early = True
            self._send_stream_head(200, EVENTS, ())
            await self._cut(fault, Point.AFTER_HEAD)
        if fault.status is not None:
            phrase = _REASONS.get(fault.status, "")
            body = fault.body if fault.body is not None else f'{{"error":{{"message":"mock fault: {phrase}"}}}}'
            content_type = next((value for name, value in fault.headers if name == "content-type"), JSON)
            others = [(name, value) for name, value in fault.headers if name not in {"content-type", "content-length"}]
            await self.reply(fault.status, body.encode(), content_type, others)
            return True
        return False

    def _send_stream_head(self, status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> None:
        lines = [f"content-type: {content_type}\r\n", "transfer-encoding: chunked\r\n"]
        lines.extend(f"{name}: {value}\r\n" for name, value in headers)
        self.started = True
        self._connection.write(self._head(status, lines))

    def _head(self, status: int, lines: list[str]) -> bytes:
        self.record.status = status
        self.record.head_sent = time.time()
        if not self._connection.keep_alive:
            lines.append("connection: close\r\n")
        first = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"
        return first.encode() + _clock.line() + "".join(lines).encode("latin-1") + b"\r\n"

    async def _before_head(self, fault: Fault) -> None:
        if fault.delay_head:
            await asyncio.sleep(fault.delay_head)
        await self._cut(fault, Point.BEFORE_HEAD)

    async def _cut(self, fault: Fault, point: Point) -> None:
        if fault.hang is point:
            await self._connection.hang()
        if fault.drop is point:
            self._connection.reset()
            raise _CutError

    async def _cut_in_reply(self, fault: Fault, head: bytes, body: bytes) -> None:
        self._connection.write(head)
        await self._cut(fault, Point.AFTER_HEAD)
        self._connection.write(body[: len(body) // 2])
        if fault.truncate:
            self._connection.close_gently()
            raise _CutError
        if Point.MID_BODY in (fault.drop, fault.hang):
            await self._connection.flushed()  # a reset throws away what is still in the buffer
        await self._cut(fault, Point.MID_BODY)
        self._connection.write(body[len(body) // 2 :])
        self.record.first_byte = time.time()
        raise _CutError


class Connection(asyncio.Protocol):
    """One accepted connection: parses requests, runs the handler for one at a time, notices at once that the peer left."""

    def __init__(self, server: HttpServer) -> None:
        self.keep_alive = True
        self.congested = False
        self.idle_since = 0.0
        self._server = server
        self._transport: Transport = cast("Transport", None)
        self._buffer = bytearray()
        self._record: Record | None = None
        self._upload: _Upload | None = None
        self._task: Task[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._closing = False

    # --- the event loop's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer has connected."""
        self._transport = cast("Transport", transport)
        self.idle_since = self._server.loop.time()
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of the next ones while one is being answered."""
        self._buffer += data
        if self._task is None:
            self._parse()
        upload = self._upload
        if upload is not None and upload.rate is not None:
            self._transport.pause_reading()
            self._server.loop.call_later(len(data) / upload.rate, self._resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The peer has left, or we have."""
        self._server.forget(self)
        self._closing = True
        record = self._record
        if record is not None:
            self._server.recorder.close(record, self._server.ending or Outcome.CLIENT_CLOSED)
        if self._task is not None:
            self._task.cancel()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def pause_writing(self) -> None:
        """The peer reads too slowly."""
        self.congested = True

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self.congested = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # --- the exchange's side ---

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._transport.write(data)

    async def drained(self) -> None:
        """Return when the peer has caught up or left."""
        self._room = self._server.loop.create_future()
        await self._room

    async def flushed(self) -> None:
        """Return when every byte written has gone to the socket."""
        while self._transport.get_write_buffer_size() and not self._closing:
            await asyncio.sleep(0)

    async def hang(self) -> None:
        """Never return; the peer's leaving cancels."""
        await self._server.loop.create_future()

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        if self._record is not None:
            self._server.recorder.close(self._record, Outcome.FAULT)
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def close_gently(self) -> None:
        """Send what is buffered, then close."""
        if self._record is not None:
            self._server.recorder.close(self._record, Outcome.FAULT)
        self._transport.close()

    # --- the server's side ---

    @property
    def busy(self) -> bool:
        """A request is arriving or being answered."""
        return self._record is not None or bool(self._buffer)

    def break_off(self) -> None:
        """The process behind the connection is gone."""
        self._closing = True
        if self._record is not None:
            self._server.recorder.close(self._record, self._server.ending or Outcome.STOPPED)
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    def close_when_idle(self) -> None:
        """Close now if nothing is under way, else after the answer."""
        self.keep_alive = False
        if not self.busy:
            self._transport.close()

    # --- parsing ---

    def _parse(self) -> None:
        try:
            while self._task is None and self._buffer and not self._closing:
                if self._record is None and not self._read_head():
                    return
                if self._upload is not None and not self._read_body(self._upload):
                    return
        except ProtocolError:
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self._transport.close()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise ProtocolError
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        first = lines[0].split(" ")
        if len(first) != 3 or not first[2].startswith("HTTP/1."):
            raise ProtocolError
        headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise ProtocolError
            headers.append((name.lower(), value.strip()))
        self._begin(first[0], first[1], headers, http10=first[2] == "HTTP/1.0")
        return True

    def _begin(self, method: str, target: str, headers: list[tuple[str, str]], *, http10: bool) -> None:
        named = dict(headers)
        connection = named.get("connection", "").lower()
        self.keep_alive = self._server.accepting and (connection == "keep-alive" if http10 else connection != "close")
        server = self._server
        path = target.partition("?")[0]
        inference = method == "POST" and path in server.inference_paths
        record = Record(method, target, headers, inference)
        self._record = record
        if not path.startswith("/_mock/"):
            server.recorder.open(record)
        length = named.get("content-length")
        chunked = "chunked" in named.get("transfer-encoding", "")
        if length is None and not chunked:
            self._complete(record, b"")
            return
        try:
            upload = _Upload(None if chunked else int(length or 0))
        except ValueError:
            raise ProtocolError from None
        self._upload = upload
        if server.faults.rules or HEADER in named:
            self._spoil_upload(upload, path, named.get(HEADER), inference=inference)
        if named.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if upload.remaining == 0:
            self._upload = None
            self._complete(record, b"")

    def _spoil_upload(self, upload: _Upload, path: str, header: str | None, *, inference: bool) -> None:
        faults = self._server.faults
        try:
            fault = faults.from_header(header) if header is not None else None
        except FaultError:
            return  # answered with 400 when the body is in
        fault = fault or faults.on_upload(path, inference=inference)
        if fault is None:
            return
        upload.fault = fault
        upload.rate = fault.upload_rate
        if fault.drop is Point.UPLOAD:
            self.reset()
        elif fault.hang is Point.UPLOAD:
            self._transport.pause_reading()

    def _read_body(self, upload: _Upload) -> bool:
        if not upload.feed(self._buffer):
            return False
        record = self._record
        if record is None:  # a fault has reset the connection
            return False
        self._upload = None
        self._complete(record, bytes(upload.body), upload.fault)
        return True

    def _resume_reading(self) -> None:
        if not self._closing:
            self._transport.resume_reading()

    # --- answering ---

    def _complete(self, record: Record, body: bytes, fault: Fault | None = None) -> None:
        record.body = body
        record.received = time.time()
        self._server.recorder.changed()
        self._task = self._server.loop.create_task(self._answer(Exchange(record, self, fault)))

    async def _answer(self, exchange: Exchange) -> None:
        record = exchange.record
        server = self._server
        try:
            if server.faults.rules or record.header(HEADER) is not None:
                exchange.fault = exchange.fault or server.fault_of(record)
            if not await exchange.apply_request_faults():
                await server.handler(exchange)
            outcome = Outcome.COMPLETED
        except _CutError:
            outcome = Outcome.FAULT
        except FaultError as error:
            await exchange.reply(400, str(error).encode(), TEXT)
            outcome = Outcome.COMPLETED
        except Exception as error:  # noqa: BLE001 - a defect in a handler must not look like a silent worker
            server.on_error(exchange, error)
            if exchange.started:
                self._transport.abort()
                outcome = Outcome.FAULT
            else:
                await exchange.reply(500, b"Internal Server Error", TEXT)
                outcome = Outcome.COMPLETED
        finally:
            self._task = None
        self._record = None
        server.recorder.close(record, outcome)
        if not self.keep_alive:
            self._transport.close()
            return
        self.idle_since = server.loop.time()
        if self._buffer:
            self._parse()


class _Upload:
    """A request body on its way in."""

    __slots__ = ("_in_chunk", "body", "fault", "rate", "remaining")

    def __init__(self, length: int | None) -> None:
        self.body = bytearray()
        self.fault: Fault | None = None
        self.rate: float | None = None
        self.remaining = length  # None: chunked
        self._in_chunk = 0

    def feed(self, buffer: bytearray) -> bool:
        """Take what belongs to the body out of ``buffer``; True when the body is complete."""
        if self.remaining is None:
            return self._feed_chunked(buffer)
        self.body += buffer[: self.remaining]
        taken = min(self.remaining, len(buffer))
        del buffer[:taken]
        self.remaining -= taken
        return self.remaining == 0

    def _feed_chunked(self, buffer: bytearray) -> bool:
        while buffer:
            if self._in_chunk:
                taken = min(self._in_chunk, len(buffer))
                self.body += buffer[:taken]
                del buffer[:taken]
                self._in_chunk -= taken
                continue
            start = 2 if buffer[:2] == b"\r\n" and self.body else 0
            end = buffer.find(b"\r\n", start)
            if end < 0:
                return False
            try:
                size = int(bytes(buffer[start:end]).partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError from None
            if size == 0:
                trailer_end = buffer.find(b"\r\n\r\n", end)
                if trailer_end < 0:
                    return False
                del buffer[: trailer_end + 4]
                return True
            del buffer[: end + 2]
            self._in_chunk = size
        return False


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
    ) -> None:
        self.handler = handler
        self.recorder = recorder
        self.faults = faults
        self.inference_paths = inference_paths
        self.on_error = on_error
        self.connections: set[Connection] = set()
        self.ending: Outcome | None = None
        self.accepting = True
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
        header = record.header(HEADER)
        fault = self.faults.from_header(header) if header is not None else None
        return fault or self.faults.on_request(record.path, record.body, inference=record.inference)

    async def refuse(self) -> None:
        """Close the listener: new connections are refused, those that exist go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

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
