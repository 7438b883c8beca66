"""The gRPC methods a server of this package answers, by path, independent of the HTTP/2 engine below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from extproc.transport.grpc_framing import Status
from extproc.transport.interface import Call, CallHandler, Process

if TYPE_CHECKING:
    from extproc.transport.health import HealthStatuses

PROCESS_PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

# `Call.queued` above HIGH_WATER makes the transport watch for it to fall to LOW_WATER and then call `drained`; bytes.
HIGH_WATER = 1 << 20
LOW_WATER = 1 << 18


class RpcCall(Call, Protocol):
    """A call of any method: some methods end by themselves, which ``Process`` never does."""

    def finish(self) -> None:
        """End the call with status OK after what was sent."""


class RequestHandler:
    """Base of the ``CallHandler``s of methods with exactly one request message, which the peer's half-close follows.

    Not an abstract base class: every call asks at its half-close whether its handler is one of these, and that has to
    be cheap.
    """

    def __init__(self, call: RpcCall) -> None:
        self.call = call
        self._asked = False

    def answer(self, request: bytes) -> None:
        """Answer the one request."""
        raise NotImplementedError

    def received(self, message: bytes) -> None:
        """See ``CallHandler``."""
        if self._asked:
            self.call.abort(Status.INTERNAL, "more than one request message")
            return
        self._asked = True
        self.answer(message)

    def half_closed(self) -> None:
        """The peer sends no more, but listens."""
        if not self._asked:
            self.call.abort(Status.INTERNAL, "no request message")

    def drained(self) -> None:
        """Answers are a few bytes each: nothing waits for room."""

    def closed(self) -> None:
        """Nothing is held."""


Method = Callable[[RpcCall], CallHandler]
NO_METHODS: Final[Mapping[str, Method]] = MappingProxyType({})


def method_table(process: Process, health: HealthStatuses, others: Mapping[str, Method]) -> dict[str, Method]:
    """Every method served, by path."""
    return {PROCESS_PATH: process, **health.methods, **others}
