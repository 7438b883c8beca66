"""What the conformance suites stand on: both servers, a handler that its client steers, and a client that may lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import ngh2

from extproc.transport.grpcio_server import GrpcioProcessServer
from extproc.transport.interface import Call, Header
from extproc.transport.methods import PROCESS_PATH
from extproc.transport.ngh2_server import Ngh2ProcessServer

Server = Ngh2ProcessServer | GrpcioProcessServer
SERVERS: list[type[Server]] = [Ngh2ProcessServer, GrpcioProcessServer]
PATIENCE = 60.0  # seconds until a condition that must come true is given up
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Steered:
    """A handler that echoes, unless a message tells it what to do: ``!verb argument``."""

    def __init__(self, call: Call, calls: Calls) -> None:
        self.call = call
        self.calls = calls
        self.received_bytes = 0
        self.messages = 0
        self.drains = 0
        self.ends = 0
        self.refills = 0
        self.fail_in: str | None = None

    def received(self, message: bytes) -> None:
        self.messages += 1
        self.received_bytes += len(message)
        self.calls.changed.set()
        if message.startswith(b"!"):
            self._obey(message.decode())
        elif not message.startswith(b"?"):  # which wants no answer
            self.call.send(message)

    def _obey(self, command: str) -> None:
        verb, _, argument = command.partition(" ")
        if verb == "!abort":
            code, _, detail = argument.partition(" ")
            self.call.abort(int(code), detail)
        elif verb == "!burst":  # messages of 64 KiB
            for _ in range(int(argument)):
                self.call.send(bytes(1 << 16))
        elif verb == "!refill":  # a burst now and at every drain until so many were sent
            self.refills = int(argument)
            self._refill()
        elif verb == "!pause":
            self.call.pause()
        elif verb == "!fail":
            self.fail_in = argument
            if argument == "received":
                raise RuntimeError("told to fail in received")
        elif verb == "!size":
            self.call.send(bytes(int(argument)))

    def _refill(self) -> None:
        if self.refills:
            self.refills -= 1
            for _ in range(40):
                self.call.send(bytes(1 << 16))

    def drained(self) -> None:
        self.drains += 1
        self.calls.changed.set()
        self._refill()
        if self.fail_in == "drained":
            raise RuntimeError("told to fail in drained")

    def closed(self) -> None:
        self.ends += 1
        self.calls.changed.set()
        if self.fail_in == "closed":
            raise RuntimeError("told to fail in closed")


class Calls:
    """Every call a server was given, in order."""

    def __init__(self) -> None:
        self.handlers: list[Steered] = []
        self.changed = asyncio.Event()
        self.fail = False

    def process(self, call: Call) -> Steered:
        if self.fail:
            raise RuntimeError("told to fail in process")
        handler = Steered(call, self)
        self.handlers.append(handler)
        self.changed.set()
        return handler

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what a handler will have seen."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def all_ended(self, count: int) -> None:
        """Wait until ``count`` calls have come and all have ended; none may have ended twice."""
        await self.until(lambda: len(self.handlers) >= count and all(each.ends for each in self.handlers))
        assert [each.ends for each in self.handlers] == [1] * count


@dataclass
class Answer:
    """All that came back on one stream."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    reset: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def grpc_status(self) -> int | None:
        """Of the trailers, or of a trailers-only answer; None when there is none."""
        value = self.trailers.get(b"grpc-status", self.headers.get(b"grpc-status"))
        return None if value is None else int(value)


class RawClient(asyncio.Protocol):
    """An HTTP/2 client that frames messages as badly as it is told."""

    def __init__(self, settings: dict[int, int] | None = None) -> None:
        self.answers: dict[int, Answer] = {}
        self.lost = asyncio.Event()
        self.goaway = asyncio.Event()
        self.changed = asyncio.Event()
        self.h2 = ngh2.Connection(ngh2.Role.CLIENT)
        self._settings = settings or {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.h2.initiate_connection(self._settings)
        self.flush()

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)

    def open(self, path: str = PROCESS_PATH, *, end_stream: bool = False, extra: tuple[Header, ...] = ()) -> int:
        """Open a stream; returns its id. ``extra`` replaces headers of the same name."""
        headers = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": path.encode(),
            b":authority": b"extproc",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
            **dict(extra),
        }
        stream = self.h2.send_request(tuple(headers.items()), end_stream=end_stream)
        self.answers[stream] = Answer()
        self.flush()
        return stream

    def data(self, stream: int, data: bytes, *, end_stream: bool = False) -> None:
        """Send ``data`` as it is in a DATA frame of its own."""
        self.h2.send_data(stream, data, end_stream=end_stream)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.h2.receive_data(data)
        for event in self.h2.events():
            self._handle(event)
        self.changed.set()
        self.flush()

    def _handle(self, event: ngh2.Event) -> None:
        match event:
            case ngh2.ResponseReceived(stream_id, headers, _):
                self.answers[stream_id].headers = dict(headers)
                self.answers[stream_id].status = int(dict(headers)[b":status"])
            case ngh2.DataReceived(stream_id, data, _):
                self.answers[stream_id].data += data
            case ngh2.TrailersReceived(stream_id, headers):
                self.answers[stream_id].trailers = dict(headers)
            case ngh2.StreamReset(stream_id, error_code):
                self.answers[stream_id].reset = error_code
            case ngh2.GoAwayReceived():
                self.goaway.set()
        if isinstance(event, ngh2.StreamClosed | ngh2.TrailersReceived | ngh2.StreamReset) or getattr(
            event, "end_stream", False
        ):
            self.answers[event.stream_id].ended.set()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.lost.set()
        self.changed.set()

    async def ended(self, stream: int) -> Answer:
        """Wait until the server has ended the stream."""
        async with asyncio.timeout(PATIENCE):
            await self.answers[stream].ended.wait()
        return self.answers[stream]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the server will have sent."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def raw_client(path: str, settings: dict[int, int] | None = None) -> AsyncIterator[RawClient]:
    """A connected RawClient."""
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_unix_connection(lambda: RawClient(settings), path)
    try:
        yield client
    finally:
        transport.abort()
        await client.lost.wait()
