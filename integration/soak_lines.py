"""The soak's connections: HTTP/1.1 ones that a client keeps as long as it can, and HTTP/2 ones that several share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

import ngh2
from http2_client import Http2Client, Stream
from http_client import Exchange, Reply
from soak_requests import Visit

_BUFFER = 1 << 24
_BETWEEN_PIECES = 0.001  # seconds

Headers = Sequence[tuple[str, str]]


class Talk(Protocol):
    """One request and its answer."""

    reply: Reply

    async def piece(self) -> bytes:
        """The next piece of the answer; empty at its end. Raises CutError when it ends too early."""

    async def whole(self) -> Reply:
        """The complete answer. Raises CutError when it is not."""


class Line(Protocol):
    """A way to a server."""

    async def talk(self, visit: Visit, headers: Headers, share: float = 1.0) -> Talk:
        """Send a request, or this share of its body."""

    async def leave(self, *, reset: bool = False) -> None:
        """Have nothing more to do with the last talk."""

    async def close(self) -> None:
        """Hang up."""


class Http1Line:
    """A connection of one's own, made anew after each talk that was left or cut."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._last: Exchange | None = None

    async def talk(self, visit: Visit, headers: Headers, share: float = 1.0) -> Exchange:
        """See Line."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=_BUFFER)
        exchange = self._last = Exchange(*self._streams, visit.method)
        host, port = self._address
        fields = [("host", f"{host}:{port}"), ("content-type", "application/json"), *headers]
        fields.append(("transfer-encoding", "chunked") if visit.chunked else ("content-length", str(len(visit.raw))))
        lines = [f"{visit.method} {visit.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) if visit.chunked else piece for piece in _pieces(visit)]
        try:
            if share < 1:
                await exchange.send(head + b"".join(pieces)[: int(len(visit.raw) * share)])
                return exchange
            await exchange.send(head)
            for piece in pieces:
                await exchange.send(piece)
                await asyncio.sleep(_BETWEEN_PIECES)
            if visit.chunked:
                await exchange.send(b"0\r\n\r\n")
        except ConnectionError:
            return exchange  # there may be an answer all the same
        exchange.sent()
        return exchange

    async def leave(self, *, reset: bool = False) -> None:
        """See Line."""
        if self._streams is None or self._last is None:
            return
        writer, self._streams = self._streams[1], None
        if reset:
            self._last.reset()
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            return

    async def close(self) -> None:
        """See Line."""
        await self.leave()


class _Http2Talk:
    """A Talk on a shared connection."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reply = stream.reply
        self._read = 0

    async def piece(self) -> bytes:
        """See Talk."""
        while len(self.reply.body) == self._read and not self.reply.ended:
            await self.stream.progress()
        piece = self.reply.body[self._read :]
        self._read = len(self.reply.body)
        return piece

    async def whole(self) -> Reply:
        """See Talk."""
        return await self.stream.whole()


class Http2Line:
    """A stream of a connection that others use, too."""

    def __init__(self, client: Http2Client) -> None:
        self._client = client
        self._last: Stream | None = None

    async def talk(self, visit: Visit, headers: Headers, share: float = 1.0) -> _Http2Talk:
        """See Line."""
        fields = [("content-type", "application/json"), *headers]
        if not visit.chunked:
            fields.append(("content-length", str(len(visit.raw))))
        stream = self._last = self._client.open(visit.path, fields, visit.method, end=not visit.raw)
        sent = visit.raw[: int(len(visit.raw) * share)] if share < 1 else None
        pieces = list(_pieces(visit)) if sent is None else [sent] if sent else []
        for number, piece in enumerate(pieces, 1):
            try:
                stream.send(piece, end=sent is None and number == len(pieces))
            except ngh2.NGH2Error:
                break  # it is answered already
            await asyncio.sleep(_BETWEEN_PIECES)
        return _Http2Talk(stream)

    async def leave(self, *, reset: bool = False) -> None:  # noqa: ARG002 - there is one way to leave
        """See Line."""
        if self._last is not None and not self._last.reply.ended:
            try:
                self._last.reset()
            except ngh2.NGH2Error:
                return  # the other side was first

    async def close(self) -> None:
        """See Line: the connection is not ours."""


def _pieces(visit: Visit) -> Iterator[bytes]:
    size = max(-(-len(visit.raw) // visit.pieces), 1)
    for at in range(0, len(visit.raw), size):
        yield visit.raw[at : at + size]
