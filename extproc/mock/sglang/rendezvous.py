"""How two mock processes pass a KV cache from prefill to decode: nobody computes, but both wait as the engine's do.

The prefill listens on its bootstrap port. A decode opens one connection per prefill and speaks lines:

    decode → prefill   ``want <room> <digest>``   ``drop <room>``
    prefill → decode   ``done <room>``            ``fail <room> <reason>``

The digest tells the prompts of the two legs apart: the engine checks nothing and writes nonsense, the mock fails both.
``GET /health`` on the same port is answered like the engine's bootstrap server.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from asyncio import Future, Transport

DEFAULT_PORT = 8998
_HTTP_OK = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 2\r\nconnection: close\r\n\r\nOK"
)


class TransferError(Exception):
    """The KV cache did not get across; the text is the engine's."""


class _Lines(asyncio.Protocol):
    """A connection that carries lines of text."""

    def __init__(self) -> None:
        self.transport: Transport = cast("Transport", None)
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.line(line.decode())

    def line(self, line: str) -> None:
        raise NotImplementedError

    def send(self, line: str) -> None:
        if not self.transport.is_closing():
            self.transport.write(line.encode() + b"\n")


# --- the prefill's side ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Room:
    """Who is in a room: the prefill leg's future, the decode's connection, and the digests they brought."""

    leg: Future[None] | None = None
    leg_digest: int = 0
    decode: _DecodePeer | None = None
    decode_digest: int = 0


class _DecodePeer(_Lines):
    """A decode process connected to this prefill."""

    def __init__(self, host: Bootstrap) -> None:
        super().__init__()
        self.rooms: set[int] = set()
        self._host = host

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._host.peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.peers.discard(self)
        for room in list(self.rooms):
            self._host.decode_left(self, room)

    def line(self, line: str) -> None:
        word, *rest = line.split()
        if word == "want":
            self._host.decode_came(self, int(rest[0]), int(rest[1]))
        elif word == "drop":
            self._host.decode_left(self, int(rest[0]))
        elif word == "GET":
            self.transport.write(_HTTP_OK)
            self.transport.close()


class Bootstrap:
    """A prefill's rooms, and the server that lets decodes in."""

    def __init__(self) -> None:
        self.peers: set[_DecodePeer] = set()
        self.rooms: dict[int, _Room] = {}
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _DecodePeer(self), host, port)
        return int(self._listener.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Stop listening and break with every decode."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for peer in list(self.peers):
            peer.transport.abort()

    def enter(self, number: int, digest: int) -> Future[None]:
        """A prefill leg waits in a room: done when a decode is there, TransferError if it cannot be."""
        future: Future[None] = asyncio.get_running_loop().create_future()
        room = self.rooms.setdefault(number, _Room())
        if room.leg is not None:
            future.set_exception(TransferError("Duplicate or cancelled bootstrap room"))
            return future
        room.leg, room.leg_digest = future, digest
        self._meet(room)
        return future

    def transferred(self, number: int) -> None:
        """The prefill leg has sent the KV cache: the decode goes on, the room is free again."""
        room = self.rooms.pop(number, None)
        if room is not None and room.decode is not None:
            room.decode.rooms.discard(number)
            room.decode.send(f"done {number}")

    def leave(self, number: int, future: Future[None], reason: str) -> None:
        """The prefill leg is over without a transfer."""
        room = self.rooms.get(number)
        if room is None or room.leg is not future:
            return
        del self.rooms[number]
        if room.decode is not None:
            room.decode.rooms.discard(number)
            room.decode.send(f"fail {number} {reason}")

    def decode_came(self, peer: _DecodePeer, number: int, digest: int) -> None:
        """A decode wants the KV cache of a room."""
        room = self.rooms.setdefault(number, _Room())
        if room.decode is not None:
            peer.send(f"fail {number} Duplicate decode bootstrap room")
            return
        room.decode, room.decode_digest = peer, digest
        peer.rooms.add(number)
        self._meet(room)

    def decode_left(self, peer: _DecodePeer, number: int) -> None:
        """A decode leg was aborted, or its process died."""
        peer.rooms.discard(number)
        room = self.rooms.get(number)
        if room is None or room.decode is not peer:
            return
        del self.rooms[number]
        if room.leg is not None and not room.leg.done():
            room.leg.set_exception(TransferError("Aborted by AbortReq."))

    def _meet(self, room: _Room) -> None:
        if room.leg is None or room.decode is None or room.leg.done():
            return
        if room.leg_digest != room.decode_digest:
            room.leg.set_exception(TransferError("mock: the two legs of this room have different prompts"))
            return
        room.leg.set_result(None)


# --- the decode's side -------------------------------------------------------------------------------------------------


class _PrefillPeer(_Lines):
    """The connection to one prefill's bootstrap port."""

    def __init__(self, owner: Prefills, address: tuple[str, int]) -> None:
        super().__init__()
        self.waiting: dict[int, Future[None]] = {}
        self._owner = owner
        self._address = address

    def line(self, line: str) -> None:
        word, room, *reason = line.split(" ", 2)
        future = self.waiting.pop(int(room), None)
        if future is None or future.done():
            return
        if word == "done":
            future.set_result(None)
        else:
            future.set_exception(TransferError(reason[0] if reason else ""))

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self._address, self)


class Prefills:
    """A decode's connections to the prefills it was sent to. ``death_delay``: seconds until a dead one is noticed."""

    def __init__(self, death_delay: float) -> None:
        self._death_delay = death_delay
        self._peers: dict[tuple[str, int], asyncio.Task[_PrefillPeer]] = {}

    async def want(self, host: str, port: int, room: int, digest: int) -> None:
        """Return when the KV cache is here; raises TransferError, or OSError if nobody listens there."""
        address = (host, port)
        task = self._peers.get(address)
        if task is None:
            task = self._peers[address] = asyncio.get_running_loop().create_task(self._connect(address))
        try:
            peer = await asyncio.shield(task) if not task.done() else task.result()
        except OSError:
            if self._peers.get(address) is task:
                del self._peers[address]
            raise
        if room in peer.waiting:
            raise TransferError("Duplicate decode bootstrap room")
        future: Future[None] = asyncio.get_running_loop().create_future()
        peer.waiting[room] = future
        peer.send(f"want {room} {digest}")
        try:
            await future
        except asyncio.CancelledError:
            if peer.waiting.get(room) is future:
                del peer.waiting[room]
                peer.send(f"drop {room}")
            raise

    def lost(self, address: tuple[str, int], peer: _PrefillPeer) -> None:
        """The prefill's process has gone: the engine's heartbeat notices after a while."""
        self._peers.pop(address, None)
        if peer.waiting:
            asyncio.get_running_loop().call_later(self._death_delay, _fail_all, address, dict(peer.waiting))
            peer.waiting.clear()

    async def stop(self) -> None:
        """Close every connection."""
        for task in list(self._peers.values()):
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().transport.abort()
            else:
                task.cancel()
        await asyncio.gather(*self._peers.values(), return_exceptions=True)
        self._peers.clear()

    async def _connect(self, address: tuple[str, int]) -> _PrefillPeer:
        host = address[0].removeprefix("[").removesuffix("]")
        loop = asyncio.get_running_loop()
        _, peer = await loop.create_connection(lambda: _PrefillPeer(self, address), host, address[1])
        return peer


def _fail_all(address: tuple[str, int], waiting: dict[int, Future[None]]) -> None:
    for room, future in waiting.items():
        if not future.done():
            future.set_exception(
                TransferError(
                    f"Lost connection with prefill instance (bootstrap_addr: {address[0]}:{address[1]}) {room}"
                )
            )
