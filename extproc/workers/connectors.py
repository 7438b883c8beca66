"""vLLM's KV connectors by class name: which get fields in requests, which need none, which are refused.

Source: vLLM 0.32, ``kv_connector/factory.py`` (the names) and each connector's module (what it reads of a request's
``kv_transfer_params``).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from extproc.workers.worker import MOONCAKE, NIXL

MULTI: Final = "MultiConnector"
# Engines that have no connectors, and how they are called.
WITHOUT_CONNECTORS: Final = MappingProxyType({"sglang": "SGLang", "tokenspeed": "TokenSpeed"})
# The cache moves by fields in the requests, which the gateway sends.
BY_FIELDS: Final = frozenset({NIXL, MOONCAKE})
# They want nothing of a request: shared stores, caches of one's own, tools.
WITHOUT_FIELDS: Final = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MooncakeStoreConnector",
        "OffloadingConnector",
        "SharedStorageConnector",  # ExampleConnector's former name
        "SimpleCPUOffloadConnector",
    }
)
# Without what they want of a request nothing is moved, or the engine ends.
_REFUSED: Final = MappingProxyType(
    {
        "NixlPushConnector": "requests must name the transfer and the prefill worker's address, use NixlConnector",
        "MoRIIOConnector": "requests must carry the other worker's handshake and notify ports",
        "P2pNcclConnector": "requests must carry both workers' addresses in X-Request-Id",  # before 0.32
    }
)
_RELAYED: Final = "whatever the prefill returns is relayed"
_NAMES: Final = {name.lower(): name for name in (MULTI, *BY_FIELDS, *WITHOUT_FIELDS, *_REFUSED)} | {
    "nixl": NIXL,
    "mooncake": MOONCAKE,
    "nixlpullconnector": NIXL,  # its newer name
}


def canonical(name: str) -> str:
    """The one name of a connector, of which ``nixl``, ``mooncake`` and any case are accepted; unknown ones as given."""
    return _NAMES.get(name.lower(), name)


def refusal(name: str) -> str:
    """Why a worker with the connector of this canonical name cannot be served; empty when it can."""
    why = _REFUSED.get(name)
    return f"{name}: its handoff is not supported ({why})" if why else ""


def doubt(name: str, *, asked: bool = False) -> str:
    """What should be said of a worker with this canonical name (empty: with none), if anything.

    ``asked``: the server itself has told it, or that it has none; else the registration has.
    """
    if not name:
        return f"{'the server has no kv_connector' if asked else 'no kv_connector registered'}: {_RELAYED}"
    if name in BY_FIELDS or name in WITHOUT_FIELDS:
        return ""
    return f"connector {name} is not known: {_RELAYED}"
