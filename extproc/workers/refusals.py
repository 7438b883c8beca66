"""What the peer's registrations may say and cannot be done here: refused by name, with what to do instead.

Source of the names: the peer's WorkerSpec (``crates/protocols/src/worker.rs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_RANK: Final = (
    "ranks are not registered one by one; register the engine once, with the URL without @rank, and dp_size if it does "
    "not tell it, and start the gateway with --dp-aware"
)

# Field -> why. They may be given where they say nothing new.
_FIELDS: Final = {
    "dp_base_url": _RANK,
    "dp_rank": _RANK,
    "provider": "only engines are served; leave it out, and send requests for other providers past this gateway",
    "zmq_handshake_address": "workers are reached over HTTP or gRPC; leave it out, and give such a URL",
}

# Field -> value -> why.
_ENGINE: Final = "its handoff is not known; give sglang, vllm or tokenspeed if the engine speaks like one of them"
_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "connection_mode": {"zmq": "workers over ZeroMQ are not served; expected http or grpc"},
    "runtime_type": dict.fromkeys(("trtllm", "mlx", "generic", "external"), _ENGINE),
    "runtime": dict.fromkeys(("trtllm", "mlx", "generic", "external"), _ENGINE),
}

NAMES: Final = frozenset(_FIELDS)


def refusals(value: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing in a registration that is known and refused."""
    for name, given in value.items():
        if name in _FIELDS and not _says_nothing(name, given, value):
            yield f"`{name}` is refused: {_FIELDS[name]}"
        elif isinstance(given, str) and (why := _VALUES.get(name, {}).get(given)):
            yield f"{name}: `{given}` is refused: {why}"


def _says_nothing(name: str, given: object, value: Mapping[str, Any]) -> bool:
    """Whether a refused field is null, or says of a server with one rank what is so anyhow."""
    match name:
        case "dp_base_url" if given is not None:
            return given == value.get("url")
        case "dp_rank" if given is not None:
            return type(given) is int and given == 0 and value.get("dp_size") in (None, 1)
    return given is None
