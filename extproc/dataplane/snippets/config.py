"""What the snippets for Envoys of others are made of, besides the data plane's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from extproc.dataplane.config import DataplaneConfig
from extproc.transport.address import UnixAddress, parse_address
from extproc.workers.endpoints import Endpoint

_EXTPROC_PORT: Final = 50051
_CONTROL_PORT: Final = 50053


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a cluster the objects belong, and how those are named that they go with."""

    namespace: str = "llm"
    gateway: str = "inference-gateway"  # a Gateway of the Gateway API; in Istio also the label of its pods
    service: str = "pd-extproc"  # Service of the sidecar
    workers: str = "pd-workers"  # Service of all workers, or InferencePool
    worker_port: int = 8000

    def host(self, service: str) -> str:
        """The name by which a Service is found from every namespace."""
        return f"{service}.{self.namespace}.svc.cluster.local"


@dataclass(frozen=True, slots=True)
class SnippetConfig:
    """All inputs of a snippet. ``prefill`` and ``decode``: workers by host name, for snippets that list them."""

    dataplane: DataplaneConfig
    place: Place = Place()
    prefill: Sequence[Endpoint] = ()
    decode: Sequence[Endpoint] = ()

    @property
    def listen(self) -> str:
        """What the sidecar is told to listen on."""
        address = parse_address(self.dataplane.extproc)
        return str(address) if isinstance(address, UnixAddress) else f"0.0.0.0:{address.port}"

    @property
    def extproc_port(self) -> int:
        """The port of the sidecar's Service."""
        return _port(self.dataplane.extproc, _EXTPROC_PORT)

    @property
    def control_port(self) -> int:
        """The same of its control API."""
        return _port(self.dataplane.control, _CONTROL_PORT)


def _port(text: str, usual: int) -> int:
    """A Service has a port, whatever the sidecar has in its pod."""
    address = parse_address(text)
    return usual if isinstance(address, UnixAddress) else address.port
