"""One leg on its way to the first of some workers that takes it, told of in the words of Envoy's egress listener."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from extproc.names import ERROR_CODE, LATE, LOCAL_REPLY, NAMING, UPSTREAM
from extproc.transport.egress_leg import EgressLeg
from extproc.transport.interface import Header, LegReceiver, Lost
from extproc.transport.receiving import Receiving
from extproc.upstream.host import Http2Connection, TooManyError
from extproc.upstream.http1 import Http1Connection

if TYPE_CHECKING:
    from extproc.upstream.request import Request, Target

_log: Final = logging.getLogger(__name__)

# Envoy's response flags, by which the exchange tells failures from each other.
UNREACHABLE: Final = b"UF"
UNKNOWN_HOST: Final = b"UH"
OVERFLOW: Final = b"UO"
CONNECTION_LOST: Final = b"UC"
NO_HTTP: Final = b"UPE"

_UPSTREAM: Final = UPSTREAM.encode()
_LOCAL_REPLY: Final = LOCAL_REPLY.encode()
# The connection's (RFC 9110 §7.6.1), and what only the gateway may say.
_REMOVED: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"),
        *(name.encode() for name in (ERROR_CODE, LATE, UPSTREAM, *NAMING)),
    }
)


class UpstreamLeg(Receiving):
    """Implements ``Leg``; the Reader of an HTTP/1.1 connection and the LegReceiver of an HTTP/2 stream.

    A connection that does not come about leads to the next target. One that was idle and is found closed, without a
    byte of the request having reached its worker, leads to a new one to the same. After that a request is not sent
    again: its worker may have begun it.

    Args:
        request: what is sent.
        targets: where to, in order of preference.
        receiver: hears of the answer.
        over: is called when it is over.
        proxied: the target is a proxy, whose word for its own answers counts, and without which there is no way.
    """

    __slots__ = (
        "_carrier",
        "_connecting",
        "_headed",
        "_next",
        "_over",
        "_paused",
        "_proxied",
        "_request",
        "_targets",
        "_trickles",
    )

    def __init__(
        self,
        request: Request,
        targets: Sequence[Target],
        receiver: LegReceiver,
        over: Callable[[UpstreamLeg], None],
        *,
        proxied: bool,
    ) -> None:
        self._request: Request | None = request  # while it may have to be sent again
        self._targets = targets
        self._next = 0  # the target to be tried
        self._receiver: LegReceiver | None = receiver
        self._over = over
        self._proxied = proxied
        self._carrier: Http1Connection | EgressLeg | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._headed = False
        self._paused = False
        self._trickles = False

    # the receiver's side: Leg

    def cancel(self) -> None:
        """See ``Leg.cancel``."""
        if self._receiver is None:
            return
        self._end()
        if self._connecting is not None:
            self._connecting.cancel()
        carrier, self._carrier = self._carrier, None
        if isinstance(carrier, Http1Connection):
            carrier.drop()
        elif carrier is not None:
            carrier.cancel()

    def pause(self) -> None:
        """See ``Leg.pause``."""
        self._paused = True
        if self._carrier is not None:
            self._carrier.pause()

    def resume(self) -> None:
        """See ``Leg.resume``."""
        self._paused = False
        if self._carrier is not None:
            self._carrier.resume()

    def trickle(self) -> None:
        """See ``Leg.trickle``. Of HTTP/1.1 no more is under way than the socket takes."""
        self._trickles = True
        if isinstance(self._carrier, EgressLeg):
            self._carrier.trickle()

    # the egress's side

    def begin(self) -> None:
        """Send it on an idle connection, or make one. The receiver hears of nothing before the next tick."""
        if not self._targets:
            asyncio.get_running_loop().call_soon(self._refuse, UNKNOWN_HOST, "the worker that was chosen is not known")
            return
        carrier = self._targets[0].host.take()
        if carrier is None:
            self._connect()
        else:
            self._send(carrier)

    def give_up(self, detail: str) -> None:
        """There will be no connections any more."""
        receiver = self._receiver
        self.cancel()
        if receiver is not None:
            self._last(lambda: receiver.lost(Lost.RESET, detail))

    # inside

    def _connect(self) -> None:
        connecting = self._connecting = asyncio.get_running_loop().create_task(self._find(), name="connect-leg")
        connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        if self._connecting is task:
            self._connecting = None
        if not task.cancelled() and (error := task.exception()) is not None:  # a defect
            _log.error("a leg was not sent", exc_info=error)
            self._refuse(UNREACHABLE, "internal error")

    async def _find(self) -> None:
        """Connect to the first of the targets that accepts; of further ones an idle connection will do."""
        flag, detail = UNREACHABLE, ""
        first = self._next
        while self._next < len(self._targets):
            host = self._targets[self._next].host
            try:
                carrier = (None if self._next == first else host.take()) or await host.connect()
            except (OSError, TimeoutError) as error:
                flag = OVERFLOW if isinstance(error, TooManyError) else UNREACHABLE
                detail = str(error) or "no connection in time"
                self._next += 1
                continue
            self._connecting = None
            self._send(carrier)
            return
        self._connecting = None
        if self._proxied:
            self._lost(Lost.UNREACHABLE, detail)
        else:
            self._refuse(flag, detail)

    def _send(self, carrier: Http1Connection | Http2Connection) -> None:
        request = self._request
        assert request is not None
        target = self._targets[self._next]
        if isinstance(carrier, Http1Connection):
            self._carrier = carrier
            carrier.send(request.head(target), request.body, self)
            if not carrier.used:
                self._request = None
            if self._paused:
                carrier.pause()
            return
        leg = EgressLeg(self)
        if not carrier.submit(leg, request.fields(target), request.body):  # it has just said goodbye
            self._connect()
            return
        self._carrier = leg
        if self._trickles:
            leg.trickle()
        if self._paused:
            leg.pause()

    def _again(self) -> None:
        """Send it once more, on a connection that is new."""
        self._carrier = None
        self._connect()

    # Reader

    def answer_head(self, status: int, headers: Sequence[Header]) -> None:
        """See Reader."""
        receiver = self._receiver
        if receiver is None:
            return
        self._headed = True
        self._request = None
        kept = [field for field in headers if field[0] not in _REMOVED and (self._proxied or field[0] != _LOCAL_REPLY)]
        kept.append((_UPSTREAM, self._who(headers)))
        self._guarded(lambda: receiver.head(status, kept))

    def answer_data(self, chunk: bytes) -> None:
        """See Reader."""
        receiver = self._receiver
        if receiver is None:
            return
        try:
            receiver.data(chunk)
        except Exception:  # noqa: BLE001 - logged there; one leg's failure stays its own
            self._crashed()

    def answer_done(self) -> None:
        """See Reader."""
        receiver = self._end()
        self._carrier = None
        if receiver is not None:
            self._last(receiver.done)

    def answer_lost(self, detail: str, *, unseen: bool, broken: bool) -> None:
        """See Reader."""
        self._carrier = None
        if self._receiver is None:
            return
        if self._headed:
            self._lost(Lost.RESET, detail)
        elif unseen and self._request is not None:
            self._again()
        else:
            self._refuse(NO_HTTP if broken else CONNECTION_LOST, detail)

    # LegReceiver, of an HTTP/2 stream

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self.answer_head(status, headers)

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""
        self.answer_data(chunk)

    def trailers(self, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        receiver = self._receiver
        if receiver is not None:
            self._guarded(lambda: receiver.trailers(headers))

    def done(self) -> None:
        """See LegReceiver."""
        self.answer_done()

    def lost(self, reason: Lost, detail: str) -> None:
        """See LegReceiver. A stream that the server has certainly not looked at is sent once more."""
        unseen = reason is Lost.REFUSED and self._request is not None and not self._request.repeated
        if unseen and self._request is not None:
            self._request.repeated = True
        self.answer_lost(detail, unseen=unseen, broken=False)

    # its end

    def _who(self, headers: Sequence[Header]) -> bytes:
        """Who answers: where a proxy says so, it knows better."""
        if self._proxied:
            for name, value in headers:
                if name == _UPSTREAM:
                    return value
        return self._targets[self._next].name

    def _refuse(self, flag: bytes, detail: str) -> None:
        """Answer in the worker's place, as Envoy does."""
        receiver = self._end()
        if receiver is None:
            return
        _log.debug("a leg failed: %s", detail)
        headers = [(_LOCAL_REPLY, flag), (b"content-type", b"text/plain")]
        if self._next < len(self._targets):
            headers.append((_UPSTREAM, self._targets[self._next].name))

        def answer() -> None:
            receiver.head(503, headers)
            receiver.data(detail.encode())
            receiver.done()

        self._last(answer)

    def _lost(self, reason: Lost, detail: str) -> None:
        receiver = self._end()
        if receiver is not None:
            self._last(lambda: receiver.lost(reason, detail))

    def _end(self) -> LegReceiver | None:
        receiver, self._receiver = self._receiver, None
        self._request = None
        if receiver is not None:
            self._over(self)
        return receiver

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - logged there; one leg's failure stays its own
            self._crashed()


if TYPE_CHECKING:
    from extproc.transport.interface import Leg
    from extproc.upstream.http1 import Reader

    _: tuple[type[Leg], type[Reader], type[LegReceiver]] = (UpstreamLeg, UpstreamLeg, UpstreamLeg)
