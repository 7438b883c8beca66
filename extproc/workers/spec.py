"""What an operator says of a worker when registering it, by flag, YAML file or ``POST /workers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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
    # Of no effect: an attempt is made on two workers, so that neither can say how many there are.
    max_retries: int | None = None
    initial_backoff_ms: int | None = None
    max_backoff_ms: int | None = None
    backoff_multiplier: float | None = None
    jitter_factor: float | None = None
    disable_retry: bool | None = None
    retryable_status_codes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class HttpPool:
    """Connections to one worker, as the peer has them; of no effect: Envoy's connections are alike for all."""

    pool_max_idle_per_host: int | None = None
    pool_idle_timeout_secs: float | None = None
    timeout_secs: float | None = None
    connect_timeout_secs: float | None = None


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
    engine_models_too: bool = False  # besides those of ``cards``, those that the engine names are served
    health: HealthOverrides = HealthOverrides()
    resilience: Resilience = Resilience()
    overload: Overload = Overload()
    load_monitor_interval_secs: float | None = None
    bootstrap_host: str = ""  # of the bootstrap server, IPv6 in brackets; empty: the URL's
    kv_block_size: int | None = None  # tokens of a KV cache block, where neither labels nor the engine say it
    # Of no effect, as `unused` says.
    max_connection_attempts: int | None = None
    http_pool: HttpPool = HttpPool()
    multimodal_tensor_transport: str | None = None
    multimodal_shm_min_bytes: int | None = None

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The models named at registration."""
        return tuple(str(card["id"]) for card in self.cards)

    @property
    def unserved(self) -> str:
        """Why such a worker is given no requests; empty when it is. See Worker."""
        return _UNSERVED.get(self.role, "")

    def requested_as(self, other: WorkerSpec) -> bool:
        """Whether requests are placed on a worker registered so, and sent to it, just as if it were ``other``."""
        return all(getattr(self, name) == getattr(other, name) for name in _OF_REQUESTS)

    def idle(self, connector: str | None) -> tuple[str, ...]:
        """What is registered and changes nothing, for people: it may have been meant for another worker.

        ``connector``: that the worker has, registered or by its own word; None: it has not said yet.
        """
        is_prefill = self.role is Role.PREFILL
        has_bootstrap = self.role in (Role.PREFILL, Role.ENCODE)
        found = []
        if self.engine_id_named and not (is_prefill and connector in (None, MOONCAKE)):
            found.append(f"kv_engine_id is of no effect: only prefill workers with {MOONCAKE} need one")
        for name in ("bootstrap_port", "bootstrap_host"):
            if getattr(self, name) in (None, ""):
                continue
            if not has_bootstrap:
                found.append(f"{name} is of no effect: only prefill workers have a bootstrap server")
            elif is_prefill and connector not in (None, "", MOONCAKE):
                found.append(f"{name} is of no effect with {connector}")
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
        for group, members in _IDLE_MEMBERS.items():
            given = getattr(self, group)
            found += [
                f"{group}.{name} is of no effect: {why}"
                for name, why in members.items()
                if getattr(given, name) is not None
            ]
        for name in ("multimodal_tensor_transport", "multimodal_shm_min_bytes"):
            if getattr(self, name) is not None:
                found.append(f"{name} is of no effect: it is for encode workers, which are given no requests yet")
        return tuple(found)


_UNSERVED: Final = {
    Role.ENCODE: "encode workers are given no requests yet",
    Role.REGULAR: "a prefill/decode gateway gives regular workers no requests",
}
# Of a registration, what decides to whom requests go and what they then say.
_OF_REQUESTS: Final = (
    "url",
    "role",
    "cards",
    "engine_models_too",
    "bootstrap_host",
    "bootstrap_port",
    "api_key",
    "labels",
    "runtime",
    "kv",
    "kv_block_size",
)


_ANY_OF_TWO: Final = "an attempt is made on two workers"
_ALIKE: Final = "Envoy's connections are alike for all workers"
# Of groups of fields, what changes nothing, and why.
_IDLE_MEMBERS: Final = {
    "resilience": {
        "max_retries": f"{_ANY_OF_TWO}; use --retry-max-retries",
        "initial_backoff_ms": f"{_ANY_OF_TWO}; use --retry-initial-backoff-ms",
        "max_backoff_ms": f"{_ANY_OF_TWO}; use --retry-max-backoff-ms",
        "backoff_multiplier": f"{_ANY_OF_TWO}; use --retry-backoff-multiplier",
        "jitter_factor": f"{_ANY_OF_TWO}; use --retry-jitter-factor",
        "disable_retry": f"{_ANY_OF_TWO}; use --disable-retries",
        "retryable_status_codes": f"{_ANY_OF_TWO}, and which answers lead to another one is fixed",
    },
    "http_pool": {
        "pool_max_idle_per_host": f"{_ALIKE}; idle ones are not counted, but closed soon",
        "pool_idle_timeout_secs": f"{_ALIKE}; idle ones are closed after 3 s",
        "timeout_secs": "a request has one time for both legs, --request-timeout-secs; for probes: health.timeout_secs",
        "connect_timeout_secs": f"{_ALIKE}; one must be made within 2 s",
    },
}
