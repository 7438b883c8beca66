"""One request and the answer to it, with the faults that are asked for."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, NoReturn

from extproc.mock.faults import Fault, Point

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.mock.connection import Connection
    from extproc.mock.recorder import Record

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class CutError(Exception):
    """A fault, or the engine, has ended the exchange before the answer was complete."""


class _Clock:
    """The ``date`` and ``server`` headers, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = b""

    def lines(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._lines = b"date: " + formatdate(now, usegmt=True).encode() + b"\r\nserver: uvicorn\r\n"
        return self._lines


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
        if self.record.method == "HEAD":
            body = b""
        if fault is not None:
            self._connection.write(head)
            await self._cut(fault, Point.AFTER_HEAD)
            head, body = body[: len(body) // 2], body[len(body) // 2 :]
            if fault.truncate or Point.MID_BODY in {fault.drop, fault.hang}:
                self._connection.write(head)
                await self._cut(fault, Point.MID_BODY)
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
            if self._chunks == fault.after_chunks or (self._chunks > fault.after_chunks and fault.until is not None):
                await self._cut(fault, Point.MID_BODY)
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
        self._connection.write(b"0\r\n\r\n")

    def abandon(self) -> NoReturn:
        """Give up in the middle of a stream: the connection is closed without the stream's end. Never returns."""
        self._connection.close_gently()
        raise CutError

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
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        lines.append(f"content-type: {content_type}\r\n")
        self.started = True
        self._connection.write(self._head(status, lines, b"transfer-encoding: chunked\r\n"))

    def _head(self, status: int, lines: list[str], last: bytes = b"") -> bytes:
        self.record.status = status
        self.record.head_sent = time.time()
        lines.append("vary: Origin\r\n" if self._connection.keep_alive else "vary: Origin\r\nconnection: close\r\n")
        first = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"
        return first.encode() + _clock.lines() + "".join(lines).encode("latin-1") + last + b"\r\n"

    async def _before_head(self, fault: Fault) -> None:
        if fault.delay_head:
            await asyncio.sleep(fault.delay_head)
        if fault.until is not None and fault.hang is None:
            await fault.until.wait()
        await self._cut(fault, Point.BEFORE_HEAD)

    async def _cut(self, fault: Fault, point: Point) -> None:
        if fault.hang is point:
            await (self._connection.hang() if fault.until is None else fault.until.wait())
        if fault.drop is point:
            await self._connection.flushed()  # a reset throws away what is still in the buffer
            self._connection.reset()
            raise CutError
        if fault.truncate and point is Point.MID_BODY:
            self.abandon()
