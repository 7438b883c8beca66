"""The server's side of one HTTP/2 connection: streams to calls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from ngh2 import (
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    NGH2Error,
    PingAcknowledged,
    RequestReceived,
    Role,
    SettingsAcknowledged,
    StreamClosed,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)

from extproc.transport.address import keep_alive
from extproc.transport.grpc_framing import Status, status_trailers
from extproc.transport.http2 import Http2Protocol, configuration, settings
from extproc.transport.interface import ANSWER_PATH
from extproc.transport.methods import LOW_WATER
from extproc.transport.ngh2_answer import Ngh2Answer
from extproc.transport.ngh2_call import Ngh2Call

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping

    from ngh2 import Event

    from extproc.transport.interface import Answers
    from extproc.transport.methods import Method

_log = logging.getLogger(__name__)

_LIMITS = configuration()
# Every HTTP request under way in Envoy is a stream here.
_SETTINGS = settings(max_concurrent_streams=1 << 20)
_OK_TRAILERS = status_trailers(Status.OK, "")
_TRAILERS_ONLY = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_DRAIN_PING = b"draining"


class Owner(Protocol):
    """What keeps a server's connections."""

    def joined(self, connection: ServerConnection) -> None:
        """A connection has been made."""

    def left(self, connection: ServerConnection) -> None:
        """A connection has ended."""


