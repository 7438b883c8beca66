"""A request whose decode leg Envoy runs by itself: what the machine decides is done here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from extproc.apis.request import CONTROL_FIELDS, InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import HOLD_SECONDS, LINGER_SECONDS, Handle
from extproc.exchange.headers import HeaderValue, RequestHead
from extproc.exchange.legs import WholeAnswer, destinations, leg_headers, leg_path, send_aborts
from extproc.exchange.machine import Event, Outside, State, rule_of
from extproc.exchange.record import named, server_timing
from extproc.handoff.handoff import Plan
from extproc.names import ERROR_CODE, UPSTREAM
from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Leg
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_log: Final = logging.getLogger(__name__)
_LAST: Final = (Event.CLOSED, Event.LINGERED)  # after these nothing more will happen
_NO_EDITS: Final[Mapping[str, bytes]] = {}
_NO_AUTHORIZATION: Final = wire.remove_header(b"authorization")
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
        "_local_reply",
        "_path",
        "_plan",
        "_prefill",
        "_released",
        "_request",
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
        self._plan: Plan | None = None
        self._body = b""  # of the released request, until it is released
        self._early_head = False
        self._error: GatewayError | None = None
        self._holding: Handle | None = None
        self._status = 0  # of the decode's answer
        self._local_reply = ""  # the code of an answer that Envoy made up itself
        self._released = False

    @classmethod
    def paired(cls, session: Session, head: RequestHead, request: InferenceRequest) -> DirectCourse:
        """A request for a prefill/decode pair. Raises GatewayError when there is none."""
        gateway = session.gateway
        pair = gateway.placer.pair(request.model)
        course = cls(session, head, request, pair.decodes)
        course._prefill = pair.prefill
        course._early_head = request.stream and request.api.early_head
        plan = course._plan = gateway.handoff.plan(
            request, pair.prefill, _NO_EDITS, trust_client=gateway.config.trust_client
        )
        course._body = plan.decode
        record = session.record
        record.handoff = gateway.handoff.name
        record.prefill = pair.prefill.name
        return course

    @classmethod
    def alone(cls, session: Session, head: RequestHead, request: InferenceRequest) -> DirectCourse:
        """A request that one prefill worker answers. Raises GatewayError when there is none."""
        course = cls(session, head, request, session.gateway.placer.prefills(request.model))
        drop = () if session.gateway.config.trust_client else CONTROL_FIELDS
        course._body = request.body.edited({}, drop)
        return course

    # -- Course ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Course."""
        self._session.record.sent = self._session.gateway.clock.now()
        self._fire(Event.ACCEPTED if self._prefill is not None else Event.ACCEPTED_ALONE)

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:
        """See Course."""
        status = 0
        code = None
        upstream = None
        for header in headers:
            name = header.key
            if name == ":status":
                status = int(header.raw_value)
            elif name == UPSTREAM:
                upstream = header.raw_value.decode("latin-1")
            elif name == ERROR_CODE:
                code = header.raw_value.decode("latin-1")
        self._status = status
        if code is not None:  # Envoy answered in the worker's place
            self._session.record.code = self._local_reply = code
            if code.endswith("_unreachable"):
                self._report(self._upstreams)
        elif upstream != self._decode.endpoint:
            self._served_by(upstream)
        if status >= 400:
            self._fire(Event.DECODE_REFUSED)
        elif self._early_head:
            self._fire(Event.DECODE_HEAD_EARLY)
        else:
            self._fire(Event.DECODE_HEAD)

    def drained(self) -> None:
        """See Course. A released body is queued once; nothing follows it."""

    def end(self, error: GatewayError) -> None:
        """See Course."""
        self._error = error
        self._fire(Event.EXPIRED)

    def closed(self) -> None:
        """See Course."""
        self._fire(Event.CLOSED)

    # -- Outside --------------------------------------------------------------------------------------------------

    def send_both(self) -> None:
        """See Outside."""
        prefill, plan = self._prefill, self._plan
        assert prefill is not None
        assert plan is not None
        session = self._session
        gateway = session.gateway
        headers = leg_headers(gateway, self._head, self._path, (prefill,), session.record.request_id, len(plan.prefill))
        answer = WholeAnswer(
            Role.PREFILL, prefill, self._prefill_done, self._prefill_failed, is_failure=gateway.handoff.failed
        )
        self._leg = gateway.egress.send(headers, plan.prefill, answer)
        prefill.load += 1
        self._plan = plan._replace(prefill=b"", decode=b"")  # the bodies are on their way, and may be large
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
        if self._local_reply:
            pass  # no worker served
        elif self._prefill is None:
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
        self._give_decode_back()
        self._holding = self._session.gateway.clock.after(LINGER_SECONDS, lambda: self._fire(Event.LINGERED))

    def answer_error(self) -> None:
        """See Outside."""
        self._stop_holding()
        assert self._error is not None
        self._session.reject(self._error)

    def drop_prefill(self) -> None:
        """See Outside."""
        if self._leg is not None and self._prefill is not None:
            self._leg.cancel()
            self._prefill_over()
            self._abort((self._prefill,))

    def drop_decode(self) -> None:
        """See Outside."""
        # Until a head comes, Envoy may be with any worker of the list: it says where it is only then.
        self._abort((self._decode,) if self._status else self._upstreams)

    def finish(self) -> None:
        """See Outside."""
        try:
            self._stop_holding()
            self.drop_prefill()  # only after a defect is there one left
        finally:
            self._give_decode_back()
            plan, self._plan = self._plan, None
            if plan is not None:
                self._session.gateway.handoff.release(plan)
            self._session.finish()

    # -- inside ---------------------------------------------------------------------------------------------------

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

    def _prefill_done(self, _: WholeAnswer) -> None:
        self._prefill_over()
        self._session.record.prefill_ended = self._session.gateway.clock.now()
        self._fire(Event.PREFILL_DONE)

    def _prefill_failed(self, error: GatewayError) -> None:
        self._prefill_over()
        self._session.record.prefill_ended = self._session.gateway.clock.now()
        self._error = error
        if error.fault.code == "prefill_unreachable" and self._prefill is not None:
            self._session.gateway.report_unreachable(self._prefill)
        self._fire(Event.PREFILL_FAILED)

    def _prefill_over(self) -> None:
        """The prefill's work ends with its leg, long before the request's: its load must not count on."""
        assert self._prefill is not None
        self._leg = None
        self._prefill.load -= 1

    def _give_decode_back(self) -> None:
        if self._released:
            self._released = False
            self._decode.load -= 1

    def _abort(self, workers: Sequence[Worker]) -> None:
        if self._plan is not None:
            gateway = self._session.gateway
            send_aborts(gateway, self._head, workers, self._plan, self._session.record.request_id)

    def _report(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._session.gateway.report_unreachable(worker)

    def _stop_holding(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None

    def _served_by(self, endpoint: str | None) -> None:
        """Envoy says who answered: after a fail-over that is not the first of the list."""
        for position, worker in enumerate(self._upstreams):
            if worker.endpoint == endpoint:
                self._report(self._upstreams[:position])
                self._decode.load -= 1
                worker.load += 1
                self._decode = worker
                return

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
        elif self._session.gateway.api_key is not None:
            mutation += _NO_AUTHORIZATION  # it is the gateway's own key
        if not fields.get("content-type", b"").startswith(b"application/json"):
            mutation += _JSON
        for name in head.withheld:
            mutation += wire.remove_header(name)
        return mutation


@lru_cache(4096)  # there are few pairs
def _names(prefill: str, decode: str, handoff: str) -> bytes:
    """The header mutation that names who serves."""
    return b"".join([wire.set_header(*pair) for pair in named(prefill, decode, handoff)])


if TYPE_CHECKING:
    _: type[Outside] = DirectCourse
