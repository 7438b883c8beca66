"""What all exchanges share: settings, the way out, the clock, and the list of those that are alive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from extproc.admission.gate import Gate, GateSettings
from extproc.admission.legs import LegQueue, LegSettings
from extproc.admission.priority import Tenants
from extproc.errors import GatewayError
from extproc.exchange.attempts import KvMissing, RetryPolicy
from extproc.exchange.clock import CLOSING_SECONDS, Clock
from extproc.exchange.conditional import Conditional
from extproc.exchange.progress import Progress
from extproc.exchange.record import Observer
from extproc.exchange.releases import Releases
from extproc.exchange.stored import StoredResponses
from extproc.handoff.table import Handoffs
from extproc.names import REQUEST_ID_HEADERS
from extproc.policies.placement import Placer
from extproc.transport.interface import Answer, AnswerHandler, Egress
from extproc.workers.worker import Worker

if TYPE_CHECKING:
    from extproc.exchange.fetched_reply import FetchedReply
    from extproc.exchange.outlet import Late
    from extproc.exchange.rpc import Rpc

_Timed = TypeVar("_Timed")
_log: Final = logging.getLogger(__name__)
_DRAIN_RETRY_AFTER: Final = 1


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What an operator can set of the request path."""

    request_timeout: float = 1800.0
    max_payload_bytes: int = 512 * 1024 * 1024
    request_id_headers: tuple[str, ...] = REQUEST_ID_HEADERS
    api_key: str | None = field(default=None, repr=False)
    response_headers: bool = True  # x-pd-prefill, x-pd-decode, x-pd-handoff, server-timing
    trust_client: bool = False  # leave control fields in clients' bodies
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    retry_released: bool = True  # try requests anew whose decode leg Envoy has; Envoy must be set up for it
    kv_missing: KvMissing = KvMissing.RECOMPUTE
    bootstrap_timeout: float = 280.0  # seconds that legs which meet in a room have for that; 0: any
    min_prompt_tokens: int = 0  # a prompt of fewer runs on the decode worker alone; as below: 0: none
    min_uncached_tokens: int = 0  # so does one of which the decode worker holds all but fewer
    gate: GateSettings = field(default_factory=GateSettings)
    legs: LegSettings = field(default_factory=LegSettings)
    tenants: Tenants = field(default_factory=Tenants)
    keep_alive: float = 15.0  # seconds of a stream's silence until it gets a comment, over gRPC; 0: none
    destination_header: bool = False  # tell Envoy of a released request's worker by a header ...
    destination_metadata: bool = True  # ... and by metadata
    destination_hosts: int = 4  # how many workers it may be told of
    select_only: bool = False  # legs are for llm-d's sidecars to send
    model_aliases: Mapping[str, str] = field(default_factory=dict)  # to the name by which workers know the model


class Mortal(Protocol):
    """What has a deadline."""

    def end(self, error: GatewayError) -> None:
        """Its time is over: end everything under way, and tell the client ``error``."""

    def abandon(self) -> None:
        """It should have been over long ago: give its call up."""

    def prefill_lost(self, worker: Worker) -> None:
        """A prefill worker is gone; it may be one that the request needs."""


class Meeting(Protocol):
    """A leg that is to meet another one."""

    def too_late(self) -> None:
        """It has not, and its time for that is over."""