class ServerConnection(Http2Protocol):
    """One connection from a gRPC client, most likely one of Envoy's worker threads."""

    def __init__(
        self, methods: Mapping[bytes, Method], max_message: int, owner: Owner, answers: Answers | None = None
    ) -> None:
        super().__init__(Role.SERVER, _LIMITS, _SETTINGS)
        self.max_message = max_message
        self._methods = methods
        self._answers = answers
        self._owner = owner
        self._calls: dict[int, Ngh2Call | Ngh2Answer] = {}
        self._watched: set[Ngh2Call | Ngh2Answer] = set()  # above the high-water mark
        self._resets: set[int] = set()  # streams that we ended and the peer has not: reset once all was sent
        self._draining = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello, then report for duty."""
        super().connection_made(transport)
        keep_alive(transport)
        self._owner.joined(self)

    @property
    def open_calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def handle(self, events: Iterable[Event]) -> None:
        """Dispatch, most frequent kind first."""
        calls = self._calls
        for event in events:
            if type(event) is DataReceived:
                if (call := calls.get(event.stream_id)) is not None:
                    if data := event.data:
                        call.feed(data)
                    if event.end_stream:
                        call.half_closed()
            elif type(event) is RequestReceived:
                self._open(event)
            elif type(event) is StreamClosed or type(event) is StreamReset:
                if (call := calls.pop(event.stream_id, None)) is not None:
                    call.lost()
                if self._resets:
                    self._resets.discard(event.stream_id)
            else:
                self._handle_rare(event)

    def ended(self, detail: str) -> None:
        """The connection is gone: so are its calls."""
        calls = list(self._calls.values())
        self._calls.clear()
        self._watched.clear()
        if calls:
            _log.info("%d calls lost: %s", len(calls), detail)
        for call in calls:
            call.lost()
        self._owner.left(self)

    def drain(self) -> None:
        """Announce that no new streams are welcome.

        Two steps, so that no stream that crosses the announcement is lost: the final GOAWAY follows the answer to a
        ping, and until then new streams are still served.
        """
        if self._draining or self._over:
            return
        self._draining = self.attentive = True
        try:
            self.h2.send_shutdown_notice()
            self.h2.ping(_DRAIN_PING)
        except NGH2Error as error:
            _log.debug("no shutdown notice: %s", error)
        self.touch()

    # called by the calls

    @property
    def writable(self) -> bool:
        """The transport takes more."""
        return self._writable

    def watch(self, call: Ngh2Call | Ngh2Answer) -> None:
        """Tell ``call`` when its queue has drained."""
        self._watched.add(call)
        self.attentive = True

    def soon(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` in the next tick."""
        self._loop.call_soon(callback)

    def end(self, stream_id: int, responded: bool, code: int, detail: str, *, reset: bool) -> None:  # noqa: FBT001
        """End our side of a stream with a gRPC status.

        ``reset``: the peer's side is still open and nobody will listen to it.
        """
        self._calls.pop(stream_id, None)
        trailers = status_trailers(code, detail) if code else _OK_TRAILERS
        try:
            if responded:
                self.h2.send_trailers(stream_id, trailers)
            else:
                self.h2.send_response(stream_id, _TRAILERS_ONLY + trailers, end_stream=True)
        except NGH2Error:
            return  # the peer has reset the stream
        if reset:
            self._resets.add(stream_id)
            self.attentive = True
        self.touch()

    # inside

    def _handle_rare(self, event: Event) -> None:
        if type(event) is WindowUpdated:
            self._credited(event.stream_id)
        elif type(event) is TrailersReceived:  # gRPC clients send none; they end the stream all the same
            if (call := self._calls.get(event.stream_id)) is not None:
                call.half_closed()
        elif type(event) is SettingsAcknowledged:
            for call in self._calls.values():
                call.settings_acknowledged()
        elif type(event) is PingAcknowledged:
            if event.opaque_data == _DRAIN_PING:
                self._last_goaway()
        elif type(event) is ConnectionClosed:
            self.close()

    def _credited(self, stream_id: int) -> None:
        """The peer takes more of a stream, or of all."""
        if stream_id:
            call = self._calls.get(stream_id)
            if call is not None and call.stalled:
                self.watch(call)
        else:
            for call in self._calls.values():
                if call.stalled:
                    self.watch(call)

    def _answer(self, answers: Answers, stream_id: int, path: bytes, *, ended: bool) -> None:
        """A plain request: whoever knows its path answers it."""
        answer = Ngh2Answer(self, stream_id)
        self._calls[stream_id] = answer
        try:
            handler = answers(path, answer)
        except Exception:  # noqa: BLE001 -- one answer's failure stays its own
            _log.exception("an answer could not be given")
            handler = None
        if handler is None:
            del self._calls[stream_id]
            self._refuse(stream_id, b"404", ended)
        else:
            answer.bind(handler)

    def _open(self, event: RequestReceived) -> None:
        if self._over:
            return
        stream_id = event.stream_id
        fields = dict(event.headers)
        if self._answers is not None and fields[b":path"].startswith(ANSWER_PATH):
            self._answer(self._answers, stream_id, fields[b":path"], ended=event.end_stream)
            return
        if not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            self._refuse(stream_id, b"415", event.end_stream)
            return
        if fields[b":method"] != b"POST":
            self._refuse(stream_id, b"405", event.end_stream)
            return
        call = Ngh2Call(self, stream_id, fields.get(b"grpc-encoding"))
        method = self._methods.get(fields[b":path"])
        if method is None:
            call.abort(Status.UNIMPLEMENTED, "unknown method")
            return
        self._calls[stream_id] = call
        try:
            call.bind(method(call))
        except Exception:  # noqa: BLE001 -- one call's failure stays its own
            _log.exception("a call could not be given a handler")
            call.abort(Status.INTERNAL, "internal error")
            return
        if event.end_stream:
            call.half_closed()

    def _refuse(self, stream_id: int, status: bytes, ended: bool) -> None:  # noqa: FBT001
        """Answer with an HTTP status: what came is not gRPC."""
        try:
            self.h2.send_response(stream_id, ((b":status", status),), end_stream=True)
        except NGH2Error:
            return
        if not ended:
            self._resets.add(stream_id)
            self.attentive = True

    def flushed(self) -> None:
        """See to what waits for output to leave."""
        watched, self._watched = self._watched, set()  # a handler may fill its own or another's queue again at once
        self._watched |= {call for call in watched if not call.drained_below(LOW_WATER)}
        for stream_id in [each for each in self._resets if not self.h2.queued_body_size(each)]:
            self._resets.discard(stream_id)
            self._reset(stream_id)
        self.attentive = bool(self._watched or self._resets or self._draining)

    def _reset(self, stream_id: int) -> None:
        try:
            self.h2.reset_stream(stream_id, ErrorCode.NO_ERROR)
        except NGH2Error as error:
            _log.debug("stream %d was not reset: %s", stream_id, error)
        self.touch()

    def _last_goaway(self) -> None:
        """The peer has seen the shutdown notice: whatever it opens from now on is refused."""
        try:
            self.h2.send_goaway()
        except NGH2Error as error:
            _log.debug("no GOAWAY: %s", error)
        self.touch()
