"""The answer to one plain HTTP request on a server connection: a handler's pieces out, as fast as the peer reads."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ngh2 import NGH2Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.transport.interface import AnswerHandler, Header
    from extproc.transport.ngh2_connection import ServerConnection

_log = logging.getLogger(__name__)

# What waits here for a slow reader: above the one its source is asked to wait, below the other it goes on.
ANSWER_HIGH_WATER = 1 << 16
ANSWER_LOW_WATER = 1 << 14


class Ngh2Answer:
    """Implements ``Answer``. Made by the connection, which holds it while the stream is open.

    Nothing is done for a stalled answer until its stream is given credit, so that a thousand of them cost the others
    nothing.
    """

    __slots__ = ("_connection", "_handler", "_open", "_stream_id", "stalled")

    def __init__(self, connection: ServerConnection, stream_id: int) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._handler: AnswerHandler | None = None
        self._open = True
        self.stalled = False  # above the high-water mark since, and not drained

    # the handler's side: Answer

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See ``Answer.head``."""
        if not self._open:
            return
        try:
            self._connection.h2.send_response(self._stream_id, [(b":status", b"%d" % status), *headers])
        except NGH2Error:
            return  # the peer has reset the stream; that event waits behind the one being handled
        self._connection.touch()

    def body(self, chunk: bytes, *, end: bool) -> None:
        """See ``Answer.body``."""
        if not self._open:
            return
        connection, stream_id = self._connection, self._stream_id
        try:
            connection.h2.send_data(stream_id, chunk, end_stream=end)
        except NGH2Error:
            return  # as above
        if not self.stalled and connection.h2.queued_body_size(stream_id) > ANSWER_HIGH_WATER:
            self.stalled = True
            connection.watch(self)
        connection.touch()

    @property
    def queued(self) -> int:
        """See ``Answer.queued``."""
        return self._connection.h2.queued_body_size(self._stream_id) if self._open else 0

    # the connection's side

    def bind(self, handler: AnswerHandler) -> None:
        """Give the answer who gives it."""
        self._handler = handler

    def feed(self, data: bytes) -> None:
        """What the request still says does not matter."""

    def half_closed(self) -> None:
        """Nor that it has ended."""

    def settings_acknowledged(self) -> None:
        """Nothing of the request is held up."""

    def lost(self) -> None:
        """The stream is over."""
        self._open = False
        handler, self._handler = self._handler, None
        if handler is not None:
            self._guard(handler.closed)

    def drained_below(self, low_water: int) -> bool:  # noqa: ARG002 -- that of calls
        """Tell the handler when little is left. False: to be asked again when more was sent, credit or not."""
        if not self._open or self._handler is None:
            return True
        if self.queued > ANSWER_LOW_WATER:
            return self._connection.writable  # all that the peer takes was sent: its next credit has us asked
        self.stalled = False
        self._guard(self._handler.drained)
        return True

    # inside

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 -- one answer's failure stays its own
            _log.exception("who gives an answer failed")
