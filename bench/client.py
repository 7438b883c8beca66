"""Closed-loop load over keep-alive HTTP/1.1 connections, at little cost of its own, with every answer verified."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s\r\naccept: application/json\r\nuser-agent: pd-extproc-bench\r\n"
    b"authorization: Bearer sk-bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


@dataclass(slots=True)
class Load:
    """What one run of requests gave. Times in seconds."""

    requests: int = 0
    wall: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    reads: int = 0  # pieces in which the answers came: how much of a stream was put together on its way
    failures: Counter[str] = field(default_factory=Counter)  # what was wrong: how often


class LoadGenerator:
    """Connections to one address; each sends its next request as soon as it has its answer.

    ``expected`` is the exact response body, or says what is wrong with one: a system that loses, adds or mixes up bytes
    is a failure, not a fast one.
    """

    def __init__(self, port: int, expected: bytes | Callable[[bytes], str | None]) -> None:
        self.host = b"127.0.0.1:%d" % port
        self.expected = expected
        self._port = port
        self._connections: list[_Connection] = []
        self._bodies: Iterator[bytes]
        self._unsent = 0
        self._load = Load()
        self._finished: asyncio.Future[None]

    async def open(self, concurrency: int) -> Self:
        """Connect; raises OSError when nobody listens."""
        loop = asyncio.get_running_loop()
        for _ in range(concurrency):
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
            self._connections.append(connection)
        return self

    async def run(self, bodies: Iterator[bytes], requests: int, limit: float) -> Load:
        """Send ``requests`` requests. Those not answered within ``limit`` seconds, or by a dead connection, fail."""
        load = self._load = Load()
        self._bodies, self._unsent = bodies, requests
        self._finished = asyncio.get_running_loop().create_future()
        begin = perf_counter()
        for connection in self._connections:
            self.next(connection)
        try:
            await asyncio.wait_for(asyncio.shield(self._finished), limit)
        except TimeoutError:
            self._unsent = 0
            self.close()
        load.wall = perf_counter() - begin
        load.requests = len(load.latencies)
        if missing := requests - load.requests - load.failures.total():
            load.failures["not answered"] += missing
        return load

    def next(self, connection: _Connection) -> None:
        """Send the connection's next request, or note that all are answered."""
        if self._unsent and not connection.closed:
            self._unsent -= 1
            connection.send(next(self._bodies))
        elif not any(c.busy for c in self._connections) and not self._finished.done():
            self._finished.set_result(None)

    def answered(self, latency: float, first_byte: float, problem: str | None) -> None:
        """Count an answer; ``problem`` says what was wrong with it."""
        if problem:
            self._load.failures[problem] += 1
        else:
            self._load.latencies.append(latency)
            self._load.first_bytes.append(first_byte)

    def count_reads(self, number: int) -> None:
        """Count the pieces of an answer."""
        self._load.reads += number

    def close(self) -> None:
        """Abort all connections."""
        for connection in self._connections:
            connection.abort()


class _Connection(asyncio.Protocol):
    """One request at a time; decides cheaply when the answer is complete, then looks at all of it."""

    def __init__(self, generator: LoadGenerator) -> None:
        self._generator = generator
        self._transport: asyncio.Transport
        self._sent_at = self._first_at = 0.0
        self._pieces: list[bytes] = []
        self._missing: int | None = None  # bytes of the body still to come; None until the head is whole
        self._chunked = False
        self.busy = False
        self.closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def abort(self) -> None:
        self.closed = True
        self._transport.abort()

    def send(self, body: bytes) -> None:
        self.busy = True
        self._pieces.clear()
        self._missing = None
        self._sent_at = perf_counter()
        self._transport.write(_HEAD % (self._generator.host, len(body)) + body)

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            self._generator.answered(0, 0, "bytes that nobody asked for")
            self.abort()
            return
        if not self._pieces:
            self._first_at = perf_counter()
        self._pieces.append(data)
        if self._missing is None:
            self._read_head(b"".join(self._pieces))
        else:
            self._missing -= len(data)
        if self._missing is None:
            return
        if self._ends_with_last_chunk() if self._chunked else self._missing <= 0:
            self._complete()

    def _read_head(self, received: bytes) -> None:
        head, found, body = received.partition(b"\r\n\r\n")
        if found:
            _, sized, rest = head.lower().partition(b"\r\ncontent-length:")
            self._chunked = not sized
            self._missing = int(rest.partition(b"\r\n")[0]) - len(body) if sized else 0

    def _ends_with_last_chunk(self) -> bool:
        end = b"0\r\n\r\n"
        last = self._pieces[-1]
        return last.endswith(end) or (len(last) < len(end) and b"".join(self._pieces[-len(end) :]).endswith(end))

    def _complete(self) -> None:
        now = perf_counter()
        self._generator.count_reads(len(self._pieces))
        problem = verify(b"".join(self._pieces), self._generator.expected)
        self.busy = False
        self._generator.answered(now - self._sent_at, self._first_at - self._sent_at, problem)
        self._generator.next(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self.closed = True
        if self.busy:
            self.busy = False
            self._generator.answered(0, 0, "connection closed before the answer was complete")
        self._generator.next(self)


def verify(answer: bytes, expected: bytes | Callable[[bytes], str | None]) -> str | None:
    """What is wrong with the whole ``answer``, or None."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12]
    if status != b"200":
        return f"status {status.decode(errors='replace')}: {body[:200].decode(errors='replace')}"
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        try:
            body = dechunk(body)
        except ValueError as error:
            return f"bad chunked body: {error}"
    if not isinstance(expected, bytes):
        return expected(body)
    if body != expected:
        return f"body differs: {len(body)} bytes that end in {body[-40:]!r}, not {len(expected)}"
    return None


def dechunk(data: bytes) -> bytes:
    """Undo chunked framing; raises ValueError when it is broken or does not end with the data."""
    parts = []
    position = 0
    while True:
        end = data.index(b"\r\n", position)
        size = int(data[position:end], 16)
        position = end + 2
        if size == 0:
            break
        parts.append(data[position : position + size])
        position += size
        if data[position : position + 2] != b"\r\n":
            raise ValueError("no line end behind a chunk")
        position += 2
    if data[position:] != b"\r\n":
        raise ValueError("bytes behind the last chunk")
    return b"".join(parts)
