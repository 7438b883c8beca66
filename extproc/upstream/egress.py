"""Implementations of ``Egress`` that need no listener of Envoy's: straight to the workers, or through a proxy."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from extproc.transport.interface import Header, Leg, LegReceiver
from extproc.upstream.host import IDLE_SECONDS, Http1Host, Http2Host, Place
from extproc.upstream.leg import UpstreamLeg
from extproc.upstream.request import Request, Target
from extproc.upstream.tls import WorkerTls
from extproc.workers.endpoints import DECODE_GRPC_CLUSTER, PREFILL_GRPC_CLUSTER, ROLES, Endpoint, Snapshot

_SWEEP_SECONDS: Final = 1.0
_GRPC: Final = frozenset({PREFILL_GRPC_CLUSTER.encode(), DECODE_GRPC_CLUSTER.encode()})


class _Egress(ABC):
    """What both have in common: their legs, and the sweeping of connections that are idle."""

    def __init__(self) -> None:
        self._legs: set[UpstreamLeg] = set()
        self._retired: list[Http1Host | Http2Host] = []  # these only finish what is under way
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def open_legs(self) -> int:
        """Legs under way."""
        return len(self._legs)

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return sum(host.connections for host in self._hosts())

    def start(self) -> None:
        """Begin to look after connections. Must be called on the running loop."""
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="egress-idle")

    async def stop(self) -> None:
        """Close all connections; legs under way are lost."""
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        for leg in list(self._legs):
            leg.give_up("the egress was stopped")
        for host in self._hosts():
            host.close()
        await asyncio.sleep(0)  # in which the connections hear of it

    def send(self, headers: Sequence[Header], body: bytes, receiver: LegReceiver) -> Leg:
        """See ``Egress.send``."""
        request = Request(headers, body)
        leg = UpstreamLeg(request, self._targets(request), receiver, self._legs.discard, proxied=self._proxied)
        self._legs.add(leg)
        leg.begin()
        return leg

    _proxied = False

    @abstractmethod
    def _targets(self, request: Request) -> Sequence[Target]:
        """Where a request goes, in order."""

    @abstractmethod
    def _hosts(self) -> Iterable[Http1Host | Http2Host]:
        """All, also those that only finish what is under way."""

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            before = loop.time() - IDLE_SECONDS
            for host in self._hosts():
                host.sweep(before)
            self._retired = [host for host in self._retired if host.connections]


class DirectEgress(_Egress):
    """To the workers, by their addresses as they are published to Envoy.

    ``tls`` is for https and grpcs workers.
    """

    def __init__(self, tls: WorkerTls) -> None:
        super().__init__()
        self._tls = tls
        self._known: dict[tuple[bytes, bytes], Target] = {}  # by cluster and "ip:port"
        self._endpoints: dict[tuple[bytes, bytes], Endpoint] = {}
        self._lists: dict[tuple[bytes, bytes], Sequence[Target]] = {}  # by cluster and list

    def publish(self, snapshot: Snapshot) -> None:
        """The workers are these from now on; those that are no more finish what they have."""
        endpoints = {
            (cluster.encode(), endpoint.address.encode()): endpoint
            for cluster in ROLES
            for endpoint in reversed(snapshot.of(cluster))  # of two at the same address the first counts
        }
        known: dict[tuple[bytes, bytes], Target] = {}
        for key, endpoint in endpoints.items():
            before = self._endpoints.get(key)
            same = before is not None and _place(before) == _place(endpoint)
            known[key] = self._known[key] if same else self._target(key[1], endpoint)
        for key, target in self._known.items():
            if known.get(key) is not target:
                target.host.retire()
                self._retired.append(target.host)
        self._known, self._endpoints = known, endpoints
        self._lists.clear()

    def _target(self, name: bytes, endpoint: Endpoint) -> Target:
        place = Place(
            endpoint.ip,
            endpoint.port,
            self._tls.context(grpc=endpoint.grpc) if endpoint.tls else None,
            endpoint.hostname,
        )
        host = Http2Host(place) if endpoint.grpc else Http1Host(place)
        return Target(host, name, _authority(endpoint), tls=endpoint.tls)

    def _targets(self, request: Request) -> Sequence[Target]:
        key = request.cluster, request.destinations
        found = self._lists.get(key)
        if found is None:
            cluster, names = key
            known = (self._known.get((cluster, name.strip())) for name in names.split(b","))
            found = tuple(target for target in known if target is not None)
            if len(self._lists) >= 4096:
                self._lists.clear()
            self._lists[key] = found
        return found

    def _hosts(self) -> Iterator[Http1Host | Http2Host]:
        for target in self._known.values():
            yield target.host
        yield from self._retired


class ProxyEgress(_Egress):
    """Through a proxy or the listener of a mesh at ``host:port``: it is told the worker, and connects to it.

    HTTP/1.1; gRPC legs HTTP/2 without TLS.
    """

    _proxied = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        place = Place(host, port)
        self._http = Http1Host(place)
        self._grpc = Http2Host(place)

    def publish(self, snapshot: Snapshot) -> None:
        """The proxy knows by itself."""

    def _targets(self, request: Request) -> Sequence[Target]:
        host = self._grpc if request.cluster in _GRPC else self._http
        return (Target(host, request.destinations.partition(b",")[0], proxied=True),)

    def _hosts(self) -> Iterator[Http1Host | Http2Host]:
        yield self._http
        yield self._grpc


def _place(endpoint: Endpoint) -> tuple[object, ...]:
    """What a connection depends on: not its health."""
    return endpoint.ip, endpoint.port, endpoint.hostname, endpoint.tls, endpoint.grpc


def _authority(endpoint: Endpoint) -> bytes:
    """As Envoy names the worker to itself: with TLS without the port."""
    host = f"[{endpoint.hostname}]" if ":" in endpoint.hostname else endpoint.hostname
    return host.encode() if endpoint.tls else f"{host}:{endpoint.port}".encode()