class Gateway:
    """The shared surroundings of all exchanges.

    Args:
        config: the operator's settings.
        placer: chooses workers.
        handoffs: prepare legs that meet.
        egress: the way to workers.
        clock: time.
        observer: is told of every finished request.
        report_unreachable: is told of workers that refused a connection.
        report_failure: is told of workers on which a leg failed in another way than by its own fault.
        report_doubt: is told of workers whose answer may mean that they are not what they were.
    """

    def __init__(
        self,
        config: GatewayConfig,
        placer: Placer,
        handoffs: Handoffs,
        egress: Egress,
        clock: Clock,
        observer: Observer,
        report_unreachable: Callable[[Worker], None],
        report_failure: Callable[[Worker], None] = lambda _: None,
        report_doubt: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.placer = placer
        self.handoffs = handoffs
        self.egress = egress
        self.clock = clock
        self.observer = observer
        self.report_unreachable = report_unreachable
        self.report_failure = report_failure
        self.report_doubt = report_doubt
        self.stored = StoredResponses()
        self.releases = Releases(clock)
        self.progress = Progress(clock)
        self.late: dict[bytes, Late] = {}  # answers whose second call is awaited, or there; by request id
        self.fetched: dict[bytes, FetchedReply] = {}  # answers that Envoy is to fetch, by path
        self.fetches = False  # it can; set by whoever serves them
        self.rpc: Rpc | None = None  # what requests for gRPC workers need; set by whoever has it
        least, uncached = config.min_prompt_tokens, config.min_uncached_tokens
        self.conditional = (
            Conditional(placer, handoffs, least=least, least_uncached=uncached) if least or uncached else None
        )
        self.gate = Gate(config.gate, clock)
        self.legs = LegQueue(config.legs, clock)
        self.draining = False
        self.on_idle: Callable[[], None] = lambda: None  # called when the last request under way is over
        self.api_key = None if config.api_key is None else config.api_key.encode()
        # Both in order of their deadlines, since all have the same time: checking them is looking at the first.
        self._alive: dict[Mortal, float] = {}
        self._ended: dict[Mortal, float] = {}  # told to end, not yet closed by Envoy
        self._meeting: dict[Meeting, float] = {}  # prefill legs that a decode is to meet; they have all the same time

    def fetch(self, path: bytes, answer: Answer) -> AnswerHandler | None:
        """Who gives the answer that Envoy fetches from ``path``; see ``Answers``."""
        reply = self.fetched.pop(path, None)
        if reply is not None:
            reply.fetch(answer)
        return reply

    @property
    def alive(self) -> int:
        """How many requests are under way."""
        return len(self._alive) + len(self._ended)

    @property
    def rooms(self) -> int:
        """How many rooms are taken, in which legs meet."""
        return self.handoffs.live + (0 if self.rpc is None else self.rpc.handoffs.live)

    def enter(self, exchange: Mortal) -> float:
        """A request began. Returns its deadline, by our clock."""
        deadline = self._alive[exchange] = self.clock.now() + self.config.request_timeout
        return deadline

    def leave(self, exchange: Mortal) -> None:
        """A request is over and holds nothing."""
        if self._alive.pop(exchange, None) is None:
            self._ended.pop(exchange, None)
        if not self._alive and not self._ended:
            self.on_idle()

    def to_meet(self, leg: Meeting) -> None:
        """``leg`` is out, and is told when it is too late for what it is to meet."""
        self._meeting[leg] = self.clock.now() + self.config.bootstrap_timeout

    def met(self, leg: Meeting) -> None:
        """``leg`` is to be told nothing any more."""
        self._meeting.pop(leg, None)

    def expire(self) -> None:
        """End the requests, and the meetings, whose deadline has passed; to be called about once a second."""
        now = self.clock.now()
        for leg in _due(self._meeting, now):
            if self._meeting.pop(leg, None) is not None:  # one may end others of its request
                _guarded(leg.too_late)
        for exchange in _due(self._ended, now):
            del self._ended[exchange]
            _guarded(exchange.abandon)
        for exchange in _due(self._alive, now):
            self._end(exchange, GatewayError("request_timeout", "the request took too long"))

    def prefill_lost(self, worker: Worker) -> None:
        """A prefill worker is gone: requests may wait for what it was to send."""
        for exchange in list(self._alive):
            _guarded(partial(exchange.prefill_lost, worker))

    def drain(self) -> None:
        """Take no new requests, and turn away those that wait: their clients do better to go elsewhere at once."""
        self.draining = True
        for queue in (self.gate, self.legs):
            queue.refuse_all(draining())

    def end_all(self, error: GatewayError) -> None:
        """End every request under way."""
        for exchange in list(self._alive):
            self._end(exchange, error)

    def cut_short(self, exchange: Mortal, error: GatewayError) -> None:
        """End one request under way, unless it has been told to end already."""
        if exchange in self._alive:
            self._end(exchange, error)

    def _end(self, exchange: Mortal, error: GatewayError) -> None:
        del self._alive[exchange]
        self._ended[exchange] = self.clock.now() + CLOSING_SECONDS
        _guarded(lambda: exchange.end(error))


def draining() -> GatewayError:
    """The error for who comes, or waits, while the gateway is shutting down."""
    return GatewayError("draining", "the gateway is shutting down", retry_after=_DRAIN_RETRY_AFTER)


def _due(deadlines: dict[_Timed, float], now: float) -> list[_Timed]:
    due = []
    for one, deadline in deadlines.items():
        if deadline > now:
            break
        due.append(one)
    return due


def _guarded(action: Callable[[], None]) -> None:
    """One request's trouble must not keep the others' deadlines from being looked at."""
    try:
        action()
    except Exception:  # noqa: BLE001 - logged
        _log.exception("a request could not be ended")
