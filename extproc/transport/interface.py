"""The boundaries of the transport: calls that Envoy opens to us, answers that it fetches, legs that we send through it.

Everything above this module works with these protocols only; tests use in-memory stand-ins. All methods are called on
one event loop's thread and none of them blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol

Header = tuple[bytes, bytes]


class Call(Protocol):
    """One ``Process`` stream of ``envoy.service.ext_proc.v3.ExternalProcessor``, that is, one HTTP request in Envoy.

    After the handler's :meth:`CallHandler.closed` was called, every method here is a no-op.
    """

    def send(self, message: bytes) -> None:
        """Queue one serialised ``ProcessingResponse``. Queued messages leave together at the end of the loop's tick."""

    def abort(self, code: int, detail: str) -> None:
        """End the stream with a gRPC status other than OK (0). Envoy then answers with the filter's error status."""

    def pause(self) -> None:
        """Stop granting flow-control credit: the peer may send what it has credit for, then must wait."""

    def resume(self) -> None:
        """Grant the credit withheld since :meth:`pause`."""

    @property
    def queued(self) -> int:
        """Bytes given to :meth:`send` that the peer's flow control has not let out yet."""


class CallHandler(Protocol):
    """What receives a call's events. An exception it raises ends that call with INTERNAL, never the connection."""

    def received(self, message: bytes) -> None:
        """One whole serialised ``ProcessingRequest`` arrived."""

    def drained(self) -> None:
        """``queued`` was above the transport's high-water mark and has fallen below its low-water mark."""

    def closed(self) -> None:
        """The call is over, for whatever reason: half-closed by the peer, reset, connection lost. Called exactly once.

        Envoy ends the stream when the HTTP response's last byte is out or when the client has left.
        """


Process = Callable[[Call], CallHandler]


class Answer(Protocol):
    """The answer to a plain HTTP request that Envoy sends us as it would send it to a worker.

    Unlike what is said in a :class:`Call`, Envoy reads it only as fast as the client reads what it makes of it. After
    the handler's :meth:`AnswerHandler.closed` was called, every method here is a no-op.
    """

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """Begin it."""

    def body(self, chunk: bytes, *, end: bool) -> None:
        """Go on with it, or end it."""

    @property
    def stalled(self) -> bool:
        """``queued`` was above the transport's high-water mark and has not fallen below its low-water mark since."""

    @property
    def queued(self) -> int:
        """Bytes given to :meth:`body` that the peer's flow control has not let out yet."""


class AnswerHandler(Protocol):
    """What gives an answer."""

    def drained(self) -> None:
        """``queued`` was above the transport's high-water mark and has fallen below its low-water mark."""

    def closed(self) -> None:
        """The answer is out, or nobody wants it any more. Called exactly once."""


ANSWER_PATH: Final = b"/answers/"  # below it are the paths of plain requests

# Who answers a request with this path; None: nobody.
Answers = Callable[[bytes, Answer], AnswerHandler | None]


class ProcessServer(Protocol):
    """A gRPC server of ``ExternalProcessor`` and ``grpc.health.v1.Health``; ngh2 and grpcio implement it alike."""

    async def start(self, address: str, process: Process) -> None:
        """Listen on ``address``: ``unix:/path`` or ``host:port`` (IPv6 host in brackets).

        Raises OSError when the address cannot be bound.
        """

    def set_serving(self, service: str, serving: bool) -> None:  # noqa: FBT001
        """Set the health service's answer for ``service``; watchers are told. Unknown services answer NOT_FOUND."""

    async def drain(self, grace: float) -> None:
        """GOAWAY: accept no new streams, let the open ones end for at most ``grace`` seconds, then close everything."""


class Lost(Enum):
    """Why a leg ended without a complete HTTP answer."""

    UNREACHABLE = "unreachable"  # there is no connection to Envoy's egress listener
    RESET = "reset"  # the stream was reset after it was sent, or its connection broke
    REFUSED = "refused"  # the stream was certainly not processed (REFUSED_STREAM, GOAWAY below it)


class LegReceiver(Protocol):
    """What receives a leg's answer: ``head``, any number of ``data``, ``trailers`` if there are any, then ``done``.

    Or ``lost`` at any moment.
    """

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """The final response head; pseudo headers are not in ``headers``."""

    def data(self, chunk: bytes) -> None:
        """A piece of the response body, as it comes."""

    def trailers(self, headers: Sequence[Header]) -> None:
        """The trailers of the answer, which is complete with them."""

    def done(self) -> None:
        """The answer is complete."""

    def lost(self, reason: Lost, detail: str) -> None:
        """The answer will never be complete."""


class Leg(Protocol):
    """A request under way through the egress listener."""

    def cancel(self) -> None:
        """Reset the stream (CANCEL). The receiver hears nothing more. A no-op when the leg is over."""

    def pause(self) -> None:
        """Stop granting flow-control credit for the answer."""

    def resume(self) -> None:
        """Grant the credit withheld since :meth:`pause`."""

    def trickle(self) -> None:
        """Never have more than a little of the answer under way: it is a stream, and its reader may be slow."""


class Egress(Protocol):
    """The way out: HTTP/2 to Envoy's egress listener."""

    def send(self, headers: Sequence[Header], body: bytes, receiver: LegReceiver) -> Leg:
        """Send one request. ``headers`` starts with the pseudo headers; ``body`` may be empty.

        Never raises for transport trouble: ``receiver.lost`` is called instead, always after this method returned.
        """
