"""A request whose answer is made here, out of the answers of several legs.

Where one pair of legs cannot give the client what a single server would (several samples of a prompt, log
probabilities that only the prefill has), all legs go out through the egress listener, and the merged answer is streamed
to the client as Envoy's local reply. Measured on Envoy 1.40: ``streamed_immediate_response`` works after a fully
received body, in any number of pieces, and a client that leaves closes the call at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.clock import LINGER_SECONDS
from extproc.exchange.headers import HeaderValue, RequestHead, end_to_end
from extproc.exchange.legs import (
    WholeAnswer,
    answered_by,
    leg_headers,
    leg_path,
    loss_of,
    refused_before,
    send_aborts,
)
from extproc.exchange.record import naming_headers, server_timing
from extproc.handoff.handoff import Plan
from extproc.merge.answer import joined_answer
from extproc.merge.split import sample_edits
from extproc.transport.interface import Header, Leg, Lost
from extproc.workers.worker import Role, Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

_log: Final = logging.getLogger(__name__)
_HIGH_WATER: Final = 1 << 20  # bytes queued for a client that does not read, before the workers are made to wait


class _Phase(Enum):
    WAITING = "waiting"  # nothing has been sent to the client
    ANSWERING = "answering"  # the client has the head
    ENDED = "ended"  # the client has everything it will get
    OVER = "over"


class _Sample:
    """One pair of legs; the LegReceiver of its decode leg."""

    __slots__ = ("_course", "_refusal", "decode", "headed", "index", "plan", "prefill", "worker")

    def __init__(self, course: RelayedCourse, index: int, worker: Worker) -> None:
        self._course = course
        self._refusal: WholeAnswer | None = None  # receives an answer that is an error
        self.index = index
        self.worker = worker  # who decodes, as far as known
        self.headed = False  # it is known
        self.plan: Plan | None = None
        self.prefill: Leg | None = None
        self.decode: Leg | None = None

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See LegReceiver."""
        self._course.decode_answers(self, headers)
        if 200 <= status < 300:
            self._course.decode_head(headers)
        else:
            self._refusal = self._course.refusal_of(self)
            self._refusal.head(status, headers)

    def data(self, chunk: bytes) -> None:
        """See LegReceiver."""
        if self._refusal is not None:
            self._refusal.data(chunk)
        else:
            self._course.decode_data(self, chunk)

    def done(self) -> None:
        """See LegReceiver."""
        self._over()
        if self._refusal is not None:
            self._refusal.done()
        else:
            self._course.decode_done(self)

    def lost(self, reason: Lost, detail: str) -> None:
        """See LegReceiver."""
        self._over()
        self._course.fail(loss_of(Role.DECODE, self.worker, reason, detail))

    def _over(self) -> None:
        self.decode = None
        self.worker.load -= 1


