"""What Envoy is told of the workers: one list of endpoints per role cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFILL_CLUSTER = "prefill"
DECODE_CLUSTER = "decode"


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
    """One address Envoy may send to. ``ip`` has no brackets; ``hostname`` is the worker URL's host (SNI, Host)."""

    ip: str
    port: int
    hostname: str
    tls: bool = False
    health: Health = Health.HEALTHY

    @property
    def address(self) -> str:
        """``ip:port`` as ``x-gateway-destination-endpoint`` wants it, IPv6 in brackets."""
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All endpoints at one moment."""

    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
