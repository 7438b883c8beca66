"""A client that shows bytes and moments: what aiohttp hides is what the mock's tests are about."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 60.0


@dataclass
class Answer:
    """An answer; ``complete`` is False where the connection ended before it did."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    complete: bool = False
    chunks: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of the stream's events, parsed; ``[DONE]`` as it is."""
        found = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [entry if entry == "[DONE]" else json.loads(entry) for entry in found]


class Call:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, mock: Any) -> Call:
        return cls(*await asyncio.open_connection(mock.host, mock.port))

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"host": "mock", **({"content-type": "application/json"} if body is not None else {})}
        named |= {"content-length": str(len(data)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)

    async def head(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().removesuffix("\r\n\r\n").split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return Answer(int(first.split()[1]), dict(pairs))

    async def answer(self) -> Answer:
        answer = await self.head()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            async with asyncio.timeout(PATIENCE):
                await self._read_body(answer)
        answer.body = b"".join(answer.chunks)
        return answer

    async def _read_body(self, answer: Answer) -> None:
        if answer.headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")), 16):
                answer.chunks.append(await self.reader.readexactly(size))
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            remaining = int(answer.headers["content-length"])
            while remaining:
                piece = await self.reader.read(remaining)
                if not piece:
                    return
                answer.chunks.append(piece)
                remaining -= len(piece)
        answer.complete = True

    async def ended(self) -> bytes:
        """What still comes until the connection ends."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def dialling() -> AsyncIterator[Callable[[Any], Awaitable[Call]]]:
    """Opens connections to mocks; closes them all in the end."""
    calls: list[Call] = []

    async def dial(mock: Any) -> Call:
        calls.append(await Call.open(mock))
        return calls[-1]

    try:
        yield dial
    finally:
        for call in calls:
            await call.close()


async def ask(
    mock: Any, path: str, body: Any = None, method: str = "", headers: dict[str, str] | None = None
) -> Answer:
    """One request and its whole answer."""
    call = await Call.open(mock)
    try:
        call.send(method or ("GET" if body is None else "POST"), path, body, headers)
        return await call.answer()
    finally:
        await call.close()
