"""The way of an answer to the client that Envoy fetches from the service, as it would from a worker.

Of what it is told in an ext_proc stream, Envoy takes any amount, whether the client reads it or not. So the request of
an answer that streams is released, without its body, to the service itself, while the legs are out; and Envoy reads the
answer only as fast as the client. An error before it begins is said on the request's own call, as with
outlet.LocalReply.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.headers import RequestHead
from extproc.names import ANSWERS_CLUSTER, CLUSTER, NAMING
from extproc.transport.interface import ANSWER_PATH, Answer, Header

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_TO_US: Final = wire.set_header(CLUSTER.encode(), ANSWERS_CLUSTER.encode())
_OURS: Final = frozenset(name.encode() for name in NAMING)  # Envoy takes them away, as from a worker's answers
_NEEDED: Final = "x-forwarded-proto"  # without which Envoy finds no route
_FULL: Final = 1 << 16  # bytes: Envoy has what it may, and this waits


class FetchedReply:
    """An Outlet, and the AnswerHandler of what Envoy fetches.

    Args:
        session: of the request, which is held.
        head: its head, of which Envoy need not repeat anything.
        drained: is called when little is left of what waits for the client.
    """

    __slots__ = ("_answer", "_drained", "_head", "_held", "_path", "_said", "_session", "_waiting", "mutation")

    def __init__(self, session: Session, head: RequestHead, drained: Callable[[], None]) -> None:
        self._session = session
        self._head = head
        self._drained = drained
        self._path = ANSWER_PATH + b"%032x" % random.getrandbits(128)  # a client's id may be used twice
        self._said: tuple[int, Sequence[Header]] | None = None  # the answer's head
        self.mutation = b""  # see Outlet
        self._held: list[tuple[bytes, bool]] = []  # what is to be said as soon as Envoy asks
        self._waiting = 0  # bytes of it
        self._answer: Answer | None = None

    # -- Outlet ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """See Outlet. Envoy asks at once, so that what comes later is on its way at once."""
        self._session.gateway.fetched[self._path] = self
        mutation = wire.set_header(b":path", self._path) + _TO_US
        names = [name for name in self._head.fields if name[0] != ":" and name != _NEEDED]
        mutation += b"".join([wire.remove_header(name.encode("latin-1")) for name in names])
        call = self._session.call
        call.send(wire.request_headers_reply(mutation, reroute=True))
        call.send(wire.request_body_reply(b"", end=True))

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See Outlet."""
        self._said = (status, [header for header in headers if header[0] not in _OURS])
        self.mutation = b"".join([wire.set_header(*header) for header in headers if header[0] in _OURS])
        if self._answer is not None:
            self._answer.head(*self._said)

    def body(self, chunk: bytes, *, end: bool) -> None:
        """See Outlet."""
        if self._answer is not None:
            self._answer.body(chunk, end=end)
        else:
            self._held.append((chunk, end))
            self._waiting += len(chunk)

    def reject(self, error: GatewayError) -> None:
        """See Outlet."""
        self._session.reject(error)

    @property
    def queued(self) -> int:
        """See Outlet."""
        return self._waiting if self._answer is None else self._answer.queued

    @property
    def full(self) -> bool:
        """See Outlet."""
        return self._waiting > _FULL if self._answer is None else self._answer.stalled

    def forget(self) -> None:
        """See Outlet."""
        self._session.gateway.fetched.pop(self._path, None)
        self._drained = _nothing  # who is told refers back to us

    # -- AnswerHandler --------------------------------------------------------------------------------------------

    def fetch(self, answer: Answer) -> None:
        """Envoy asks for it."""
        self._answer = answer
        if self._said is None:
            return
        answer.head(*self._said)
        held, self._held = self._held, []
        for chunk, end in held:
            answer.body(chunk, end=end)
        if not self.full:  # else its being drained is told
            self._drained()

    def drained(self) -> None:
        """See AnswerHandler."""
        self._drained()

    def closed(self) -> None:
        """See AnswerHandler. That the client has it all, or has left, the request's own call says."""
        self._answer = None


def _nothing() -> None:
    """Nobody is left who is to be told."""
