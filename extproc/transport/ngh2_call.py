"""One gRPC call on a server connection: HTTP/2 events in, a handler's messages out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ngh2 import NGH2Error

from extproc.transport.grpc_framing import PREFIX, PREFIX_SIZE, FramingError, Reassembly, Status
from extproc.transport.http2 import STREAM_WINDOW
from extproc.transport.methods import HIGH_WATER, RequestHandler

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.transport.interface import CallHandler
    from extproc.transport.ngh2_connection import ServerConnection

_log = logging.getLogger(__name__)

_COPY_LIMIT = 1 << 14  # a longer message is queued behind its prefix instead of being copied behind it

_RESPONSE_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))


class Ngh2Call:
    """Implements ``RpcCall``. Made by the connection, which feeds it and holds it while it is open."""

    __slots__ = ("_connection", "_encoding", "_handler", "_open", "_paused", "_reassembly", "_responded", "_stream_id")

    stalled = False  # such calls are looked at whenever something was sent, for as long as they are above the mark

    _handler: CallHandler | None  # None before bind() and after closed() was called

    def __init__(self, connection: ServerConnection, stream_id: int, encoding: bytes | None) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._encoding = encoding
        self._handler = None
        self._reassembly: Reassembly | None = None  # only once a message did not come in one piece
        self._responded = False
        self._paused = False
        self._open = True

    # the handler's side: Call

    def send(self, message: bytes) -> None:
        """See ``Call.send``."""
        if not self._open:
            return
        connection, stream_id = self._connection, self._stream_id
        h2 = connection.h2
        try:
            if not self._responded:
                self._responded = True
                h2.send_response(stream_id, _RESPONSE_HEAD)
            if len(message) <= _COPY_LIMIT:
                h2.send_data(stream_id, PREFIX.pack(0, len(message)) + message)
            else:
                h2.send_data(stream_id, PREFIX.pack(0, len(message)))
                h2.send_data(stream_id, message)
        except NGH2Error:
            return  # the peer has reset the stream; that event waits behind the one being handled
        if h2.queued_body_size(stream_id) > HIGH_WATER:
            connection.watch(self)
        connection.touch()

    def abort(self, code: int, detail: str) -> None:
        """See ``Call.abort``."""
        if self._open:
            self._finish(code, detail)

    def finish(self) -> None:
        """See ``RpcCall.finish``."""
        if self._open:
            self._finish(Status.OK, "")

    def pause(self) -> None:
        """See ``Call.pause``.

        ngh2 gives credit back by itself; a window shrunk to nothing stops it. Accounting for every chunk instead would
        cost those who never pause, too.
        """
        self._paused = True
        self._resize(0)

    def resume(self) -> None:
        """See ``Call.resume``."""
        self._paused = False
        self._resize(STREAM_WINDOW)

    @property
    def queued(self) -> int:
        """See ``Call.queued``."""
        return self._connection.h2.queued_body_size(self._stream_id) if self._open else 0

    # the connection's side

    def bind(self, handler: CallHandler) -> None:
        """Give the call what receives its events."""
        self._handler = handler

    def feed(self, data: bytes) -> None:
        """Handle the payload of one DATA frame."""
        if self._reassembly is None:
            # Nearly every frame holds one or more whole messages: no buffer, no generator, one copy each.
            start, end, limit = 0, len(data), self._connection.max_message
            while end - start >= PREFIX_SIZE:
                flag, size = PREFIX.unpack_from(data, start)
                stop = start + PREFIX_SIZE + size
                if flag or stop > end or size > limit:
                    break
                self._deliver(data[start + PREFIX_SIZE : stop])
                if not self._open:
                    return
                start = stop
            if start == end:
                return
            data = data[start:]
        self._feed_slowly(data)

    def half_closed(self) -> None:
        """The peer has sent its last message: the call is over."""
        if not self._open:
            return
        if self._reassembly is not None and not self._reassembly.empty:
            self._fail(FramingError(Status.INTERNAL, "the stream ended in the middle of a message"))
            return
        if isinstance(self._handler, RequestHandler):
            self._guard(self._handler.half_closed)
            return
        self._open = False
        self._notify_closed()
        self._connection.end(self._stream_id, self._responded, Status.OK, "", reset=False)

    def lost(self) -> None:
        """The stream or its connection is gone."""
        self._open = False
        self._notify_closed()

    def settings_acknowledged(self) -> None:
        """The peer applied our initial window size, which widened every stream's window, a paused one's as well."""
        if self._paused:
            self._resize(0)

    def drained_below(self, low_water: int) -> bool:
        """Tell the handler, and return True, when the queue has fallen to ``low_water`` or the call is over."""
        if not self._open or self._handler is None:
            return True
        if self.queued > low_water:
            return False
        self._guard(self._handler.drained)
        return True

    # inside

    def _deliver(self, message: bytes) -> None:
        if self._handler is None:
            return
        try:
            self._handler.received(message)
        except Exception:  # noqa: BLE001 -- logged there; one call's failure stays its own
            self._crashed()

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 -- logged there; one call's failure stays its own
            self._crashed()

    def _feed_slowly(self, data: bytes) -> None:
        if self._reassembly is None:
            self._reassembly = Reassembly(self._connection.max_message, self._encoding)
        try:
            for message in self._reassembly.feed(data):
                self._deliver(message)
                if not self._open:
                    return
        except FramingError as error:
            self._fail(error)
            return
        if self._reassembly.empty:
            self._reassembly = None

    def _crashed(self) -> None:
        """To be called while the handler's exception is being handled."""
        _log.exception("the handler of a call failed")
        self._fail(FramingError(Status.INTERNAL, "internal error"))

    def _fail(self, error: FramingError) -> None:
        if self._open:
            self._finish(error.code, error.detail)
        self._notify_closed()

    def _finish(self, code: int, detail: str) -> None:
        """End the stream. The handler, which is probably our caller, hears of it in the next tick."""
        self._open = False
        self._connection.end(self._stream_id, self._responded, code, detail, reset=True)
        self._connection.soon(self._notify_closed)

    def _notify_closed(self) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        try:
            handler.closed()
        except Exception:  # noqa: BLE001 -- nothing more can be done for it
            _log.exception("the handler of a call failed in closed()")

    def _resize(self, window: int) -> None:
        if not self._open:
            return
        try:
            self._connection.h2.set_local_window_size(window, stream_id=self._stream_id)
        except NGH2Error:
            return  # as in send()
        self._connection.touch()
