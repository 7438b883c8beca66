"""One attempt at a relayed request: pairs of legs, all on the same two workers, that live and end together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.apis.table import RESPONSES
from extproc.errors import GatewayError
from extproc.exchange.answers import WholeAnswer, answered_by, broke_at, refused_before, tellable
from extproc.exchange.attempts import KvMissing
from extproc.exchange.clock import Handle
from extproc.exchange.failures import apart, charge, kv_missing, loss_of, refused
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import leg_headers, leg_path
from extproc.exchange.orders import send_orders
from extproc.exchange.placed import Placed
from extproc.exchange.prefill_leg import PrefillLeg
from extproc.exchange.record import NO_PARAMS, WAIVED
from extproc.exchange.stored import naming
from extproc.handoff.handoff import Handed, Handoff, Kv, Plan
from extproc.merge.parts import Joint, leg_edits
from extproc.policies.placement import Pair
from extproc.transport.interface import Header, Leg, Lost
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session


_log: Final = logging.getLogger(__name__)
_OUTPUT: Final = b"event: response.output"  # ..._item.added, ..._text.delta


class AttemptEvents(Protocol):
    """What an attempt tells of itself; nothing any more once it was dropped."""

    def prefill_done(self, part: int, body: bytes) -> None:
        """A prefill leg's answer is complete."""

    def decode_head(self, headers: Sequence[Header]) -> None:
        """A decode leg answers 2xx."""

    def decode_data(self, part: int, chunk: bytes) -> None:
        """A piece of a decode leg's answer."""

    def decode_done(self, part: int) -> None:
        """A decode leg's answer is complete."""

    def broke(self) -> None:
        """A defect of ours."""

    def leg_failed(self, error: GatewayError, workers: Sequence[Worker]) -> None:
        """A leg failed, and with it the attempt; ``workers`` is where it was tried."""


class Part:
    """One pair of legs; the LegReceiver of its decode leg, and its prefill leg's PrefillEvents."""

    __slots__ = (
        "_attempt",
        "_refusal",
        "begun",
        "blaming",
        "decode",
        "headed",
        "index",
        "params",
        "plan",
        "prefill",
        "tokens",
        "turn",
        "worker",
    )

    def __init__(self, attempt: Attempt, index: int, worker: Worker, tokens: int) -> None:
        self._attempt = attempt
        self._refusal: WholeAnswer | None = None  # receives an answer that is an error
        self.index = index
        self.worker = worker  # who decodes, as far as known
        self.tokens = tokens  # of its prompt, about
        self.turn = 0  # of that worker, while the decode leg is out
        self.headed = False  # it is known
        self.begun = False  # a token of the answer has come
        self.blaming: Handle | None = None  # of an error that is kept back for the prefill's fate
        self.plan: Plan | None = None
        self.params = b""  # what a decode may still have to be told of, for the prefill to free the KV cache
        self.prefill: PrefillLeg | None = None
        self.decode: Leg | None = None

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self._attempt.answered(self, headers)
        if 200 <= status < 300:
            self.params = b""  # the decode has the request: it fetches the cache, or has it freed when it is aborted
            self._attempt.kept(self)
            self._attempt.events.decode_head(headers)
        else:
            self._refusal = self._attempt.refusal_of(self)
            self._refusal.head(status, headers)

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""
        if self._refusal is not None:
            self._refusal.data(chunk)
        else:
            self.begun = self.begun or self._attempt.shows_token(chunk)
            self._attempt.events.decode_data(self.index, chunk)

    def trailers(self, headers: Sequence[Header]) -> None:
        """See LegReceiver. HTTP's say nothing that matters."""

    def done(self) -> None:
        """See LegReceiver."""
        refusal, turn = self._refusal, self.turn
        self.over()
        if refusal is not None:
            refusal.done()
        else:
            self.worker.answered(turn)
            self._attempt.learn(self.worker)
            self._attempt.events.decode_done(self.index)

    def lost(self, reason: Lost, detail: str) -> None:
        """See LegReceiver."""
        error = loss_of(self.worker, reason, detail)
        charge((self.worker,), error, self.turn)
        self.over()
        self._attempt.lost(self, error)

    def guarded(self, step: Callable[[], None]) -> None:
        """See PrefillEvents."""
        self._attempt.guarded(step)

    def prefill_answered(self, leg: PrefillLeg, body: bytes) -> None:  # noqa: ARG002 - PrefillEvents' signature
        """See PrefillEvents."""
        self._attempt.prefill_answered(self, body)

    def prefill_failed(self, leg: PrefillLeg, error: GatewayError) -> None:
        """See PrefillEvents."""
        self.params = b""  # nothing was computed that could be freed
        if self.decode is not None:
            leg.unpin(error)
        self._attempt.events.leg_failed(error, (self._attempt.prefill,))

    def kept_by(self, leg: PrefillLeg, body: bytes) -> bytes:
        """See PrefillEvents."""
        return self._attempt.handed(self, leg.plan, body).params

    @property
    def fetched(self) -> bool:
        """See PrefillEvents."""
        return self.begun

    @property
    def prefilling(self) -> bool:
        """The prefill leg is out."""
        return self.prefill is not None and self.prefill.out

    def may_wait_for(self, worker: Worker) -> bool:
        """The decode may have nothing of the cache that ``worker``, which is lost, was to send."""
        return (
            self.decode is not None
            and not self.begun
            and self.prefill is not None
            and self.prefill.is_fetched_from(worker)
        )

    def over(self) -> None:
        """The decode leg has ended."""
        self.decode = None
        self._refusal = None  # it refers back to us
        self.worker.end(self.turn, self.tokens)


