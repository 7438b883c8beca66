"""An HTTP/2 client without TLS (prior knowledge) that does one thing at a time: heads, pieces, trailers, resets."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Self

import ngh2
from http_client import PATIENCE, CutError, Headers, Reply


class Stream:
    """One request on a connection."""

    def __init__(self, connection: Http2Client, number: int) -> None:
        self.reply = Reply(0, [], started=time.time())
        self._connection = connection
        self._number = number
        self._changed = asyncio.Event()
        self._error: int | None = None
        self._unread = 0  # bytes that no credit was given for, on a connection that gives it by hand
        self.reads = not connection.by_hand

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, data: bytes, *, end: bool = False) -> None:
        """Send a piece of the body."""
        self._connection.h2.send_data(self._number, data, end_stream=end)
        self._connection.flush()

    def trailers(self, headers: Headers) -> None:
        """End the request with trailers."""
        self._connection.h2.send_trailers(self._number, [(name.encode(), value.encode()) for name, value in headers])
        self._connection.flush()

    def reset(self) -> float:
        """Leave; the time at which we did."""
        left = time.time()
        self._connection.h2.reset_stream(self._number, ngh2.ErrorCode.CANCEL)
        self._connection.flush()
        return left

    # -- receiving ------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """From now on read what comes, on a connection where streams do not until they are told to."""
        self.reads = True
        self._connection.h2.acknowledge_received_data(self._unread, self._number)
        self._connection.flush()

    async def head(self) -> Reply:
        """The answer's status and headers."""
        while not self.reply.headed:
            await self.progress()
        return self.reply

    async def until(self, text: bytes) -> None:
        """Read on until ``text`` has come."""
        while text not in self.reply.body:
            assert not self.reply.ended, f"{text!r} never came, but {self.reply.body!r}"
            await self.progress()

    async def whole(self) -> Reply:
        """The complete answer. Raises CutError when the stream is reset."""
        while not self.reply.ended:
            await self.progress()
        return self.reply

    async def cut(self) -> bytes:
        """Read on until the stream is reset; what had come of its body. Fails when the answer is complete."""
        try:
            await self.whole()
        except CutError as error:
            return error.received
        raise AssertionError(f"the answer was not cut: {self.reply.status} {self.reply.body!r}")

    async def progress(self) -> None:
        """Wait for whatever comes next."""
        if self._error is not None:
            raise CutError(self.reply.body)
        self._changed.clear()
        async with asyncio.timeout(PATIENCE):
            await self._changed.wait()

    # -- the connection's side ------------------------------------------------------------------------------------

    def happened(self, event: ngh2.Event) -> None:
        """Take in what the peer did."""
        reply = self.reply
        match event:
            case ngh2.ResponseReceived():
                fields = [(name.decode(), value.decode("latin-1")) for name, value in event.headers]
                reply.status = int(fields[0][1])
                reply.headers = fields[1:]
                reply.headed = time.time()
            case ngh2.DataReceived():
                reply.body += event.data
                if self.reads and self._connection.by_hand:
                    self._connection.h2.acknowledge_received_data(len(event.data), self._number)
                elif not self.reads:
                    self._unread += len(event.data)
            case ngh2.StreamReset() | ngh2.StreamClosed():
                if event.error_code and not reply.ended:
                    self._error = event.error_code
        if getattr(event, "end_stream", False) or isinstance(event, ngh2.TrailersReceived):
            reply.ended = time.time()
        self._changed.set()

    def lost(self) -> None:
        """The connection is gone."""
        if not self.reply.ended:
            self._error = -1
        self._changed.set()


class Http2Client(asyncio.Protocol):
    """One connection with any number of requests on it. ``by_hand``: a stream is not read until it is told to."""

    def __init__(self, authority: str, *, by_hand: bool = False) -> None:
        self.by_hand = by_hand
        self.h2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=not by_hand))
        self._authority = authority
        self._streams: dict[int, Stream] = {}
        self._transport: asyncio.Transport
        self._gone = asyncio.Event()

    @classmethod
    async def connect(cls, host: str, port: int, *, by_hand: bool = False) -> Self:
        """Connect and say hello."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(f"{host}:{port}", by_hand=by_hand), host, port)
        return client

    def open(self, path: str, headers: Headers = (), method: str = "POST", *, end: bool = False) -> Stream:
        """Send a request's head."""
        pseudo = [(":method", method), (":scheme", "http"), (":authority", self._authority), (":path", path)]
        fields = [(name.encode(), value.encode("latin-1")) for name, value in [*pseudo, *headers]]
        number = self.h2.send_request(fields, end_stream=end)
        stream = self._streams[number] = Stream(self, number)
        self.flush()
        return stream

    def post(self, path: str, body: object, headers: Headers = ()) -> Stream:
        """Send a whole request. ``body`` that is not bytes goes as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = [("content-type", "application/json"), ("content-length", str(len(raw)))]
        stream = self.open(path, [*headers, *length])
        stream.send(raw, end=True)
        return stream

    async def close(self) -> None:
        """Close the connection, whatever is open."""
        self._transport.close()
        await self._gone.wait()

    def flush(self) -> None:
        """Write what is due."""
        if data := self.h2.data_to_send():
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.h2.initiate_connection()
        if self.by_hand:  # what some streams do not read must not be credit that others lack
            self.h2.set_local_window_size(1 << 30)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.h2.receive_data(data)
        for event in self.h2.events():
            if (stream := self._streams.get(getattr(event, "stream_id", 0))) is not None:
                stream.happened(event)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """See asyncio.Protocol."""
        for stream in self._streams.values():
            stream.lost()
        self._gone.set()
