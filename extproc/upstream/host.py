"""One address that legs go to: its connections, of which idle ones are kept for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Final, Protocol, TypeVar

from ngh2 import Setting

from extproc.transport.egress_connection import EgressConnection
from extproc.upstream.http1 import Http1Connection
from extproc.upstream.tcp import notice_dead_peer

CONNECT_SECONDS: Final = 2.0  # name, connection and TLS
# Below the 5 s after which uvicorn (SGLang, vLLM) closes an idle connection.
IDLE_SECONDS: Final = 3.0
MOST_IDLE: Final = 512
MOST_CONNECTIONS: Final = 16384  # that any worker has open is a defect of somebody's
_GREETING_SECONDS: Final = 2.0
_MOST_STREAMS: Final = 1000  # on one HTTP/2 connection, before another one is opened
_T = TypeVar("_T", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an address is, and how it is spoken to.

    Attributes:
        host: an IP address, or a name.
        port: a TCP port.
        tls: the context, where it is spoken; ``server_name`` is verified.
    """

    host: str
    port: int
    tls: SSLContext | None = None
    server_name: str | None = None


class TooManyError(OSError):
    """There are as many connections as there may be."""


class Host(Protocol):
    """What :class:`Hosts` keeps of either protocol."""

    place: Place

    def sweep(self, before: float) -> None:
        """Close what has been idle since before that loop time."""

    def retire(self) -> None:
        """No more legs will come: close what is idle, and the rest when it is."""

    def close(self) -> None:
        """Close everything."""

    @property
    def connections(self) -> int:
        """How many are open; at least one while one is being made that no leg answers for."""


async def _connected(place: Place, factory: Callable[[], _T]) -> _T:
    """Raises OSError (ssl.SSLError is one) or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_SECONDS):
        _, protocol = await loop.create_connection(
            factory,
            place.host,
            place.port,
            ssl=place.tls,
            server_hostname=place.server_name if place.tls else None,
        )
    return protocol


class Http1Host:
    """HTTP/1.1: a leg has a connection of its own. The one that was used last is used first."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._idle: list[Http1Connection] = []
        self._open: set[Http1Connection] = set()
        self._retired = False

    @property
    def connections(self) -> int:
        """See Host."""
        return len(self._open)

    def take(self) -> Http1Connection | None:
        """An idle connection."""
        idle = self._idle
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while idle:
            connection = idle.pop()
            if not connection.closed:
                if connection.idle_since > oldest and connection.wake():
                    return connection
                connection.close()
        return None

    async def connect(self) -> Http1Connection:
        """A new connection. Raises OSError or TimeoutError."""
        if len(self._open) >= MOST_CONNECTIONS:
            raise TooManyError(f"{MOST_CONNECTIONS} connections are open")
        connection = await _connected(self.place, lambda: Http1Connection(self._keep, self._open.discard))
        if connection.closed:
            raise ConnectionError("the connection was closed at once")
        self._open.add(connection)
        return connection

    def _keep(self, connection: Http1Connection) -> None:
        if self._retired or len(self._idle) >= MOST_IDLE:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def sweep(self, before: float) -> None:
        """See Host."""
        idle = self._idle
        stale = 0
        while stale < len(idle) and (idle[stale].closed or idle[stale].idle_since < before):
            stale += 1
        for connection in idle[:stale]:
            if not connection.closed:
                connection.close()
        del idle[:stale]

    def retire(self) -> None:
        """See Host."""
        self._retired = True
        for connection in self._idle:
            if not connection.closed:
                connection.close()
        self._idle.clear()

    def close(self) -> None:
        """See Host."""
        self.retire()
        for connection in list(self._open):
            connection.close()


class Http2Connection(EgressConnection):
    """One of a gRPC worker's."""

    most = _MOST_STREAMS  # legs at once

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        notice_dead_peer(transport.get_extra_info("socket"))
        super().connection_made(transport)

    @property
    def has_room(self) -> bool:
        """Another leg can be under way here at once."""
        return self.usable and self.open_legs < self.most


class Http2Host:
    """HTTP/2: legs share connections, of which there are more only when one is full.

    They stay open, as Envoy's do: servers announce (GOAWAY) that they are about to close one.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._open: set[EgressConnection] = set()
        self._ready: list[Http2Connection] = []
        self._connecting: asyncio.Task[Http2Connection] | None = None
        self._retired = False

    @property
    def connections(self) -> int:
        """See Host."""
        return len(self._open) or int(self._connecting is not None)

    def take(self) -> Http2Connection | None:
        """A connection with room."""
        for connection in self._ready:
            if connection.has_room:
                return connection
        return None

    async def connect(self) -> Http2Connection:
        """One with room, new if need be; those who want one at the same time share it. Raises as Http1Host's."""
        while (connection := self.take()) is None:
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="connect-http2")
                self._connecting.add_done_callback(self._connected)
            await asyncio.shield(self._connecting)
        return connection

    def _connected(self, task: asyncio.Task[Http2Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # those who wait have it

    async def _connect(self) -> Http2Connection:
        connection = await _connected(self.place, lambda: Http2Connection(self._forget))
        self._open.add(connection)
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                await connection.greeted()
        except TimeoutError:
            connection.terminate()
            raise
        if not connection.usable:
            raise ConnectionError("the connection was closed before HTTP/2 settings came")
        limit = connection.h2.remote_settings.get(Setting.MAX_CONCURRENT_STREAMS, _MOST_STREAMS)
        connection.most = max(1, min(limit, _MOST_STREAMS))
        self._ready = [each for each in self._ready if each.usable]
        self._ready.append(connection)
        return connection

    def _forget(self, connection: EgressConnection) -> None:
        self._open.discard(connection)

    def sweep(self, before: float) -> None:  # noqa: ARG002 - Host's signature
        """See Host. What takes no new legs goes when its last one is over."""
        self._ready = [each for each in self._ready if each.usable]
        for connection in list(self._open):
            done = self._retired or (connection not in self._ready and self._connecting is None)
            if done and not connection.open_legs:
                connection.terminate()

    def retire(self) -> None:
        """See Host."""
        self._retired = True
        self._ready.clear()
        self.sweep(0)

    def close(self) -> None:
        """See Host."""
        if self._connecting is not None:
            self._connecting.cancel()
        self.retire()
        for connection in list(self._open):
            connection.terminate()
