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
    drain_settle_secs: float | None = None  # of no effect: removal waits for the requests themselves


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
    runtime: str | None = None  # sglang or vllm; None: find out
    kv: KvConfig = field(default_factory=KvConfig)  # vLLM's HTTP server does not tell its connector
    engine_id_named: bool = False  # given by itself, not as one of many things in the engine's own configuration
    health: HealthOverrides = HealthOverrides()

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
