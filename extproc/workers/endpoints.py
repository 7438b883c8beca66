"""What Envoy is told of the workers: one list of endpoints per role cluster."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL_CLUSTER = "prefill"
DECODE_CLUSTER = "decode"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address Envoy may send to. ``ip`` has no brackets; ``hostname`` is the worker URL's host (SNI, Host)."""

    ip: str
    port: int
    hostname: str
    tls: bool = False

    @property
    def address(self) -> str:
        """``ip:port`` as ``x-gateway-destination-endpoint`` wants it, IPv6 in brackets."""
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All endpoints at one moment."""

    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
