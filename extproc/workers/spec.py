"""What an operator says of a worker when registering it, by flag, YAML file or ``POST /workers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.workers.kv_config import KvConfig
from extproc.workers.worker import MOONCAKE, Role, WorkerUrl


@dataclass(frozen=True, slots=True)
class HealthOverrides:
    """Health settings of one worker; None takes the fleet's. Names and units are those of the control API."""

    timeout_secs: float | None = None
    check_interval_secs: float | None = None
    success_threshold: int | None = None
    failure_threshold: int | None = None
    disable_health_check: bool | None = None
    drain_settle_secs: float | None = None  # that removal takes at least; it waits for the requests themselves anyhow


@dataclass(frozen=True, slots=True)
class Resilience:
    """Circuit breaker settings of one worker; None takes the fleet's. Names and units are those of the control API."""

    cb_failure_threshold: int | None = None
    cb_success_threshold: int | None = None
    cb_timeout_secs: float | None = None
    cb_window_secs: float | None = None
    disable_circuit_breaker: bool | None = None
    capacity_status_codes: tuple[int, ...] | None = None  # answers that say "full", not "broken"


@dataclass(frozen=True, slots=True)
class Overload:
    """When one worker counts as overloaded; None takes the fleet's. Names are those of the control API."""

    waiting_requests: int | None = None
    token_usage: float | None = None  # share of the KV cache in use, above 0 and up to 1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A registration. What is left out here is learnt from the worker (:mod:`extproc.workers.metadata`)."""

    url: WorkerUrl
    role: Role
    cards: tuple[Mapping[str, object], ...] = ()  # model cards; their ``id`` decides which models the worker serves
    bootstrap_port: int | None = None
    api_key: str | None = field(default=None, repr=False)  # bearer for everything this gateway asks of the worker
    priority: int = 50
    cost: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)  # win over discovered labels of the same name
    runtime: str | None = None  # sglang, vllm or tokenspeed; None: find out
    kv: KvConfig = field(default_factory=KvConfig)  # vLLM's HTTP server does not tell its connector, the gRPC one does
    engine_id_named: bool = False  # given by itself, not as one of many things in the engine's own configuration
    health: HealthOverrides = HealthOverrides()
    resilience: Resilience = Resilience()
    overload: Overload = Overload()
    load_monitor_interval_secs: float | None = None
    max_connection_attempts: int | None = None  # of no effect: connecting is tried for as long as it is registered

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The models named at registration."""
        return tuple(str(card["id"]) for card in self.cards)

    @property
    def idle(self) -> tuple[str, ...]:
        """What is registered and changes nothing, for people: it may have been meant for another worker."""
        is_prefill = self.role is Role.PREFILL
        found = []
        if self.engine_id_named and not (is_prefill and self.kv.connector == MOONCAKE):
            found.append(f"kv_engine_id is of no effect: only prefill workers with {MOONCAKE} need one")
        if self.bootstrap_port is not None and not is_prefill:
            found.append("bootstrap_port is of no effect: only prefill workers have a bootstrap server")
        elif self.bootstrap_port is not None and self.kv.connector not in ("", MOONCAKE):
            found.append(f"bootstrap_port is of no effect with {self.kv.connector}")
        return tuple(found)

    @property
    def unused(self) -> tuple[str, ...]:
        """What of the peer's registrations is kept and shown, and changes nothing whatever the worker; for people."""
        found = []
        if self.priority != 50:
            found.append("priority is of no effect: no policy here looks at it")
        if self.cost != 1.0:
            found.append("cost is of no effect: no policy here looks at it")
        if self.max_connection_attempts is not None:
            found.append("max_connection_attempts is of no effect: connecting is tried as long as it is registered")
        return tuple(found)
