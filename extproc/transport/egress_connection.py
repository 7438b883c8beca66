"""The client's side of one HTTP/2 connection to Envoy's egress listener: legs to streams."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ngh2 import (
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    GoAwayReceived,
    NGH2Error,
    ResponseReceived,
    Role,
    SettingsAcknowledged,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)

from extproc.transport.egress_leg import LEG_WINDOW, EgressLeg
from extproc.transport.http2 import Http2Protocol, configuration, settings
from extproc.transport.interface import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ngh2 import Event

    from extproc.transport.interface import Header

_log = logging.getLogger(__name__)

# Envoy bounds a worker's response head itself (60 KiB unless configured); ours only has to be wider, because exceeding
# it costs the whole connection.
_LIMITS = configuration(max_header_list=1 << 20)
_SETTINGS = settings(enable_push=0, initial_window_size=LEG_WINDOW)


class EgressConnection(Http2Protocol):
    """Sends legs and hands their answers out. Legs beyond the peer's concurrent streams wait inside ngh2."""

    def __init__(self, forget: Callable[[EgressConnection], None]) -> None:
        super().__init__(Role.CLIENT, _LIMITS, _SETTINGS)
        self._forget = forget
        self._legs: dict[int, EgressLeg] = {}
        self._greeted = asyncio.Event()
        self._retired = asyncio.Event()

    @property
    def usable(self) -> bool:
        """New legs may be sent: the peer speaks HTTP/2 and has not said goodbye."""
        return self._greeted.is_set() and not self._retired.is_set()

    @property
    def open_legs(self) -> int:
        """Legs under way."""
        return len(self._legs)

    async def greeted(self) -> None:
        """Wait for the peer's SETTINGS, or for the connection's end."""
        await self._greeted.wait()

    async def retired(self) -> None:
        """Wait until no new legs may be sent here."""
        await self._retired.wait()

    def submit(self, leg: EgressLeg, headers: Sequence[Header], body: bytes) -> bool:
        """Send a leg's request; False when this connection cannot take it."""
        if self._retired.is_set():
            return False
        h2 = self.h2
        try:
            stream_id = h2.send_request(headers, end_stream=not body)
            if body:
                h2.send_data(stream_id, body, end_stream=True)  # keeps a reference: not copied until framed
        except NGH2Error as error:  # GOAWAY, or the stream ids are used up
            _log.info("an egress connection takes no more requests: %s", error)
            self._retired.set()
            return False
        leg.sent(self, stream_id)
        self._legs[stream_id] = leg
        self.touch()
        return True

    def handle(self, events: Iterable[Event]) -> None:
        """Dispatch, most frequent kind first."""
        legs = self._legs
        for event in events:
            if type(event) is DataReceived:
                if (leg := legs.get(event.stream_id)) is not None:
                    if data := event.data:
                        leg.data(data)
                    if event.end_stream:
                        self._complete(event.stream_id)
            elif type(event) is ResponseReceived:
                if (leg := legs.get(event.stream_id)) is not None:
                    leg.head(int(event.headers[0][1]), event.headers[1:])
                    if event.end_stream:
                        self._complete(event.stream_id)
            elif type(event) is StreamClosed or type(event) is StreamReset:
                if (leg := legs.pop(event.stream_id, None)) is not None:
                    leg.lost(*_reason(event))
            else:
                self._handle_rare(event)

    def ended(self, detail: str) -> None:
        """The connection is gone: so are its legs."""
        self._greeted.set()
        self._retired.set()
        legs = list(self._legs.values())
        self._legs.clear()
        for leg in legs:
            leg.lost(Lost.RESET, detail)
        self._forget(self)

    def abandon(self, stream_id: int) -> None:
        """Reset a stream whose answer nobody wants any more."""
        self._legs.pop(stream_id, None)
        self._reset(stream_id, ErrorCode.CANCEL)

    def _complete(self, stream_id: int) -> None:
        leg = self._legs.pop(stream_id, None)
        if leg is None:  # cancelled by its receiver just now
            return
        if self.h2.queued_body_size(stream_id):  # answered before it was asked in full
            self._reset(stream_id, ErrorCode.NO_ERROR)
        leg.done()

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        try:
            self.h2.reset_stream(stream_id, code)
        except NGH2Error as error:
            _log.debug("stream %d was not reset: %s", stream_id, error)
        self.touch()

    def _handle_rare(self, event: Event) -> None:
        if type(event) is TrailersReceived:
            if (leg := self._legs.get(event.stream_id)) is not None:
                leg.trailers(event.headers)
            self._complete(event.stream_id)
        elif type(event) is SettingsReceived:
            self._greeted.set()
        elif type(event) is SettingsAcknowledged:  # which widened every stream's window
            for leg in self._legs.values():
                leg.hold()
        elif type(event) is GoAwayReceived:  # ngh2 closes the streams above its last_stream_id as refused
            self._retired.set()
        elif type(event) is ConnectionClosed:
            self.close()


def _reason(event: StreamClosed | StreamReset) -> tuple[Lost, str]:
    if isinstance(event, StreamClosed) and event.local_error is not None:
        return Lost.REFUSED, str(event.local_error)
    try:
        name = ErrorCode(event.error_code).name
    except ValueError:
        name = f"error {event.error_code}"
    return Lost.REFUSED if event.error_code == ErrorCode.REFUSED_STREAM else Lost.RESET, f"stream reset: {name}"
