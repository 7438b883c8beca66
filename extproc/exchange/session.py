"""One ``Process`` stream of Envoy's: collects the request, sends it on its course, answers what cannot be served."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hmac import compare_digest
from typing import Final, Protocol

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.apis.request import InferenceRequest
from extproc.apis.table import RESPONSES, Api, Flow, api_of, stored_name
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.attempts import Attempts, OnPrefillFailure
from extproc.exchange.choice import PairChoice
from extproc.exchange.clock import ABANDONED
from extproc.exchange.direct import DirectCourse
from extproc.exchange.failures import refuse_unknown
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import HeaderValue, RequestHead, client_request_id, new_request_id
from extproc.exchange.outlet import LateReply
from extproc.exchange.placed import Placed
from extproc.exchange.record import WAIVED, Record, naming_headers
from extproc.exchange.relayed import RelayedCourse
from extproc.handoff.handoff import Alone, Kv
from extproc.merge.parts import check_parts, joint_of
from extproc.names import LATE
from extproc.policies.placement import Pair
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Call
from extproc.workers.worker import Role, Worker

_log: Final = logging.getLogger(__name__)
_DRAIN_RETRY_AFTER: Final = 1
_LOGGED_MODEL: Final = 256  # characters; a client may send any number


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
    """A CallHandler for one HTTP request."""

    __slots__ = (
        "_answered",
        "_api",
        "_bodyless",
        "_course",
        "_head",
        "_late",
        "_named",
        "_parts",
        "_size",
        "call",
        "deadline",
        "gateway",
        "notes",
        "record",
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
        self.notes: dict[object, object] = {}  # what placement has worked out of the request
        self._late: LateReply | None = None  # this is the second call of another session's request
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
            self._on_head(RequestHead.of(headers.headers.headers))
            if headers.end_of_stream:
                self._on_complete()
        elif kind == "request_body":
            self._on_body(request.request_body.body)
            if request.request_body.end_of_stream:
                self._on_complete()
        elif kind == "response_headers":
            if self._course is not None:
                self._course.response_headers(request.response_headers.headers.headers)
            elif self._head is None and self._late is None:
                self._adopt(request.response_headers.headers.headers)
        elif kind == "request_trailers":
            self._on_complete()
        elif kind == "response_trailers":
            self.call.send(wire.response_trailers_reply())

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
        """The request is over: tell the observer."""
        self.record.ended = self.gateway.clock.now()
        self._parts.clear()
        self._course = None  # it refers back to us: without the cycle both are freed at once, not by the collector
        if self.notes:
            self.gateway.placer.over(self.notes)
        self.gateway.leave(self)
        if self._head is not None or self._answered:  # else the client left before anything is known of its request
            self.gateway.observer.finished(self.record)

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
        except GatewayError as error:
            self.reject(error)

    def _adopt(self, headers: Iterable[HeaderValue]) -> None:
        """A call that begins with an answer's head is the second one of a request: see outlet.LateReply."""
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
                raise GatewayError("unauthorized", "the request does not bear the gateway's API key")
        if gateway.draining:
            raise GatewayError("draining", "the gateway is shutting down", retry_after=_DRAIN_RETRY_AFTER)
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

    def _on_complete(self) -> None:
        head, api = self._head, self._api
        if self._answered or self._course is not None or head is None or api is None:
            return
        parts = self._parts
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        try:
            course = self._course = self._set_course(api, head, raw)
            course.start()
        except GatewayError as error:
            self.reject(error)
        except Exception:  # noqa: BLE001 - whatever it is, the client must hear of it and the service must go on
            _log.exception("request %s failed", self.record.request_id.decode("latin-1"))
            self.reject(GatewayError("internal_error", "the gateway failed; its log says why"))

    def _set_course(self, api: Api, head: RequestHead, raw: bytes) -> Course:
        if api.flow is Flow.KEEPER:
            return self._about_stored(head, raw)
        request = InferenceRequest.read(api, raw, head.fields)
        self.notes = request.notes
        model = self.gateway.config.model_aliases.get(request.model or "")
        if model is not None:
            request = request.renamed(model)
        record = self.record
        record.model = (request.model or "")[:_LOGGED_MODEL]
        record.stream = request.stream
        record.samples = request.samples
        gateway = self.gateway
        if api.flow is Flow.PREFILL_ONLY:
            return DirectCourse.alone(self, head, request, gateway.placer.prefills(request))
        try:
            pair = gateway.placer.pair(request)
        except GatewayError:
            course = self._without_prefill(head, request)
            if course is None:
                raise
            return course
        handoff = gateway.handoffs.of(pair.prefill)
        if handoff.prefixes_ids and not self._named:  # the engine's name for it is then just like ours
            record.leg_id = record.request_id.removeprefix(api.id_prefix.encode())
        alone = handoff.alone(request, pair.prefill)
        if alone is not None:
            refuse_unknown(gateway, pair.prefill, alone)
            return self._alone(head, request, pair, alone)
        placed = Placed(pair, handoff)
        joint = joint_of(request, pair.prefill.runtime)
        if joint.parts > 1 or joint.prompt_logprobs:
            check_parts(request, joint, gateway.config.max_payload_bytes)
            attempts = Attempts(gateway.config.retry, self.deadline)
            choice = PairChoice(gateway, request, pair.prefill, handoff)
            return RelayedCourse(self, head, request, joint, placed, choice, attempts)
        return DirectCourse.paired(self, head, request, placed)

    def _alone(self, head: RequestHead, request: InferenceRequest, pair: Pair, alone: Alone) -> Course:
        """The course of a request that one worker of the pair answers alone."""
        placer = self.gateway.placer
        workers = pair.decodes if alone.role is Role.DECODE else placer.prefills(request, pair.prefill)
        if request.api is RESPONSES and isinstance(before := request.body.get("previous_response_id"), str):
            keeper = self.gateway.stored.keeper(before, placer.all_decodes())
            workers = workers if keeper is None else (keeper,)
        return DirectCourse.alone(self, head, request, workers, alone)

    def _without_prefill(self, head: RequestHead, request: InferenceRequest) -> Course | None:
        """The course of a request for which there is no pair, where a decode may serve without."""
        gateway = self.gateway
        decodes = gateway.placer.decodes(request)
        waives = gateway.config.retry.on_prefill_failure is OnPrefillFailure.DECODE_ONLY
        if not waives or not decodes or not gateway.handoffs.of(decodes[0]).waivable:
            return None
        return DirectCourse.alone(self, head, request, decodes, Alone(Role.DECODE, Kv.RECOMPUTED, WAIVED))

    def _about_stored(self, head: RequestHead, raw: bytes) -> Course:
        """The course of a request about a stored response. Raises GatewayError when nobody can be asked for it."""
        name = stored_name(head.path)
        if name is None:
            raise GatewayError("not_found", f"Invalid URL ({head.method} {head.path[:_LOGGED_MODEL]})")
        keeper = self.gateway.stored.keeper(name, self.gateway.placer.all_decodes())
        if keeper is None:
            message = f"Response with id '{name[:_LOGGED_MODEL]}' not found."
            raise GatewayError("response_not_found", message, param="response_id")
        return DirectCourse.stored(self, head, keeper, None if self._bodyless else raw)
