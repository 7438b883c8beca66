"""What Envoy is told of the workers: lists of endpoints per role, of HTTP workers and of gRPC ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

PREFILL_CLUSTER = "prefill"
DECODE_CLUSTER = "decode"
# The same of gRPC workers, to which Envoy speaks HTTP/2: a cluster has one protocol.
PREFILL_GRPC_CLUSTER = "prefill_grpc"
DECODE_GRPC_CLUSTER = "decode_grpc"
# Every cluster with workers, and the value of their role.
ROLES: Final[Mapping[str, str]] = {
    PREFILL_CLUSTER: "prefill",
    DECODE_CLUSTER: "decode",
    PREFILL_GRPC_CLUSTER: "prefill",
    DECODE_GRPC_CLUSTER: "decode",
}


class Health(Enum):
    """What Envoy is told of how a worker is; the values are names of ``envoy.config.core.v3.HealthStatus``.

    For Envoy's own statistics and for other users of its clusters: the policy ``override_host`` (1.40) sends to the
    hosts that a request names, whatever their health.
    """

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address Envoy may send to.

    ``ip`` has no brackets; ``hostname`` is the worker URL's host (SNI, Host); ``grpc``: HTTP/2 is spoken there.
    """

    ip: str
    port: int
    hostname: str
    tls: bool = False
    health: Health = Health.HEALTHY
    grpc: bool = False

    @property
    def address(self) -> str:
        """``ip:port`` as ``x-gateway-destination-endpoint`` wants it, IPv6 in brackets."""
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All endpoints at one moment, by role."""

    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()

    def of(self, cluster: str) -> tuple[Endpoint, ...]:
        """Those of one cluster."""
        workers = {"prefill": self.prefill, "decode": self.decode}.get(ROLES.get(cluster, ""), ())
        grpc = cluster in (PREFILL_GRPC_CLUSTER, DECODE_GRPC_CLUSTER)
        return tuple(endpoint for endpoint in workers if endpoint.grpc is grpc)
