"""Which way the legs go that the service sends itself (``--egress``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from extproc.envoy_config import egress_target
from extproc.transport.address import TcpAddress, parse_address
from extproc.transport.egress import EgressClient
from extproc.transport.interface import Egress
from extproc.upstream.egress import DirectEgress, ProxyEgress
from extproc.upstream.tls import WorkerTls
from extproc.values import EGRESS_DIRECT, EGRESS_ENVOY
from extproc.workers.endpoints import Snapshot

if TYPE_CHECKING:
    from extproc.settings import Settings

_MOST_CONNECTIONS: Final = 4


class Way(Egress, Protocol):
    """An Egress with a life of its own."""

    def start(self) -> None:
        """Begin to connect, or to look after connections. Must be called on the running loop."""

    async def stop(self) -> None:
        """Close all connections; legs under way are lost."""

    def publish(self, snapshot: Snapshot) -> None:
        """Where the workers are."""

    @property
    def open_legs(self) -> int:
        """Legs under way or waiting."""


class EnvoyEgress(EgressClient):
    """Through Envoy's egress listener; Envoy learns of the workers by itself."""

    def publish(self, snapshot: Snapshot) -> None:
        """See Way."""


def egress_of(settings: Settings) -> Way:
    """The way that the settings say. Raises OSError or ssl.SSLError where ``--worker-ca-file`` cannot be read."""
    if settings.egress == EGRESS_DIRECT:
        return DirectEgress(WorkerTls(settings.worker_ca_file))
    if settings.egress == EGRESS_ENVOY:
        # Envoy serves a connection by one of its threads: with one connection all legs would be that thread's.
        connections = min(settings.envoy_concurrency, _MOST_CONNECTIONS)
        return EnvoyEgress(egress_target(settings), connections=connections)
    address = parse_address(settings.egress.removeprefix("http://"))
    assert isinstance(address, TcpAddress)
    return ProxyEgress(address.host, address.port)
