"""What the tests of the service's own connections to workers stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from raw_server import Connection, RawServer
from transport_peer import Receiver

from extproc.transport.interface import Header
from extproc.upstream.egress import DirectEgress, ProxyEgress
from extproc.upstream.tls import WorkerTls
from extproc.workers.endpoints import Endpoint, Snapshot

UNREACHABLE_PORT = 1  # of nobody


@asynccontextmanager
async def direct_egress() -> AsyncIterator[DirectEgress]:
    """One that runs, and has no leg left at its end."""
    egress = DirectEgress(WorkerTls(None))
    egress.start()
    yield egress
    await egress.stop()
    assert egress.open_legs == 0


def post(*ports: int, cluster: str = "prefill", size: int = 0, path: str = "/p?q=1") -> list[Header]:
    """The head of a leg to workers at these ports."""
    destinations = ",".join(f"127.0.0.1:{port}" for port in ports)
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":authority", b"first:1"),
        (b":path", path.encode()),
        (b"x-pd-cluster", cluster.encode()),
        (b"x-gateway-destination-endpoint", destinations.encode()),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % size),
    ]


def workers(*ports: int, names: Mapping[int, str] | None = None, grpc: bool = False, tls: bool = False) -> Snapshot:
    """Prefill workers at these ports."""
    found = names or {}
    return Snapshot(
        prefill=tuple(
            Endpoint("127.0.0.1", port, found.get(port, f"w{at}"), tls=tls, grpc=grpc) for at, port in enumerate(ports)
        )
    )


async def asked(
    egress: DirectEgress | ProxyEgress, server: RawServer, number: int = 0, body: bytes = b"hello"
) -> tuple[Receiver, Connection, tuple[str, dict[str, str], bytes]]:
    """A leg whose request has come on the so-manieth connection."""
    receiver = Receiver()
    egress.send(post(server.port, size=len(body)), body, receiver)
    connection = await server.connection(number)
    return receiver, connection, await connection.request()


def told(receiver: Receiver) -> tuple[int, bytes | None, bytes | None]:
    """Status, Envoy's flags where nobody answered, and who did."""
    fields = dict(receiver.headers)
    return receiver.status, fields.get(b"x-pd-local-reply"), fields.get(b"x-pd-upstream")
