"""One HTTP/1.1 connection of the mock: bytes to requests, and who left when."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import TYPE_CHECKING, cast

from extproc.mock.exchange import TEXT, CutError, Exchange
from extproc.mock.faults import HEADER, Fault, FaultError, Point
from extproc.mock.recorder import Outcome, Record

if TYPE_CHECKING:
    from asyncio import Task, Transport

    from extproc.mock.http_server import HttpServer

_MAX_HEAD = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class ProtocolError(Exception):
    """Bytes that are no HTTP/1.1 request."""


class Connection(asyncio.Protocol):
    """One accepted connection: parses requests, runs the handler for one at a time, notices when the peer leaves."""

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
        if self._server.ending is not None:  # the listener is closed, but this one was already waiting to be accepted
            self._closing = True
            self._transport.abort()
            return
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
        while not self._closing:
            if not self._transport.get_write_buffer_size():
                return
            await asyncio.sleep(0)

    async def hang(self) -> None:
        """Never return; the peer's leaving cancels."""
        await self._server.loop.create_future()

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        self._closing = True
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
        record = Record(method, target, headers, named, inference)
        self._record = record
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
            self._spoil_upload(upload, path, named.get(HEADER) if inference else None, inference=inference)
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

    def _read_body(self, upload: _Upload) -> bool:
        if upload.fault is not None and upload.fault.hang is Point.UPLOAD:
            self._buffer.clear()  # read on, for only so the peer's leaving is noticed
            return False
        record = self._record
        if record is None or self._closing or not upload.feed(self._buffer):
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
        record.inference = record.inference and not self._server.is_probe(record)
        self._task = self._server.loop.create_task(self._answer(Exchange(record, self, fault)))
        if record.inference:
            self._server.answering += 1
            self._task.add_done_callback(self._server.answered)
        self._server.recorder.changed()  # last, so that who waits for the request finds it begun

    async def _answer(self, exchange: Exchange) -> None:
        record = exchange.record
        server = self._server
        try:
            if server.faults.rules or HEADER in record.named:
                exchange.fault = exchange.fault or server.fault_of(record)
            if await exchange.apply_request_faults():
                server.on_injected(record)
            else:
                await server.handler(exchange)
            outcome = Outcome.COMPLETED
        except CutError:
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
