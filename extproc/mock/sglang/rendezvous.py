"""How two mock processes pass a KV cache from prefill to decode: nobody computes, but both wait as the engine's do.

The prefill listens on its bootstrap port. A decode opens one connection per prefill and speaks lines:

    decode → prefill   ``layout <words>``   ``want <room> <digest> [<rank>]``   ``drop <room>``
    prefill → decode   ``done <room>``      ``fail <room> <reason>``            ``unlike <words>``

The decode wants the cache of one of the prefill's data-parallel ranks: the one it was told, else the one that the room
implies. A prefill leg on another rank is never heard of.

What happens when a leg is missing, late, doubled or aborted is what was seen on 0.5.23; above all: a prefill that gives
up tells nobody, and its decode waits on. The digest tells the prompts of the two legs apart: the engine does not check
and writes nonsense, the mock fails both. A prefill whose cache is laid out otherwise is noticed at the first contact,
and is the decode's end (``disaggregation/common/conn.py``, ``try_ensure_parallel_info``). ``GET
/health`` on the port is answered like the engine's bootstrap server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from extproc.mock.engine import CrashError
from extproc.mock.lines import Lines
from extproc.mock.tasks import looked_at

if TYPE_CHECKING:
    from asyncio import Future

DEFAULT_PORT = 8998
_TOMBSTONES = 10_000
_MISMATCH = "mock: the two legs in this room have different prompts"
_HTTP_OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\nconnection: close\r\n\r\nOK"
OTHER_SIDE = "Failed due to an unknown reason from another rank"
ABORTED = "Aborted by AbortReq."


class TransferError(Exception):
    """The KV cache did not get across; the text is the engine's."""


class UnreachableError(TransferError):
    """Nobody listens on the bootstrap port."""


# --- the prefill's side ---

_Key = tuple[int, int]  # a room's number, and the rank that it is on


@dataclass(slots=True, eq=False)
class _Room:
    """Who is in a room: prefill legs, of which there should be one, and the decode."""

    legs: list[Future[None]] = field(default_factory=list)
    digest: int | None = None  # of the legs' prompt
    decode: _DecodePeer | None = None
    wanted: int | None = None  # the digest of the decode's prompt
    abandoned: bool = False  # the decode was here and left


class _DecodePeer(Lines):
    """A decode process connected to this prefill."""

    def __init__(self, host: Bootstrap) -> None:
        super().__init__()
        self._host = host

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A decode's process, or a health check, has connected."""
        super().connection_made(transport)
        self._host.peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The decode's process has gone."""
        self._host.decode_died(self)

    def line(self, line: str) -> None:
        """A word from the decode."""
        word, *rest = line.split()
        if word == "want":
            number = int(rest[0])
            rank = int(rest[2]) if len(rest) > 2 else self._host.implied(number)
            self._host.decode_came(self, (number, rank), int(rest[1]))
        elif word == "drop":
            self._host.decode_dropped(self, int(rest[0]))
        elif word == "layout":
            if rest != self._host.layout.split():
                self.send(f"unlike {self._host.layout}")
        elif word == "GET":
            self.transport.write(_HTTP_OK)
            self.transport.close()


class Bootstrap:
    """A prefill's rooms, by number and rank, and the server that lets decodes in."""

    def __init__(self, layout: str, dp_size: int = 1) -> None:
        self.layout = layout
        self.peers: set[_DecodePeer] = set()
        self.rooms: dict[_Key, _Room] = {}
        self.dropped: dict[_Key, None] = {}  # rooms that a decode has left before a prefill leg came
        self._dp_size = dp_size
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

    def enter(self, number: int, rank: int, digest: int) -> Future[None]:
        """A prefill leg waits in a room: done when a decode is there, TransferError if none will come."""
        future: Future[None] = asyncio.get_running_loop().create_future()
        key = number, rank
        if self.dropped.pop(key, 0) is None:
            future.set_exception(TransferError(OTHER_SIDE))
            return future
        room = self.rooms.setdefault(key, _Room())
        room.legs.append(future)
        room.digest = digest
        self._meet(key, room)
        return future

    def transferred(self, number: int, rank: int) -> None:
        """A prefill leg has sent the KV cache: the decode goes on, the room is free again."""
        key = number, rank
        room = self.rooms.get(key)
        if room is not None and room.decode is not None:
            room.decode.send(f"done {number}")
            room.decode = None
            self._forget_if_empty(key, room)

    def leave(self, number: int, rank: int, future: Future[None]) -> None:
        """A prefill leg is over. A decode in the room is told nothing."""
        key = number, rank
        room = self.rooms.get(key)
        if room is not None and future in room.legs:
            room.legs.remove(future)
            self._forget_if_empty(key, room)

    def implied(self, number: int) -> int:
        """The rank of a room whose decode was told none."""
        return number % self._dp_size

    def decode_came(self, peer: _DecodePeer, key: _Key, digest: int) -> None:
        """A decode wants the KV cache of a room. It takes the place of one that is there already."""
        room = self.rooms.setdefault(key, _Room())
        room.decode, room.wanted, room.abandoned = peer, digest, False
        self._meet(key, room)

    def decode_dropped(self, peer: _DecodePeer, number: int) -> None:
        """A decode leg was aborted."""
        for key in [key for key in self.rooms if key[0] == number]:
            self._decode_left(peer, key)

    def _decode_left(self, peer: _DecodePeer, key: _Key) -> None:
        room = self.rooms.get(key)
        if room is None or room.decode is not peer:
            return
        room.decode, room.abandoned = None, True
        if not room.legs:
            self.dropped[key] = None
            while len(self.dropped) > _TOMBSTONES:
                del self.dropped[next(iter(self.dropped))]
        for leg in room.legs:
            if not leg.done():
                leg.set_exception(TransferError(OTHER_SIDE))
        self._forget_if_empty(key, room)

    def abandoned(self, number: int, rank: int) -> bool:
        """Whether the decode has left a room before it was served."""
        room = self.rooms.get((number, rank))
        return room is not None and room.abandoned

    def decode_died(self, peer: _DecodePeer) -> None:
        """A decode's process has gone: nothing comes of the legs it was to meet."""
        self.peers.discard(peer)
        for key in [key for key, room in self.rooms.items() if room.decode is peer]:
            self._decode_left(peer, key)

    def _meet(self, key: _Key, room: _Room) -> None:
        if room.decode is None or not room.legs:
            return
        same = room.digest == room.wanted
        for leg in room.legs:
            if not leg.done():
                leg.set_result(None) if same else leg.set_exception(TransferError(_MISMATCH))
        if not same:
            room.decode.send(f"fail {key[0]} {_MISMATCH}")
            room.decode = None

    def _forget_if_empty(self, key: _Key, room: _Room) -> None:
        if not room.legs and room.decode is None:
            self.rooms.pop(key, None)


