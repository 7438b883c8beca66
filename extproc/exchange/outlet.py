"""The ways of an answer that is made here to the client; fetched_reply.py is another.

:class:`LocalReply`: the request is still held; Envoy streams what we say as its own reply
(``streamed_immediate_response``).

:class:`LateReply`: the request was released to a worker before, whose answer, or silence, shall not reach the client.
Envoy 1.40 has no way to stream a local reply then. What it has is a second ext_proc filter, in front of everything,
that wakes only for an answer with the header ``x-pd-late``: for the answer that the first call gives it (an error,
which the client gets should the second call not come) Envoy opens a second call, and what that says replaces head and
body.

Sent on the first call, the answer resets the worker's request at once. If Envoy had a head of the worker's on its way
to us at that moment, it takes our answer for the client's: then nothing may follow, and nothing does.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import ABANDONED, SECOND_CALL_SECONDS, Handle
from extproc.exchange.headers import HeaderValue
from extproc.exchange.record import naming_headers
from extproc.names import LATE
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Call, Header

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_LATE: Final = LATE.encode()
_UNSEEN: Final = b" "  # a body that must not be empty
_HIGH_WATER: Final = 1 << 20  # bytes queued for Envoy, before the workers are made to wait


class Outlet(Protocol):
    """Where an answer goes: a head, then pieces, the last of them marked; or an error."""

    def prepare(self) -> None:
        """The legs are sent: an answer will come."""

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """Begin the answer."""

    def body(self, chunk: bytes, *, end: bool) -> None:
        """Go on with it."""

    def reject(self, error: GatewayError) -> None:
        """Answer with ``error``; where an answer has begun, have Envoy cut it."""

    @property
    def queued(self) -> int:
        """Bytes that Envoy has not taken yet."""

    @property
    def full(self) -> bool:
        """They are so many that the workers are to wait until they are drained."""

    @property
    def mutation(self) -> bytes:
        """What is to be changed of the head when Envoy asks about it."""

    def forget(self) -> None:
        """The request is over."""


class Late(Protocol):
    """Says in the second call of a request what the client gets, in the place of what that call has seen."""

    def opened(self, call: Call, headers: Iterable[HeaderValue]) -> None:
        """The second call is there; ``headers`` is what it found."""

    def received(self, chunk: bytes) -> None:
        """A piece of the body that it found."""

    def ended(self) -> None:
        """That was the last piece, and there are no trailers."""

    def trailers(self, headers: Iterable[HeaderValue]) -> None:
        """The trailers that it found; Envoy waits for our word on them."""

    def drained(self) -> None:
        """Envoy has taken what was queued."""

    def closed(self) -> None:
        """The second call is over, or did not come."""


class _OnCall(ABC):
    """An Outlet that says all in a call, of which Envoy takes any amount."""

    __slots__ = ()

    @property
    @abstractmethod
    def queued(self) -> int:
        """See Outlet."""

    @property
    def full(self) -> bool:
        """See Outlet."""
        return self.queued > _HIGH_WATER

    @property
    def mutation(self) -> bytes:
        """See Outlet. All of the head is said here."""
        return b""


class LocalReply(_OnCall):
    """See the module."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def prepare(self) -> None:
        """See Outlet. Envoy need not know."""

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See Outlet."""
        self._session.call.send(wire.relayed_head(status, headers))

    def body(self, chunk: bytes, *, end: bool) -> None:
        """See Outlet."""
        for message in wire.relayed_body(chunk, end=end):
            self._session.call.send(message)

    def reject(self, error: GatewayError) -> None:
        """See Outlet."""
        self._session.reject(error)

    @property
    def queued(self) -> int:
        """See Outlet."""
        return self._session.call.queued

    def forget(self) -> None:
        """See Outlet. There is nothing but the call."""


class LateReply(_OnCall):
    """See the module.

    Args:
        session: of the first call.
        lost: is called when the second call will not come, or has ended: nothing can be said any more.
        drained: is called when Envoy has taken what was queued.
    """

    __slots__ = (
        "_begun",
        "_call",
        "_first",
        "_head",
        "_held",
        "_id",
        "_lost",
        "_names",
        "_session",
        "_waiting",
        "drained",
    )

    def __init__(self, session: Session, lost: Callable[[], None], drained: Callable[[], None]) -> None:
        self._session = session
        self._id = b"%032x" % random.getrandbits(128)  # not the request's own id, which clients may use twice
        self._lost = lost
        self.drained = drained
        self._call: Call | None = None
        self._names: Sequence[bytes] = ()  # of the headers that the second call found
        self._held: list[tuple[bytes, bool]] = []  # what was said before it came
        self._waiting: Handle | None = None
        self._head: tuple[int, Sequence[Header]] | None = None
        self._begun = False
        self._first: GatewayError | None = None  # what the client has been told unless the second call says otherwise

    def open(self, error: GatewayError, *, asked: bool) -> None:
        """Have Envoy open the second call.

        Args:
            error: what the client gets should it not come.
            asked: Envoy has a worker's head and waits for our word.
        """
        session = self._session
        record = session.record
        gateway = session.gateway
        gateway.late[self._id] = self
        if asked:
            # With a body of ours, since of the second call Envoy takes none as long as the worker has not sent any.
            session.call.send(wire.response_headers_replaced(wire.set_header(_LATE, self._id), _UNSEEN))
        else:
            self._first = error
            record.told(error)
            headers = [*error.headers, (b"x-request-id", record.request_id), (_LATE, self._id)]
            session.call.send(wire.immediate_reply(error.status, headers, error.body or _UNSEEN))
        self._waiting = gateway.clock.after(SECOND_CALL_SECONDS, self.closed)

    def opened(self, call: Call, headers: Iterable[HeaderValue]) -> None:
        """The second call is there; ``headers`` is what it found."""
        self._stop_waiting()
        self._call = call
        self._names = [header.key.encode("latin-1") for header in headers if not header.key.startswith(":")]
        if self._held:
            self._say()

    def received(self, chunk: bytes) -> None:
        """See Late. What a worker still says is not the client's answer."""

    def ended(self) -> None:
        """See Late. The client's answer has an end of its own."""

    def trailers(self, headers: Iterable[HeaderValue]) -> None:  # noqa: ARG002 - Late's signature
        """See Late."""
        if self._call is not None:
            self._call.send(wire.response_trailers_reply())

    def closed(self) -> None:
        """The second call is over, or did not come: the client has everything, or has left."""
        self._stop_waiting()
        if self._session.gateway.late.pop(self._id, None) is not None:
            self._call = None
            if self._first is not None and not self._begun:  # what was to be said has reached nobody
                self._session.record.told(self._first)
            lost, self._lost, self.drained = self._lost, _nothing, _nothing  # who is told refers back to us
            lost()

    def abandon(self) -> None:
        """Envoy should have closed the second call."""
        if self._call is not None:
            self._call.abort(Status.INTERNAL, ABANDONED)
        self.closed()

    def prepare(self) -> None:
        """See Outlet. Envoy knows from :meth:`open`."""

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See Outlet. Envoy sends it on with the first piece of the body, and so do we."""
        self._head = (status, headers)

    def body(self, chunk: bytes, *, end: bool) -> None:
        """See Outlet."""
        self._held.append((chunk, end))
        if self._call is not None:
            self._say()

    def reject(self, error: GatewayError) -> None:
        """See Outlet."""
        record = self._session.record
        if self._begun and self._call is not None:
            self._call.abort(Status.INTERNAL, error.message)
            return
        self._held.clear()
        record.kv = record.note = ""
        record.told(error)
        headers = [*error.headers, (b"x-request-id", record.request_id)]
        if self._session.gateway.config.response_headers:
            headers += naming_headers(record)
        self.head(error.status, headers)
        self.body(error.body or _UNSEEN, end=True)

    @property
    def queued(self) -> int:
        """See Outlet."""
        return 0 if self._call is None else self._call.queued

    def forget(self) -> None:
        """See Outlet. That the second call is over is known already."""

    def _say(self) -> None:
        """Say what is held: the head before the first piece."""
        call = self._call
        assert call is not None
        if not self._begun and self._head is not None:
            self._begun = True
            status, headers = self._head
            mutation = b"".join([wire.remove_header(name) for name in self._names])
            mutation += wire.set_header(b":status", b"%d" % status)
            mutation += b"".join([wire.set_header(name, value) for name, value in headers])
            call.send(wire.response_headers_reply(mutation))
        held, self._held = self._held, []
        for chunk, end in held:
            for message in wire.response_body_replies(chunk, end=end):
                call.send(message)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _nothing() -> None:
    """Nobody is left who is to be told."""
