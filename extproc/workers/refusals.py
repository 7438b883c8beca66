"""What the peer's registrations may say and is not done here: refused by name, with the reason.

Source of the names: the peer's WorkerSpec (``crates/protocols/src/worker.rs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_RETRY: Final = "an attempt is made on two workers, so that no one of them can say how many there are"
_POOL: Final = "Envoy's connections are alike for all workers"
_ENCODE: Final = "encode workers are not served yet"
_RANK: Final = "ranks are not registered one by one; give the engine's URL once, and dp_size if it does not tell it"

# Field -> why. Members of an object are named after a dot.
_FIELDS: Final = {
    "bootstrap_host": "it is the host of the URL",
    "dp_base_url": _RANK,
    "dp_rank": _RANK,
    "http_pool.pool_max_idle_per_host": f"{_POOL}; idle ones are not counted, but closed soon",
    "http_pool.pool_idle_timeout_secs": f"{_POOL}; idle ones are closed after 3 s",
    "http_pool.timeout_secs": "a request has one time for both legs, --request-timeout-secs; for probes: "
    "health.timeout_secs",
    "http_pool.connect_timeout_secs": f"{_POOL}; one must be made within 2 s",
    "kv_block_size": "it is for the policy cache_aware, which is not available yet; for pairing, give the label "
    "block_size",
    "multimodal_shm_min_bytes": _ENCODE,
    "multimodal_tensor_transport": _ENCODE,
    "provider": "only engines are served, not other providers' APIs",
    "resilience.backoff_multiplier": f"{_RETRY}; use --retry-backoff-multiplier",
    "resilience.disable_retry": f"{_RETRY}; use --disable-retries",
    "resilience.initial_backoff_ms": f"{_RETRY}; use --retry-initial-backoff-ms",
    "resilience.jitter_factor": f"{_RETRY}; use --retry-jitter-factor",
    "resilience.max_backoff_ms": f"{_RETRY}; use --retry-max-backoff-ms",
    "resilience.max_retries": f"{_RETRY}; use --retry-max-retries",
    "resilience.retryable_status_codes": f"{_RETRY}; which answers lead to another one is fixed",
    "zmq_handshake_address": "workers are reached over HTTP or gRPC",
}

# Field -> value -> why.
_ENGINE: Final = "its handoff is not known; expected sglang, vllm or tokenspeed"
_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "worker_type": {
        "regular": "regular workers are not served yet; expected prefill or decode",
        "encode": f"{_ENCODE}; expected prefill or decode",
    },
    "connection_mode": {"zmq": "workers over ZeroMQ are not served; expected http or grpc"},
    "runtime_type": dict.fromkeys(("trtllm", "mlx", "generic", "external"), _ENGINE),
    "runtime": dict.fromkeys(("trtllm", "mlx", "generic", "external"), _ENGINE),
}

# Objects of which nothing else is known than what is refused.
REFUSED_WHOLE: Final = frozenset({"http_pool"})
NAMES: Final = frozenset(name.partition(".")[0] for name in _FIELDS)


def is_refused(name: str) -> bool:
    """Whether a field, or a member of an object after a dot, is known and not taken, whatever its value."""
    return name in _FIELDS


def refusals(value: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing in a registration that is known and refused."""
    for name, given in _given(value):
        whole, _, member = name.partition(".")
        if name in _FIELDS:
            yield f"`{name}` is refused: {_FIELDS[name]}"
        elif isinstance(given, str) and (why := _VALUES.get(name, {}).get(given)):
            yield f"{name}: `{given}` is refused: {why}"
        elif whole in REFUSED_WHOLE:
            yield f"unknown field `{name}`" if member else f"{name}: expected an object"


def _given(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields and members of objects, with their values; null says nothing."""
    for name, given in value.items():
        if isinstance(given, Mapping) and name in NAMES:
            yield from ((f"{name}.{member}", item) for member, item in given.items() if item is not None)
        elif given is not None:
            yield name, given
