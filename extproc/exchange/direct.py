"""A request whose decode leg Envoy runs by itself: what the machine decides is done here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import HOLD_SECONDS, LINGER_SECONDS, Handle
from extproc.exchange.headers import HeaderValue, RequestHead
from extproc.exchange.legs import WholeAnswer, destinations, leg_headers, leg_path, send_aborts
from extproc.exchange.machine import Event, IllegalTransitionError, State, rule_of
from extproc.exchange.record import server_timing
from extproc.handoff import sglang
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Leg
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_log: Final = logging.getLogger(__name__)
_JSON: Final = wire.set_header(b"content-type", b"application/json")


class DirectCourse:
    """The Outside of a direct exchange, and its Course."""

    __slots__ = (
        "_body",
        "_decode",
        "_early_head",
        "_error",
        "_head",
        "_holding",
        "_leg",
        "_path",
        "_prefill",
        "_prefill_body",
        "_released",
        "_request",
        "_rid",
        "_rooms",
        "_session",
        "_state",
        "_status",
        "_upstreams",
    )

    def __init__(self, session: Session, head: RequestHead, request: InferenceRequest, upstreams: Sequence[Worker]):
        self._session = session
        self._head = head
        self._request = request
        self._path = leg_path(request.api, head.path)
        self._state = State.READY
        self._upstreams = upstreams  # where Envoy may send the released request, in order
        self._decode = upstreams[0]  # who has the released request, as far as known
        self._prefill: Worker | None = None
        self._leg: Leg | None = None
        self._rooms: tuple[int, ...] = ()
        self._rid: str | None = None
        self._body = request.body.raw
        self._prefill_body = b""
        self._early_head = False
        self._error: GatewayError | None = None
        self._holding: Handle | None = None
        self._status = 0  # of the decode's answer
        self._released = False

    @classmethod
    def paired(cls, session: Session, head: RequestHead, request: InferenceRequest) -> DirectCourse:
        """A request for a prefill/decode pair. Raises GatewayError when there is none."""
        gateway = session.gateway
        pair = gateway.placer.pair(request.model)
        course = cls(session, head, request, pair.decodes)
        course._prefill = pair.prefill
        course._early_head = request.stream and request.api.early_head
        if request.api.rid_key is not None and request.api.rid_key not in request.body:
            course._rid = sglang.new_rid(request.api.rid_prefix)
        rooms = gateway.rooms.mint(request.prompts or 1)
        try:
            legs = sglang.plan(request, pair.prefill, rooms, course._rid, trust_client=gateway.config.trust_client)
        except BaseException:
            gateway.rooms.release(rooms)
            raise
        course._rooms, course._body, course._prefill_body = rooms, legs.decode, legs.prefill
        record = session.record
        record.handoff = sglang.NAME
        record.prefill = pair.prefill.name
        return course

    @classmethod
    def alone(cls, session: Session, head: RequestHead, request: InferenceRequest) -> DirectCourse:
        """A request that one prefill worker answers. Raises GatewayError when there is none."""
        return cls(session, head, request, session.gateway.placer.prefills(request.model))

    # -- Course ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Course."""
        self._session.record.sent = self._session.gateway.clock.now()
        self._fire(Event.ACCEPTED if self._prefill is not None else Event.ACCEPTED_ALONE)

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:
        """See Course."""
        status = 0
        code = None
        for header in headers:
            name = header.key
            if name == ":status":
                status = int(header.raw_value)
            elif name == "x-pd-upstream":
                self._served_by(header.raw_value.decode("latin-1"))
            elif name == "x-pd-error-code":
                code = header.raw_value.decode("latin-1")
        self._status = status
        if code is not None:
            self._note_local_reply(code)
        if status >= 400:
            self._fire(Event.DECODE_REFUSED)
        elif self._early_head:
            self._fire(Event.DECODE_HEAD_EARLY)
        else:
            self._fire(Event.DECODE_HEAD)

    def drained(self) -> None:
        """See Course. Nothing is ever queued for long here."""

    def expire(self) -> None:
        """See Course."""
        self._error = GatewayError("request_timeout", "the request took too long")
        self._fire(Event.EXPIRED)

    def closed(self) -> None:
        """See Course."""
        self._fire(Event.CLOSED)

    # -- Outside --------------------------------------------------------------------------------------------------

    def send_both(self) -> None:
        """See Outside."""
        prefill = self._prefill
        assert prefill is not None
        session = self._session
        prefill.load += 1
        self._leg = session.gateway.egress.send(
            leg_headers(self._head, self._path, (prefill,), session.record.request_id, len(self._prefill_body)),
            self._prefill_body,
            WholeAnswer(Role.PREFILL, prefill, self._prefill_done, self._prefill_failed),
        )
        self._prefill_body = b""
        self.release()

    def release(self) -> None:
        """See Outside."""
        session = self._session
        decode = self._decode
        decode.load += 1
        self._released = True
        body = self._body
        self._body = b""
        metadata = wire.destination_metadata(destinations(self._upstreams))
        session.call.send(wire.request_headers_reply(self._request_mutation(decode, body), metadata))
        # A client's trailers end here, unanswered: no engine reads any. Were they released behind a body that the
        # router keeps for the next host, Envoy 1.40 would send that body twice and so spoil the worker's connection.
        session.call.send(wire.request_body_reply(body, end=True))

    def pass_head(self) -> None:
        """See Outside."""
        self._stop_holding()
        session = self._session
        record = session.record
        record.headed = session.gateway.clock.now()
        record.status = self._status
        if self._prefill is None:
            record.prefill = self._decode.name
        else:
            record.decode = self._decode.name
        mutation = wire.set_header(b"x-request-id", record.request_id)
        if session.gateway.config.response_headers:
            mutation += wire.set_header(b"server-timing", server_timing(record))
            mutation += _names(record.prefill, record.decode, record.handoff)
        session.call.send(wire.response_headers_reply(mutation + wire.REMOVE_UPSTREAM))

    def hold_head(self) -> None:
        """See Outside."""
        self._holding = self._session.gateway.clock.after(HOLD_SECONDS, lambda: self._fire(Event.HELD_ENOUGH))

    def linger(self) -> None:
        """See Outside."""
        self._holding = self._session.gateway.clock.after(LINGER_SECONDS, lambda: self._fire(Event.LINGERED))

    def fail_with_prefill(self) -> None:
        """See Outside."""
        self._stop_holding()
        self.drop_decode()
        assert self._error is not None
        self._session.reject(self._error)

    def fail_with_timeout(self) -> None:
        """See Outside."""
        self._stop_holding()
        assert self._error is not None
        self._session.reject(self._error)

    def drop_prefill(self) -> None:
        """See Outside."""
        if self._leg is not None and self._prefill is not None:
            self._leg.cancel()
            self._prefill_over()
            self._abort(self._prefill)

    def drop_decode(self) -> None:
        """See Outside."""
        self._abort(self._decode)

    def finish(self) -> None:
        """See Outside."""
        self._stop_holding()
        self.drop_prefill()  # only after a defect is there one left
        if self._released:
            self._released = False
            self._decode.load -= 1
        self._session.gateway.rooms.release(self._rooms)
        self._rooms = ()
        self._session.finish()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _fire(self, event: Event) -> None:
        """Let an event happen; a defect ends the request and nothing else."""
        try:
            self._state, actions = rule_of(self._state, event)
        except IllegalTransitionError as error:
            _log.exception("request %s: %s", self._session.record.request_id.decode("latin-1"), error)
            self._session.call.abort(Status.INTERNAL, str(error))
            if event is Event.CLOSED and self._state is not State.OVER:
                self._state = State.OVER
                self.finish()
            return
        for action in actions:
            getattr(self, action)()

    def _prefill_done(self, _: WholeAnswer) -> None:
        self._prefill_over()
        self._fire(Event.PREFILL_DONE)

    def _prefill_failed(self, error: GatewayError) -> None:
        self._prefill_over()
        self._error = error
        if error.fault.code == "prefill_unreachable" and self._prefill is not None:
            self._session.gateway.report_unreachable(self._prefill)
        self._fire(Event.PREFILL_FAILED)

    def _prefill_over(self) -> None:
        """The prefill's work ends with its leg, long before the request's: its load must not count on."""
        assert self._prefill is not None
        self._leg = None
        self._prefill.load -= 1
        self._session.record.prefill_ended = self._session.gateway.clock.now()

    def _abort(self, worker: Worker) -> None:
        if self._rid is not None:
            gateway = self._session.gateway
            rids = sglang.abortable_rids(self._request, self._rid)
            send_aborts(gateway.egress, gateway.clock, self._head, worker, rids, self._session.record.request_id)

    def _stop_holding(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None

    def _served_by(self, endpoint: str) -> None:
        """Envoy says who answered: after a fail-over that is not the first of the list."""
        if endpoint == self._decode.endpoint:
            return
        for worker in self._upstreams:
            if worker.endpoint == endpoint:
                self._session.gateway.report_unreachable(self._decode)
                self._decode.load -= 1
                worker.load += 1
                self._decode = worker
                return

    def _note_local_reply(self, code: str) -> None:
        """Envoy answered in the decode worker's place."""
        record = self._session.record
        record.code = code
        if code in ("decode_unreachable", "prefill_unreachable"):
            for worker in self._upstreams:
                self._session.gateway.report_unreachable(worker)

    def _request_mutation(self, worker: Worker, body: bytes) -> bytes:
        head = self._head
        fields = head.fields
        mutation = wire.set_header(b"content-length", b"%d" % len(body))
        request_id = self._session.record.request_id
        if fields.get("x-request-id") != request_id:
            mutation += wire.set_header(b"x-request-id", request_id)
        if self._request.api.worker_path != self._request.api.path:
            mutation += wire.set_header(b":path", self._path)
        if worker.api_key is not None:
            mutation += wire.set_header(b"authorization", b"Bearer " + worker.api_key.encode())
        if not fields.get("content-type", b"").startswith(b"application/json"):
            mutation += _JSON
        for name in head.withheld:
            mutation += wire.remove_header(name)
        return mutation


@lru_cache(4096)
def _names(prefill: str, decode: str, handoff: str) -> bytes:
    """The header mutation that names who serves."""
    named = ((b"x-pd-prefill", prefill), (b"x-pd-decode", decode), (b"x-pd-handoff", handoff))
    return b"".join([wire.set_header(name, value.encode()) for name, value in named if value])
