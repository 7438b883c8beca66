"""The gRPC methods a server of this package answers, by path, independent of the HTTP/2 engine below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

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


class RequestHandler(ABC):
    """A ``CallHandler`` of a method with one request message: the peer's half-close is no end, it only follows it."""

    @abstractmethod
    def received(self, message: bytes) -> None:
        """See ``CallHandler``."""

    @abstractmethod
    def drained(self) -> None:
        """See ``CallHandler``."""

    @abstractmethod
    def closed(self) -> None:
        """See ``CallHandler``."""

    @abstractmethod
    def half_closed(self) -> None:
        """The peer sends no more, but listens."""


Method = Callable[[RpcCall], CallHandler]


def method_table(process: Process, health: HealthStatuses) -> dict[str, Method]:
    """Every method served, by path."""
    return {PROCESS_PATH: process, **health.methods}
