"""One attempt at a relayed request over gRPC: each pair of legs is one sequence, whose answer is made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from extproc.apis.json_object import LegEdits
from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange.attempt import Attempt, AttemptEvents, Part
from extproc.exchange.clock import PREFILL_WORD_SECONDS, Handle
from extproc.exchange.failures import charge
from extproc.exchange.headers import RequestHead
from extproc.exchange.placed import Placed
from extproc.exchange.prefill_leg import PrefillLeg
from extproc.exchange.rpc import RpcRequest, Texts
from extproc.exchange.rpc_failures import Verdict, cut_short, is_strange, refusal_of, verdict_of
from extproc.exchange.rpc_prompt import Making, told
from extproc.handoff.grpc import Sequences
from extproc.handoff.handoff import Handoff, Plan
from extproc.merge.parts import Joint
from extproc.transport.interface import Header, Leg, Lost
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_AS_IT_IS: Final = LegEdits()


class RpcPart(Part):
    """One pair of legs; the LegReceiver of its decode leg."""

    __slots__ = (
        "_ended",
        "_failure",
        "_leaving",
        "_left",
        "_limit",
        "_making",
        "_own",
        "_timer",
        "_verdict",
        "transcoder",
    )

    def __init__(self, attempt: RpcAttempt, index: int, worker: Worker, tokens: int) -> None:
        super().__init__(attempt, index, worker, tokens)
        self._own = attempt
        self.transcoder = attempt.rpc.transcoder(worker, index)
        self._failure: GatewayError | None = None  # what the decode's head means
        self._verdict: Verdict | None = None
        self._ended = False  # the decode's call has ended well, and the answer waits for the prefill's word
        self._timer: Handle | None = None  # how long
        self._making: Making | None = None  # of what the prefill has told
        self._left: Leg | None = None  # the decode leg, which nobody wants any more but may not be ended yet
        self._leaving: Plan | None = None  # by which its engine is asked to end it then
        self._limit: Handle

    # -- LegReceiver ----------------------------------------------------------------------------------------------

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        if self._left is not None:
            return
        self._own.answered(self, headers)
        self._verdict = verdict_of(headers)
        self._failure = refusal_of(self.worker, status, headers)
        if is_strange(status, headers):  # and may go on for ever
            failure, self._failure = self._failure, None
            assert failure is not None
            self._own.drop_decode(self)
            self._own.refused(self, failure)
        elif self._failure is None:
            self.params = b""  # the decode has the request: it fetches the cache, or has it freed when it is aborted
            self._own.events.decode_head([(b"content-type", self.transcoder.content_type)])

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""
        if self._left is not None:
            self._end_left()
        elif self._failure is None:
            self.begun = True
            self._feed(chunk)

    def trailers(self, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self._verdict = verdict_of(headers)

    def done(self) -> None:
        """See LegReceiver."""
        if self._left is not None:
            self._end_left(over=True)
            return
        self.over()
        verdict = self._verdict
        if self._failure is not None:
            self._own.refused(self, self._failure)
        elif verdict is None:
            self._own.broken(self, cut_short(self.worker))
        elif verdict.code:
            self._own.broken(self, verdict.failure(self.worker))
        else:
            self.worker.answered(self.turn)
            self._own.learn(self.worker)
            self._ended = True
            if not self.prefilling and self._making is None:
                self._end()
            elif not self.transcoder.waits:
                clock = self._own.session.gateway.clock
                self._timer = clock.after(PREFILL_WORD_SECONDS, lambda: self.guarded(self._end))

    def lost(self, reason: Lost, detail: str) -> None:
        """See LegReceiver."""
        if self._left is not None:
            self._end_left(over=True)
        else:
            super().lost(reason, detail)

    # -- the prefill ----------------------------------------------------------------------------------------------

    def prefill_failed(self, leg: PrefillLeg, error: GatewayError) -> None:
        """See PrefillEvents. A decode that has said all has had what it needed of it."""
        if self._ended and not self.transcoder.waits:
            self._end()
        else:
            super().prefill_failed(leg, error)

    def told(self, body: bytes) -> None:
        """The prefill has answered. Raises GatewayError where it does not tell what was asked for."""
        own = self._own
        work = told(self.transcoder, own.prefill, body)
        if work is not None:
            then: Callable[[GatewayError | None], None] = lambda error: self.guarded(lambda: self._made(error))  # noqa: E731
            self._making = Making(own.texts, self.transcoder, work, self.tokens, then)

    def _made(self, error: GatewayError | None) -> None:
        self._making = None
        if error is not None:
            self._own.events.leg_failed(error, ())
        else:
            self.go_on()

    def go_on(self) -> None:
        """What waited for the prefill's word goes on."""
        if self._making is not None:
            return
        if self._ended:
            self._end()
        elif self.begun and self.decode is not None:
            self._feed(b"")

    # -- its end --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Nobody wants to hear of it any more."""
        self._ended = False
        if self._making is not None:
            self._making.drop()
            self._making = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self, seconds: float) -> None:
        """Let the decode leg go on until it has what it is receiving, or for so long; it counts until then."""
        self._left, self.decode = self.decode, None
        self._leaving = self.plan
        self._limit = self._own.session.gateway.clock.after(seconds, self._end_left)

    @property
    def is_left(self) -> bool:
        """That is so."""
        return self._left is not None

    def _end_left(self, *, over: bool = False) -> None:
        """It may be ended now; ``over``: it has ended."""
        leg, self._left = self._left, None
        plan, self._leaving = self._leaving, None
        self._limit.cancel()
        if leg is None:
            return
        self.worker.end(self.turn, self.tokens)
        if not over:
            leg.cancel()
            if plan is not None:
                self._own.tell(plan, self.worker)

    # -- the answer -----------------------------------------------------------------------------------------------

    def _feed(self, chunk: bytes) -> None:
        transcoder = self.transcoder
        try:
            given = transcoder.feed(chunk)
        except GatewayError as error:
            self._own.drop_decode(self)
            self._own.events.leg_failed(error, (self.worker,))
            return
        if not transcoder.complete:
            if given:
                self._own.events.decode_data(self.index, given)
            return
        self._own.drop_decode(self)  # nothing of what it still makes is needed
        self._give_last(given)

    def _end(self) -> None:
        """The decode's call has ended well."""
        self.forget()
        transcoder = self.transcoder
        try:
            given = transcoder.end(0)
        except GatewayError as error:
            self._own.events.leg_failed(error, (self.worker,))
            return
        self._give_last(given)

    def _give_last(self, given: bytes) -> None:
        failed = self.transcoder.failed
        if failed is not None:
            record = self._own.session.record
            record.code, record.message = failed.fault.code, failed.message
        events = self._own.events
        if given:
            events.decode_data(self.index, given)
        events.decode_done(self.index)


