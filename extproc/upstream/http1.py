"""One HTTP/1.1 connection to a worker: one leg at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from extproc.transport.interface import Header
from extproc.upstream.tcp import notice_dead_peer, seen

_log: Final = logging.getLogger(__name__)

_HEAD_LIMIT: Final = 60 * 1024  # bytes of an answer's head, as in Envoy
_TOGETHER: Final = 1 << 16  # a body up to this size is written in one piece with its head
_BODYLESS: Final = (204, 304)


class Reader(Protocol):
    """What hears of the answer to the request that a connection has; nothing any more once it is over."""

    def answer_head(self, status: int, headers: Sequence[Header]) -> None:
        """The head of the final answer; names in lower case."""

    def answer_data(self, chunk: bytes) -> None:
        """A piece of its body."""

    def answer_done(self) -> None:
        """It is complete."""

    def answer_lost(self, detail: str, *, unseen: bool, broken: bool) -> None:
        """It will never be complete.

        Args:
            detail: why.
            unseen: the worker has not had a byte of the request, for it had closed the connection before.
            broken: what it sent is no HTTP.
        """


class Http1Connection(asyncio.Protocol):
    """``idle`` is called when it may be used again, ``over`` once when it is gone."""

    def __init__(self, idle: Callable[[Http1Connection], None], over: Callable[[Http1Connection], None]) -> None:
        self._idle = idle
        self._over = over
        self._transport: asyncio.Transport
        self._socket: object = None
        self._parser = HttpResponseParser(self)
        self._reader: Reader | None = None
        self._reading = True
        self._used = False  # had a request before
        self._acknowledged = -1  # bytes, before the request; -1: not known
        self._status = 0
        self._headers: list[Header] = []
        self._head_size = 0  # bytes that came before the head was whole
        self._headed = False
        self._framed = False  # the answer says where it ends
        self._lasting = False  # the worker keeps the connection open after it
        self._whole = False  # all of it has come
        self.idle_since = 0.0  # loop time; the pool's
        self.closed = False

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected, and TLS agreed on."""
        self._transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")
        notice_dead_peer(self._socket)

    def data_received(self, data: bytes) -> None:
        """Parse; anything but the answer to a request ends the connection."""
        if self._reader is None:
            self.close()  # at once, so that no leg takes it in the same turn of the loop
            return
        if not self._headed:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self._whole:
                self._break(f"no HTTP/1.1: {error}")
                return
            self._lasting = False
        if self._whole:
            # Answered before it was asked in full: the rest would be taken for the next request.
            self._complete(reusable=self._lasting and not self._transport.get_write_buffer_size())
        elif not self._headed and self._reader is not None and self._head_size > _HEAD_LIMIT:
            self._break(f"the head is larger than {_HEAD_LIMIT} bytes")

    def eof_received(self) -> None:
        """The end of an answer that does not say its length; else the connection's. The transport closes itself."""
        if self._reader is not None and self._headed and not self._framed:
            self._complete(reusable=False)
        else:
            self._lose("the worker closed the connection", ended=True)

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self.closed = True
        # A broken pipe is what a connection becomes that the worker had ended when we sent.
        self._lose(str(error) if error else "the connection was closed", ended=isinstance(error, BrokenPipeError))
        self._over(self)

    # the leg's side

    def send(self, head: bytes, body: bytes, reader: Reader) -> None:
        """Send a request whose answer ``reader`` hears of."""
        self._reader = reader
        self._status = self._head_size = 0
        self._headers = []
        self._headed = self._framed = self._whole = False
        if len(body) <= _TOGETHER:
            self._write(head + body)
        else:
            self._write(head)
            self._write(body)

    def wake(self) -> bool:
        """It was idle and is to be used again: whether the worker has left it open, as far as is known here."""
        now = seen(self._socket)
        if now is None:
            self._acknowledged = -1
            return True
        self._acknowledged = now.acknowledged
        return now.established

    @property
    def used(self) -> bool:
        """It had a request before the one that it has."""
        return self._used

    def drop(self) -> None:
        """Nobody wants the answer any more: the worker sees its client leave."""
        self._reader = None
        self.close()

    def close(self) -> None:
        """Close at once, whatever is under way."""
        self.closed = True
        self._transport.abort()

    def pause(self) -> None:
        """Read no more of the answer."""
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    # the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Trailers say nothing that matters."""
        if not self._headed:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """See httptools. Interim answers are passed over."""
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if self._whole:
            return
        if status < 200:
            self._status = 0
            return
        self._status = status
        self._headed = True
        self._lasting = bool(self._parser.should_keep_alive())
        self._framed = status in _BODYLESS or any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in headers
        )
        if self._reader is not None:
            self._reader.answer_head(status, headers)

    def on_body(self, chunk: bytes) -> None:
        """See httptools."""
        if self._reader is not None and not self._whole:
            self._reader.answer_data(chunk)

    def on_message_begin(self) -> None:
        """See httptools. What comes behind an answer is no answer to the next request."""
        if self._whole:
            self._lasting = False

    def on_message_complete(self) -> None:
        """See httptools. It is called for an interim answer, too."""
        self._whole = self._whole or bool(self._status and self._framed)

    # inside

    def _write(self, data: bytes) -> None:
        self._transport.write(data)

    def _complete(self, *, reusable: bool) -> None:
        reader, self._reader = self._reader, None
        self._used = True
        if reusable and reader is not None:
            self.resume()
            self._idle(self)
        else:
            self.close()
        if reader is not None:
            reader.answer_done()

    def _break(self, detail: str) -> None:
        reader, self._reader = self._reader, None
        self.close()
        if reader is not None:
            reader.answer_lost(detail, unseen=False, broken=True)

    def _lose(self, detail: str, *, ended: bool) -> None:
        self.closed = True
        reader, self._reader = self._reader, None
        if reader is None:
            return
        unseen = False
        if ended and self._acknowledged >= 0:
            # The end that came says how much of ours has reached the worker's machine. A reset does not say it.
            now = seen(self._socket)
            unseen = now is not None and now.acknowledged == self._acknowledged
        reader.answer_lost(detail, unseen=unseen, broken=False)
