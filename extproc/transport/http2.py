"""One HTTP/2 connection on an asyncio transport: what the server's and the client's role have in common.

ngh2 keeps the protocol's state and frames; this class moves bytes between it and the transport, once per loop tick.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from ngh2 import Configuration, Connection, NGH2Error, Role, Setting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ngh2 import Event

_log = logging.getLogger(__name__)

# Credit given to the peer. Envoy forwards a body in messages of up to 1 MiB; 20 MB took 75 ms with a stream window of
# 1 MiB, 100 ms with 256 KiB and no less with 16 MiB. The connection's window only has to be larger than what many
# streams have under way at once, because ngh2 gives it back as soon as bytes were handed to us.
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 1 << 26
# Above this many queued bytes output is taken from ngh2 in pieces of this size, so that the transport can object; and
# it is cheaper: 20 MB take 3 ms of CPU in such pieces and 23 ms at once.
WRITE_PIECE = 1 << 18

_SEND_BUFFER = 1 << 20

_UNLIMITED = (10**9, 10**9)  # (burst, rate): the peer is our own Envoy, and every client that leaves costs it a reset


def configuration(max_header_list: int = 1 << 16) -> Configuration:
    """ngh2's limits for a peer that is trusted to be busy."""
    return Configuration(
        stream_reset_rate_limit=_UNLIMITED,
        glitch_rate_limit=_UNLIMITED,
        max_send_header_block_length=1 << 20,  # what is too long for Envoy is for Envoy to answer (431)
        max_inbound_header_list_size=max_header_list,
    )


def settings(**extra: int) -> dict[int, int]:
    """Our SETTINGS; ``extra`` by the names of ``ngh2.Setting`` in lower case."""
    return {
        Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        **{Setting[name.upper()]: value for name, value in extra.items()},
    }


class Http2Protocol(asyncio.Protocol, ABC):
    """Drives an ``ngh2.Connection``; subclasses handle its events and decide when the connection is over."""

    def __init__(self, role: Role, limits: Configuration, our_settings: dict[int, int]) -> None:
        self.h2 = Connection(role, limits)
        self._our_settings = our_settings
        self._transport: asyncio.Transport
        self._loop: asyncio.AbstractEventLoop
        self._dirty = False  # a flush is due in this tick
        self._writable = False  # the transport takes more
        self._over = False  # nothing more is read, nothing more will be written
        self.attentive = False

    @property
    def over(self) -> bool:
        """The connection was given up or lost."""
        return self._over

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._writable = True
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family == socket.AF_UNIX:
            # The kernel's default holds less than one long prompt; each refill would be one more wake-up.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.h2.initiate_connection(self._our_settings)
        self.h2.set_local_window_size(CONNECTION_WINDOW)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Handle what came, then let out whatever the handlers answered: in one write."""
        if self._over:
            return
        self._dirty = True  # the flush below covers everything that is sent meanwhile
        try:
            self.h2.receive_data(data)
        except NGH2Error as error:
            self.broken(f"HTTP/2 error: {error}")
            return
        self.handle(self.h2.events())
        self._flush()

    def eof_received(self) -> None:
        """The peer will send no more: the transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        """Everything that was open is lost."""
        self._end(str(error) if error else "connection closed")

    def pause_writing(self) -> None:
        """The transport's buffer is full: leave bytes in ngh2, where :meth:`queued` sees them."""
        self._writable = False

    def resume_writing(self) -> None:
        """Go on where pause_writing stopped us."""
        self._writable = True
        self._flush()

    # the subclass's side

    @abstractmethod
    def handle(self, events: Iterable[Event]) -> None:
        """Handle what the peer did."""

    @abstractmethod
    def ended(self, detail: str) -> None:
        """The connection is gone; called exactly once."""

    def flushed(self) -> None:
        """Called after output was taken from ngh2, while :attr:`attentive` is set."""

    def touch(self) -> None:
        """Have the output leave at the end of this tick."""
        if not self._dirty:
            self._dirty = True
            self._loop.call_soon(self._flush)

    def broken(self, detail: str) -> None:
        """Give the connection up: the peer broke the protocol."""
        _log.warning("giving up an HTTP/2 connection: %s", detail)
        self._end(detail)

    def terminate(self) -> None:
        """Say GOAWAY and close, whatever is open."""
        if self._over:
            return
        try:
            self.h2.terminate_connection()
            self._transport.write(self.h2.data_to_send(WRITE_PIECE))
        except NGH2Error as error:
            _log.debug("no GOAWAY: %s", error)
        self._end("the connection was closed by us")

    def close(self) -> None:
        """Close after what was written has left."""
        self._end("the connection was closed by us")

    def _end(self, detail: str) -> None:
        if self._over:
            return
        self._over = True
        if self._writable:
            self._transport.close()
        else:  # close() would wait for a peer that does not read
            self._transport.abort()
        self._writable = False
        self.ended(detail)

    def _flush(self) -> None:
        self._dirty = False
        if not self._writable:
            return
        h2 = self.h2
        try:
            if h2.queued_body_size() <= WRITE_PIECE:
                if data := h2.data_to_send():
                    self._transport.write(data)
            else:
                while self._writable and (data := h2.data_to_send(WRITE_PIECE)):
                    self._transport.write(data)
        except NGH2Error as error:
            self.broken(f"HTTP/2 error: {error}")
            return
        if events := h2.events():
            self.handle(events)
        if self.attentive:
            self.flushed()