# --- the decode's side ---


class PrefillPeer(Lines):
    """The connection to one prefill's bootstrap port."""

    def __init__(self, owner: Prefills, address: tuple[str, int]) -> None:
        super().__init__()
        self.waiting: dict[int, Future[None]] = {}
        self._owner = owner
        self._address = address
        self._unlike = False  # the prefill's cache is of another kind

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what the prefill's cache must be like."""
        super().connection_made(transport)
        self.send(f"layout {self._owner.layout}")

    def want(self, room: int, rank: int | None, digest: int) -> Future[None]:
        """Ask for the KV cache in a room, on a rank or on the one that it implies; done when it is here.

        An earlier leg in the same room is never served.
        """
        future: Future[None] = asyncio.get_running_loop().create_future()
        if self._unlike:
            future.set_exception(CrashError())
            return future
        self.waiting[room] = future
        self.send(f"want {room} {digest}" if rank is None else f"want {room} {digest} {rank}")
        return future

    def drop(self, room: int, future: Future[None]) -> None:
        """Ask no longer."""
        if self.waiting.get(room) is future:
            del self.waiting[room]
            self.send(f"drop {room}")

    def line(self, line: str) -> None:
        """The prefill says that a room's KV cache is sent, or will not be, or that it is of another kind."""
        word, room, *reason = line.split(" ", 2)
        if word == "unlike":
            self._unlike = True
            for waiting in self.waiting.values():
                if not waiting.done():
                    waiting.set_exception(CrashError())
            return
        future = self.waiting.pop(int(room), None)
        if future is None or future.done():
            return
        if word == "done":
            future.set_result(None)
        else:
            future.set_exception(TransferError(reason[0] if reason else ""))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The prefill's process has gone."""
        self._owner.lost(self._address, self)


class Prefills:
    """A decode's connections to the prefills it was sent to."""

    def __init__(self, layout: str, death_delay: float, connect_patience: float) -> None:
        self.layout = layout
        self._death_delay = death_delay
        self._connect_patience = connect_patience
        self._peers: dict[tuple[str, int], asyncio.Task[PrefillPeer]] = {}
        self._over = False  # this process is dead, although some of its tasks may not have heard of it

    async def peer(self, address: tuple[str, int]) -> PrefillPeer:
        """The connection to ``address``; raises UnreachableError when nobody has listened there for too long."""
        if self._over:
            raise UnreachableError(ABORTED)
        task = self._peers.get(address)
        if task is None:
            task = self._peers[address] = asyncio.get_running_loop().create_task(self._connect(address))
            task.add_done_callback(looked_at)  # those who wait for it may have left
        return task.result() if task.done() else await asyncio.shield(task)

    def lost(self, address: tuple[str, int], peer: PrefillPeer) -> None:
        """A prefill's process has gone: the engine's heartbeat notices only after a while."""
        self._peers.pop(address, None)
        if peer.waiting:
            where = f"{address[0]}:{address[1]}"
            asyncio.get_running_loop().call_later(self._death_delay, _fail_all, where, dict(peer.waiting))
            peer.waiting.clear()

    def kill(self) -> list[asyncio.Task[PrefillPeer]]:
        """Break every connection, and make no more; returns the tasks that made them."""
        self._over = True
        tasks, self._peers = list(self._peers.values()), {}
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().transport.abort()
            else:
                task.cancel()
        return tasks

    async def stop(self) -> None:
        """Close every connection."""
        await asyncio.gather(*self.kill(), return_exceptions=True)

    async def _connect(self, address: tuple[str, int]) -> PrefillPeer:
        host = address[0].removeprefix("[").removesuffix("]")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_patience
        while True:
            try:
                _, peer = await loop.create_connection(lambda: PrefillPeer(self, address), host, address[1])
            except OSError:
                if loop.time() >= deadline:
                    self._peers.pop(address, None)
                    raise UnreachableError(ABORTED) from None
                await asyncio.sleep(self._connect_patience / 15)
            else:
                return peer


def _fail_all(address: str, waiting: dict[int, Future[None]]) -> None:
    for future in waiting.values():
        if not future.done():
            future.set_exception(TransferError(f"Lost connection with prefill instance (bootstrap_addr: {address})"))
