"""One prefill leg, from its sending to its end, and what must be done about it should it end badly or too soon."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from extproc.errors import GatewayError
from extproc.exchange.answers import WholeAnswer, never_fetched
from extproc.exchange.clock import (
    LEFTOVER_SECONDS,
    PUSH_SECONDS,
    REST_SECONDS,
    SETTLE_SECONDS,
    TAKEN_SECONDS,
    Handle,
)
from extproc.exchange.failures import apart, charge, waited_in_vain
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import leg_headers
from extproc.exchange.orders import send_orders, settle, unpin
from extproc.exchange.placed import Placed
from extproc.exchange.rpc_failures import RpcAnswer
from extproc.handoff.handoff import Plan
from extproc.transport.interface import Leg
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

# Whose whole answers, when the client leaves, a vLLM decode (0.32) takes for refused. A stream's sends its head before
# it asks for anything, and asks for nothing when its leg ends. Over gRPC streams are no exception: their servers take
# every call that is cancelled before its first token for refused.
_ASK_AT_THEIR_END: Final = frozenset({"chat", "completions", "messages", "responses"})


class PrefillEvents(Protocol):
    """What a prefill leg tells of itself; nothing any more once it was dropped."""

    @property
    def fetched(self) -> bool:
        """The decode has shown that it has the KV cache."""

    def guarded(self, step: Callable[[], None]) -> None:
        """Do ``step``; a defect in it ends the request and nothing else."""

    def prefill_answered(self, leg: PrefillLeg, body: bytes) -> None:
        """Its answer is complete, and good."""

    def prefill_failed(self, leg: PrefillLeg, error: GatewayError) -> None:
        """It failed."""

    def kept_by(self, leg: PrefillLeg, body: bytes) -> bytes:
        """What a decode worker must be told for the KV cache to be freed that this answer of a dropped leg names."""


class PrefillLeg:
    """See the module.

    Args:
        session, head, path: the request, and the worker's path for it.
        placed: the workers.
        plan: whose prefill leg it is.
        leg_id: what workers are told for the request's id.
        tokens: of its prompt, about.
        keep: its answer's body is wanted whole.
        events: is told what happens.
    """

    __slots__ = (
        "_answer",
        "_answered_well",
        "_decoding",
        "_events",
        "_head",
        "_keep",
        "_leg",
        "_leg_id",
        "_limit",
        "_path",
        "_placed",
        "_session",
        "_tokens",
        "_turn",
        "_unsettled",
        "plan",
    )

    def __init__(
        self,
        session: Session,
        head: RequestHead,
        path: bytes,
        placed: Placed,
        plan: Plan,
        leg_id: bytes,
        tokens: int,
        *,
        keep: bool,
        events: PrefillEvents,
    ) -> None:
        self._session = session
        self._head = head
        self._path = path
        self._placed = placed
        self._leg_id = leg_id
        self._tokens = tokens
        self._keep = keep
        self._events = events
        self._leg: Leg | None = None
        self._answer: WholeAnswer | None = None
        self._turn = 0  # of its worker
        self._limit: Handle | None = None  # of a leg that is let finish although nobody wants its answer any more
        self.plan = plan
        self._answered_well: float | None = None  # when that was
        self._decoding = 0.0  # since when the decode leg is out
        self._unsettled = 0.0  # until then its decode may ask for what it has had

    @property
    def out(self) -> bool:
        """It was sent, and somebody waits for its answer."""
        return self._leg is not None and self._limit is None

    @property
    def _has_early_head(self) -> bool:
        """Its decode worker sends a head before it looks for a cache."""
        return self._session.record.stream and self._placed.handoff.early_heads

    def is_fetched_from(self, worker: Worker) -> bool:
        """Whether a decode may still wait for what ``worker`` sends of it, if that has been lost now."""
        pair, handoff = self._placed
        if worker is not pair.prefill or not handoff.pushes or self._answered_well is None:
            return False
        return self._session.gateway.clock.now() - self._answered_well < PUSH_SECONDS

    def send(self) -> None:
        """Send it. It counts on its worker until it ends, long before the request does."""
        session, plan, worker = self._session, self.plan, self._placed.pair.prefill
        gateway = session.gateway
        headers = leg_headers(gateway, self._head, self._path, (worker,), self._leg_id, len(plan.prefill))
        kind = RpcAnswer if worker.over_grpc else WholeAnswer
        answer = kind(
            worker,
            lambda answer: self._events.guarded(lambda: self._answered(answer)),
            lambda error: self._events.guarded(lambda: self._failed(error)),
            is_failure=self._placed.handoff.failed,
            answers_client=False,
            keep=self._keep,
        )
        self._answer = answer
        self._leg = gateway.egress.send(headers, plan.prefill, answer)
        self._turn = worker.begin(self._tokens)
        self._decoding = gateway.clock.now()
        if plan.rooms and gateway.config.bootstrap_timeout:
            gateway.to_meet(self)
        self.plan = plan._replace(prefill=b"", decode=b"")  # the bodies are on their way, and may be large

    def drop(self) -> None:
        """Nobody wants its answer: end it, on its worker too, or let it finish where the engines need that.

        Of one in turn that has begun to answer, the work is done, and only the rest of the answer names what it keeps.
        """
        leg = self._leg
        if leg is None or self._limit is not None:
            return
        if self._placed.handoff.lets_finish:
            self._limit = self._session.gateway.clock.after(LEFTOVER_SECONDS, self._give_up)
            return
        if self._placed.handoff.in_turn and self._answer is not None and self._answer.begun:
            self._limit = self._session.gateway.clock.after(REST_SECONDS, self._give_up)
            return
        leg.cancel()
        self._over()
        self._abort()

    def too_late(self) -> None:
        """It is answered when its decode has the KV cache, which should be so by now: end it as one that failed.

        The engines themselves wait no longer, each for the other, and say so in an error 500 of their own.
        """
        leg = self._leg
        if leg is None or self._limit is not None or self._events.fetched:
            return
        gateway = self._session.gateway
        leg.cancel()
        events = self._over()
        self._session.record.prefill_ended = gateway.clock.now()
        error = waited_in_vain(f"not within {gateway.config.bootstrap_timeout:g} s")
        events.guarded(lambda: events.prefill_failed(self, apart(self._placed.pair, self.plan.rooms, error)))
        self._abort()

    def _abort(self) -> None:
        """End its work on its worker."""
        pair, handoff = self._placed
        aborts = handoff.aborts(self.plan)
        send_orders(self._session.gateway, self._head, [(pair.prefill,)], aborts, self._session.record.request_id)

    def unpin(self, error: GatewayError) -> None:
        """Free what a decode keeps for it: it failed with ``error``, and the decode's leg has ended, or soon will."""
        unpin(self._session, self._head, self._placed, self.plan, error)

    def decode_failed(self, code: str, status: int) -> bytes:
        """Its decode leg failed without a good answer: see to what the decode worker may not have told the prefill.

        Args:
            code: of the error that Envoy made up; empty for a worker's answer.
            status: a worker's.

        Returns what a decode worker must be told for the KV cache to be freed, if that is all that must be done.
        """
        if never_fetched(code, status, early=self._has_early_head):
            return self.plan.params
        self.settle(refused=True)
        return b""

    def settle(self, *, refused: bool = False) -> None:
        """Its decode leg has ended before it had a good answer: leave nothing of the transfer, once this one is done.

        What a decode asks for before, is answered then; so a leg that we ended, and so a decode that has most likely
        seen the request, matters only where that was just before: it may ask once more just after.

        Args:
            refused: the decode leg was not ended by us.
        """
        session, since = self._session, self._decoding
        if self._answered_well is not None:
            waited = session.gateway.clock.now() - since
            asks_itself = session.record.api in _ASK_AT_THEIR_END and not self._has_early_head
            taken = not refused and asks_itself and waited >= TAKEN_SECONDS
            settle(session, self._head, self._placed, self.plan, since, taken=taken)
        else:
            self._unsettled = inf if refused else session.gateway.clock.now() + SETTLE_SECONDS

    def _answered(self, answer: WholeAnswer) -> None:
        self._answered_well = now = self._session.gateway.clock.now()
        self._placed.pair.prefill.answered(self._turn)
        in_turn = self._placed.handoff.in_turn
        if self._limit is not None:
            events = self._let_finish()
            if in_turn:
                self._free(events.kept_by(self, answer.body) or self.plan.params)
            elif now < self._unsettled:
                self.settle(refused=self._unsettled == inf)
            return
        if in_turn:
            self._decoding = now
        events = self._over()
        self._session.record.prefill_ended = now
        events.prefill_answered(self, answer.body)

    def _failed(self, error: GatewayError) -> None:
        if self._leg is not None:
            self._leg.cancel()  # one whose head alone says so goes on
        charge((self._placed.pair.prefill,), error, self._turn)
        if self._limit is not None:
            self._let_finish()
            if not self._placed.handoff.in_turn:  # else no decode waits for it
                self.unpin(error)
            return
        events = self._over()
        self._session.record.prefill_ended = self._session.gateway.clock.now()
        events.prefill_failed(self, apart(self._placed.pair, self.plan.rooms, error))

    def _free(self, params: bytes) -> None:
        """Have a decode worker say that nobody will fetch the cache. None has asked for it: no more is needed."""
        pair, handoff = self._placed
        session, orders = self._session, handoff.forgets(params)
        send_orders(session.gateway, self._head, [pair.decodes], orders, session.record.request_id)

    def _let_finish(self) -> PrefillEvents:
        """It has ended by itself; as :meth:`_over`."""
        if self._limit is not None:
            self._limit.cancel()
        return self._over()

    def _give_up(self) -> None:
        if self._leg is not None:
            self._leg.cancel()
            self._over()

    def _over(self) -> PrefillEvents:
        """It has ended. Whom it tells of that is returned, and forgotten: the two refer to each other."""
        events = self._events
        del self._events
        self._leg = self._limit = self._answer = None
        self._session.gateway.met(self)
        self._placed.pair.prefill.end(self._turn, self._tokens)
        return events
