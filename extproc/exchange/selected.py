"""A request whose legs are not ours: Envoy is told the decode worker, and by a header the prefill worker.

Beside each decode worker stands a routing sidecar of llm-d, which takes the header away, has the prefill worker named
there compute the prompt, and passes the request on to its engine; without the header, to its engine alone. So the
workers are chosen, admitted and counted as ever, and what becomes of the legs is not seen: the answer of the sidecar is
the answer of both.

Source: llm-d/llm-d-router, pkg/sidecar/proxy/dispatch.go (the header is a list of ``host:port``, of which the first
counts unless sampling is on), pkg/common/routing/common.go (both names; a sidecar that knows both prefers the old one,
and the endpoint picker of llm-d sets both), connector_nixlv2.go (prefill, then decode; a prefill's error is the
answer), connector_sglang.go (both at once; a prefill's error is not looked at).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.answers import AnswerHead
from extproc.exchange.direct import DirectCourse
from extproc.exchange.failures import charge
from extproc.exchange.headers import RequestHead
from extproc.exchange.leg_heads import destinations
from extproc.exchange.released import head_reply
from extproc.handoff.handoff import Kv
from extproc.names import PREFILLER
from extproc.policies.placement import Pair
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.session import Session

HANDOFF: Final = "llm-d"


class SelectedCourse(DirectCourse):
    """See the module. Another attempt is the sidecar's to make: what is released here is not tried again."""

    __slots__ = ("_chosen", "_chosen_turn", "_shows_end")

    def __init__(
        self, session: Session, head: RequestHead, request: InferenceRequest, pair: Pair, *, in_turn: bool
    ) -> None:
        super().__init__(session, head, request, pair.decodes)
        self._serve_alone(pair.decodes, None)
        self._chosen: Worker | None = pair.prefill  # until its part is over, as far as that is seen
        self._chosen_turn = 0
        # A head of a stream may leave before the prefill is done, where the sidecar sends both legs at once.
        self._shows_end = in_turn or not request.stream
        record = session.record
        record.prefill, record.handoff, record.kv = pair.prefill.name, HANDOFF, Kv.UNKNOWN.value

    def release(self) -> None:
        """See Outside."""
        if self._chosen is not None:
            self._chosen_turn = self._chosen.begin(self._tokens)
        super().release()

    def give_back(self) -> None:
        """See Outside."""
        try:
            self._end_chosen()
        finally:
            super().give_back()

    def _released_head(self, body: bytes | None) -> bytes:
        chosen = self._chosen
        assert chosen is not None
        endpoint = (chosen.endpoint or "").encode()
        names = b"".join([wire.set_header(name, endpoint) for name in PREFILLER])
        to = destinations(self._upstreams)
        return head_reply(self._session, self._head, self._request, self._decode, self._path, body, to, names)

    def _headed(self, head: AnswerHead, error: GatewayError | None = None) -> None:
        if (chosen := self._chosen) is not None:
            self._judge(chosen, head)
        super()._headed(head, error)

    def _judge(self, prefill: Worker, head: AnswerHead) -> None:
        """What the answer says of the prefill worker: of a failure nobody can tell whose it was.

        So it is charged to both. The innocent one of the two has other partners, with whom it goes well.
        """
        if head.code is not None:  # Envoy answered in the sidecar's place
            return
        if head.status >= 400:
            charge((prefill,), head.error(prefill), self._chosen_turn)
        elif self._shows_end:
            prefill.answered(self._chosen_turn)
            self._session.gateway.placer.answered(self._request, prefill)
            self._session.record.prefill_ended = self._session.gateway.clock.now()
            self._end_chosen()

    def _end_chosen(self) -> None:
        chosen, self._chosen = self._chosen, None
        if chosen is not None and self._released:
            chosen.end(self._chosen_turn, self._tokens)
