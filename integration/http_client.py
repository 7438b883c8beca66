"""An HTTP/1.1 client that hides nothing: bytes go out when told to, what comes back is seen as it comes.

Ordinary clients repair, buffer and reuse; these tests are about half-sent requests, cut answers and moments in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 60.0  # seconds after which a test that still waits has failed
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset

Headers = Sequence[tuple[str, str]]


class CutError(Exception):
    """The answer ended before it was complete; ``received`` is what came of its body."""

    def __init__(self, received: bytes) -> None:
        super().__init__(f"the answer was cut after {received!r}")
        self.received = received


@dataclass(slots=True)
class Reply:
    """An answer as it came. Header names are in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)  # 1xx statuses that came before
    started: float = 0.0  # time.time() when the request was complete or, if sooner, the head was there
    headed: float = 0.0
    ended: float = 0.0

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        """The body parsed."""
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The gateway's error code, which header and body must agree on; None when a worker answered."""
        code = self.header("x-pd-error-code")
        if code is not None and self.body.startswith(b'{"error":{"type"'):
            assert self.json["error"]["code"] == code
        return code

    @property
    def events(self) -> list[str]:
        """The data of each server-sent event."""
        return events(self.body)

    @property
    def seconds(self) -> float:
        """From the complete request to the complete answer."""
        return self.ended - self.started


def events(body: bytes) -> list[str]:
    """The data of each server-sent event in ``body``."""
    return [entry.removeprefix("data: ") for entry in body.decode().split("\n\n") if entry]


class Exchange:
    """One request on its way, on a connection that may serve others before and after."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str = "POST") -> None:
        self.reply = Reply(0, [])
        self._reader = reader
        self._writer = writer
        self._method = method
        self._pieces: AsyncIterator[bytes] | None = None

    # -- sending --------------------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self._writer.write(data)
        await self._writer.drain()

    def sent(self) -> None:
        """The request is complete: times count from now."""
        self.reply.started = time.time()

    # -- receiving ------------------------------------------------------------------------------------------------

    async def head(self) -> Reply:
        """The answer's status and headers. Raises CutError when the connection ends first."""
        reply = self.reply
        async with asyncio.timeout(PATIENCE):
            while reply.status < 200:
                try:
                    lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                except (asyncio.IncompleteReadError, ConnectionError):
                    raise CutError(b"") from None
                if reply.status:
                    reply.interim.append(reply.status)
                reply.status = int(lines[0].split(" ")[1])
                fields = [line.partition(":") for line in lines[1:] if line]
                reply.headers = [(name.lower(), value.strip()) for name, _, value in fields]
        reply.headed = time.time()
        reply.started = reply.started or reply.headed
        return reply

    async def piece(self) -> bytes:
        """The next piece of the body, as it comes; empty at its end. Raises CutError when it ends too early."""
        reply = self.reply
        if not reply.headed:
            await self.head()
        if self._pieces is None:
            self._pieces = self._body()
        try:
            async with asyncio.timeout(PATIENCE):
                piece = await anext(self._pieces, b"")
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            raise CutError(reply.body) from None
        reply.body += piece
        if not piece:
            reply.ended = time.time()
        return piece

    async def whole(self) -> Reply:
        """The complete answer. Raises CutError when it is not."""
        while await self.piece():
            pass
        return self.reply

    async def until(self, text: bytes) -> None:
        """Read on until ``text`` has come."""
        while text not in self.reply.body:
            assert await self.piece(), f"{text!r} never came, but {self.reply.body!r}"

    async def cut(self) -> bytes:
        """Read on until the answer is cut; what had come of its body. Fails when the answer is complete."""
        try:
            await self.whole()
        except CutError as error:
            return error.received
        raise AssertionError(f"the answer was not cut: {self.reply.status} {self.reply.body!r}")

    async def gone(self) -> None:
        """Wait until the other side has closed the connection."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                await self._reader.read()

    async def _body(self) -> AsyncIterator[bytes]:
        reply = self.reply
        if self._method == "HEAD" or reply.status in (204, 304):
            return
        if (reply.header("transfer-encoding") or "") == "chunked":
            while size := int((await self._reader.readuntil(b"\r\n")).strip(), 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            await self._reader.readuntil(b"\r\n")
            return
        length = reply.header("content-length")
        missing = int(length) if length is not None else 1 << 62
        while missing:
            piece = await self._reader.read(min(missing, 1 << 16))
            if not piece:
                if length is None:
                    return
                raise asyncio.IncompleteReadError(b"", missing)
            missing -= len(piece)
            yield piece

    # -- leaving --------------------------------------------------------------------------------------------------

    def close(self) -> float:
        """Leave in an orderly way; the time at which we did."""
        left = time.time()
        self._writer.close()
        return left

    def reset(self) -> float:
        """Leave as a crashed client does, with a TCP reset; the time at which we did."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        left = time.time()
        self._writer.transport.abort()
        return left


class Client:
    """Makes requests to one address, each on a connection of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, method: str = "POST", *, buffer: int = 1 << 24) -> Exchange:
        """A connection on which nothing has been sent. About twice ``buffer`` bytes are read before they are wanted."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=buffer)
        self._writers.append(writer)
        return Exchange(reader, writer, method)

    async def close(self) -> None:
        """Close the connections that are still open."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()
        for writer in writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def request_head(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
        """The bytes of a request's head."""
        given = list(headers)
        if not any(name.lower() == "host" for name, _ in given):
            given.insert(0, ("host", f"{self.host}:{self.port}"))
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def open(
        self, target: str, body: object = None, headers: Headers = (), method: str = "POST", *, buffer: int = 1 << 24
    ) -> Exchange:
        """Send a whole request and read nothing yet. ``body`` that is not bytes goes as JSON."""
        exchange = await self.connect(method, buffer=buffer)
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = list(headers)
        if body is not None:
            fields += [("content-type", "application/json")] * (not _has(fields, "content-type"))
            fields.append(("content-length", str(len(raw))))
        await exchange.send(self.request_head(method, target, fields) + raw)
        exchange.sent()
        return exchange

    async def post(self, target: str, body: object, headers: Headers = ()) -> Reply:
        """A POST's complete answer; the connection is closed."""
        return await self._ask(target, body, headers, "POST")

    async def get(self, target: str, headers: Headers = ()) -> Reply:
        """A GET's complete answer; the connection is closed."""
        return await self._ask(target, None, headers, "GET")

    async def delete(self, target: str, headers: Headers = ()) -> Reply:
        """A DELETE's complete answer; the connection is closed."""
        return await self._ask(target, None, headers, "DELETE")

    async def put(self, target: str, body: object, headers: Headers = ()) -> Reply:
        """A PUT's complete answer; the connection is closed."""
        return await self._ask(target, body, headers, "PUT")

    async def patch(self, target: str, body: object, headers: Headers = ()) -> Reply:
        """A PATCH's complete answer; the connection is closed."""
        return await self._ask(target, body, headers, "PATCH")

    async def _ask(self, target: str, body: object, headers: Headers, method: str) -> Reply:
        exchange = await self.open(target, body, headers, method)
        try:
            return await exchange.whole()
        finally:
            exchange.close()


def _has(headers: Headers, name: str) -> bool:
    return any(key.lower() == name for key, _ in headers)
