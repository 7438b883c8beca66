"""``Egress``: HTTP/2 to Envoy's egress listener, connected as long as it can be."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.transport.address import TcpAddress, keep_alive
from extproc.transport.egress_connection import EgressConnection
from extproc.transport.egress_leg import EgressLeg
from extproc.transport.interface import Lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.transport.interface import Header, Leg, LegReceiver

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 2.0  # for the name and the connection, over TCP
_GREETING_SECONDS = 2.0  # a listener that accepts but does not speak HTTP/2 within this time is tried again
_FIRST_BACKOFF = 0.01  # seconds between attempts to connect; doubles up to _LAST_BACKOFF
_LAST_BACKOFF = 0.5


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that found no connection."""

    deadline: float  # loop time
    leg: EgressLeg
    headers: Sequence[Header]
    body: bytes


class EgressClient:
    """Implements ``Egress``.

    ``address`` is the listener's socket file, or where it is over TCP; a name is looked up anew for each connection,
    since an Envoy in a container may come back elsewhere. ``connections`` are kept open side by side and used in turn:
    Envoy serves one connection on one of its worker threads. A request that finds none of them up waits ``patience``
    seconds.
    """

    def __init__(self, address: str | TcpAddress, *, connections: int = 1, patience: float = 1.0) -> None:
        self._address = address
        self._wanted = connections
        self._patience = patience
        self._usable: list[EgressConnection] = []
        self._turn = 0
        self._all: set[EgressConnection] = set()  # also those that only finish their old legs
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connections_up(self) -> int:
        """Connections that take legs now."""
        return len(self._usable)

    @property
    def open_legs(self) -> int:
        """Legs under way or waiting."""
        return sum(connection.open_legs for connection in self._all) + len(self._waiting)

    def start(self) -> None:
        """Begin to connect. Must be called on the running loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_connected()) for _ in range(self._wanted)]

    async def stop(self) -> None:
        """Close all connections; legs under way are lost."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._all):
            connection.terminate()
        while self._waiting:
            self._waiting.popleft().leg.lost(Lost.UNREACHABLE, "the egress client was stopped")
        self._set_timer()

    def send(self, headers: Sequence[Header], body: bytes, receiver: LegReceiver) -> Leg:
        """See ``Egress.send``."""
        leg = EgressLeg(receiver)
        if not self._submit(leg, headers, body):
            loop = asyncio.get_running_loop()
            self._waiting.append(_Waiting(loop.time() + self._patience, leg, headers, body))
            self._set_timer()
        return leg

    def _submit(self, leg: EgressLeg, headers: Sequence[Header], body: bytes) -> bool:
        """Give the leg to a connection; False when none takes it."""
        usable = self._usable
        while usable:
            self._turn = (self._turn + 1) % len(usable)
            if usable[self._turn].submit(leg, headers, body):
                return True
            del usable[self._turn]
        return False

    async def _keep_connected(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            connection = await self._connect()
            if connection is None:
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, _LAST_BACKOFF)
                continue
            backoff = _FIRST_BACKOFF
            self._usable.append(connection)
            self._send_waiting()
            await connection.retired()
            if connection in self._usable:
                self._usable.remove(connection)

    async def _connect(self) -> EgressConnection | None:
        """A connection whose peer speaks HTTP/2, or None."""
        loop = asyncio.get_running_loop()
        try:
            connection = await self._open(loop)
        except OSError as error:
            _log.debug("egress listener: %s", error)
            return None
        if connection.over:
            return None
        self._all.add(connection)
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                await connection.greeted()
        except TimeoutError:
            _log.warning("egress listener: no HTTP/2 settings within %g s", _GREETING_SECONDS)
            connection.terminate()
        return connection if connection.usable else None

    async def _open(self, loop: asyncio.AbstractEventLoop) -> EgressConnection:
        """A connection that was accepted. Raises OSError."""
        address = self._address
        if not isinstance(address, TcpAddress):
            return (await loop.create_unix_connection(lambda: EgressConnection(self._all.discard), address))[1]
        async with asyncio.timeout(_CONNECT_SECONDS):  # a machine that is gone says nothing
            transport, connection = await loop.create_connection(
                lambda: EgressConnection(self._all.discard), address.host, address.port
            )
        keep_alive(transport)
        return connection

    def _send_waiting(self) -> None:
        while self._waiting and self._usable:
            request = self._waiting.popleft()
            if not request.leg.over and not self._submit(request.leg, request.headers, request.body):
                self._waiting.appendleft(request)
        self._set_timer()

    def _expire(self) -> None:
        """Give up on the requests that have waited long enough."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[0].deadline <= now:
            self._waiting.popleft().leg.lost(Lost.UNREACHABLE, f"no connection to {self._address}")
        self._set_timer()

    def _set_timer(self) -> None:
        """Have exactly one timer, for the request that has waited longest."""
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._waiting[0].deadline, self._expire)
        elif not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
