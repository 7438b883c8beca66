"""The ADS and EDS server that tells Envoy where the workers are.

State of the world, endpoints only: every answer carries the whole list of each role cluster that the Envoy subscribed
to. Cold path, so grpcio: its asyncio server wakes the event loop only when an Envoy says something.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

# Envoy is started by fork and exec, which needs none of grpcio's fork handlers; they would complain on stderr. Must be
# set before grpcio starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc  # type: ignore[import-untyped]
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc

from extproc.transport.address import SocketFile, UnixAddress, claim_socket_file, parse_address
from extproc.workers.endpoints import Endpoint, Health, Snapshot

ENDPOINTS_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
TRANSPORT_SOCKET_MATCH = "envoy.transport_socket_match"
# An Envoy acknowledges endpoints when its main thread has them; to its worker threads it has only sent them by then. A
# request for a new one that is faster finds nobody there (seen on busy machines only).
_SPREAD_SECONDS: Final = 0.025

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers on one port would share its Envoys without a word
    ("grpc.http2.max_ping_strikes", 0),  # Envoy asks for signs of life more often than grpcio likes
)

_log = logging.getLogger(__name__)


class EndpointsRejectedError(Exception):
    """An Envoy refused an endpoint list; the message is Envoy's."""


class EndpointsTimeoutError(Exception):
    """An Envoy that is connected has not acknowledged an endpoint list in time."""


@dataclass(eq=False, slots=True)
class _Subscriber:
    """One ADS stream, that is, one Envoy."""

    peer: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    names: frozenset[str] = frozenset()  # subscribed cluster names
    subscribed: bool = False
    sent_names: frozenset[str] | None = None
    sent: int = 0  # version last sent
    nonce: int = 0  # nonce last sent
    acked: int = 0
    rejected: int = 0
    rejection: str = ""


