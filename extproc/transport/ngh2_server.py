"""``ProcessServer`` on ngh2: the fast one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from extproc.transport.address import SocketFile, TcpAddress, UnixAddress, claim_socket_file, parse_address
from extproc.transport.grpc_framing import DEFAULT_MAX_MESSAGE
from extproc.transport.health import HealthStatuses
from extproc.transport.interface import Answers, Process
from extproc.transport.methods import NO_METHODS, Method, method_table
from extproc.transport.ngh2_connection import ServerConnection

_log = logging.getLogger(__name__)

_BACKLOG = 1024  # a unix socket refuses at once what does not fit, and many Envoy threads may come back together


class Ngh2ProcessServer:
    """Implements ``ProcessServer`` with asyncio protocols; works on uvloop and on plain asyncio.

    ``max_message`` bounds one gRPC message in bytes; a longer one ends its call with RESOURCE_EXHAUSTED. ``others`` are
    methods that it serves besides those of ``ProcessServer``, by path; ``answers`` answers plain HTTP requests below
    ``interface.ANSWER_PATH``.
    """

    def __init__(
        self,
        max_message: int = DEFAULT_MAX_MESSAGE,
        others: Mapping[str, Method] = NO_METHODS,
        answers: Answers | None = None,
    ) -> None:
        self._max_message = max_message
        self._others = others
        self._answers = answers
        self._health = HealthStatuses()
        self._connections: set[ServerConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._server: asyncio.Server | None = None
        self._socket_file: SocketFile | None = None
        self._draining = False
        self._address = ""

    @property
    def address(self) -> str:
        """Where the server listens: with the real port when port 0 was asked for."""
        return self._address

    @property
    def open_calls(self) -> int:
        """Calls under way on all connections, health watches included."""
        return sum(connection.open_calls for connection in self._connections)

    async def start(self, address: str, process: Process) -> None:
        """See ``ProcessServer.start``; raises ValueError when ``address`` is not one."""
        methods = {path.encode(): method for path, method in method_table(process, self._health, self._others).items()}

        def connect() -> ServerConnection:
            return ServerConnection(methods, self._max_message, self, self._answers)

        loop = asyncio.get_running_loop()
        match parse_address(address):
            case UnixAddress(path):
                await claim_socket_file(path)
                self._server = await loop.create_unix_server(connect, path, backlog=_BACKLOG)
                self._socket_file = SocketFile.bound(path)
                self._address = address
            case TcpAddress(host, port):
                self._server = await loop.create_server(connect, host, port, backlog=_BACKLOG)
                self._address = str(TcpAddress(host, self._server.sockets[0].getsockname()[1]))

    def set_serving(self, service: str, serving: bool) -> None:  # noqa: FBT001 -- as in ProcessServer
        """See ``ProcessServer.set_serving``."""
        self._health.set_serving(service, serving)

    async def drain(self, grace: float) -> None:
        """See ``ProcessServer.drain``. May be called again, and before ``start``."""
        if self._server is None:
            return
        self._draining = True
        self._server.close()
        if self._socket_file is not None:
            self._socket_file.remove()
        self._health.drain()
        for connection in list(self._connections):
            connection.drain()
        try:
            async with asyncio.timeout(grace):
                await self._none_left.wait()
        except TimeoutError:
            if self.open_calls:
                _log.warning("%d calls did not end within %g s", self.open_calls, grace)
        for connection in list(self._connections):
            connection.terminate()

    def joined(self, connection: ServerConnection) -> None:
        """See ``Owner``."""
        self._connections.add(connection)
        self._none_left.clear()
        if self._draining:  # it was accepted at the last moment
            connection.drain()

    def left(self, connection: ServerConnection) -> None:
        """See ``Owner``."""
        self._connections.discard(connection)
        if not self._connections:
            self._none_left.set()
