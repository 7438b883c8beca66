"""A small request of the gateway's own, to see that a pair can serve: both legs, and what is between them.

It is placed, sent and tried again as a client's is, and appears in log and metrics. Its legs go out through Envoy's
egress listener and its answer comes back here. No part of it are Envoy's client listener and its calls to us.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.errors import GatewayError
from extproc.exchange.attempts import Attempts
from extproc.exchange.choice import PairChoice
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.exchange.placed import Placed
from extproc.exchange.record import Record
from extproc.exchange.relayed import RelayedCourse
from extproc.exchange.rpc_relayed import RpcRelayedCourse
from extproc.exchange.session import Course, Session
from extproc.handoff.handoff import Handoff
from extproc.merge.parts import joint_of
from extproc.transport.interface import Header

_API: Final = APIS["/v1/completions"]  # every engine has it, and it needs no chat template
# Longer than a block of KV cache (16 or 32 tokens), or a connector may find nothing to hand over. What stands before it
# is another each time, or the decode would have the prompt in its own prefix cache.
_PROMPT: Final = "%016x The quick brown fox jumps over the lazy dog." + " Again and again it does so." * 8
_TOKENS: Final = 2  # of one, a prefill worker would be asked alone
_HEADERS: Final = {
    ":method": b"POST",
    ":path": _API.path.encode(),
    ":scheme": b"http",
    ":authority": b"health-generate",
    "content-type": b"application/json",
}


@dataclass(slots=True)
class _Field:
    """See HeaderValue."""

    key: str
    raw_value: bytes


class _Nowhere:
    """The Call of a request that Envoy knows nothing of."""

    queued = 0

    def send(self, message: bytes) -> None:
        """See Call."""

    def abort(self, code: int, detail: str) -> None:
        """See Call."""

    def pause(self) -> None:
        """See Call."""

    def resume(self) -> None:
        """See Call."""


class Trial(Session):
    """One such request, and the Outlet of its answer. ``tell`` is called with its record when it is over."""

    queues = False  # health is looked at however busy the gateway is

    __slots__ = ("_tell",)

    def __init__(self, gateway: Gateway, model: str | None, tell: Callable[[Record], None]) -> None:
        super().__init__(gateway, _Nowhere())
        self._tell = tell
        fields = dict(_HEADERS)
        if gateway.api_key is not None:
            fields["authorization"] = b"Bearer " + gateway.api_key
        body = {
            "prompt": _PROMPT % random.getrandbits(64),
            "max_tokens": _TOKENS,
            "temperature": 0,
            **({} if model is None else {"model": model}),
        }
        self._on_head(RequestHead.of([_Field(*field) for field in fields.items()]))
        self._on_body(orjson.dumps(body))
        self._on_complete()

    def leave(self) -> None:
        """Nobody waits for the answer any more."""
        if self.alive:
            self.closed()

    def finish(self) -> None:
        """See Session."""
        super().finish()
        self._tell(self.record)

    def head(self, status: int, headers: Sequence[Header]) -> None:
        """See Outlet."""

    def body(self, chunk: bytes, *, end: bool) -> None:  # noqa: ARG002 - what it says does not matter
        """See Outlet."""
        if end:
            self._close_soon()

    def reject(self, error: GatewayError) -> None:
        """See Outlet and Session."""
        super().reject(error)
        self._close_soon()

    def prepare(self) -> None:
        """See Outlet."""

    @property
    def full(self) -> bool:
        """See Outlet."""
        return False

    @property
    def mutation(self) -> bytes:
        """See Outlet."""
        return b""

    def forget(self) -> None:
        """See Outlet."""

    @property
    def queued(self) -> int:
        """See Outlet."""
        return 0

    def _close_soon(self) -> None:
        """As Envoy does when a client has its answer."""
        self.gateway.clock.after(0, self.leave)

    def _place(self, head: RequestHead, request: InferenceRequest) -> Course:
        """See Session. It waits for no room."""
        record, gateway = self.record, self.gateway
        pair = gateway.placer.pair(request, self._excluded())
        rpc = self._rpc if pair.prefill.over_grpc else None
        handoff: Handoff = (
            gateway.handoffs.of(pair.prefill) if rpc is None else rpc.sequences(pair.prefill, pair.decodes[0])
        )
        if handoff.prefixes_ids:
            record.leg_id = record.request_id.removeprefix(request.api.id_prefix.encode())
        alone = handoff.alone(request, pair.prefill)
        if alone is not None:
            raise GatewayError("kv_missing", f"prefill worker {pair.prefill.url} hands nothing over: {alone.why}")
        placed = Placed(pair, handoff)
        choice = PairChoice(gateway, request, pair.prefill, handoff)
        attempts = Attempts(gateway.config.retry, self.deadline)
        if rpc is not None:
            return RpcRelayedCourse(self, head, request, rpc, placed, choice, attempts, outlet=self)
        return RelayedCourse(
            self,
            head,
            request,
            joint_of(request, pair.prefill.runtime),
            placed,
            choice,
            attempts,
            outlet=self,
        )
