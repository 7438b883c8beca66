"""A request over gRPC whose answer is made of several sequences', or follows one that was released in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.exchange.attempts import Attempts
from extproc.exchange.choice import Choice
from extproc.exchange.headers import RequestHead
from extproc.exchange.outlet import Outlet
from extproc.exchange.placed import Placed
from extproc.exchange.relayed import RelayedCourse
from extproc.exchange.rpc import RpcRequest
from extproc.exchange.rpc_attempt import RpcAttempt
from extproc.handoff.grpc import Sequences
from extproc.merge.answer import JoinedAnswer
from extproc.merge.parts import Joint

if TYPE_CHECKING:
    from extproc.exchange.attempt import Attempt
    from extproc.exchange.session import Session


class RpcRelayedCourse(RelayedCourse):
    """See the module.

    Args:
        session, head, request: the request.
        rpc: the same as tokens.
        placed: where it goes the first time; the handoff is a Sequences.
        choice, attempts, outlet: see RelayedCourse.
        body: of a request that one worker answers alone.
    """

    __slots__ = ("_rpc",)

    def __init__(
        self,
        session: Session,
        head: RequestHead,
        request: InferenceRequest,
        rpc: RpcRequest,
        placed: Placed,
        choice: Choice,
        attempts: Attempts,
        outlet: Outlet | None = None,
    ) -> None:
        self._rpc = rpc
        joint = Joint(placed.pair.prefill.runtime, parts=rpc.count)
        super().__init__(session, head, request, joint, placed, choice, attempts, outlet)

    def start(self) -> None:
        """See Course."""
        self._session.record.sent = self._session.gateway.clock.now()
        self._choice.begin(self._place(self._placed))
        self._outlet.prepare()
        self._keep_client()

    def go_on(
        self, error: GatewayError, pause: float | None, *, asked: bool, ended: bool, afterwards: Callable[[], None]
    ) -> None:
        """See RelayedCourse."""
        super().go_on(error, pause, asked=asked, ended=ended, afterwards=afterwards)
        self._keep_client()

    def _keep_client(self) -> None:
        if self._request.stream and self._session.gateway.config.keep_alive:
            self.keep_alive()

    def _new_answer(self) -> JoinedAnswer:
        return self._rpc.answer()

    def _new_attempt(self, placed: Placed) -> Attempt:
        handoff = placed.handoff
        assert isinstance(handoff, Sequences)
        return RpcAttempt(self._session, self._head, self._request, placed, handoff, self._joint, self._rpc, self)