class RpcAttempt(Attempt):
    """See the module.

    Args:
        session, head, request: whose attempt it is.
        placed: the workers, and how they hand over.
        sequences: the latter, for each part.
        joint: in how many parts the request is served.
        rpc: the request as tokens.
        events: is told what happens.
    """

    def __init__(
        self,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        placed: Placed,
        sequences: Sequences,
        joint: Joint,
        rpc: RpcRequest,
        events: AttemptEvents,
    ) -> None:
        self.session = session
        self.rpc = rpc
        self._sequences = sequences
        super().__init__(session, head, request, placed, joint, keep_prefills=True, events=events)

    @property
    def texts(self) -> Texts:
        """Has threads for what takes long."""
        assert self.session.gateway.rpc is not None
        return self.session.gateway.rpc.texts

    def _part(self, index: int, worker: Worker, tokens: int) -> RpcPart:  # noqa: ARG002 - it is known exactly
        return RpcPart(self, index, worker, self.rpc.tokens)

    def _handoff_of(self, part: Part) -> Handoff:
        return self._sequences.part(part.index)

    def _path(self) -> bytes:
        return self._sequences.path

    def _edits(self, part: Part) -> LegEdits:  # noqa: ARG002 - a leg's message is made of tokens
        return _AS_IT_IS

    def send_decodes(self) -> None:
        """See Attempt."""
        for part in self._parts:
            assert isinstance(part, RpcPart)
            part.transcoder.prefilled(None)
        super().send_decodes()

    def send_alone(self, body: bytes) -> None:  # noqa: ARG002 - each part has its own
        """See Attempt."""
        record = self.session.record
        record.prefill = record.decode = ""
        for part in self._parts:
            assert isinstance(part, RpcPart)
            part.transcoder.prefilled(None)
            plan = part.plan = self._sequences.part(part.index).single(part.worker)
            self._send_decode(part, plan.decode)

    def _unaided(self, part: Part) -> Plan:
        return self._sequences.part(part.index).unaided(part.worker)

    def prefill_answered(self, part: Part, body: bytes) -> None:
        """See Attempt."""
        assert isinstance(part, RpcPart)
        try:
            part.told(body)
        except GatewayError as error:
            self._harvest(part, body)
            self.events.leg_failed(error, (self.prefill,))
            return
        super().prefill_answered(part, body)
        part.go_on()

    def _harvest(self, part: Part, body: bytes) -> None:
        """No decode leg follows: keep what a decode worker has to be told for the prefill to free its cache."""
        if self._sequences.in_turn and part.plan is not None:
            part.params = self.handed(part, part.plan, body).params

    def refused(self, part: Part, error: GatewayError) -> None:
        """A decode leg's head was all of its answer, and an error."""
        self._refused(part, error)

    def broken(self, part: Part, error: GatewayError) -> None:
        """A decode leg has failed behind its head; the client may have heard of it, or not."""
        partner = self.prefill if part.prefill is not None else None
        charge((part.worker,), error, part.turn, partner)
        self.lost(part, error)

    def drop_decode(self, part: Part) -> None:
        """Nothing more of a decode leg is needed."""
        if part.decode is not None:
            self._end_decode(part)
            self._abort(part, (part.worker,))

    def tell(self, plan: Plan, worker: Worker) -> None:
        """Have ``worker`` end the legs of ``plan``."""
        self._order(self._sequences.aborts(plan), [(worker,)])

    def drop(self) -> None:
        """See Attempt."""
        for part in self._parts:
            assert isinstance(part, RpcPart)
            part.forget()
        super().drop()

    def _end_decode(self, part: Part) -> None:
        assert isinstance(part, RpcPart)
        if self._sequences.receiving and not part.begun:
            part.leave(self._sequences.receiving)
        else:
            super()._end_decode(part)

    def _abort(self, part: Part, workers: Sequence[Worker]) -> None:
        assert isinstance(part, RpcPart)
        if not part.is_left:
            super()._abort(part, workers)
