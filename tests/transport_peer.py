"""Stand-ins for the egress client's tests: an HTTP/2 server that does what it is told, and a receiver that notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import ngh2

from extproc.transport.address import TcpAddress
from extproc.transport.interface import Header, Lost

PATIENCE = 60.0  # seconds until a condition that must come true is given up


@dataclass
class Request:
    """What arrived on one stream."""

    peer: Peer
    stream: int
    headers: tuple[Header, ...]
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    reset: int | None = None

    @property
    def path(self) -> bytes:
        return dict(self.headers)[b":path"]

    def head(self, status: int = 200, *extra: Header, end_stream: bool = False) -> None:
        self.peer.h2.send_response(self.stream, ((b":status", b"%d" % status), *extra), end_stream=end_stream)
        self.peer.flush()

    def data(self, data: bytes, *, end_stream: bool = False) -> None:
        self.peer.h2.send_data(self.stream, data, end_stream=end_stream)
        self.peer.flush()


class Peer(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, owner: PeerServer) -> None:
        self.owner = owner
        self.lost = asyncio.Event()
        self.h2 = ngh2.Connection(ngh2.Role.SERVER, ngh2.Configuration(auto_window_update=owner.auto_window_update))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.owner.peers.append(self)
        if self.owner.greets:
            self.h2.initiate_connection(self.owner.settings)
            self.flush()
        self.owner.changed.set()

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if not self.owner.greets:
            return
        self.h2.receive_data(data)
        for event in self.h2.events():
            self._handle(event)
        self.flush()
        self.owner.changed.set()

    def _handle(self, event: ngh2.Event) -> None:
        requests = self.owner.requests
        match event:
            case ngh2.RequestReceived(stream_id, headers, end_stream):
                requests.append(Request(self, stream_id, headers, complete=end_stream))
            case ngh2.DataReceived(stream_id, data, end_stream):
                request = self._request(stream_id)
                request.body += data
                request.complete = request.complete or end_stream
            case ngh2.StreamReset(stream_id, error_code):
                self._request(stream_id).reset = error_code

    def _request(self, stream: int) -> Request:
        return next(each for each in self.owner.requests if each.peer is self and each.stream == stream)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.lost.set()
        self.owner.changed.set()

    def goaway(self, last_stream: int | None = None) -> None:
        self.h2.send_goaway(last_stream_id=last_stream)
        self.flush()


class PeerServer:
    """Listens on a unix socket; remembers every connection and request."""

    def __init__(
        self, settings: dict[int, int] | None = None, *, greets: bool = True, auto_window_update: bool = True
    ) -> None:
        self.settings = settings or {}
        self.greets = greets
        self.auto_window_update = auto_window_update
        self.peers: list[Peer] = []
        self.requests: list[Request] = []
        self.changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self, where: str | TcpAddress) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(where, TcpAddress):
            self._server = await loop.create_server(lambda: Peer(self), where.host, where.port)
        else:
            self._server = await loop.create_unix_server(lambda: Peer(self), where)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for peer in self.peers:
            peer.transport.abort()
            await peer.lost.wait()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what a connection will have seen."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def request(self, index: int = -1, *, complete: bool = True) -> Request:
        """The request of that index, once it has come."""
        count = index + 1 if index >= 0 else 1
        await self.until(lambda: len(self.requests) >= count and (self.requests[index].complete or not complete))
        return self.requests[index]


@asynccontextmanager
async def peer_server(
    where: str | TcpAddress,
    settings: dict[int, int] | None = None,
    *,
    greets: bool = True,
    auto_window_update: bool = True,
) -> AsyncIterator[PeerServer]:
    """A listening PeerServer."""
    server = PeerServer(settings, greets=greets, auto_window_update=auto_window_update)
    await server.start(where)
    try:
        yield server
    finally:
        await server.stop()


class Receiver:
    """A ``LegReceiver`` that notes what it is told, and can be told to fail."""

    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in
        self.status = 0
        self.headers: Sequence[Header] = ()
        self.body = bytearray()
        self.last: Sequence[Header] = ()  # the trailers
        self.ends: list[str | Lost] = []  # "done" or why it was lost; must become exactly one
        self.detail = ""
        self.changed = asyncio.Event()

    def _note(self, what: str) -> None:
        self.changed.set()
        if what == self.fail_in:
            raise RuntimeError(f"told to fail in {what}")

    def head(self, status: int, headers: Sequence[Header]) -> None:
        self.status, self.headers = status, headers
        self._note("head")

    def data(self, chunk: bytes) -> None:
        self.body += chunk
        self._note("data")

    def trailers(self, headers: Sequence[Header]) -> None:
        self.last = headers
        self._note("trailers")

    def done(self) -> None:
        self.ends.append("done")
        self._note("done")

    def lost(self, reason: Lost, detail: str) -> None:
        self.ends.append(reason)
        self.detail = detail
        self._note("lost")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def end(self) -> str | Lost:
        """How the leg ended."""
        await self.until(lambda: self.ends)
        (end,) = self.ends
        return end
