"""A server whose connections a test plays by hand, byte by byte."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

PATIENCE = 60.0  # seconds until what must come is given up


class Connection:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        """Request line, headers and body of the next request."""
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            line, *fields = head.rstrip("\r\n").split("\r\n")
            headers = dict(field.split(": ", 1) for field in fields)
            assert len(headers) == len(fields), "no header comes twice"
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return line, headers, body

    async def left(self) -> bool:
        """Wait for the client to close; whether it did so in good order."""
        async with asyncio.timeout(PATIENCE):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionResetError:
                return False
        return True

    def say(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)

    def answer(self, body: bytes = b"ok", status: str = "200 OK", extra: str = "") -> None:
        """Send a whole answer."""
        self.say(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body)

    def close(self) -> None:
        """Close in good order; what has come unread makes the kernel reset it."""
        self.writer.close()

    def reset(self) -> None:
        """Break the connection off."""
        self.writer.transport.abort()


class RawServer:
    """Listens on a port of 127.0.0.1."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.port = 0
        self._arrived = asyncio.Event()
        self._server: asyncio.Server

    async def start(self, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(Connection(reader, writer))
        self._arrived.set()

    async def connection(self, number: int = 0) -> Connection:
        """The connection that was accepted as the so-manieth."""
        await self.until(lambda: len(self.connections) > number)
        return self.connections[number]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def stop(self) -> None:
        """Listen no more, and break off what is open."""
        self._server.close()
        for connection in self.connections:
            connection.reset()
        await asyncio.sleep(0)


@asynccontextmanager
async def raw_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """A server that listens."""
    server = RawServer()
    await server.start(tls)
    yield server
    await server.stop()
