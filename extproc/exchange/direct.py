"""A request whose decode leg Envoy runs by itself: what the machine decides is done here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from extproc.apis.json_object import NO_EDITS, Edits, LegEdits
from extproc.apis.request import ABOUT_STORED, CONTROL_FIELDS, NO_BODY, InferenceRequest
from extproc.apis.table import CHAT, RESPONSES
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.answers import AnswerHead, tellable
from extproc.exchange.attempts import Attempts, KvMissing, OnPrefillFailure, is_transient
from extproc.exchange.choice import AloneChoice, Choice, PairChoice
from extproc.exchange.clock import ABANDONED, ENDED_HEAD_SECONDS, HEAD_SECONDS, LINGER_SECONDS, Handle
from extproc.exchange.failures import charge, gone, kv_missing, refuse_unknown, refused, report
from extproc.exchange.headers import HeaderValue, RequestHead
from extproc.exchange.leg_heads import destinations, leg_path
from extproc.exchange.machine import Event, Outside, State, rule_of
from extproc.exchange.orders import send_orders
from extproc.exchange.placed import Placed, still_sought
from extproc.exchange.prefill_leg import PrefillLeg
from extproc.exchange.progress import Watch
from extproc.exchange.record import NO_PARAMS, WAIVED
from extproc.exchange.relayed import RelayedCourse
from extproc.exchange.released import answer_mutation, head_reply
from extproc.exchange.seats import pair_room
from extproc.exchange.stored import naming
from extproc.handoff.handoff import Alone, Handed, Handoff, Kv, Plan
from extproc.merge.parts import Joint, joint_of
from extproc.policies.placement import Pair
from extproc.transport.grpc_framing import Status
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_log: Final = logging.getLogger(__name__)
_LAST: Final = (Event.CLOSED, Event.LINGERED)  # after these nothing more will happen
WHOLE: Final = LegEdits()


def _nothing() -> None:
    """Nothing is left to do."""


_WITH_TOKEN_IDS: Final = Edits({"return_token_ids": b"true"})


class DirectCourse:
    """The Outside of a direct exchange, and its Course."""

    __slots__ = (
        "_attempts",
        "_body",
        "_decode",
        "_due",
        "_edits",
        "_error",
        "_handoff",
        "_head",
        "_hold",
        "_leg",
        "_local_reply",
        "_params",
        "_path",
        "_pause",
        "_plan",
        "_prefill",
        "_refusal",
        "_released",
        "_request",
        "_session",
        "_state",
        "_status",
        "_stored",
        "_timer",
        "_tokens",
        "_turn",
        "_unpinned",
        "_upstreams",
        "_waives",
        "_watch",
    )

    def __init__(self, session: Session, head: RequestHead, request: InferenceRequest, upstreams: Sequence[Worker]):
        self._session = session
        self._head = head
        self._request = request
        self._tokens = request.prompt_tokens()
        self._path = leg_path(request.api, head.path)
        self._state = State.READY
        self._upstreams = upstreams  # where Envoy may send the released request, in order
        self._decode = upstreams[0]  # who has the released request, as far as known
        self._turn = 0  # of that worker, while it has it
        self._handoff: Handoff | None = None
        self._prefill: Worker | None = None
        self._leg: PrefillLeg | None = None
        self._plan: Plan | None = None
        self._body: bytes | None = b""  # of the released request, until it is released; None: it has none
        self._edits = WHOLE
        self._stored = ""  # the name under which the decode may keep its answer
        self._params = b""  # what a decode may still have to be told of, for the prefill to free the KV cache
        self._hold = 0.0  # seconds that the decode's head may be kept back for the prefill's fate
        self._error: GatewayError | None = None
        self._attempts: Attempts | None = None
        self._pause = 0.0  # seconds before the next attempt
        self._due = 0.0  # when it may begin, by the gateway's clock
        self._timer: Handle | None = None
        self._status = 0  # of the decode's answer
        self._local_reply = ""  # the code of an answer that Envoy made up itself
        self._refusal: GatewayError | None = None  # of a decode, kept back
        self._released = False
        self._waives = False  # the decode is to do without the prefill that failed
        self._watch: Watch | None = None  # of an answer whose decode may yet wait for the prefill in vain
        self._unpinned: GatewayError | None = None  # of a prefill leg that failed while the decode's was out

    @classmethod
    def paired(cls, session: Session, head: RequestHead, request: InferenceRequest, placed: Placed) -> DirectCourse:
        """A request for a prefill/decode pair."""
        course = cls(session, head, request, placed.pair.decodes)
        course._place(placed)
        return course

    @classmethod
    def alone(
        cls,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        workers: Sequence[Worker],
        alone: Alone | None = None,
    ) -> DirectCourse:
        """A request that the first of ``workers`` which can be reached answers; ``alone`` says why, if it might not."""
        course = cls(session, head, request, workers)
        course._serve_alone(workers, alone)
        return course

    @classmethod
    def stored(cls, session: Session, head: RequestHead, keeper: Worker, body: bytes | None) -> DirectCourse:
        """A request about a stored response, for the worker that keeps it, as the client sent it."""
        course = cls(session, head, ABOUT_STORED, (keeper,))
        course._path = head.path.encode("latin-1")
        course._body = body
        return course

    def _serve_alone(self, workers: Sequence[Worker], alone: Alone | None) -> None:
        self._upstreams, self._decode = workers, workers[0]
        self._prefill = self._handoff = None
        self._name(workers[0])
        self._body = self._alone_body()
        record = self._session.record
        record.handoff = record.prefill = ""
        if alone is not None:
            record.kv, record.note = alone.kv.value, alone.why

    def _alone_body(self) -> bytes:
        drop = () if self._session.gateway.config.trust_client else CONTROL_FIELDS
        return self._request.body.edited(self._edits.decode.put, drop)

    def _name(self, worker: Worker) -> None:
        """Name a response that ``worker`` will make, so that it can be found again."""
        if self._session.gateway.config.select_only:  # bodies stay as they are
            return
        self._stored, members = naming(self._session.gateway.stored, self._request, worker, self._session.take_own_id())
        edits = Edits(members) if members else NO_EDITS
        self._edits = LegEdits(edits, edits) if members else WHOLE

    def _place(self, placed: Placed) -> None:
        """Prepare an attempt."""
        gateway = self._session.gateway
        pair, handoff = placed
        self._upstreams, self._decode = pair.decodes, pair.decodes[0]
        self._prefill, self._handoff = pair.prefill, handoff
        self._hold = handoff.hold(self._request)
        self._name(self._decode)
        self._ask_token_ids()
        trusts = gateway.config.trust_client
        plan = self._plan = handoff.plan(
            self._request, pair.prefill, self._edits, trust_client=trusts, decode=self._decode
        )
        self._body = plan.decode
        self._params = b""
        record = self._session.record
        record.handoff = handoff.name
        record.prefill = pair.prefill.name
        record.kv, record.note, record.decode = Kv.HANDED.value, "", ""

    def _ask_token_ids(self) -> None:
        """Have the prefill tell the prompt's token ids, where every decode worker that may serve takes them.

        It then need not apply the chat template and tokenise again. Only a chat's prefill tells them in a way that its
        decode understands (vLLM 0.32).
        """
        handoff = self._handoff
        assert handoff is not None
        if self._request.api is CHAT and handoff.tells_tokens and all(w.takes_token_ids for w in self._upstreams):
            self._edits = LegEdits(_WITH_TOKEN_IDS, NO_EDITS)

    # -- Course ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Course."""
        self._session.record.sent = self._session.gateway.clock.now()
        self._fire(self._accepted())

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:
        """See Course."""
        self._headed(AnswerHead.of(headers))

    def _headed(self, head: AnswerHead, error: GatewayError | None = None) -> None:
        """The head of the decode's answer is there; ``error`` is what one with an error status means, where known."""
        self._status = status = head.status
        if head.code is not None:  # Envoy answered in the worker's place
            self._session.record.code = self._local_reply = head.code
            if head.code.endswith("_unreachable"):
                self._report(self._upstreams)
            else:
                self._served_by(head.upstream)  # its connection broke
        elif head.upstream != self._decode.endpoint:
            self._served_by(head.upstream)
        if status >= 400:
            if self._leg is not None:
                untold = self._leg.decode_failed(self._local_reply, status)
                self._params = self._params or untold
            error = error or head.error(self._decode)
            if self._may_be_the_prefills(head):
                self._refusal = error
                self._fire(Event.DECODE_REFUSED_EARLY)
            else:
                self._fire(self._after_refusal(error))
            return
        # The decode has the request: it fetches the cache, or has it freed when it is aborted.
        self._params = b""
        self._decode.answered(self._turn)
        self._session.gateway.placer.answered(self._request, self._decode)
        if self._stored:
            self._session.gateway.stored.made(self._stored, self._decode)
        self._fire(Event.DECODE_HEAD_EARLY if self._hold else Event.DECODE_HEAD)

    def drained(self) -> None:
        """See Course. A released body is queued once; nothing follows it."""

    def end(self, error: GatewayError) -> None:
        """See Course."""
        self._error = error
        self._fire(Event.EXPIRED)

    def closed(self) -> None:
        """See Course."""
        self._fire(Event.CLOSED)

    def prefill_lost(self, worker: Worker) -> None:
        """See Course. A decode that waits for its cache in vain would do so for ever; one that has it, not be hurt."""
        if self._leg is None or not self._leg.is_fetched_from(worker):
            return
        if self._state is State.DECODING:
            self._error = error = gone(worker)
            self._fire(self._after(error, worker))
        elif self._watch is not None:
            self._watch.doubt()

    def abandon(self) -> None:
        """See Course."""
        self._session.call.abort(Status.INTERNAL, ABANDONED)

    # -- PrefillEvents --------------------------------------------------------------------------------------------

    @property
    def fetched(self) -> bool:
        """See PrefillEvents. A head that need not be held back comes with the first token."""
        return self._state is State.ANSWERING_PARALLEL and not self._hold

    def guarded(self, step: Callable[[], None]) -> None:
        """See PrefillEvents."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - logged; Envoy is told and closes the call, whatever it is
            _log.exception("request %s", self._session.record.request_id.decode("latin-1"))
            self._session.call.abort(Status.INTERNAL, str(error))

    def prefill_answered(self, leg: PrefillLeg, body: bytes) -> None:  # noqa: ARG002 - PrefillEvents' signature
        """See PrefillEvents."""
        if self._prefill is not None:
            self._session.gateway.placer.answered(self._request, self._prefill)
        if self._state is State.PREFILLING and not self._hand_over(body):
            self._error = kv_missing(self._prefill)
            self._fire(Event.PREFILL_FAILED)
        else:
            self._fire(Event.PREFILL_DONE)

    def prefill_failed(self, leg: PrefillLeg, error: GatewayError) -> None:  # noqa: ARG002 - PrefillEvents' signature
        """See PrefillEvents."""
        prefill = self._prefill
        assert prefill is not None
        self._error = error
        self._params = b""  # nothing was computed that could be freed
        report(self._session.gateway, (prefill,), error)
        if self._released:
            self._unpinned = error
        self._fire(self._after(error, prefill))

    def kept_by(self, leg: PrefillLeg, body: bytes) -> bytes:
        """See PrefillEvents."""
        return self._handed(leg.plan, body).params

    # -- Outside --------------------------------------------------------------------------------------------------

    def send_both(self) -> None:
        """See Outside."""
        self.send_prefill()
        self.release()

    def send_prefill(self) -> None:
        """See Outside."""
        prefill, plan, handoff, session = self._prefill, self._plan, self._handoff, self._session
        assert prefill is not None
        assert plan is not None
        assert handoff is not None
        placed = Placed(Pair(prefill, self._upstreams), handoff)
        leg = self._leg = PrefillLeg(
            session,
            self._head,
            self._path,
            placed,
            plan,
            session.record.leg_id,
            self._tokens,
            keep=handoff.in_turn,
            events=self,
        )
        leg.send()
        self._plan = leg.plan

    def release(self) -> None:
        """See Outside."""
        session = self._session
        if self._handoff is not None and self._handoff.in_turn:  # the prefill may have taken long
            self._upstreams = still_sought(self._upstreams)
            self._decode = self._upstreams[0]
        if len(self._upstreams) > session.gateway.config.destination_hosts:
            self._upstreams = self._upstreams[: session.gateway.config.destination_hosts]
        decode = self._decode
        if session.promise:
            session.use_room(decode)
        self._turn = decode.begin(self._tokens)
        self._released = True
        body = self._body
        self._body = b""
        session.call.send(self._released_head(body))
        if body is None:
            return
        # A client's trailers end here, unanswered: no engine reads any. Were they released behind a body that the
        # router keeps for the next host, Envoy 1.40 would send that body twice and so spoil the worker's connection.
        session.call.send(wire.request_body_reply(body, end=True))

    def _released_head(self, body: bytes | None) -> bytes:
        """The message that releases the request's head."""
        to = destinations(self._upstreams)
        return head_reply(self._session, self._head, self._request, self._decode, self._path, body, to)

    def pass_head(self) -> None:
        """See Outside."""
        self._head_passes()
        session = self._session
        session.call.send(wire.response_headers_reply(answer_mutation(session), self._watched()))

    def _head_passes(self) -> None:
        """The answer's head is about to go to the client: remember who gave it, and when."""
        self._stop_timer()
        session = self._session
        record = session.record
        record.headed = session.gateway.clock.now()
        record.status = self._status
        self._request = self._request._replace(body=NO_BODY)  # it may be large, and the answer long
        if self._local_reply:
            pass  # no worker served
        elif self._decode.role is Role.PREFILL:
            record.prefill = self._decode.name
        else:
            record.decode = self._decode.name

    def hold_head(self) -> None:
        """See Outside."""
        self._timer = self._session.gateway.clock.after(self._hold, lambda: self._fire(Event.HELD_ENOUGH))

    def hold_refusal(self) -> None:
        """See Outside."""
        handoff = self._handoff
        assert handoff is not None
        self._timer = self._session.gateway.clock.after(handoff.blame, self._refused_enough)

    def linger(self) -> None:
        """See Outside."""
        self._give_decode_back()
        self._timer = self._session.gateway.clock.after(LINGER_SECONDS, lambda: self._fire(Event.LINGERED))

    def pause(self) -> None:
        """See Outside."""
        self._release_plan()
        self._timer = self._session.gateway.clock.after(self._pause, lambda: self.guarded(self._try_again))

    def await_head(self) -> None:
        """See Outside."""
        wait = ENDED_HEAD_SECONDS if self._ends_by_name() else min(self._pause, HEAD_SECONDS)
        self._timer = self._session.gateway.clock.after(wait, lambda: self._fire(Event.HEADLESS))

    def answer_error(self) -> None:
        """See Outside."""
        self._stop_timer()
        assert self._error is not None
        self._session.reject(self._error)
        self._unpin()

    def drop_prefill(self) -> None:
        """See Outside."""
        if self._leg is not None:
            self._leg.drop()

    def drop_decode(self) -> None:
        """See Outside."""
        # Until a head comes, Envoy may be with any worker of the list: it says where it is only then.
        self._abort((self._decode,) if self._status else self._upstreams)

    def settle(self) -> None:
        """See Outside."""
        if self._leg is not None:
            self._leg.settle()

    def relay(self) -> None:
        """See Outside."""
        self._stop_timer()
        session, error, choice = self._session, self._error, self._choice()
        assert error is not None
        assert choice is not None
        course = self._relayed(choice)
        session.hand_on(course)
        pause = None if self._waives else max(0.0, self._due - session.gateway.clock.now())
        # Envoy ends a leg of which it has a head only when the client's answer has ended.
        stays = 200 <= self._status < 300
        counts = stays and not self._ends_by_name()  # else its engine ends it now
        if not counts and not self._waives:  # then its room is the next leg's
            self._give_decode_back()
        afterwards = self._ended if counts else self._unpin if stays else _nothing
        try:
            course.go_on(error, pause, asked=self._status != 0, ended=not counts, afterwards=afterwards)
        finally:
            if counts:
                self._released = False  # it is given back then
            elif not stays:
                self._unpin()

    def _relayed(self, choice: Choice) -> RelayedCourse:
        """The course that goes on with the request."""
        session = self._session
        pair = Pair(self._prefill or self._decode, self._upstreams)
        handoff = self._handoff or session.gateway.handoffs.of(self._decode)
        joint = joint_of(self._request, pair.prefill.runtime) if self._handoff else Joint(pair.prefill.runtime)
        placed = Placed(pair, handoff)
        return RelayedCourse(session, self._head, self._request, joint, placed, choice, self._known_attempts())

    def _ended(self) -> None:
        """The leg that stayed with Envoy under a late answer has ended, too."""
        self._decode.end(self._turn, self._tokens)
        self._unpin()

    def give_back(self) -> None:
        """See Outside."""
        try:
            self._stop_timer()
            self._forget()
        finally:
            self._give_decode_back()
            self._release_plan()

    def finish(self) -> None:
        """See Outside."""
        try:
            self.drop_prefill()  # only after a defect is there one left
            self._unpin()
            watch, self._watch = self._watch, None  # it refers back to us
            if watch is not None:
                self._session.gateway.progress.end(watch)
            self.give_back()
        finally:
            self._session.finish()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _watched(self) -> bytes:
        """Begin to watch an answer of which a head does not yet mean that the decode has the cache."""
        handoff, request = self._handoff, self._request
        if handoff is None or not handoff.pushes or not request.stream or self._status >= 300:
            return b""
        # A response's first events repeat the request.
        watch = self._watch = self._session.gateway.progress.begin(self._stuck, speaks_early=request.api is RESPONSES)
        return wire.watched_metadata(watch.name)

    def _stuck(self) -> None:
        """The prefill was gone before the decode had the cache, and so nothing of its answer will come."""
        if self._state is State.ANSWERING and self._prefill is not None:
            self._error = gone(self._prefill)
            self._fire(Event.PREFILL_FAILED)

    def _fire(self, event: Event) -> None:
        """Let an event happen; a defect ends the request and nothing else."""
        try:
            self._state, actions = rule_of(self._state, event)
            for action in actions:
                getattr(self, action)()
        except Exception as error:  # noqa: BLE001 - logged; Envoy is told and closes the call, whatever it is
            _log.exception("request %s: %s", self._session.record.request_id.decode("latin-1"), event.name)
            self._session.call.abort(Status.INTERNAL, str(error))
            if event in _LAST and self._session.alive:
                self._state = State.OVER
                self.finish()

    def _accepted(self) -> Event:
        if self._handoff is None:
            return Event.ACCEPTED_ALONE
        return Event.ACCEPTED_IN_TURN if self._handoff.in_turn else Event.ACCEPTED

    def _hand_over(self, answer: bytes) -> bool:
        """Make the decode leg of the prefill's answer; False where the operator wants none without a handoff."""
        plan = self._plan
        assert plan is not None
        config, record = self._session.gateway.config, self._session.record
        handed = self._handed(plan, answer)
        self._body, self._params = handed.decode, handed.params
        record.kv = handed.kv.value
        if handed.kv is not Kv.RECOMPUTED:
            return True
        record.note = NO_PARAMS if answer else WAIVED
        if not answer:
            record.prefill = ""  # it did not serve
        return not answer or config.kv_missing is KvMissing.RECOMPUTE

    def _handed(self, plan: Plan, answer: bytes) -> Handed:
        handoff, trusts = self._handoff, self._session.gateway.config.trust_client
        assert handoff is not None
        return handoff.handed(self._request, plan, self._edits.decode, answer, trust_client=trusts)

    def _unpin(self) -> None:
        """Free what a decode keeps for a prefill that failed; its leg has ended, or is just ending."""
        leg, error = self._leg, self._unpinned
        self._unpinned = None
        if leg is not None and error is not None:
            leg.unpin(error)

    def _after(self, error: GatewayError, prefill: Worker) -> Event:
        """What the failure of the prefill leg leads to."""
        config, handoff = self._session.gateway.config, self._handoff
        assert handoff is not None
        released = self._state in (State.PARALLEL, State.HELD, State.REFUSED, State.DECODING) and config.retry_released
        if not released and self._state is not State.PREFILLING:
            return Event.PREFILL_FAILED
        waives = config.retry.on_prefill_failure is OnPrefillFailure.DECODE_ONLY
        if waives and handoff.waivable and is_transient(error):
            self._session.tried_in_vain(error)
            if self._state is not State.PREFILLING:
                self._waives = True
                self._wait(config.retry.initial)
                return Event.PREFILL_REPLACED
            self._hand_over(b"")
            return Event.PREFILL_WAIVED
        return Event.PREFILL_REPLACED if self._may_try_again(error, (prefill,)) else Event.PREFILL_FAILED

    def _may_be_the_prefills(self, head: AnswerHead) -> bool:
        """Whether a decode's error may come of its prefill's failure, which is not known yet."""
        handoff = self._handoff
        return (
            head.status == 500
            and head.code is None
            and self._state is State.PARALLEL
            and bool(handoff is not None and handoff.blame)
        )

    def _refused_enough(self) -> None:
        error, self._refusal = self._refusal, None
        self._timer = None
        if error is not None and self._state is State.REFUSED:
            self._fire(self._after_refusal(error))

    def _after_refusal(self, error: GatewayError) -> Event:
        """What a decode's answer with an error status, or Envoy's in its place, leads to."""
        if self._state not in (State.PARALLEL, State.REFUSED, State.DECODING):
            return Event.DECODE_REFUSED
        gateway, worker = self._session.gateway, self._decode
        unreachable = error.fault.code.endswith("_unreachable")
        charge(self._upstreams if unreachable else (worker,), error, self._turn, self._prefill)
        if not unreachable:  # else they were reported
            report(gateway, (worker,), error)
        again = gateway.config.retry_released and self._may_try_again(
            error, self._upstreams if unreachable else (worker,)
        )
        if not again:
            return Event.DECODE_REFUSED
        self._error = error
        self._session.record.code = ""
        return Event.DECODE_REPLACED

    def _may_try_again(self, error: GatewayError, workers: Sequence[Worker]) -> bool:
        """Whether there is to be another attempt, without ``workers``, after ``error``; sets the pause before it."""
        attempts, choice = self._known_attempts(), self._choice()
        if choice is None or (self._released and self._handoff and self._handoff.named_by_client(self._request)):
            return False
        pause = attempts.after(error, workers, self._session.gateway.clock.now())
        # Who is left is known now; whether they still are after the pause, then.
        if pause is None or not choice.left(attempts.failed):
            return False
        self._session.tried_in_vain(error)
        self._wait(pause)
        return True

    def _choice(self) -> Choice | None:
        """Who else may serve the request; None where nobody can."""
        gateway = self._session.gateway
        if self._handoff is not None and self._prefill is not None:
            return PairChoice(gateway, self._request, self._prefill, self._handoff)
        if self._request is ABOUT_STORED:
            return None  # the keeper alone knows
        return AloneChoice(gateway, self._request, self._decode, self._alone_body())

    def _wait(self, pause: float) -> None:
        self._pause = pause
        self._due = self._session.gateway.clock.now() + pause

    def _known_attempts(self) -> Attempts:
        """The request's attempts; most have one, and need not count."""
        if self._attempts is None:
            self._attempts = Attempts(self._session.gateway.config.retry, self._session.deadline)
        return self._attempts

    def _try_again(self) -> None:
        """Place the request anew, or have it wait for room first."""
        session, attempts = self._session, self._attempts
        self._timer = None
        assert attempts is not None
        need = (self._request.model, attempts.failed, self._prefill, self._request.within)
        seeking = session.seeking(self._request, 1, need, self._place_again, lambda _: self._fire(Event.PREFILL_FAILED))
        try:
            waiter = session.gateway.legs.wait(seeking)
        except GatewayError:
            self._fire(Event.PREFILL_FAILED)
            return
        if waiter is not None:
            self._timer = waiter

    def _place_again(self, taken: Collection[Worker]) -> None:
        """Place the request on others than those that failed it, and ``taken``. Raises NoRoomError."""
        gateway, attempts, handoff = self._session.gateway, self._attempts, self._handoff
        assert attempts is not None
        assert handoff is not None
        try:
            room = pair_room(self._request, taken)
            pair = gateway.placer.pair(self._request, attempts.failed, self._prefill, room)
            alone = handoff.alone(self._request, pair.prefill)
            if alone is not None:
                refuse_unknown(gateway, pair.prefill, alone)
        except GatewayError:
            self._fire(Event.PREFILL_FAILED)
            return
        self._session.record.attempts = attempts.number
        self.guarded(lambda: self._go_again(pair, alone))

    def _go_again(self, pair: Pair, alone: Alone | None) -> None:
        handoff = self._handoff
        assert handoff is not None
        if alone is None:
            self._place(Placed(pair, handoff))
            if handoff.in_turn:
                self._session.keep_room(pair.decodes[0], 1)
        else:  # nobody has told this one's engine id
            self._serve_alone(pair.decodes, alone)
        self._fire(self._accepted())

    def _give_decode_back(self) -> None:
        if self._released:
            self._released = False
            self._decode.end(self._turn, self._tokens)

    def _abort(self, workers: Sequence[Worker]) -> None:
        if self._plan is not None and self._handoff is not None:
            self._order(self._handoff.aborts(self._plan), [(worker,) for worker in workers])

    def _ends_by_name(self) -> bool:
        """Whether the decode leg's engine ends it when it is told to, without its connection's being closed."""
        return self._plan is not None and self._handoff is not None and bool(self._handoff.aborts(self._plan))

    def _forget(self) -> None:
        """Have the prefill free a KV cache that no decode has been seen to take; a decode worker must say so."""
        params, self._params = self._params, b""
        if params and self._handoff is not None:
            failed = self._decode if self._status >= 400 else None
            unreachable = self._local_reply.endswith("_unreachable")
            placer = self._session.gateway.placer
            if workers := tellable(placer, self._request, self._upstreams, failed, unreachable=unreachable):
                self._order(self._handoff.forgets(params), [workers])

    def _order(self, orders: Sequence[tuple[bytes, bytes]], recipients: Sequence[Sequence[Worker]]) -> None:
        send_orders(self._session.gateway, self._head, recipients, orders, self._session.record.request_id)

    def _release_plan(self) -> None:
        self._session.drop_promise()
        plan, self._plan = self._plan, None
        if plan is not None and self._handoff is not None:
            self._handoff.release(plan)

    def _report(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._session.gateway.report_unreachable(worker)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _served_by(self, endpoint: str | None) -> None:
        """Envoy says who answered: after a fail-over that is not the first of the list."""
        for position, worker in enumerate(self._upstreams):
            if worker.endpoint == endpoint and worker is not self._decode:
                refused(self._session.gateway, self._upstreams[:position], self._turn)
                self._decode.end(self._turn, self._tokens)
                self._turn = worker.begin(self._tokens)
                self._decode = worker
                return


if TYPE_CHECKING:
    _: type[Outside] = DirectCourse
