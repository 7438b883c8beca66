"""The answer to a client whose decode leg is a gRPC call that Envoy runs: made of the call's messages as they come.

Envoy shows the call's answer in the second call (outlet.py); what is said there is what the client gets. A client that
reads slowly has Envoy read the call slowly, by itself: so nothing piles up here, whatever the worker has to say.

Nothing is said before the first bytes are certain, so that until then an error has a status.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import ABANDONED, PREFILL_WORD_SECONDS, SECOND_CALL_SECONDS, Handle
from extproc.exchange.headers import HeaderValue
from extproc.exchange.record import naming_headers, server_timing
from extproc.exchange.rpc_failures import Verdict, verdict_of
from extproc.names import LATE
from extproc.transcode.transcoder import Transcoder
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Call, Header

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_LATE: Final = LATE.encode()


class ReplyEvents(Protocol):
    """Who is told what becomes of the answer."""

    @property
    def prefilling(self) -> bool:
        """The prefill leg is out, whose counts of tokens the answer ends with."""

    def guarded(self, step: Callable[[], None]) -> None:
        """Do ``step``; a defect in it ends the request and nothing else."""

    def answer_whole(self, *, sooner: bool) -> None:
        """All of it was said. ``sooner``: than the worker has ended the call, of whose work nothing is needed."""

    def answer_closed(self) -> None:
        """The second call is over, or did not come: the client has everything, or has left."""

    def call_failed(self, verdict: Verdict | None) -> None:
        """The call ended with an error, of which the client was told; None: its messages are none."""


class RpcReply:
    """See the module; a Late.

    Args:
        session: of the first call.
        transcoder: makes the answer.
        events: see ReplyEvents.
    """

    __slots__ = (
        "_begun",
        "_call",
        "_error",
        "_events",
        "_id",
        "_names",
        "_session",
        "_timer",
        "_trailers",
        "_transcoder",
        "_verdict",
        "heard",
        "over",
    )

    def __init__(self, session: Session, transcoder: Transcoder, events: ReplyEvents) -> None:
        self._session = session
        self._transcoder = transcoder
        self._events: ReplyEvents | None = events
        self._id = b"%032x" % random.getrandbits(128)
        self._call: Call | None = None
        self._names: Sequence[bytes] = ()  # of the headers that the second call found
        self._begun = False  # the client's head is out
        self._error: GatewayError | None = None  # to be told when the second call is there
        self._trailers: Sequence[bytes] | None = None  # the names of those that Envoy waits for a word on
        self._verdict: Verdict | None = None
        self._timer: Handle | None = None
        self.heard = False  # the worker has said something besides its head
        self.over = False  # nothing more is said

    def open(self) -> None:
        """Have Envoy, which has asked about the call's head, show its answer in the second call."""
        gateway = self._session.gateway
        gateway.late[self._id] = self
        self._session.call.send(wire.response_headers_reply(wire.set_header(_LATE, self._id)))
        self._timer = gateway.clock.after(SECOND_CALL_SECONDS, self.closed)

    def prefilled(self) -> None:
        """The prefill has answered; the transcoder knows."""
        if self._trailers is not None and not self.over:
            self._stop_timer()
            self._end()
        elif self.heard and not self.over:  # what waited for it
            self.received(b"")

    def prefill_failed(self) -> None:
        """The prefill has failed. A decode that has said all has had what it needed of it: its answer ends well."""
        if self._trailers is not None and not self._transcoder.waits:
            self.prefilled()

    def fail(self, error: GatewayError) -> None:
        """The answer cannot be completed."""
        if self.over:
            return
        self._stop_timer()
        record = self._session.record
        record.code, record.message = error.fault.code, error.message
        if self._call is None:
            self._error = error
            return
        try:
            rest = self._transcoder.fail(error)
        except GatewayError as failed:
            self._refuse(failed)
        else:
            self._finish(rest)

    # -- Late -----------------------------------------------------------------------------------------------------

    def opened(self, call: Call, headers: Iterable[HeaderValue]) -> None:
        """See Late."""
        self._stop_timer()
        self._call = call
        self._names = [header.key.encode("latin-1") for header in headers if not header.key.startswith(":")]
        if self._error is not None:
            self.fail(self._error)

    def received(self, chunk: bytes) -> None:
        """See Late."""
        self.heard = True
        if self.over:
            return
        transcoder = self._transcoder
        try:
            given = transcoder.feed(chunk)
        except GatewayError as error:
            self._broke(error)
            return
        if transcoder.complete:
            self._complete(given, sooner=True)
        elif given:
            self._say(given)

    def ended(self) -> None:
        """See Late. A call that has no trailers was cut on its way, whatever its messages say."""
        if not self.over:
            self._end()

    def trailers(self, headers: Iterable[HeaderValue]) -> None:
        """See Late. The end of the answer may have to wait for the prefill's word."""
        pairs = [(header.key.encode("latin-1"), header.raw_value) for header in headers]
        call = self._call
        if self.over:
            if call is not None:
                call.send(wire.response_trailers_without([name for name, _ in pairs]))
            return
        self._trailers = [name for name, _ in pairs]
        self._verdict = verdict_of(pairs)
        well = self._verdict is not None and self._verdict.code == 0
        if well and self._events is not None and self._events.prefilling:
            if not self._transcoder.waits:
                clock = self._session.gateway.clock
                self._timer = clock.after(PREFILL_WORD_SECONDS, lambda: self._guarded(self._end))
        else:
            self._end()

    def drained(self) -> None:
        """See Late. What is said is as much as Envoy has shown; it shows no more than it may."""

    def closed(self) -> None:
        """See Late."""
        events = self._events
        self.leave()
        if events is not None:
            events.answer_closed()

    def leave(self) -> None:
        """The request is over."""
        self._stop_timer()
        self._session.gateway.late.pop(self._id, None)
        self._call = None
        self._events = None  # it refers back to us

    def abandon(self) -> None:
        """Envoy should have closed the second call."""
        if self._call is not None:
            self._call.abort(Status.INTERNAL, ABANDONED)
        self.closed()

    @property
    def is_open(self) -> bool:
        """The second call is there."""
        return self._call is not None

    @property
    def is_closed(self) -> bool:
        """It is over, or will not come."""
        return self._events is None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The call has ended."""
        self._timer = None
        verdict = self._verdict or Verdict(2, "the call ended without a status", constraint=False)
        try:
            given = self._transcoder.end(verdict.code, verdict.message, constraint=verdict.constraint)
        except GatewayError as error:
            self._broke(error)
            return
        if self._transcoder.failed is not None:
            self._tell_failed(self._transcoder.failed)
            self._finish(given)
        else:
            self._complete(given, sooner=False)

    def _broke(self, error: GatewayError) -> None:
        """The call failed, or says what is no answer, before the client was told anything."""
        self._tell_failed(error)
        self._refuse(error)

    def _tell_failed(self, error: GatewayError) -> None:
        record = self._session.record
        record.code, record.message = error.fault.code, error.message
        if self._events is not None:
            self._events.call_failed(self._verdict)

    def _complete(self, rest: bytes, *, sooner: bool) -> None:
        failed = self._transcoder.failed
        if failed is not None:
            self._tell_failed(failed)
        events = self._events
        self._finish(rest)
        if events is not None:
            events.answer_whole(sooner=sooner)

    def _refuse(self, error: GatewayError) -> None:
        """Answer with a status: nothing was said yet."""
        error.__traceback__ = None  # its frames refer to us: without the cycle all is freed at once
        session = self._session
        session.record.status = error.status
        headers = [*error.headers, (b"x-request-id", session.record.request_id)]
        if session.gateway.config.response_headers:
            headers += naming_headers(session.record)
        self._head(error.status, headers, len(error.body))
        self._last(error.body)

    def _finish(self, rest: bytes) -> None:
        if not self._begun:
            self._begin(whole=len(rest))
        self._last(rest)

    def _say(self, given: bytes) -> None:
        call = self._call
        if call is None:
            return
        if not self._begun:
            self._begin(whole=None)
        for message in wire.response_body_replies(given, end=False):
            call.send(message)

    def _begin(self, *, whole: int | None) -> None:
        """Say the head; ``whole`` is the body's length where it is known."""
        session = self._session
        record = session.record
        headers: list[Header] = [
            (b"content-type", self._transcoder.content_type),
            (b"x-request-id", record.request_id),
        ]
        if session.gateway.config.response_headers:
            headers += [*naming_headers(record), (b"server-timing", server_timing(record))]
        self._head(200, headers, whole)

    def _head(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        self._begun = True
        call = self._call
        if call is None:
            return
        mutation = b"".join([wire.remove_header(name) for name in self._names])
        mutation += wire.set_header(b":status", b"%d" % status)
        mutation += b"".join([wire.set_header(name, value) for name, value in headers])
        if length is not None:
            mutation += wire.set_header(b"content-length", b"%d" % length)
        call.send(wire.response_headers_reply(mutation))

    def _last(self, rest: bytes) -> None:
        """Say the last piece, and that it is the last: by the trailers, where Envoy has them."""
        self.over = True
        call, trailers = self._call, self._trailers
        if call is None:
            return
        ends = trailers is None
        if rest or ends:
            for message in wire.response_body_replies(rest, end=ends):
                call.send(message)
        if trailers is not None:
            call.send(wire.response_trailers_without(trailers))

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._events is not None:
            self._events.guarded(step)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
