"""The ADS server against a client that does by hand what Envoy does."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc

from extproc.dataplane.ads import ENDPOINTS_TYPE, AdsServer, EndpointsRejectedError, EndpointsTimeoutError, assignment
from extproc.workers.endpoints import Endpoint, Snapshot

BOTH = ("decode", "prefill")
ONE = Snapshot(prefill=(Endpoint("10.0.0.1", 1, "p"),), decode=(Endpoint("10.0.0.2", 2, "d"),))
TWO = Snapshot(prefill=(Endpoint("10.0.0.1", 1, "p"), Endpoint("10.0.0.3", 3, "q")))


class Client:
    """One ADS stream."""

    def __init__(self, address: str, *, eds: bool = False) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        if eds:
            self.stream = eds_pb2_grpc.EndpointDiscoveryServiceStub(self.channel).StreamEndpoints()
        else:
            self.stream = ads_pb2_grpc.AggregatedDiscoveryServiceStub(self.channel).StreamAggregatedResources()

    async def ask(self, *names: str, nonce: str = "", version: str = "", error: str = "", kind: str = "") -> None:
        request = discovery_pb2.DiscoveryRequest(
            type_url=kind or ENDPOINTS_TYPE, resource_names=names, response_nonce=nonce, version_info=version
        )
        if error:
            request.error_detail.message = error
        await self.stream.write(request)

    async def read(self) -> Any:
        async with asyncio.timeout(60):
            return await self.stream.read()

    async def silent(self) -> bool:
        """Nothing comes, shown by the next thing that does: the answer to another subscription."""
        await self.ask("other")
        return [name for name, _ in resources(await self.read())] == ["other"]

    async def ack(self, response: Any, *names: str) -> None:
        await self.ask(*(names or BOTH), nonce=response.nonce, version=response.version_info)

    async def close(self) -> None:
        self.stream.cancel()
        await self.channel.close()


def resources(response: Any) -> list[tuple[str, list[str]]]:
    found = []
    for packed in response.resources:
        message = endpoint_pb2.ClusterLoadAssignment()
        assert packed.Unpack(message)
        found.append(
            (
                message.cluster_name,
                [
                    f"{endpoint.endpoint.address.socket_address.address}:{endpoint.endpoint.address.socket_address.port_value}"
                    for group in message.endpoints
                    for endpoint in group.lb_endpoints
                ],
            )
        )
    return found


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[AdsServer]:
    ads = AdsServer(f"unix:{tmp_path}/ads.sock")
    await ads.start()
    yield ads
    await ads.stop()


@pytest_asyncio.fixture
async def client(server: AdsServer) -> AsyncIterator[Client]:
    envoy = Client(server._address)
    yield envoy
    await envoy.close()


async def test_the_first_answer_is_the_published_snapshot(server: AdsServer, client: Client) -> None:
    await server.publish(ONE)  # at once: nobody is connected
    await client.ask(*BOTH)
    response = await client.read()
    assert response.type_url == ENDPOINTS_TYPE
    assert resources(response) == [("decode", ["10.0.0.2:2"]), ("prefill", ["10.0.0.1:1"])]


async def test_an_envoy_whose_ads_is_anothers_asks_by_eds(server: AdsServer) -> None:
    await server.publish(ONE)
    envoy = Client(server._address, eds=True)
    await envoy.ask("decode")  # one stream for each cluster
    response = await envoy.read()
    assert resources(response) == [("decode", ["10.0.0.2:2"])]
    await envoy.ack(response, "decode")
    publishing = asyncio.create_task(server.publish(TWO))
    response = await envoy.read()
    assert resources(response) == [("decode", [])]
    assert not publishing.done()
    await envoy.ack(response, "decode")
    await publishing
    await envoy.close()


async def test_before_anything_is_published_the_lists_are_empty(client: Client) -> None:
    await client.ask(*BOTH)
    assert resources(await client.read()) == [("decode", []), ("prefill", [])]


async def test_only_what_was_subscribed_is_sent(server: AdsServer, client: Client) -> None:
    await server.publish(ONE)
    await client.ask("decode")
    first = await client.read()
    assert resources(first) == [("decode", ["10.0.0.2:2"])]
    await client.ack(first, *BOTH)
    second = await client.read()
    assert resources(second) == [("decode", ["10.0.0.2:2"]), ("prefill", ["10.0.0.1:1"])]
    assert second.version_info == first.version_info
    assert second.nonce != first.nonce


async def test_publish_returns_with_the_acknowledgement(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    await client.ack(await client.read())
    publishing = asyncio.create_task(server.publish(ONE))
    response = await client.read()
    assert not publishing.done()
    await client.ack(response)
    await publishing


async def test_publish_waits_for_every_envoy(server: AdsServer, client: Client) -> None:
    other = Client(server._address)
    for each in (client, other):
        await each.ask(*BOTH)
        await each.ack(await each.read())
    publishing = asyncio.create_task(server.publish(ONE))
    await client.ack(await client.read())
    late = await other.read()
    assert not publishing.done()
    await other.ack(late)
    await publishing
    assert server.connected == 2
    await other.close()


async def test_an_envoy_that_leaves_is_not_waited_for(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    await client.ack(await client.read())
    publishing = asyncio.create_task(server.publish(ONE))
    await client.read()
    await client.close()
    await publishing
    assert server.connected == 0


async def test_a_refused_list_is_an_error_with_envoys_words(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    await client.ack(await client.read())
    publishing = asyncio.create_task(server.publish(ONE))
    response = await client.read()
    await client.ask(*BOTH, nonce=response.nonce, version="1", error="malformed IP address")
    with pytest.raises(EndpointsRejectedError, match="malformed IP address"):
        await publishing
    good = asyncio.create_task(server.publish(TWO))
    await client.ack(await client.read())
    await good


async def test_no_answer_is_an_error_that_names_the_envoy(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    await client.read()
    with pytest.raises(EndpointsTimeoutError, match=r"within 0.05 s by unix:"):
        await server.publish(ONE, timeout=0.05)


async def test_an_answer_to_a_replaced_list_does_not_count(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    first = await client.read()
    publishing = asyncio.create_task(server.publish(ONE))
    second = await client.read()
    await client.ack(first)  # crossed the second list on its way
    await client.ack(first)
    with pytest.raises(EndpointsTimeoutError):
        await server.publish(ONE, timeout=0.05)
    await client.ack(second)
    await publishing


async def test_the_newest_acknowledgement_covers_older_publications(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    await client.ack(await client.read())
    both = asyncio.gather(server.publish(ONE), server.publish(TWO))
    response = await client.read()
    while dict(resources(response))["prefill"] != ["10.0.0.1:1", "10.0.0.3:3"]:
        response = await client.read()
    await client.ack(response)
    await both


async def test_the_same_snapshot_again_is_not_sent_again(server: AdsServer, client: Client) -> None:
    await server.publish(ONE)
    await client.ask(*BOTH)
    await client.ack(await client.read())
    await server.publish(ONE)
    assert await client.silent()


async def test_acknowledgements_are_not_answered(server: AdsServer, client: Client) -> None:
    await client.ask(*BOTH)
    await client.ack(await client.read())
    assert await client.silent()
    assert server.connected == 1


async def test_removed_endpoints_are_gone_from_the_list(server: AdsServer, client: Client) -> None:
    await server.publish(ONE)
    await client.ask(*BOTH)
    await client.ack(await client.read())
    publishing = asyncio.create_task(server.publish(Snapshot()))
    response = await client.read()
    assert resources(response) == [("decode", []), ("prefill", [])]
    await client.ack(response)
    await publishing


async def test_an_envoy_that_comes_back_gets_everything(server: AdsServer, client: Client) -> None:
    await server.publish(ONE)
    await client.ask(*BOTH, version="17")  # what it knew of an earlier sidecar
    assert resources(await client.read()) == [("decode", ["10.0.0.2:2"]), ("prefill", ["10.0.0.1:1"])]


async def test_other_types_are_not_served(server: AdsServer, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await client.ask(kind="type.googleapis.com/envoy.config.cluster.v3.Cluster")
        await client.ask(*BOTH)
        assert resources(await client.read()) == [("decode", []), ("prefill", [])]
    assert "which is not served" in caplog.text
    assert server.connected == 1


async def test_over_tcp() -> None:
    server = AdsServer("127.0.0.1:0")
    await server.start()
    client = Client(f"127.0.0.1:{server.port}")
    await client.ask(*BOTH)
    assert resources(await client.read()) == [("decode", []), ("prefill", [])]
    await client.close()
    await server.stop()


async def test_an_address_that_cannot_be_bound(tmp_path: Path) -> None:
    server = AdsServer(f"unix:{tmp_path}/no/such/directory/ads.sock")
    with pytest.raises(OSError, match="ADS cannot listen on unix:"):
        await server.start()


async def test_two_servers_never_share_an_address(server: AdsServer) -> None:
    with pytest.raises(OSError, match="another server listens"):
        await AdsServer(server._address).start()
    over_tcp = AdsServer("127.0.0.1:0")
    await over_tcp.start()
    with pytest.raises(OSError, match="ADS cannot listen on 127"):
        await AdsServer(f"127.0.0.1:{over_tcp.port}").start()
    await over_tcp.stop()


async def test_the_socket_file_is_taken_over_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "ads.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(file))
    server = AdsServer(f"unix:{file}")
    await server.start()
    client = Client(f"unix:{file}")
    await client.ask(*BOTH)
    await client.read()
    await client.close()
    await server.stop()
    assert not list(tmp_path.glob("*"))  # noqa: ASYNC240  # nothing else runs


def test_of_duplicates_the_first_counts() -> None:
    message = assignment("decode", [Endpoint("10.0.0.1", 1, "a"), Endpoint("10.0.0.1", 1, "b")])
    assert [each.endpoint.hostname for each in message.endpoints[0].lb_endpoints] == ["a:1"]


@pytest.mark.parametrize(
    ("endpoint", "hostname"),
    [
        (Endpoint("10.0.0.1", 8000, "worker"), "worker:8000"),
        (Endpoint("10.0.0.1", 80, "10.0.0.1"), "10.0.0.1:80"),
        (Endpoint("::1", 8000, "::1"), "[::1]:8000"),
        (Endpoint("10.0.0.1", 8443, "worker", tls=True), "worker"),
    ],
)
def test_host_names(endpoint: Endpoint, hostname: str) -> None:
    (found,) = assignment("decode", [endpoint]).endpoints[0].lb_endpoints
    assert found.endpoint.hostname == hostname
    assert (found.endpoint.address.socket_address.address, found.endpoint.address.socket_address.port_value) == (
        endpoint.ip,
        endpoint.port,
    )
    match = found.metadata.filter_metadata
    assert bool(match) is endpoint.tls
    if endpoint.tls:
        assert dict(match["envoy.transport_socket_match"]) == {"tls": True}
