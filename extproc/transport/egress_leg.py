"""One request under way through the egress listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngh2 import NGH2Error

from extproc.transport.http2 import STREAM_WINDOW
from extproc.transport.receiving import Receiving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.transport.egress_connection import EgressConnection
    from extproc.transport.interface import Header, LegReceiver, Lost

# Credit that every answer begins with: what may still come after a pause. One that comes in full frames gets more.
LEG_WINDOW = 1 << 15
_FULL_FRAME = 1 << 14


class EgressLeg(Receiving):
    """Implements ``Leg``; hands the connection's events to the receiver and keeps the receiver's exceptions from it."""

    __slots__ = ("_connection", "_paused", "_stream_id", "_wide", "_window")

    _connection: EgressConnection | None  # None while the leg waits for one

    def __init__(self, receiver: LegReceiver) -> None:
        self._receiver = receiver
        self._connection = None
        self._stream_id = 0
        self._paused = False
        self._window = STREAM_WINDOW  # that it may have
        self._wide = False  # it has it

    # the receiver's side: Leg

    def cancel(self) -> None:
        """See ``Leg.cancel``."""
        if self._receiver is None:
            return
        self._receiver = None
        if self._connection is not None:
            self._connection.abandon(self._stream_id)

    def pause(self) -> None:
        """See ``Leg.pause``."""
        self._paused = True
        self._resize(0)

    def resume(self) -> None:
        """See ``Leg.resume``."""
        self._paused = False
        self._resize(self._window if self._wide else LEG_WINDOW)

    def trickle(self) -> None:
        """See ``Leg.trickle``."""
        self._window = LEG_WINDOW

    # the connection's side

    @property
    def over(self) -> bool:
        """Nothing more will be told to the receiver."""
        return self._receiver is None

    def sent(self, connection: EgressConnection, stream_id: int) -> None:
        """The request was given to ``connection``."""
        self._connection = connection
        self._stream_id = stream_id

    def hold(self) -> None:
        """Shrink the window of a paused leg again after something else has set it."""
        if self._paused:
            self._resize(0)

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """The response head came."""
        self.hold()  # if it was paused before the stream was open
        if self._receiver is None:
            return
        try:
            self._receiver.head(status, headers)
        except Exception:  # noqa: BLE001 -- logged there; one leg's failure stays its own
            self._crashed()

    def data(self, chunk: bytes) -> None:
        """A piece of the body came."""
        if self._receiver is None:
            return
        if not self._wide and len(chunk) >= _FULL_FRAME and not self._paused:
            self._wide = True
            self._resize(self._window)
        try:
            self._receiver.data(chunk)
        except Exception:  # noqa: BLE001 -- as above
            self._crashed()

    def trailers(self, headers: Sequence[Header]) -> None:
        """The trailers came; :meth:`done` follows."""
        if self._receiver is None:
            return
        try:
            self._receiver.trailers(headers)
        except Exception:  # noqa: BLE001 -- as above
            self._crashed()

    def done(self) -> None:
        """The answer is complete."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._last(receiver.done)

    def lost(self, reason: Lost, detail: str) -> None:
        """There will be no complete answer."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._last(lambda: receiver.lost(reason, detail))

    # inside

    def _resize(self, window: int) -> None:
        if self._receiver is None or self._connection is None:
            return
        try:
            self._connection.h2.set_local_window_size(window, stream_id=self._stream_id)
        except NGH2Error:
            return  # not open yet (head() tries again) or closed already
        self._connection.touch()
