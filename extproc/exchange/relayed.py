"""A request whose answer is made here, out of the answers of several legs.

Where one pair of legs cannot give the client what a single server would (several samples of a prompt, a list of prompts
that a handoff cannot serve together, log probabilities that only the prefill has), all legs go out through the egress
listener, and the merged answer is streamed to the client as Envoy's local reply. So is the answer of a second attempt
after the first one's decode leg was released to Envoy. As long as the client has heard nothing, a failed attempt is
followed by another one on another pair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.attempt import Attempt
from extproc.exchange.attempts import Attempts, OnPrefillFailure, is_transient
from extproc.exchange.choice import Choice
from extproc.exchange.clock import ABANDONED, FIRST_TOKEN_SECONDS, LINGER_SECONDS, Handle
from extproc.exchange.failures import gone, report
from extproc.exchange.fetched_reply import FetchedReply
from extproc.exchange.headers import HeaderValue, RequestHead, end_to_end
from extproc.exchange.outlet import LateReply, LocalReply, Outlet
from extproc.exchange.placed import Placed
from extproc.exchange.record import naming_headers, server_timing
from extproc.exchange.seats import lone_room
from extproc.merge.answer import JoinedAnswer, joined_answer
from extproc.merge.parts import Joint
from extproc.policies.room import NoRoomError
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Header
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_log: Final = logging.getLogger(__name__)


class _Phase(Enum):
    WAITING = "waiting"  # nothing has been sent to the client
    KEPT = "kept"  # the client has the head of a stream, and nothing of the answer: comments, for it to wait on
    ANSWERING = "answering"  # the client has the head
    ENDED = "ended"  # the client has everything it will get
    OVER = "over"


_UNANSWERED: Final = (_Phase.WAITING, _Phase.KEPT)
_COMMENT: Final = b": keep-alive\n\n"


class RelayedCourse:
    """The Course of a relayed request; its attempt's AttemptEvents.

    Args:
        session, head, request: the request.
        joint: in what parts it is served.
        placed: where, the first time.
        choice: finds others.
        attempts: at it, until now.
        outlet: where its answer goes, if not to Envoy's client.
    """

    __slots__ = (
        "_afterwards",
        "_answer",
        "_attempt",
        "_attempts",
        "_choice",
        "_head",
        "_headers",
        "_joint",
        "_keeping",
        "_late",
        "_outlet",
        "_paused",
        "_phase",
        "_placed",
        "_request",
        "_session",
        "_silent",
        "_timer",
    )

    def __init__(
        self,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        joint: Joint,
        placed: Placed,
        choice: Choice,
        attempts: Attempts,
        outlet: Outlet | None = None,
    ) -> None:
        """Raises GatewayError when the request cannot be split."""
        self._session = session
        self._head = head
        self._request = request
        self._placed = placed
        self._choice = choice
        self._attempts = attempts
        self._afterwards: Callable[[], None] = lambda: None
        self._joint = joint
        self._phase = _Phase.WAITING
        self._paused = False
        self._timer: Handle | None = None
        self._keeping: Handle | None = None  # for the next comment
        self._silent = True  # nothing was sent since the last look
        self._attempt: Attempt | None = None
        self._answer = self._new_answer()
        self._headers: Sequence[Header] = ()
        self._late: LateReply | None = None
        self._outlet: Outlet = outlet or self._local()

    def _local(self) -> Outlet:
        """The way of an answer to a request that is held: a stream's goes no faster than the client reads."""
        if self._request.stream and self._session.gateway.fetches:
            return FetchedReply(self._session, self._head, self.drained)
        return LocalReply(self._session)

    # -- Course ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Course."""
        self._session.record.sent = self._session.gateway.clock.now()
        self._place(self._placed).send()
        self._outlet.prepare()

    def go_on(
        self, error: GatewayError, pause: float | None, *, asked: bool, ended: bool, afterwards: Callable[[], None]
    ) -> None:
        """Take over a request that was released to a worker in vain.

        Args:
            error: why.
            pause: seconds until the next attempt begins; None where the decode is to do without the prefill.
            asked: Envoy has the head of a worker's answer, and waits for our word on it.
            ended: the first attempt's decode leg has ended, or just will: a decode that does without has its room.
            afterwards: to be done when the request is over.
        """
        self._afterwards = afterwards
        self._outlet = self._late = LateReply(self._session, self._gone, self.drained)
        self._late.open(error, asked=asked)
        if pause is None and ended:
            self._waive()
        elif pause is None:
            decode = self._placed.pair.decodes[0]
            self._when_room((self._request.model, decode), lambda taken: self._waive_on(decode, taken), error)
        else:
            self._timer = self._session.gateway.clock.after(pause, lambda: self._try_again(error))

    def prefill_lost(self, worker: Worker) -> None:
        """See Course."""
        attempt, clock = self._attempt, self._session.gateway.clock
        if attempt is None or not (waits := attempt.waits_for(worker))():
            return
        if self._phase in _UNANSWERED:  # another attempt costs the client time only
            self.leg_failed(gone(worker), (worker,))
        elif self._timer is None:  # it may have what others of the same prefill have got, and be at its first token
            self._timer = clock.after(FIRST_TOKEN_SECONDS, lambda: self._give_up(waits, worker))

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:  # noqa: ARG002
        """See Course."""
        if self._late is not None:
            self._late.closed()  # a worker's head has crossed our word: Envoy ends the request with what it has
        else:  # Envoy asks about an answer of ours
            self._session.call.send(wire.response_headers_reply(self._outlet.mutation))

    def drained(self) -> None:
        """See Course."""
        if self._paused:
            self._paused = False
            if self._attempt is not None:
                self._attempt.resume()

    def end(self, error: GatewayError) -> None:
        """See Course."""
        self._fail(error)

    def closed(self) -> None:
        """See Course."""
        if self._late is None:  # else the second call is what counts
            self._gone()

    def abandon(self) -> None:
        """See Course."""
        if self._late is None:
            self._session.call.abort(Status.INTERNAL, ABANDONED)
        else:
            self._late.abandon()

    # -- AttemptEvents --------------------------------------------------------------------------------------------

    def prefill_done(self, part: int, body: bytes) -> None:
        """See AttemptEvents."""
        if self._answer.needs_prefill:
            self._relay(self._answer.prefill_done, part, body)

    def decode_head(self, headers: Sequence[Header]) -> None:
        """See AttemptEvents."""
        if not self._headers:
            self._headers = headers

    def decode_data(self, part: int, chunk: bytes) -> None:
        """See AttemptEvents."""
        self._relay(self._answer.decode_data, part, chunk)

    def decode_done(self, part: int) -> None:
        """See AttemptEvents."""
        self._relay(self._answer.decode_done, part)

    def leg_failed(self, error: GatewayError, workers: Sequence[Worker]) -> None:
        """See AttemptEvents. Another attempt follows, or the client hears of it."""
        if self._phase in (_Phase.ENDED, _Phase.OVER):
            return
        gateway = self._session.gateway
        report(gateway, workers, error)
        if self._phase not in _UNANSWERED or self._placed.handoff.named_by_client(self._request):
            self._fail(error)
        elif self._may_waive(error, workers):
            self._session.tried_in_vain(error)
            self._waive()
        elif (pause := self._attempts.after(error, workers, gateway.clock.now())) is None or not self._choice.left(
            self._attempts.failed
        ):
            self._fail(error)
        else:
            self._session.tried_in_vain(error)
            self._drop_attempt()
            self._timer = gateway.clock.after(pause, lambda: self._try_again(error))

    def _give_up(self, waits: Callable[[], bool], worker: Worker) -> None:
        self._timer = None
        if waits():
            self.leg_failed(gone(worker), (worker,))

    def broke(self) -> None:
        """See AttemptEvents."""
        self._fail(GatewayError("internal_error", "the gateway failed; its log says why"))

    # -- other attempts -------------------------------------------------------------------------------------------

    def _may_waive(self, error: GatewayError, workers: Sequence[Worker]) -> bool:
        """Whether the decode may do without a prefill that failed."""
        waives = self._session.gateway.config.retry.on_prefill_failure is OnPrefillFailure.DECODE_ONLY
        pair, handoff = self._placed
        return waives and handoff.waivable and pair.prefill in workers and is_transient(error)

    def _waive(self) -> None:
        """Have the decode workers do without the prefills: they compute all that is asked for themselves."""
        self._drop_attempt()
        self._joint = self._joint.without_prefills()
        self._place(self._placed).send_decodes()

    def _waive_on(self, decode: Worker, taken: Collection[Worker]) -> None:
        """The same once ``decode`` has room: Envoy may still have the first leg there. Raises NoRoomError."""
        if not lone_room(taken).on(decode):
            raise NoRoomError(decode.role)
        self._waive()

    def _try_again(self, error: GatewayError) -> None:
        """Make another attempt, or wait for room; where there is nobody, the last one's ``error`` is the client's."""
        self._timer = None
        self._session.record.attempts = self._attempts.number
        need = (self._request.model, self._attempts.failed, self._placed.pair.prefill, self._request.within)
        self._when_room(need, lambda taken: self._begin_again(error, taken), error)

    def _when_room(self, need: Hashable, begin: Callable[[Collection[Worker]], None], error: GatewayError) -> None:
        """Do ``begin``, or wait until it does not raise NoRoomError; in vain, and ``error`` is the client's."""

        def step(taken: Collection[Worker]) -> None:
            try:
                begin(taken)
            except NoRoomError:
                raise
            except Exception:  # noqa: BLE001 - logged; whatever it is, the client must hear of it
                _log.exception("request %s", session.record.request_id.decode("latin-1"))
                self.broke()

        session = self._session
        seeking = session.seeking(self._request, self._joint.parts, need, step, lambda _: self._fail(error))
        try:
            waiter = session.gateway.legs.wait(seeking)
        except GatewayError:
            self._fail(error)
            return
        if waiter is not None:
            self._timer = waiter

    def _begin_again(self, error: GatewayError, taken: Collection[Worker]) -> None:
        """Make another attempt on none of ``taken``. Raises NoRoomError."""
        try:
            placed = self._choice.next(self._attempts.failed, taken)
            attempt = self._place(placed)
            if placed.handoff.in_turn:
                self._session.keep_room(placed.pair.decodes[0], self._joint.parts)
            self._choice.begin(attempt)
        except GatewayError:
            self._fail(error)

    def _place(self, placed: Placed) -> Attempt:
        self._timer = None  # what it has waited for is there
        self._placed = placed
        self._headers = ()
        self._answer = self._new_answer()
        attempt = self._attempt = self._new_attempt(placed)
        return attempt

    def _new_answer(self) -> JoinedAnswer:
        """What puts the legs' answers together."""
        return joined_answer(self._request, self._joint)

    def _new_attempt(self, placed: Placed) -> Attempt:
        return Attempt(
            self._session,
            self._head,
            self._request,
            placed,
            self._joint,
            keep_prefills=self._answer.needs_prefill,
            events=self,
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def _fail(self, error: GatewayError) -> None:
        """Tell the client as well as it still can be told."""
        if self._phase in (_Phase.ENDED, _Phase.OVER):
            return
        started = self._phase is not _Phase.WAITING
        self._phase = _Phase.ENDED
        self._stop_timer()
        if self._attempt is not None:
            self._attempt.drop()
        if not started:
            self._outlet.reject(error)
            return
        record = self._session.record
        record.code, record.message = error.fault.code, error.message
        if last := self._answer.fail(error):
            self._send_body(last, end=True)
        else:
            self._outlet.reject(error)  # the head is out: Envoy cuts the answer, so that nobody takes it for complete

    def _gone(self) -> None:
        """The client has everything, or has left."""
        if self._answer.complete and self._attempt is not None and self._attempt.busy:
            # The answer is out; its last legs are just about to end by themselves.
            self._phase = _Phase.ENDED
            self._session.gateway.clock.after(LINGER_SECONDS, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        self._phase = _Phase.OVER
        try:
            if self._keeping is not None:
                self._keeping.cancel()
                self._keeping = None  # it refers back to us
            self._stop_timer()
            self._drop_attempt()
            self._outlet.forget()
        finally:
            self._afterwards()
            self._session.finish()

    def _drop_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.finish()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the answer -----------------------------------------------------------------------------------------------

    def _relay(self, step: Callable[..., bytes], *args: object) -> None:
        """Take one step of the merge and send what it yields."""
        if self._phase in (_Phase.ENDED, _Phase.OVER):
            return
        try:
            chunk = step(*args)
        except GatewayError as error:
            self._fail(error)
            return
        except Exception:  # noqa: BLE001 - logged; whatever it is, the client must hear of it
            _log.exception("request %s cannot be merged", self._session.record.request_id.decode("latin-1"))
            self._fail(GatewayError("internal_error", "the gateway failed; its log says why"))
            return
        if self._answer.complete:
            if self._phase is _Phase.WAITING:
                self._send_head(whole=len(chunk))
            self._phase = _Phase.ENDED
            self._send_body(chunk, end=True)
        elif chunk:
            if self._phase is _Phase.WAITING:
                self._send_head()
            self._phase = _Phase.ANSWERING
            self._send_body(chunk, end=False)

    def keep_alive(self) -> None:
        """Send a comment whenever nothing was sent for a while, from now on, unless Envoy has not taken the last."""
        if self._phase in (_Phase.ENDED, _Phase.OVER):
            return
        session = self._session
        if self._keeping is not None and self._silent and not self._outlet.queued:
            if self._phase is _Phase.WAITING:
                self._send_head()
                self._phase = _Phase.KEPT
            self._send_body(_COMMENT, end=False)
        self._silent = True
        self._keeping = session.gateway.clock.after(session.gateway.config.keep_alive, self.keep_alive)

    def _send_head(self, whole: int | None = None) -> None:
        """Begin the client's answer; ``whole`` is its length where that is known."""
        session = self._session
        record = session.record
        record.headed = session.gateway.clock.now()
        record.status = 200
        record.code = record.message = ""  # of an earlier attempt
        ours = [(b"x-request-id", record.request_id)]
        if self._answer.content_type:  # else it is the worker's
            ours.append((b"content-type", self._answer.content_type))
        names = {name for name, _ in ours}
        headers = [field for field in end_to_end(self._headers) if field[0] not in names] + ours
        if whole is not None:
            headers.append((b"content-length", b"%d" % whole))
        if session.gateway.config.response_headers:
            headers += [*naming_headers(record), (b"server-timing", server_timing(record))]
        self._outlet.head(200, headers)

    def _send_body(self, chunk: bytes, *, end: bool) -> None:
        self._silent = False
        self._outlet.body(chunk, end=end)
        if not end and not self._paused and self._outlet.full and self._attempt is not None:
            self._paused = True
            self._attempt.pause()
