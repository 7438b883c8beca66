"""What all exchanges share: settings, the way out, the clock, and the list of those that are alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from extproc.exchange.clock import ABORT_SECONDS, Clock
from extproc.exchange.record import Observer
from extproc.handoff.sglang import Rooms
from extproc.policies.placement import Placer
from extproc.transport.interface import Egress
from extproc.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What an operator can set of the request path."""

    request_timeout: float = 1800.0
    max_payload_bytes: int = 512 * 1024 * 1024
    request_id_headers: tuple[str, ...] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
    api_key: str | None = field(default=None, repr=False)
    response_headers: bool = True  # x-pd-prefill, x-pd-decode, x-pd-handoff, server-timing
    trust_client: bool = False  # leave control fields in clients' bodies


class Mortal(Protocol):
    """What has a deadline."""

    def expire(self) -> None:
        """The deadline passed."""


class Gateway:
    """The shared surroundings of all exchanges.

    Args:
        config: the operator's settings.
        placer: chooses workers.
        egress: the way to workers.
        clock: time.
        observer: is told of every finished request.
        report_unreachable: is told of workers that refused a connection.
    """

    def __init__(
        self,
        config: GatewayConfig,
        placer: Placer,
        egress: Egress,
        clock: Clock,
        observer: Observer,
        report_unreachable: Callable[[Worker], None],
    ) -> None:
        self.config = config
        self.placer = placer
        self.egress = egress
        self.clock = clock
        self.observer = observer
        self.report_unreachable = report_unreachable
        self.rooms = Rooms()
        self.draining = False
        self.api_key = None if config.api_key is None else config.api_key.encode()
        # In order of their deadlines, since all have the same time: checking them is looking at the first.
        self._alive: dict[Mortal, float] = {}
        self._idle = asyncio.Event()

    @property
    def alive(self) -> int:
        """How many requests are under way."""
        return len(self._alive)

    def enter(self, exchange: Mortal) -> None:
        """A request began."""
        self._alive[exchange] = self.clock.now() + self.config.request_timeout

    def leave(self, exchange: Mortal) -> None:
        """A request is over and holds nothing."""
        self._alive.pop(exchange, None)
        if self.draining and not self._alive:
            self._idle.set()

    async def idle(self, limit: float) -> bool:
        """Wait until no request is under way; False when ``limit`` seconds pass first. Only while draining."""
        if self._alive:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit)
        return not self._alive

    def expire(self) -> None:
        """End the requests whose deadline has passed; to be called about once a second."""
        now = self.clock.now()
        due = []
        for exchange, deadline in self._alive.items():
            if deadline > now:
                break
            due.append(exchange)
        for exchange in due:
            self._alive[exchange] = self._alive.pop(exchange) + ABORT_SECONDS  # once more, should it not end
            exchange.expire()