class Attempt:
    """See the module.

    Args:
        session, head, request: whose attempt it is.
        placed: the workers.
        joint: in how many parts the request is served.
        keep_prefills: the bodies of the prefills' answers are wanted whole.
        events: is told what happens.
    """

    def __init__(
        self,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        placed: Placed,
        joint: Joint,
        *,
        keep_prefills: bool,
        events: AttemptEvents,
    ) -> None:
        self._session = session
        self._head = head
        self._request = request
        self._placed = placed
        pair, self._handoff = placed
        self._joint = joint
        self._keep_prefills = keep_prefills
        self._paused = False  # the client does not read what there is already
        self._unreachable = False  # none of the decode workers accepts a connection
        self.events = events
        self.prefill = pair.prefill
        self._decodes = pair.decodes
        tokens = request.prompt_tokens() // max(1, len(joint.prompts))
        self._parts = [self._part(index, pair.decodes[0], tokens) for index in range(joint.parts)]
        self._stored, self._members = naming(session.gateway.stored, request, pair.decodes[0], session.take_own_id())

    def _part(self, index: int, worker: Worker, tokens: int) -> Part:
        return Part(self, index, worker, tokens)

    def _handoff_of(self, part: Part) -> Handoff:  # noqa: ARG002 - what another kind of attempt asks
        """What prepares a part's legs."""
        return self._handoff

    def _path(self) -> bytes:
        """The workers' path for the legs."""
        return leg_path(self._request.api, self._head.path)

    @property
    def busy(self) -> bool:
        """A leg is out."""
        return any(part.prefilling or part.decode for part in self._parts)

    def send(self) -> None:
        """Send the prefill legs, and the decode legs unless they wait for those."""
        self._say(Kv.HANDED)
        for part in self._parts:
            self._send(part)

    def send_decodes(self) -> None:
        """Send the decode legs alone: the decode worker is to do without the prefill."""
        self._say(Kv.RECOMPUTED, WAIVED)
        self._session.record.prefill = ""  # it did not serve
        for part in self._parts:
            part.plan = self._unaided(part)
            self._hand_over(part, b"")

    def _unaided(self, part: Part) -> Plan:  # noqa: ARG002 - what another kind of attempt asks
        """What the decode leg of a part is made of that has no prefill."""
        return Plan(b"", b"")

    def send_alone(self, body: bytes) -> None:
        """Send the one leg of a request that a worker answers by itself; what is known of its cache stays so."""
        record = self._session.record
        record.prefill = record.decode = ""
        for part in self._parts:
            self._send_decode(part, body)

    def waits_for(self, worker: Worker) -> Callable[[], bool]:
        """What tells whether some decode still waits for what ``worker``, which is lost now, was to send."""
        parts = [part for part in self._parts if part.may_wait_for(worker)]
        return lambda: any(part.decode is not None and not part.begun for part in parts)

    def _say(self, kv: Kv, note: str = "") -> None:
        record = self._session.record
        record.handoff, record.prefill, record.decode = self._handoff.name, self.prefill.name, ""
        record.kv, record.note = kv.value, note

    def pause(self) -> None:
        """Have the decodes wait, and those that begin meanwhile."""
        self._paused = True
        for part in self._parts:
            if part.decode is not None:
                part.decode.pause()

    def resume(self) -> None:
        """Have them go on."""
        self._paused = False
        for part in self._parts:
            if part.decode is not None:
                part.decode.resume()

    def drop(self) -> None:
        """End every leg that is out, on its worker too."""
        for part in self._parts:
            if part.blaming is not None:
                part.blaming.cancel()
                part.blaming = None
            if part.prefill is not None:
                part.prefill.drop()
            if part.decode is not None:
                self._end_decode(part)
                if part.prefill is not None and not part.headed:
                    part.prefill.settle()
                # Until a head comes, Envoy may be with any worker of the list: it says where it is only then.
                self._abort(part, (part.worker,) if part.headed else self._decodes)
            params, part.params = part.params, b""
            if params and (workers := self._reachable(part)):
                self._order(self._handoff.forgets(params), [workers])

    def _end_decode(self, part: Part) -> None:
        """Nobody wants the answer of a decode leg that is out."""
        assert part.decode is not None
        part.decode.cancel()
        part.over()

    def _reachable(self, part: Part) -> Sequence[Worker]:
        """Decode workers that can have a prefill free what it holds."""
        failed = part.worker if part.headed else None
        placer = self._session.gateway.placer
        return tellable(placer, self._request, self._decodes, failed, unreachable=self._unreachable)

    def finish(self) -> None:
        """The same, and give back what the attempt took."""
        try:
            self.drop()
        finally:
            for part in self._parts:
                plan, part.plan = part.plan, None
                part.prefill = None  # it refers back to the part
                if plan is not None:
                    self._handoff.release(plan)
            self._parts.clear()  # they refer back to us
            self._session.drop_promise()

    def learn(self, worker: Worker) -> None:
        """A leg on ``worker`` was answered as it should be: placement may go by it."""
        self._session.gateway.placer.answered(self._request, worker)

    # -- what the decode legs tell --------------------------------------------------------------------------------

    def answered(self, part: Part, headers: Sequence[Header]) -> None:
        """A decode leg has its answer's head, and with it the word of who answers."""
        served = answered_by(self._decodes, headers)
        if served is None:
            if broken := broke_at(self._decodes, headers):
                self._is_with(part, broken)
            return
        part.headed = True
        served.answers += 1
        self._is_with(part, served)
        if served.role is Role.PREFILL:
            self._session.record.prefill = served.name
        else:
            self._session.record.decode = served.name

    def refusal_of(self, part: Part) -> WholeAnswer:
        """What receives a decode leg's answer that is an error."""
        return WholeAnswer(
            part.worker,
            lambda _: None,
            lambda error: self._refused(part, error),
            is_failure=self._handoff.failed,
            answers_client=True,
        )

    def shows_token(self, chunk: bytes) -> bool:
        """Whether the first pieces of an answer, of which this is one, mean that the decode has the KV cache."""
        return self._request.api is not RESPONSES or _OUTPUT in chunk  # whose first events repeat the request

    def kept(self, part: Part) -> None:
        """A decode leg answers 2xx: its worker may keep the answer."""
        if self._stored:
            self._session.gateway.stored.made(self._stored, part.worker)

    def lost(self, part: Part, error: GatewayError) -> None:
        """A decode leg has broken off."""
        if not part.headed:
            self._untold(part, error.fault.code)
        self.events.leg_failed(error, (part.worker,))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_with(self, part: Part, worker: Worker) -> None:
        """Envoy says where a decode leg is: after a fail-over that is not the first of the list."""
        if worker is not part.worker:
            refused(self._session.gateway, refused_before(self._decodes, worker), part.turn)
            part.worker.end(part.turn, part.tokens)
            part.worker, part.turn = worker, worker.begin(part.tokens)

    def _untold(self, part: Part, code: str, status: int = 0) -> None:
        """See to what a decode worker that failed before its answer may not have told the prefill."""
        if part.prefill is not None:
            untold = part.prefill.decode_failed(code, status)
            part.params = part.params or untold

    def _refused(self, part: Part, error: GatewayError) -> None:
        """A decode leg has an error: its own, or, if its prefill fails just now, that one's."""
        if part.plan is not None:
            error = apart(Pair(self.prefill, (part.worker,)), part.plan.rooms, error)
        blame = self._handoff.blame
        if blame and error.answered == 500 and part.prefilling:
            decided = partial(self.guarded, partial(self._refused_for_good, part, error))
            part.blaming = self._session.gateway.clock.after(blame, decided)
        else:
            self._refused_for_good(part, error)

    def _refused_for_good(self, part: Part, error: GatewayError) -> None:
        part.blaming = None
        self._unreachable = error.fault.code.endswith("_unreachable")
        partner = self.prefill if part.prefill is not None else None
        charge(self._decodes if self._unreachable else (part.worker,), error, part.turn, partner)
        code = "" if part.headed else error.fault.code
        self._untold(part, code, error.status)
        self.events.leg_failed(error, self._decodes if self._unreachable else (part.worker,))

    def _edits(self, part: Part) -> LegEdits:
        """In what the part's legs differ from the client's request."""
        edits = leg_edits(self._request, self._joint, part.index)
        if not self._members:
            return edits
        prefill, decode = [Edits({**leg.put, **self._members}, leg.drop) for leg in edits[:2]]
        return LegEdits(prefill, decode, edits.prompt_logprobs)

    def _send(self, part: Part) -> None:
        session, handoff = self._session, self._handoff_of(part)
        gateway = session.gateway
        edits = self._edits(part)
        trusts, decode = gateway.config.trust_client, self._decodes[0]
        plan = handoff.plan(self._request, self.prefill, edits, trust_client=trusts, decode=decode)
        keep = self._keep_prefills or handoff.in_turn
        path = self._path()
        leg = part.prefill = PrefillLeg(
            session, self._head, path, self._placed, plan, self._leg_id(part), part.tokens, keep=keep, events=part
        )
        leg.send()
        part.plan = leg.plan
        if not handoff.in_turn:
            self._send_decode(part, plan.decode)

    def _send_decode(self, part: Part, body: bytes) -> None:
        gateway, head = self._session.gateway, self._head
        path = self._path()
        headers = leg_headers(gateway, head, path, self._decodes, self._leg_id(part), len(body))
        leg = part.decode = gateway.egress.send(headers, body, part)
        if self._request.stream:
            leg.trickle()
        if self._paused:
            leg.pause()
        if self._session.promise:
            self._session.use_room(part.worker)
        part.turn = part.worker.begin(part.tokens)

    def _leg_id(self, part: Part) -> bytes:
        """What workers are told for the request's id: engines name a request after it."""
        leg_id = self._session.record.leg_id
        return leg_id + b"-%d" % part.index if part.index and self._handoff.prefixes_ids else leg_id

    def prefill_answered(self, part: Part, body: bytes) -> None:
        """A prefill leg's answer is complete."""
        self.learn(self.prefill)
        if self._handoff.in_turn and not self._hand_over(part, body):
            self.events.leg_failed(kv_missing(self.prefill), (self.prefill,))
        else:
            self.events.prefill_done(part.index, body)

    def handed(self, part: Part, plan: Plan, answer: bytes) -> Handed:
        """What follows from the prefill's answer."""
        handoff, edits, trusts = self._handoff_of(part), self._edits(part), self._session.gateway.config.trust_client
        return handoff.handed(self._request, plan, edits.decode, answer, trust_client=trusts)

    def guarded(self, step: Callable[[], None]) -> None:
        """Do ``step``; a defect ends the request and nothing else."""
        try:
            step()
        except Exception:  # noqa: BLE001 - logged; whatever it is, the client must hear of it
            _log.exception("request %s", self._session.record.request_id.decode("latin-1"))
            self.events.broke()

    def _hand_over(self, part: Part, answer: bytes) -> bool:
        """Send the decode leg that the prefill's answer makes; False where that is none and there must be one."""
        plan, session = part.plan, self._session
        assert plan is not None
        config = session.gateway.config
        handed = self.handed(part, plan, answer)
        part.params = handed.params
        if handed.kv is not Kv.HANDED:  # one part that is not decides
            session.record.kv = handed.kv.value
        if handed.kv is Kv.RECOMPUTED and answer:
            session.record.note = NO_PARAMS
            if config.kv_missing is KvMissing.FAIL:
                return False
        self._send_decode(part, handed.decode)
        return True

    def _abort(self, part: Part, workers: Sequence[Worker]) -> None:
        if part.plan is not None:
            self._order(self._handoff.aborts(part.plan), [(worker,) for worker in workers])

    def _order(self, orders: Sequence[tuple[bytes, bytes]], recipients: Sequence[Sequence[Worker]]) -> None:
        send_orders(self._session.gateway, self._head, recipients, orders, self._session.record.request_id)