class RelayedCourse:
    """The Course of a relayed request."""

    __slots__ = (
        "_answer",
        "_decodes",
        "_head",
        "_headers",
        "_paused",
        "_phase",
        "_prefill",
        "_request",
        "_samples",
        "_session",
    )

    def __init__(self, session: Session, head: RequestHead, request: InferenceRequest) -> None:
        """Raises GatewayError when there is no pair, or the request cannot be split."""
        self._session = session
        self._head = head
        self._request = request
        self._answer = joined_answer(request)
        pair = session.gateway.placer.pair(request.model)
        self._prefill = pair.prefill
        self._decodes = pair.decodes
        self._samples = [_Sample(self, index, pair.decodes[0]) for index in range(request.samples)]
        self._phase = _Phase.WAITING
        self._paused = False
        self._headers: Sequence[Header] = ()
        record = session.record
        record.handoff = session.gateway.handoff.name
        record.prefill = pair.prefill.name

    # -- Course ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Course."""
        session = self._session
        session.record.sent = session.gateway.clock.now()
        for sample in self._samples:
            self._send(sample)

    def response_headers(self, headers: Iterable[HeaderValue]) -> None:  # noqa: ARG002
        """See Course. Envoy asks about its own local reply: there is nothing to change."""
        self._session.call.send(wire.response_headers_reply(b""))

    def drained(self) -> None:
        """See Course."""
        if self._paused:
            self._paused = False
            for sample in self._samples:
                if sample.decode is not None:
                    sample.decode.resume()

    def end(self, error: GatewayError) -> None:
        """See Course."""
        self.fail(error)

    def closed(self) -> None:
        """See Course."""
        if self._answer.complete and any(sample.prefill or sample.decode for sample in self._samples):
            # The answer is out; its last legs are just about to end by themselves.
            self._phase = _Phase.ENDED
            self._session.gateway.clock.after(LINGER_SECONDS, self._finish)
        else:
            self._finish()

    # -- what the legs tell ---------------------------------------------------------------------------------------

    def decode_answers(self, sample: _Sample, headers: Sequence[Header]) -> None:
        """A decode leg has its answer's head, and with it the word of who answers."""
        served = answered_by(self._decodes, headers)
        for worker in refused_before(self._decodes, served):
            self._session.gateway.report_unreachable(worker)
        if served is None:
            return
        sample.headed = True
        sample.worker.load -= 1
        served.load += 1
        sample.worker = served
        self._session.record.decode = served.name

    def decode_head(self, headers: Sequence[Header]) -> None:
        """A decode leg answers 2xx."""
        if not self._headers:
            self._headers = headers

    def refusal_of(self, sample: _Sample) -> WholeAnswer:
        """What receives a decode leg's answer that is an error."""
        return WholeAnswer(
            Role.DECODE, sample.worker, lambda _: None, self.fail, is_failure=self._session.gateway.handoff.failed
        )

    def decode_data(self, sample: _Sample, chunk: bytes) -> None:
        """A piece of a decode leg's answer."""
        self._relay(lambda: self._answer.decode_data(sample.index, chunk))

    def decode_done(self, sample: _Sample) -> None:
        """A decode leg's answer is complete."""
        self._relay(lambda: self._answer.decode_done(sample.index))

    def fail(self, error: GatewayError) -> None:
        """A leg failed, so the request fails: end every leg, tell the client as well as it still can be told."""
        if self._phase in (_Phase.ENDED, _Phase.OVER):
            return
        started = self._phase is _Phase.ANSWERING
        self._phase = _Phase.ENDED
        if error.fault.code == "prefill_unreachable":
            self._session.gateway.report_unreachable(self._prefill)
        self._drop_legs()
        session = self._session
        if not started:
            session.reject(error)
            return
        session.record.code = error.fault.code
        session.record.message = error.message
        if self._request.stream:
            self._send_body(self._answer.fail(error), end=True)
        else:
            session.reject(error)  # the head is out: Envoy cuts the connection, so that nobody takes it for complete

    # -- inside ---------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._phase = _Phase.OVER
        handoff = self._session.gateway.handoff
        try:
            self._drop_legs()
        finally:
            for sample in self._samples:
                if sample.plan is not None:
                    handoff.release(sample.plan)
            self._samples.clear()  # they refer back to us
            self._session.finish()

    def _send(self, sample: _Sample) -> None:
        session, request, head = self._session, self._request, self._head
        gateway = session.gateway
        plan = gateway.handoff.plan(
            request,
            self._prefill,
            sample_edits(request, sample.index),
            trust_client=gateway.config.trust_client,
        )
        sample.plan = plan._replace(prefill=b"", decode=b"")  # the bodies are on their way, and may be large
        path, request_id = leg_path(request.api, head.path), session.record.request_id
        answer = WholeAnswer(
            Role.PREFILL,
            self._prefill,
            lambda answer: self._prefill_done(sample, answer),
            lambda error: self._prefill_failed(sample, error),
            is_failure=gateway.handoff.failed,
            keep=self._answer.needs_prefill,
        )
        headers = leg_headers(gateway, head, path, (self._prefill,), request_id, len(plan.prefill))
        sample.prefill = gateway.egress.send(headers, plan.prefill, answer)
        self._prefill.load += 1
        headers = leg_headers(gateway, head, path, self._decodes, request_id, len(plan.decode))
        sample.decode = gateway.egress.send(headers, plan.decode, sample)
        sample.worker.load += 1

    def _prefill_done(self, sample: _Sample, answer: WholeAnswer) -> None:
        self._prefill_over(sample)
        self._session.record.prefill_ended = self._session.gateway.clock.now()
        if self._answer.needs_prefill:
            self._relay(lambda: self._answer.prefill_done(sample.index, answer.body))

    def _prefill_failed(self, sample: _Sample, error: GatewayError) -> None:
        self._prefill_over(sample)
        self._session.record.prefill_ended = self._session.gateway.clock.now()
        self.fail(error)

    def _prefill_over(self, sample: _Sample) -> None:
        sample.prefill = None
        self._prefill.load -= 1

    def _relay(self, step: Callable[[], bytes]) -> None:
        """Take one step of the merge and send what it yields."""
        if self._phase in (_Phase.ENDED, _Phase.OVER):
            return
        try:
            chunk = step()
        except GatewayError as error:
            self.fail(error)
            return
        except Exception:  # noqa: BLE001 - logged; whatever it is, the client must hear of it
            _log.exception("request %s cannot be merged", self._session.record.request_id.decode("latin-1"))
            self.fail(GatewayError("internal_error", "the gateway failed; its log says why"))
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

    def _send_head(self, whole: int | None = None) -> None:
        """Begin the client's answer; ``whole`` is its length where that is known."""
        session = self._session
        record = session.record
        record.headed = session.gateway.clock.now()
        record.status = 200
        headers = [field for field in end_to_end(self._headers) if field[0] not in (b"content-type", b"x-request-id")]
        headers += [(b"content-type", self._answer.content_type), (b"x-request-id", record.request_id)]
        if whole is not None:
            headers.append((b"content-length", b"%d" % whole))
        if session.gateway.config.response_headers:
            headers += [*naming_headers(record), (b"server-timing", server_timing(record))]
        session.call.send(wire.relayed_head(200, headers))

    def _send_body(self, chunk: bytes, *, end: bool) -> None:
        call = self._session.call
        for message in wire.relayed_body(chunk, end=end):
            call.send(message)
        if not end and not self._paused and call.queued > _HIGH_WATER:
            self._paused = True
            for sample in self._samples:
                if sample.decode is not None:
                    sample.decode.pause()

    def _drop_legs(self) -> None:
        """End whatever is still out, on its worker too."""
        for sample in self._samples:
            if sample.prefill is not None:
                sample.prefill.cancel()
                self._prefill_over(sample)
                self._abort(sample, (self._prefill,))
            if sample.decode is not None:
                sample.decode.cancel()
                sample.decode = None
                sample.worker.load -= 1
                # Until a head comes, Envoy may be with any worker of the list: it says where it is only then.
                self._abort(sample, (sample.worker,) if sample.headed else self._decodes)

    def _abort(self, sample: _Sample, workers: Sequence[Worker]) -> None:
        if sample.plan is not None:
            send_aborts(self._session.gateway, self._head, workers, sample.plan, self._session.record.request_id)
