"""One ``Process`` stream of Envoy's: collects the request, sends it on its course, answers what cannot be served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from hmac import compare_digest
from typing import Final, Protocol, TypeVar

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.admission.priority import Priority
from extproc.apis.request import ABOUT_STORED, InferenceRequest
from extproc.apis.table import Api, Flow, api_of, stored_name
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.attempts import Attempts, OnPrefillFailure
from extproc.exchange.choice import PairChoice
from extproc.exchange.clock import ABANDONED, Handle
from extproc.exchange.direct import DirectCourse
from extproc.exchange.failures import refuse_unknown
from extproc.exchange.gateway import Gateway, draining
from extproc.exchange.headers import HeaderValue, RequestHead, client_request_id, new_request_id, subset, with_served
from extproc.exchange.lone import Lone, apart_of, kept_by, without_pair
from extproc.exchange.outlet import Late
from extproc.exchange.placed import Placed
from extproc.exchange.record import WAIVED, Record, naming_headers
from extproc.exchange.relayed import RelayedCourse
from extproc.exchange.rpc import Rpc, RpcRequest
from extproc.exchange.rpc_placing import Cancelling, but, rpc_alone, rpc_course, served_over_grpc
from extproc.exchange.seats import NOBODY, Seeking, lone_room, pair_room
from extproc.exchange.selected import SelectedCourse
from extproc.generation.asked import Asked
from extproc.handoff.handoff import Alone, Handoff, Kv
from extproc.merge.parts import check_parts, joint_of
from extproc.names import LATE
from extproc.policies.room import NoRoomError, Room
from extproc.text.tokenizer import Prepared, Tokenizer
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Call
from extproc.workers.worker import Role, Worker

_log: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOGGED_MODEL: Final = 256  # characters; a client may send any number


# Of the body of a request that waits to be let in. The rest stays with Envoy, but for what it may send unasked (1 MiB).
# Most bodies are smaller: an Envoy that may not pass on what it has reads no more either, and so does not see that a
# client over HTTP/1.1 has left.
_KEPT_WAITING: Final = 1 << 20
# What gRPC workers cannot be given, and others might.
_UNTOLD: Final = frozenset({"unsupported_parameter", "not_implemented", "tokenizer_not_found"})


class Course(Protocol):
    """How an accepted request is served, from its release to its end."""

    def start(self) -> None:
        """Send the legs."""

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:
        """Envoy has the head of the decode's answer and waits for our word."""

    def drained(self) -> None:
        """Envoy took what was queued."""

    def end(self, error: GatewayError) -> None:
        """The request's time is over."""

    def closed(self) -> None:
        """Envoy ended the stream."""

    def abandon(self) -> None:
        """Envoy should have ended the stream long ago: give the call up."""

    def prefill_lost(self, worker: Worker) -> None:
        """A prefill worker is gone."""


