"""What an operator may set of policies: the settings' fields of the same names, with the same defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from extproc.policies.names import AssignmentMode, LoadMetric


@dataclass(frozen=True, slots=True)
class Tuning:
    """See the help texts of ``pd-extproc launch``; names and defaults are the peer's."""

    power_of_two_load_metric: LoadMetric = LoadMetric.EXPECTED_WAIT
    least_load_kv_pressure_weight: float = 0.15  # seconds
    least_load_default_throughput: float = 2000.0  # tokens per second
    least_load_mean_prefill_tokens: int = 1024
    least_load_max_waiting_requests: int = 0  # 0: as many as there are
    prefix_token_count: int = 256
    prefix_hash_load_factor: float = 1.25
    prefix_hash_balance_abs_threshold: int = 10  # requests
    bucket_adjust_interval_secs: float = 5.0
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_idle_secs: float = 14400.0
    assignment_mode: AssignmentMode | None = None
    routing_key_override: bool = False
    routing_key_headers: tuple[str, ...] = ("x-smg-routing-key",)
    dp_minimum_tokens_scheduler: bool = False
    api_key: str | None = None  # of the gateway, which all clients bear

    @classmethod
    def of(cls, settings: object) -> Tuning:
        """Taken from an object that has all of it under the same names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})
