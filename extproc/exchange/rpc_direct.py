"""A request whose decode leg is a gRPC call that Envoy runs by itself: a DirectCourse whose answer is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.answers import AnswerHead
from extproc.exchange.choice import Choice, PairChoice
from extproc.exchange.clock import FIRST_TOKEN_SECONDS
from extproc.exchange.direct import DirectCourse
from extproc.exchange.failures import charge, gone, report
from extproc.exchange.headers import HeaderValue, RequestHead
from extproc.exchange.leg_heads import destinations
from extproc.exchange.machine import Event
from extproc.exchange.placed import Placed
from extproc.exchange.prefill_leg import PrefillLeg
from extproc.exchange.record import naming_headers
from extproc.exchange.relayed import RelayedCourse
from extproc.exchange.released import call_reply
from extproc.exchange.rpc import RpcRequest
from extproc.exchange.rpc_choice import RpcAloneChoice
from extproc.exchange.rpc_failures import Verdict, cut_short, is_strange, stranger, unsaid, verdict_of
from extproc.exchange.rpc_prompt import Making, told
from extproc.exchange.rpc_relayed import RpcRelayedCourse
from extproc.exchange.rpc_reply import RpcReply
from extproc.handoff.grpc import Sequences
from extproc.handoff.handoff import Alone, Plan
from extproc.policies.placement import Pair
from extproc.transcode.transcoder import Transcoder
from extproc.transport.interface import Header
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session


class RpcDirectCourse(DirectCourse):
    """See the module; also the ReplyEvents of its answer.

    Args:
        session, head, request: the request.
        workers: where its decode leg may go, in order.
        rpc: the same as tokens.
        sequences: how the pair hands over; of a request that one worker answers alone, how that would.
    """

    __slots__ = (
        "_aborted",
        "_alone",
        "_first_closed",
        "_making",
        "_refused_names",
        "_reply",
        "_rpc",
        "_said",
        "_sequences",
        "_transcoder",
    )

    def __init__(
        self,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        workers: Sequence[Worker],
        rpc: RpcRequest,
        sequences: Sequences,
    ) -> None:
        super().__init__(session, head, request, workers)
        self._alone: Plan | None = None  # the leg of a request that one worker answers
        self._rpc = rpc
        self._sequences = sequences
        self._path = sequences.path
        self._tokens = rpc.tokens
        self._transcoder: Transcoder | None = None
        self._reply: RpcReply | None = None
        self._making: Making | None = None  # of what the prefill has told of a long prompt
        self._said: GatewayError | None = None  # what the worker's head means, which is all there is of its answer
        self._refused_names: Sequence[bytes] = ()  # of that head
        self._first_closed = False  # the first call is over, the second goes on
        self._aborted = False  # the decode's work was ended by name

    @classmethod
    def of_pair(
        cls,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        pair: Pair,
        rpc: RpcRequest,
        seqs: Sequences,
    ) -> RpcDirectCourse:
        """A request for a prefill/decode pair."""
        course = cls(session, head, request, pair.decodes, rpc, seqs)
        course._place(Placed(pair, seqs))
        return course

    @classmethod
    def of_one(
        cls,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        workers: Sequence[Worker],
        rpc: RpcRequest,
        seqs: Sequences,
        alone: Alone | None,
    ) -> RpcDirectCourse:
        """A request that the first of ``workers`` which can be reached answers alone."""
        course = cls(session, head, request, workers, rpc, seqs)
        course._serve_alone(workers, alone)
        return course

    # -- preparing ------------------------------------------------------------------------------------------------

    def _place(self, placed: Placed) -> None:
        super()._place(placed)
        self._transcoder = self._rpc.transcoder(self._decode)

    def _serve_alone(self, workers: Sequence[Worker], alone: Alone | None) -> None:
        super()._serve_alone(workers, alone)
        self._transcoder = self._rpc.transcoder(self._decode)
        self._transcoder.prefilled(None)

    def _alone_body(self) -> bytes:
        self._alone = self._sequences.single(self._decode)
        return self._alone.decode

    def _abort(self, workers: Sequence[Worker]) -> None:
        if self._plan is None and self._alone is not None:
            self._order(self._sequences.aborts(self._alone), [(worker,) for worker in workers])
        else:
            super()._abort(workers)

    def _released_head(self, body: bytes | None) -> bytes:  # noqa: ARG002 - a call has no length
        return call_reply(self._session, self._head, self._decode, self._path, destinations(self._upstreams))

    # -- the decode's head ----------------------------------------------------------------------------------------

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:
        """See Course."""
        fields = list(headers)
        head = AnswerHead.of(fields)
        pairs = [(field.key.encode("latin-1"), field.raw_value) for field in fields]
        error = None if head.code is not None or head.status != 200 else self._told_by(head, pairs)
        if error is None:
            self._headed(head)
            return
        self._refused_names = [name for name, _ in pairs if not name.startswith(b":")]
        self._said = error
        self._headed(head._replace(status=error.status), error)

    def _told_by(self, head: AnswerHead, pairs: Sequence[Header]) -> GatewayError | None:
        """What a worker's head means that is all there is of its answer, or no call's; None for any other."""
        # The reporter of a fail-over: who answered is known only after this.
        worker = self._answering(head.upstream)
        verdict = verdict_of(pairs)
        if verdict is not None:
            return verdict.failure(worker) if verdict.code else unsaid(worker)
        return stranger(worker) if self._session.bare or is_strange(200, pairs) else None

    def _answering(self, endpoint: str | None) -> Worker:
        return next((worker for worker in self._upstreams if worker.endpoint == endpoint), self._decode)

    def pass_head(self) -> None:
        """See Outside."""
        self._head_passes()
        session = self._session
        if self._said is not None:
            self._pass_refusal(self._said)
        elif self._local_reply or self._status != 200:  # JSON already, or no gRPC server's
            super().pass_head()
        else:
            assert self._transcoder is not None
            self._reply = RpcReply(session, self._transcoder, self)
            self._reply.open()

    @property
    def prefilling(self) -> bool:
        """See ReplyEvents."""
        return self._making is not None or (self._leg is not None and self._leg.out)

    @property
    def fetched(self) -> bool:
        """See PrefillEvents."""
        return self._reply is not None and self._reply.heard

    def _pass_refusal(self, error: GatewayError) -> None:
        session = self._session
        record = session.record
        record.told(error)
        headers = [*error.headers, (b"x-request-id", record.request_id)]
        if session.gateway.config.response_headers:
            headers += naming_headers(record)
        mutation = b"".join([wire.remove_header(name) for name in self._refused_names])
        mutation += wire.set_header(b":status", b"%d" % error.status)
        mutation += b"".join([wire.set_header(name, value) for name, value in headers])
        session.call.send(wire.response_headers_replaced(mutation, error.body))

    def _watched(self) -> bytes:
        """See DirectCourse. What the decode says is seen here."""
        return b""

    def prefill_lost(self, worker: Worker) -> None:
        """See Course. Most servers' heads come with the first token, but some at once."""
        reply, clock = self._reply, self._session.gateway.clock
        if reply is None:
            super().prefill_lost(worker)
        elif not reply.heard and self._leg is not None and self._leg.is_fetched_from(worker) and self._timer is None:
            self._timer = clock.after(FIRST_TOKEN_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """The prefill is gone, and the decode has had a moment to show that it has the cache."""
        self._timer = None
        if self._reply is not None and not self._reply.heard and self._prefill is not None:
            self._error = gone(self._prefill)
            self._fire(Event.PREFILL_FAILED)

    # -- the prefill ----------------------------------------------------------------------------------------------

    def prefill_answered(self, leg: PrefillLeg, body: bytes) -> None:
        """See PrefillEvents."""
        assert self._prefill is not None
        assert self._transcoder is not None
        try:
            work = told(self._transcoder, self._prefill, body)
        except GatewayError as error:  # it does not say what was asked for, and would not elsewhere
            super().prefill_answered(leg, body)
            self.end(error)
            return
        if work is not None:
            self._make(self._transcoder, work)
        super().prefill_answered(leg, body)
        if self._reply is not None and self._making is None:
            self._reply.prefilled()

    def _make(self, transcoder: Transcoder, work: Callable[[], None]) -> None:
        """Have ``work`` done in a thread; the answer waits for it."""

        def made(error: GatewayError | None) -> None:
            self._making = None
            if error is not None:
                self.end(error)
            elif self._reply is not None:
                self._reply.prefilled()

        rpc = self._session.gateway.rpc
        assert rpc is not None
        self._making = Making(
            rpc.texts, transcoder, work, self._tokens, lambda error: self.guarded(lambda: made(error))
        )

    def prefill_failed(self, leg: PrefillLeg, error: GatewayError) -> None:
        """See PrefillEvents."""
        if self._reply is not None:
            self._reply.prefill_failed()
        super().prefill_failed(leg, error)

    def _hand_over(self, answer: bytes) -> bool:
        if not answer and self._transcoder is not None:
            self._transcoder.prefilled(None)
        return super()._hand_over(answer)

    # -- ReplyEvents ----------------------------------------------------------------------------------------------

    def answer_whole(self, *, sooner: bool) -> None:
        """See ReplyEvents."""
        if sooner:
            self._abort_decode()

    def call_failed(self, verdict: Verdict | None) -> None:
        """See ReplyEvents."""
        worker = self._decode
        if verdict is not None and verdict.code:
            error = verdict.failure(worker)
        elif verdict is None:
            error = cut_short(worker)
        else:
            error = GatewayError("decode_failed", f"decode worker {worker.name} broke off", answered=500)
        charge((worker,), error, self._turn, self._prefill)
        report(self._session.gateway, (worker,), error)

    def answer_closed(self) -> None:
        """See ReplyEvents."""
        if self._first_closed:
            super().closed()

    # -- the end --------------------------------------------------------------------------------------------------

    def closed(self) -> None:
        """See Course. Envoy ends the first call with the worker's trailers; the answer ends with the second."""
        reply = self._reply
        waits = reply is not None and not reply.is_closed and (reply.is_open or self._session.trailed)
        if waits:
            self._first_closed = True
        else:
            super().closed()

    def abandon(self) -> None:
        """See Course."""
        super().abandon()
        if self._reply is not None:
            self._reply.abandon()

    def answer_error(self) -> None:
        """See Outside. An answer that has begun ends with an event that says why, where its form has such."""
        reply = self._reply
        if reply is None:
            super().answer_error()
            return
        self._stop_timer()
        assert self._error is not None
        reply.fail(self._error)
        self._unpin()

    def drop_decode(self) -> None:
        """See Outside."""
        self._aborted = True
        super().drop_decode()

    def finish(self) -> None:
        """See Outside. A client that has left ends the call; the engine is told by name, too."""
        if self._making is not None:
            self._making.drop()
            self._making = None
        reply = self._reply
        if reply is not None:
            if not reply.over:
                self._abort_decode()
            reply.leave()
        super().finish()

    def _abort_decode(self) -> None:
        if not self._aborted:
            self.drop_decode()

    # -- other attempts -------------------------------------------------------------------------------------------

    def _choice(self) -> Choice | None:
        session = self._session
        if self._handoff is not None and self._prefill is not None:
            return PairChoice(session.gateway, self._request, self._prefill, self._handoff)
        return RpcAloneChoice(session.gateway, self._request, self._decode, self._sequences)

    def _relayed(self, choice: Choice) -> RelayedCourse:
        placed = Placed(Pair(self._prefill or self._decode, self._upstreams), self._sequences)
        attempts = self._known_attempts()
        return RpcRelayedCourse(self._session, self._head, self._request, self._rpc, placed, choice, attempts)