class AdsServer:
    """Serves the snapshots given to :meth:`publish` to every Envoy that connects. All methods on one event loop."""

    def __init__(self, address: str) -> None:
        """``address``: ``unix:/path`` or ``host:port``."""
        self._address = address
        self._server: grpc.aio.Server | None = None
        self._socket_file: SocketFile | None = None
        self._subscribers: set[_Subscriber] = set()
        self._snapshot = Snapshot()
        self._version = 1
        self._changed = asyncio.Condition()
        self.port = 0  # the TCP port that was bound; 0 for a unix socket

    @property
    def connected(self) -> int:
        """How many Envoys are subscribed now."""
        return sum(subscriber.subscribed for subscriber in self._subscribers)

    async def start(self) -> None:
        """Listen. Raises OSError when the address cannot be bound, ValueError when it is none."""
        address = parse_address(self._address)
        if isinstance(address, UnixAddress):
            await claim_socket_file(address.path)
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        servicer = _Servicer(self._serve)
        ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(servicer, server)
        eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(servicer, server)
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise OSError(f"ADS cannot listen on {self._address}: {error}") from None
        await server.start()
        self._server = server
        if isinstance(address, UnixAddress):
            self._socket_file = SocketFile.bound(address.path)
        else:
            self.port = port

    async def stop(self) -> None:
        """End all streams and stop listening. Envoys keep the endpoints they have."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
        if self._socket_file is not None:
            self._socket_file.remove()
            self._socket_file = None

    async def publish(self, snapshot: Snapshot, timeout: float = 5.0) -> None:  # noqa: ASYNC109  # part of the meaning
        """Make ``snapshot`` what Envoys know; return when every connected one has acknowledged it, and, of new
        endpoints, has had a moment to tell its threads.

        Returns at once when none is connected: one that connects later gets the snapshot before it serves, unless it
        has been waiting for longer than it may (``initial_fetch_timeout``). Raises
        EndpointsRejectedError when an Envoy refuses it, EndpointsTimeoutError when one does not answer within
        ``timeout`` seconds. In both cases the snapshot stays published.
        """
        new = False
        if snapshot != self._snapshot:
            new = bool(_addresses(snapshot) - _addresses(self._snapshot))
            self._snapshot = snapshot
            self._version += 1
            for subscriber in self._subscribers:
                subscriber.wake.set()
        version = self._version
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: not self._missing(version))
        except TimeoutError:
            peers = ", ".join(sorted(subscriber.peer for subscriber in self._missing(version)))
            message = f"no acknowledgement of the endpoints within {timeout:g} s by {peers}"
            raise EndpointsTimeoutError(message) from None
        if new and self.connected:
            await asyncio.sleep(_SPREAD_SECONDS)

    def _missing(self, version: int) -> list[_Subscriber]:
        for subscriber in self._subscribers:
            if subscriber.rejected >= version:
                raise EndpointsRejectedError(subscriber.rejection)
        return [subscriber for subscriber in self._subscribers if subscriber.subscribed and subscriber.acked < version]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, requests: AsyncIterator[Any], peer: str) -> AsyncIterator[Any]:
        subscriber = _Subscriber(peer)
        self._subscribers.add(subscriber)
        reader = asyncio.create_task(self._read(requests, subscriber))
        reader.add_done_callback(lambda task: _ended(task, subscriber))
        _log.info("Envoy connected to ADS: %s", peer)
        try:
            while not reader.done():
                await subscriber.wake.wait()
                subscriber.wake.clear()
                if subscriber.subscribed and self._due(subscriber):
                    yield self._response(subscriber)
        finally:
            reader.cancel()
            self._subscribers.discard(subscriber)
            _log.info("Envoy disconnected from ADS: %s", peer)
            await asyncio.shield(self._notify())

    def _due(self, subscriber: _Subscriber) -> bool:
        return subscriber.sent < self._version or subscriber.sent_names != subscriber.names

    def _response(self, subscriber: _Subscriber) -> Any:
        subscriber.sent, subscriber.sent_names = self._version, subscriber.names
        subscriber.nonce += 1
        response = discovery_pb2.DiscoveryResponse(
            version_info=str(self._version), type_url=ENDPOINTS_TYPE, nonce=str(subscriber.nonce)
        )
        for name in sorted(subscriber.names):
            response.resources.add().Pack(assignment(name, self._snapshot.of(name)))
        return response

    async def _read(self, requests: AsyncIterator[Any], subscriber: _Subscriber) -> None:
        async for request in requests:
            if request.type_url != ENDPOINTS_TYPE:
                _log.warning("Envoy asks ADS for %s, which is not served", request.type_url)
                continue
            if request.response_nonce and request.response_nonce != str(subscriber.nonce):
                continue  # answers a list that a newer one has already replaced
            if request.response_nonce:
                self._note_answer(request, subscriber)
            subscriber.subscribed = True
            subscriber.names = frozenset(request.resource_names)
            subscriber.wake.set()
            await self._notify()

    @staticmethod
    def _note_answer(request: Any, subscriber: _Subscriber) -> None:
        if request.HasField("error_detail"):
            subscriber.rejected, subscriber.rejection = subscriber.sent, request.error_detail.message
            _log.error("Envoy rejects endpoints version %d: %s", subscriber.sent, subscriber.rejection)
        else:
            subscriber.acked = subscriber.sent


def _addresses(snapshot: Snapshot) -> set[tuple[str, str]]:
    named = {"prefill": snapshot.prefill, "decode": snapshot.decode}
    return {(role, endpoint.address) for role, endpoints in named.items() for endpoint in endpoints}


def _ended(reader: asyncio.Task[None], subscriber: _Subscriber) -> None:
    if not reader.cancelled() and (error := reader.exception()) is not None:
        _log.debug("ADS stream of %s broke: %s", subscriber.peer, error)
    subscriber.wake.set()


class _Servicer(  # xds-protos has no types
    ads_pb2_grpc.AggregatedDiscoveryServiceServicer,  # type: ignore[misc]
    eds_pb2_grpc.EndpointDiscoveryServiceServicer,  # type: ignore[misc]
):
    """Both ways to ask: an Envoy has one ADS server, which in a mesh is another's."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve

    async def StreamAggregatedResources(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for response in self._serve(requests, context.peer()):
            yield response

    async def StreamEndpoints(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for response in self._serve(requests, context.peer()):
            yield response


def assignment(name: str, endpoints: Iterable[Endpoint]) -> Any:
    """The ClusterLoadAssignment of one role cluster. Of endpoints with the same address the first counts."""
    unique: dict[tuple[str, int], Endpoint] = {}
    for endpoint in endpoints:
        unique.setdefault((endpoint.ip, endpoint.port), endpoint)
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    if unique:
        group = message.endpoints.add()
        for endpoint in unique.values():
            _fill(group.lb_endpoints.add(), endpoint)
    return message


def _fill(target: Any, endpoint: Endpoint) -> None:
    address = target.endpoint.address.socket_address
    address.address, address.port_value = endpoint.ip, endpoint.port
    target.endpoint.hostname = host_header(endpoint)
    if endpoint.health is not Health.HEALTHY:  # which Envoy takes for granted
        target.health_status = health_check_pb2.HealthStatus.Value(endpoint.health.value)
    if endpoint.tls:
        target.metadata.filter_metadata[TRANSPORT_SOCKET_MATCH].update({"tls": True})


def host_header(endpoint: Endpoint) -> str:
    """What Envoy sends as ``Host``.

    Envoy takes the server name of TLS from the same field and would send a port as part of it, so an https:// worker
    gets its host name without the port.
    """
    if endpoint.tls:
        return endpoint.hostname
    host = f"[{endpoint.hostname}]" if ":" in endpoint.hostname else endpoint.hostname
    return f"{host}:{endpoint.port}"
