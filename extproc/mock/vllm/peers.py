"""A decode's connections to the prefill processes whose KV caches it fetches.

    decode → prefill   ``<word> <number> <arguments, percent-encoded>``
    prefill → decode   ``kv <number> <digest>``         ``fail <number> <reason>``

Nobody computes: the digest of the prompt that was prefilled stands for its KV cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote, unquote

from extproc.mock.lines import Lines
from extproc.mock.tasks import looked_at


class LoadError(Exception):
    """The KV cache did not get across."""


class LostError(LoadError):
    """Nobody listens, or the connection has ended."""


class PrefillPeer(Lines):
    """The connection to one prefill process."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._number = 0

    def ask(self, word: str, *arguments: object) -> asyncio.Future[int]:
        """Say something that is answered with a digest or LoadError; LostError where it cannot be answered."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            future.set_exception(LostError("the connection has ended"))
            return future
        self._number += 1
        self._waiting[self._number] = future
        self.send(" ".join(quote(str(part), safe="") for part in (word, self._number, *arguments)))
        return future

    def line(self, line: str) -> None:
        """An answer."""
        word, number, rest = line.split(" ", 2)
        future = self._waiting.pop(int(number), None)
        if future is None or future.done():
            return
        if word == "kv":
            future.set_result(int(rest))
        else:
            future.set_exception(LoadError(rest))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The prefill's process has gone."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LostError("the connection has ended"))
        self._waiting.clear()


class Peers:
    """These connections, one per address, made when they are first needed."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, int], asyncio.Task[PrefillPeer]] = {}

    async def peer(self, host: object, port: object) -> PrefillPeer:
        """The connection to an address; raises LoadError where that is none, LostError where nobody listens."""
        if not isinstance(host, str) or not isinstance(port, int):
            raise LoadError("no address")
        address = (host, port)
        task = self._peers.get(address)
        if task is None or (task.done() and _dead(task)):
            task = self._peers[address] = asyncio.get_running_loop().create_task(_connect(host, port))
            task.add_done_callback(looked_at)  # who wanted it may have left
        return await asyncio.shield(task)

    def close(self) -> None:
        """Break every connection, and give up those that are being made."""
        for task in self._peers.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().transport.abort()
            task.cancel()
        self._peers.clear()


def _dead(task: asyncio.Task[PrefillPeer]) -> bool:
    return task.cancelled() or task.exception() is not None or task.result().transport.is_closing()


async def _connect(host: str, port: int) -> PrefillPeer:
    try:
        _, peer = await asyncio.get_running_loop().create_connection(
            PrefillPeer, host.removeprefix("[").removesuffix("]"), port
        )
    except OSError as error:
        raise LostError(str(error)) from None
    return peer


Hear = Callable[[Lines, str, str, list[str]], None]


class Listener:
    """A prefill's side: lines from decodes go to ``hear``, with the connection to answer on; its end to ``lost``."""

    def __init__(self, hear: Hear, lost: Callable[[Lines], None] = lambda _: None) -> None:
        self._hear = hear
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._stopped = False
        self._connections: set[_DecodePeer] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Stop listening and break with every decode."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.transport.abort()

    def _accept(self) -> _DecodePeer:
        return _DecodePeer(self._hear, self._begin, self._end)

    def _begin(self, connection: _DecodePeer) -> None:
        if self._stopped:  # it had been accepted by then
            connection.transport.abort()
        self._connections.add(connection)

    def _end(self, connection: _DecodePeer) -> None:
        self._connections.discard(connection)
        self._lost(connection)


class _DecodePeer(Lines):
    """A decode's connection to this prefill."""

    def __init__(self, hear: Hear, begin: Callable[[_DecodePeer], None], end: Callable[[_DecodePeer], None]) -> None:
        super().__init__()
        self._hear = hear
        self._begin = begin
        self._end = end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._end(self)

    def line(self, line: str) -> None:
        word, number, *arguments = line.split(" ")
        self._hear(self, word, number, [unquote(argument) for argument in arguments])