class Session:
    """A CallHandler for one HTTP request. Where it must wait to be let in, it is an Entrant of the gate."""

    queues = True  # it needs a slot of the gate

    __slots__ = (
        "_answered",
        "_api",
        "_bodyless",
        "_complete",
        "_course",
        "_entered",
        "_head",
        "_late",
        "_named",
        "_parts",
        "_paused",
        "_promised",
        "_rpc",
        "_size",
        "_waiter",
        "bare",
        "call",
        "deadline",
        "gateway",
        "notes",
        "priority",
        "promise",
        "record",
        "trailed",
    )

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self.gateway = gateway
        self.call = call
        self.record = Record(gateway.clock.now())
        self._head: RequestHead | None = None
        self._api: Api | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._course: Course | None = None
        self._answered = False
        self._bodyless = False  # the request ended with its head
        self._named = False  # by the client, or something has its name already
        self.priority = Priority.DEFAULT
        self._entered = False  # it has a slot of the gate
        self._waiter: Handle | None = None  # its place among those that wait, for the gate or for workers
        self._complete = False  # all of it has come, while it waits to be let in
        self._paused = False  # no more of it is asked for meanwhile
        self.promise = 0  # legs that a worker keeps room for
        self._promised: Worker | None = None  # which
        self.notes: dict[object, object] = {}  # what placement has worked out of the request
        self.bare = False  # the worker's answer has ended with its head
        self.trailed = False  # the worker's answer has ended with trailers: Envoy ends this call, though not the answer
        self._rpc: RpcRequest | None = None  # the request as tokens, if gRPC workers may serve it
        self._late: Late | None = None  # this is the second call of another session's request
        self.deadline = gateway.enter(self)  # by the gateway's clock

    def received(self, message: bytes) -> None:
        """See CallHandler."""
        if self._answered:
            return  # what Envoy had sent before it heard our answer
        request = ProcessingRequest.FromString(message)
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            headers = request.request_headers
            self._bodyless = headers.end_of_stream
            head = RequestHead.of(headers.headers.headers)
            if request.HasField("metadata_context"):  # not from our Envoy
                head = head._replace(within=subset(request.metadata_context))
            self._on_head(head)
            if headers.end_of_stream:
                self._on_complete()
        elif kind == "request_body":
            self._on_body(request.request_body.body)
            if request.request_body.end_of_stream:
                self._on_complete()
        elif kind == "request_trailers":
            self._on_complete()
        else:
            self._on_answer(kind, request)

    def _on_answer(self, kind: str | None, request: ProcessingRequest) -> None:
        """A part of a worker's answer came."""
        late = self._late
        if kind == "response_body":
            body = request.response_body
            if late is not None:
                late.received(body.body)
                if body.end_of_stream:
                    late.ended()
            else:  # another's Envoy may show every answer and wait for it to be given back, as endpoint pickers must
                for message in wire.response_body_replies(body.body, end=body.end_of_stream):
                    self.call.send(message)
        elif kind == "response_headers":
            if self._course is not None:
                self.bare = request.response_headers.end_of_stream
                headers = request.response_headers.headers.headers
                if request.HasField("metadata_context"):  # not from our Envoy
                    headers = with_served(headers, request.metadata_context)
                self._course.response_headers(headers)
            elif self._head is None and late is None:
                self._adopt(request.response_headers.headers.headers)
        elif kind == "response_trailers":
            if late is None:
                self.trailed = True
                self.call.send(wire.response_trailers_reply())
            else:
                late.trailers(request.response_trailers.trailers.headers)

    def drained(self) -> None:
        """See CallHandler."""
        if self._course is not None:
            self._course.drained()
        elif self._late is not None:
            self._late.drained()

    def closed(self) -> None:
        """See CallHandler."""
        if self._course is not None:
            self._course.closed()
        elif self._late is not None:
            self._late.closed()
        elif self.alive:  # else the request's second call was the last
            self.finish()

    def end(self, error: GatewayError) -> None:
        """See Mortal."""
        if self._course is not None:
            self._course.end(error)
        elif not self._answered:
            self.reject(error)

    def abandon(self) -> None:
        """See Mortal."""
        if self._course is not None:
            self._course.abandon()
        else:
            self.call.abort(Status.INTERNAL, ABANDONED)

    def prefill_lost(self, worker: Worker) -> None:
        """See Mortal."""
        if self._course is not None:
            self._course.prefill_lost(worker)

    def reject(self, error: GatewayError) -> None:
        """Answer the client with ``error``; where an answer has begun, Envoy cuts it instead."""
        record = self.record
        self._answered = True
        self._stop_waiting()
        self._parts.clear()
        if not record.status:
            record.kv = record.note = ""  # whatever was handed over, nothing came of it
            record.status = error.status
        record.code = error.fault.code
        record.message = error.message
        headers = [*error.headers, (b"x-request-id", record.request_id)]
        if self.gateway.config.response_headers:
            headers += naming_headers(record)
        self.call.send(wire.immediate_reply(error.status, headers, error.body))

    def tried_in_vain(self, error: GatewayError) -> None:
        """An attempt failed, and another follows: the client does not hear of this one, so that the log must say it."""
        record = self.record
        _log.info(
            "attempt failed, another follows",
            extra={
                "request_id": record.request_id.decode("latin-1"),
                "attempt": record.attempts,
                "handoff": record.handoff or None,
                "prefill": record.prefill or None,
                "decode": record.decode or None,
                "code": error.fault.code,
                "reason": error.message,
            },
        )

    def hand_on(self, course: Course) -> None:
        """Another course goes on with the request."""
        self._course = course

    def take_own_id(self) -> bytes:
        """The request's id, to name one thing after; empty if the client chose it or something has its name."""
        named, self._named = self._named, True
        return b"" if named else self.record.request_id

    @property
    def alive(self) -> bool:
        """The request is not over."""
        return not self.record.ended

    def finish(self) -> None:
        """The request is over: give back what it held, and tell the observer."""
        gateway = self.gateway
        self._stop_waiting()
        self.drop_promise()
        self.record.ended = gateway.clock.now()
        self._parts.clear()
        self._rpc = None
        self._course = None  # it refers back to us: without the cycle both are freed at once, not by the collector
        gateway.leave(self)
        try:
            if self.notes:
                gateway.placer.over(self.notes)
            if self._head is not None or self._answered:  # else the client left before anything is known of its request
                gateway.observer.finished(self.record)
        finally:
            if self._entered:
                self._entered = False
                gateway.gate.leave(self.priority, self)

    # -- admission ------------------------------------------------------------------------------------------------

    def admitted(self) -> None:
        """See Entrant."""
        self._entered = True
        self._flow()
        if self._complete:
            self._on_complete()

    @property
    def unanswered(self) -> bool:
        """See Entrant."""
        record = self.record
        return not (self._answered or record.headed or record.status or record.ended)

    def preempted(self, error: GatewayError) -> None:
        """See Entrant."""
        self.gateway.cut_short(self, error)

    def refused(self, error: GatewayError) -> None:
        """See Waits."""
        self.reject(error)

    def waited(self, seconds: float) -> None:
        """See Waits."""
        self._waiter = None
        self.record.queued += seconds

    def seeking(
        self,
        request: InferenceRequest,
        legs: int,
        need: Hashable,
        step: Callable[[Collection[Worker]], None],
        refused: Callable[[GatewayError], None],
    ) -> Seeking:
        """What waits for workers in the request's place: see Seeking."""
        return Seeking(self.gateway.placer, request, legs, self.priority, need, step, refused, self.waited)

    def keep_room(self, worker: Worker, legs: int) -> None:
        """Have ``worker`` keep room for legs that are sent later; each is told of by :meth:`use_room`."""
        self.drop_promise()
        if worker.limit is not None:
            worker.promised += legs
            self._promised, self.promise = worker, legs

    def use_room(self, sent_to: Worker) -> None:
        """One of these legs is sent now, there or to another. To be asked only while there is a promise."""
        worker = self._promised
        assert worker is not None
        worker.promised -= 1
        self.promise -= 1
        if not self.promise:
            self._promised = None
        if worker is not sent_to:
            worker.freed(worker)

    def drop_promise(self) -> None:
        """There will be no such legs any more."""
        worker, legs = self._promised, self.promise
        if worker is not None:
            self._promised, self.promise = None, 0
            worker.promised -= legs
            worker.freed(worker)

    def _enter(self, head: RequestHead) -> None:
        """Take a slot of the gate, or wait for one. Raises GatewayError when it may not."""
        gate = self.gateway.gate
        if gate.classed:
            self.priority = self.gateway.config.tenants.priority(head.fields)
        if gate.enter(self.priority, self):
            self._entered = True
            return
        waiter = gate.wait(self.priority, self)
        if not self._entered:
            self._waiter = waiter

    def _stop_waiting(self) -> None:
        if self._waiter is not None:
            self._waiter.cancel()
        self._flow()

    def _flow(self) -> None:
        if self._paused:
            self._paused = False
            self.call.resume()

    def _wait_for_room(self, head: RequestHead, request: InferenceRequest) -> None:
        """Stand in line for workers. Raises GatewayError when it may not."""
        apart = apart_of(self.gateway, request)
        legs = max(request.samples, request.prompts or 1) if self._rpc is None else self._rpc.count
        legs = 1 if apart is not None else legs
        need = (request.api.flow, request.model, apart, request.within)

        def step(taken: Collection[Worker]) -> None:
            rpc = self._rpc
            if rpc is not None and rpc.outdated:
                self._rpc = None
                self.gateway.clock.after(0.0, lambda: self._tokenise_again(head, request))
                return
            try:
                self._begin(self._course_of(head, request, taken))
            except NoRoomError:
                raise
            except GatewayError as error:
                self.reject(error)
            except Exception:  # noqa: BLE001 - as in _on_complete
                self._broke()

        seeking = self.seeking(request, legs, need, step, self.reject)
        seeking.lone = apart is not None
        waiter = self.gateway.legs.wait(seeking)
        if waiter is not None:
            self._waiter = waiter

    # -- the request ----------------------------------------------------------------------------------------------

    def _on_head(self, head: RequestHead) -> None:
        self._head = head
        config = self.gateway.config
        api = self._api = api_of(head.path)
        record = self.record
        given = client_request_id(head, config.request_id_headers)
        self._named = given is not None
        record.request_id = record.leg_id = given or new_request_id(api.id_prefix if api else "req-")
        if api is None:
            self.reject(GatewayError("not_found", f"Invalid URL ({head.method} {head.path})"))
            return
        record.api = api.name
        try:
            self._admit(head)
            if self.queues and api.flow is not Flow.KEEPER:
                self._enter(head)
        except GatewayError as error:
            self.reject(error)

    def _adopt(self, headers: Iterable[HeaderValue]) -> None:
        """A call that begins with an answer's head is the second one of a request: see outlet.Late."""
        late_id = next((header.raw_value for header in headers if header.key == LATE), b"")
        reply = self.gateway.late.get(late_id)
        if reply is None:
            self.call.abort(Status.INTERNAL, "nobody waits for this answer")
            return
        self.gateway.leave(self)
        self._late = reply
        reply.opened(self.call, headers)

    def _admit(self, head: RequestHead) -> None:
        gateway = self.gateway
        if gateway.api_key is not None:
            scheme, _, key = head.fields.get("authorization", b"").partition(b" ")
            if not compare_digest(key.strip(), gateway.api_key) or scheme.lower() != b"bearer":
                raise GatewayError("unauthorized", "Missing or wrong API key: send 'Authorization: Bearer <key>'")
        if gateway.draining:
            raise draining()
        announced = head.fields.get("content-length")
        if announced is not None and announced.isdigit():
            self._check_size(int(announced))

    def _check_size(self, size: int) -> None:
        limit = self.gateway.config.max_payload_bytes
        if size > limit:
            raise GatewayError("payload_too_large", f"the body is larger than {limit} bytes")

    def _on_body(self, chunk: bytes) -> None:
        self._size += len(chunk)
        try:
            self._check_size(self._size)
        except GatewayError as error:
            self.reject(error)
        else:
            self._parts.append(chunk)
            if self._waiter is not None and self._size > _KEPT_WAITING and not self._paused:
                self._paused = True
                self.call.pause()

    def _on_complete(self) -> None:
        head, api = self._head, self._api
        if self._answered or self._course is not None or head is None or api is None:
            return
        if self._waiter is not None:
            self._complete = True
            return
        parts = self._parts
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        try:
            course = self._set_course(api, head, raw)
            if course is not None:
                self._begin(course)
        except GatewayError as error:
            self.reject(error)
        except Exception:  # noqa: BLE001 - whatever it is, the client must hear of it and the service must go on
            self._broke()

    def _begin(self, course: Course) -> None:
        self._course = course
        course.start()

    def _broke(self) -> None:
        """To be called while the exception is being handled."""
        _log.exception("request %s failed", self.record.request_id.decode("latin-1"))
        self.reject(GatewayError("internal_error", "the gateway failed; its log says why"))

    def _set_course(self, api: Api, head: RequestHead, raw: bytes) -> Course | None:
        """The request's course; None where it waits for workers first."""
        if api.flow is Flow.KEEPER:
            return self._about_stored(head, raw)
        request = InferenceRequest.read(api, raw, head.fields, head.within)
        self.notes = request.notes
        model = self.gateway.config.model_aliases.get(request.model or "")
        if model is not None:
            request = request.renamed(model)
        record = self.record
        record.model = (request.model or "")[:_LOGGED_MODEL]
        record.stream = request.stream
        record.samples = request.samples
        rpc = None if self.gateway.config.select_only else self.gateway.rpc
        if rpc is not None and rpc.workers and rpc.may_serve(self.gateway.placer, request):
            self._tokenise(rpc, head, rpc.named(self.gateway.placer, request))
            return None
        if rpc is not None and rpc.workers and rpc.answers(self.gateway.placer, request):
            self._wait_for(partial(rpc.endpoints.answer, api, raw, request.model), self._answer)
            return None
        return self._place(head, request)

    def _place(self, head: RequestHead, request: InferenceRequest) -> Course | None:
        """The same of a request of which all is known that workers need."""
        if not self.gateway.legs.waiting:  # else those come first
            try:
                return self._course_of(head, request, NOBODY)
            except NoRoomError:
                pass
        self._wait_for_room(head, request)
        return None

    def _tokenise(self, rpc: Rpc, head: RequestHead, request: InferenceRequest) -> None:
        """Have the prompts made tokens, then go on: at once where they are short."""
        try:
            asked = RpcRequest.read(request)
        except GatewayError as error:
            self._otherwise(rpc, head, request, error)
            return
        self._wait_for(
            partial(rpc.texts.prepare, asked),
            partial(self._tokenised, rpc, head, request, asked, rpc.texts.of(request.model)),
        )

    def _tokenise_again(self, head: RequestHead, request: InferenceRequest) -> None:
        """The model has another tokenizer than when the request began to wait."""
        rpc = self.gateway.rpc
        if rpc is None or self._answered or not self.alive:
            return
        try:
            self._tokenise(rpc, head, request)
        except GatewayError as error:
            self.reject(error)
        except Exception:  # noqa: BLE001 - as in _on_complete
            self._broke()

    def _wait_for(self, ask: Callable[[Callable[[_T], None]], Callable[[], None]], step: Callable[[_T], None]) -> None:
        """Take ``step`` with what ``ask`` tells, at once or later, unless the client leaves before."""
        told = False

        def then(outcome: _T) -> None:
            nonlocal told
            told = True
            self._waiter = None
            try:
                step(outcome)
            except GatewayError as error:
                self.reject(error)
            except Exception:  # noqa: BLE001 - as in _on_complete
                self._broke()

        cancel = ask(then)
        if not told:
            self._waiter = Cancelling(cancel)

    def _answer(self, outcome: bytes | GatewayError) -> None:
        """Answer the client with JSON, or an error."""
        if isinstance(outcome, GatewayError):  # not raised: its traceback would keep the frame that has it, and us
            self.reject(outcome)
            return
        self._answered = True
        self.record.status = 200
        self.record.headed = self.gateway.clock.now()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self.record.request_id)]
        self.call.send(wire.immediate_reply(200, headers, outcome))

    def _tokenised(
        self,
        rpc: Rpc,
        head: RequestHead,
        request: InferenceRequest,
        asked: Asked,
        tokenizer: Tokenizer | None,
        outcome: tuple[Prepared, ...] | GatewayError,
    ) -> None:
        if isinstance(outcome, GatewayError):
            self._otherwise(rpc, head, request, outcome)
            return
        now = rpc.texts.of(request.model)
        if now is None or tokenizer is None:
            raise GatewayError("tokenizer_not_found", "the model's tokenizer was taken away meanwhile")
        if now is not tokenizer:  # what the prompts have become, means something else to it
            self._tokenise(rpc, head, request)
            return
        self._rpc = RpcRequest(rpc, request, asked, outcome, self.record, tokenizer)
        course = self._place(head, request)
        if course is not None:
            self._begin(course)

    def _otherwise(self, rpc: Rpc, head: RequestHead, request: InferenceRequest, error: GatewayError) -> None:
        """gRPC workers cannot be given the request, but others may serve the model, too: if not, that is the answer."""
        others_may = error.fault.code in _UNTOLD and rpc.others_serve(request)  # even if they are not usable now
        if not others_may and not self.gateway.placer.has_pair(request, rpc.workers, None):
            self.reject(error)  # not raised: see _answer
            return
        course = self._place(head, request)
        if course is not None:
            self._begin(course)

    def _excluded(self) -> Collection[Worker]:
        """Workers that cannot be given the request: it has not been made tokens."""
        rpc = self.gateway.rpc
        return NOBODY if rpc is None or self._rpc is not None else rpc.workers

    def _course_of(self, head: RequestHead, request: InferenceRequest, taken: Collection[Worker]) -> Course:
        """The course of ``request`` on workers that have room, but none of ``taken``.

        Raises NoRoomError when there are none, GatewayError when the request cannot be served at all.
        """
        gateway, api = self.gateway, request.api
        room = lone_room(taken)
        excluded = self._excluded()
        if api.flow is Flow.PREFILL_ONLY:
            workers = but(gateway, request, gateway.placer.prefills(request, room=room), excluded)
            return DirectCourse.alone(self, head, request, workers)
        lone = self._lone_of(request, room, excluded)
        if lone is not None:
            return self._lone(head, request, lone)
        try:
            pair = gateway.placer.pair(request, excluded, room=pair_room(request, taken))
        except NoRoomError:
            conditional = gateway.conditional
            lone = None if conditional is None else conditional.lone(request, room, busy=True)
            lone = lone or without_pair(gateway, request, room)
            if lone is None or lone.workers[0] in excluded:
                raise
            return self._lone(head, request, lone)
        except GatewayError as error:
            course = self._without_prefill(head, request, taken)
            if course is None:
                raise served_over_grpc(gateway, request, excluded) or error from None
            return course
        if gateway.config.select_only:
            in_turn = gateway.handoffs.of(pair.prefill).in_turn
            return SelectedCourse(self, head, request, pair, in_turn=in_turn)
        if self._rpc is not None and pair.prefill.over_grpc:
            return rpc_course(self, head, request, pair, self._rpc)
        handoff = gateway.handoffs.of(pair.prefill)
        self._name_legs(handoff, api)
        alone = handoff.alone(request, pair.prefill)
        if alone is not None:
            refuse_unknown(gateway, pair.prefill, alone)
            prefills = alone.role is Role.PREFILL
            gateway.placer.spared(request, Role.DECODE if prefills else Role.PREFILL)
            workers = gateway.placer.prefills(request, pair.prefill) if prefills else pair.decodes
            return DirectCourse.alone(self, head, request, workers, alone)
        placed = Placed(pair, handoff)
        joint = joint_of(request, pair.prefill.runtime)
        if handoff.in_turn:
            self.keep_room(pair.decodes[0], joint.parts)
        if joint.parts > 1 or joint.needs_prefill:
            check_parts(request, joint, gateway.config.max_payload_bytes)
            attempts = Attempts(gateway.config.retry, self.deadline)
            choice = PairChoice(gateway, request, pair.prefill, handoff)
            return RelayedCourse(self, head, request, joint, placed, choice, attempts)
        return DirectCourse.paired(self, head, request, placed)

    def _lone_of(self, request: InferenceRequest, room: Room, excluded: Collection[Worker]) -> Lone | None:
        """Who answers ``request``, for which no pair need be looked for. Raises NoRoomError."""
        gateway = self.gateway
        if (kept := kept_by(gateway, request)) is not None:
            if not room.on(kept.workers[0]):
                raise NoRoomError(kept.workers[0].role)
            return kept
        lone = None if gateway.conditional is None else gateway.conditional.lone(request, room)
        return None if lone is None or lone.workers[0] in excluded else lone

    def _lone(self, head: RequestHead, request: InferenceRequest, lone: Lone) -> Course:
        """The course of a request that one worker answers."""
        workers = lone.workers
        if self._rpc is not None and workers[0].over_grpc:
            sequences = self._rpc.sequences(workers[0], workers[0])
            return rpc_alone(self, head, request, workers, self._rpc, sequences, lone.alone)
        self._name_legs(self.gateway.handoffs.of(workers[0]), request.api)
        return DirectCourse.alone(self, head, request, workers, lone.alone)

    def _name_legs(self, handoff: Handoff, api: Api) -> None:
        if handoff.prefixes_ids and not self._named:  # the engine's name for it is then just like ours
            self.record.leg_id = self.record.request_id.removeprefix(api.id_prefix.encode())

    def _without_prefill(
        self, head: RequestHead, request: InferenceRequest, taken: Collection[Worker]
    ) -> Course | None:
        """The course of a request for which there is no pair, where a decode may serve without."""
        gateway = self.gateway
        waives = gateway.config.retry.on_prefill_failure is OnPrefillFailure.DECODE_ONLY
        decodes = gateway.placer.decodes(request, room=lone_room(taken)) if waives else ()
        if not decodes or decodes[0] in self._excluded() or not gateway.handoffs.of(decodes[0]).waivable:
            return None
        return self._lone(head, request, Lone(decodes, Alone(Role.DECODE, Kv.RECOMPUTED, WAIVED)))

    def _about_stored(self, head: RequestHead, raw: bytes) -> Course:
        """The course of a request about a stored response. Raises GatewayError when nobody can be asked for it."""
        name = stored_name(head.path)
        if name is None:
            raise GatewayError("not_found", f"Invalid URL ({head.method} {head.path[:_LOGGED_MODEL]})")
        placer = self.gateway.placer
        decodes = placer.all_decodes(head.within)
        if not decodes and head.within is not None:
            raise placer.nobody(ABOUT_STORED._replace(within=head.within), Role.DECODE)
        keeper = self.gateway.stored.keeper(name, decodes)
        if keeper is None:
            message = f"Response with id '{name[:_LOGGED_MODEL]}' not found."
            raise GatewayError("response_not_found", message, param="response_id")
        return DirectCourse.stored(self, head, keeper, None if self._bodyless else raw)
