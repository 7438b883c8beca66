"""The egress client against an HTTP/2 server that does what the test says."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import ngh2
import pytest
from ports import silent_port
from transport_peer import PATIENCE, PeerServer, Receiver, peer_server

from extproc.transport.address import TcpAddress
from extproc.transport.egress import EgressClient
from extproc.transport.egress_leg import LEG_WINDOW
from extproc.transport.http2 import STREAM_WINDOW
from extproc.transport.interface import Lost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from extproc.transport.interface import Header


def post(path: bytes = b"/") -> tuple[Header, ...]:
    return ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"prefill"), (b":path", path), (b"x-a", b"1"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "egress")


@pytest.fixture
async def server(path: str) -> AsyncIterator[PeerServer]:
    async with peer_server(path) as server:
        yield server


@pytest.fixture
async def client(path: str) -> AsyncIterator[EgressClient]:
    client = EgressClient(path, patience=2.0)
    client.start()
    yield client
    await client.stop()
    assert client.open_legs == 0


async def test_a_request_and_its_answer(server: PeerServer, client: EgressClient) -> None:
    receiver = Receiver()
    client.send(post(), b"hello", receiver)
    request = await server.request()
    assert (request.headers, bytes(request.body)) == (post(), b"hello")
    request.head(201, (b"content-type", b"text/plain"))
    request.data(b"wor")
    request.data(b"ld", end_stream=True)
    assert await receiver.end() == "done"
    assert (receiver.status, receiver.headers, bytes(receiver.body)) == (
        201,
        ((b"content-type", b"text/plain"),),
        b"world",
    )


async def test_a_request_without_a_body_and_an_answer_without_one(server: PeerServer, client: EgressClient) -> None:
    receiver = Receiver()
    client.send(post(), b"", receiver)
    (await server.request()).head(204, end_stream=True)
    assert await receiver.end() == "done"
    assert (receiver.status, receiver.headers, bytes(receiver.body)) == (204, (), b"")


async def test_interim_answers_are_passed_over_and_trailers_end_an_answer(
    server: PeerServer, client: EgressClient
) -> None:
    receiver = Receiver()
    client.send(post(), b"hello", receiver)
    request = await server.request()
    request.peer.h2.send_informational_response(request.stream, ((b":status", b"103"),))
    request.head()
    request.data(b"body")
    request.peer.h2.send_trailers(request.stream, ((b"x-trailer", b"1"),))
    request.peer.flush()
    assert await receiver.end() == "done"
    assert (receiver.status, bytes(receiver.body)) == (200, b"body")


async def test_nothing_is_told_from_inside_send(path: str, client: EgressClient) -> None:
    receivers = [Receiver()]
    client.send(post(), b"", receivers[-1])  # not connected yet
    async with peer_server(path) as server:
        await server.request()
        server.peers[0].transport.abort()
        assert await receivers[0].end() is Lost.RESET
        receivers.append(Receiver())
        client.send(post(), b"", receivers[-1])  # disconnected
        assert not receivers[-1].ends
        (await server.request(1)).head(end_stream=True)
        assert await receivers[-1].end() == "done"
    await client.stop()
    receivers.append(Receiver())
    client.send(post(), b"", receivers[-1])  # stopped
    assert not receivers[-1].ends
    assert await receivers[-1].end() is Lost.UNREACHABLE


async def test_20_mb_both_ways(server: PeerServer, client: EgressClient) -> None:
    body = bytes(range(250)) * 80_000
    receiver = Receiver()
    client.send(post(), body, receiver)
    request = await server.request()
    assert request.body == body
    request.head()
    request.data(body, end_stream=True)
    assert await receiver.end() == "done"
    assert receiver.body == body


async def test_the_peers_flow_control_is_honoured(path: str, client: EgressClient) -> None:
    async with peer_server(path, auto_window_update=False) as server:
        receiver = Receiver()
        client.send(post(), bytes(200_000), receiver)
        request = await server.request(complete=False)
        await server.until(lambda: len(request.body) == 65_535)  # all the credit there is
        other = Receiver()
        client.send(post(b"/other"), b"", other)  # and others are not held up
        (await server.request(1)).head(end_stream=True)
        assert await other.end() == "done"
        assert not request.complete
        while not request.complete:
            size = len(request.body)
            request.peer.h2.acknowledge_received_data(min(size, 65_535), request.stream)
            request.peer.flush()
            await server.until(lambda size=size: len(request.body) > size)
        assert len(request.body) == 200_000
        request.head(end_stream=True)
        assert await receiver.end() == "done"


async def test_legs_beyond_the_peers_concurrent_streams_wait(path: str, client: EgressClient) -> None:
    async with peer_server(path, {ngh2.Setting.MAX_CONCURRENT_STREAMS: 3}) as server:
        receivers = [Receiver() for _ in range(10)]
        legs = [client.send(post(), b"x", receiver) for receiver in receivers]
        for done in range(9):
            request = await server.request(done)
            assert len(server.requests) <= done + 3
            if done == 0:
                legs[9].cancel()  # has not left yet, and never will
            request.head(end_stream=True)
            assert await receivers[done].end() == "done"
        assert (len(server.requests), receivers[9].ends) == (9, [])


@pytest.mark.parametrize("moment", ["at once", "before the head", "after the head"])
async def test_cancel_resets_the_stream_and_is_the_last_that_is_heard(
    server: PeerServer, client: EgressClient, moment: str
) -> None:
    await until_connected(client, server)
    receiver = Receiver()
    leg = client.send(post(), b"hello", receiver)
    if moment == "at once":
        leg.cancel()
    else:
        request = await server.request()
        if moment == "after the head":
            request.head()
            request.data(b"some")
            await receiver.until(lambda: receiver.body)
        leg.cancel()
        await server.until(lambda: request.reset is not None)
        assert request.reset == ngh2.ErrorCode.CANCEL
    leg.cancel()  # again is no harm
    other = Receiver()
    client.send(post(b"/other"), b"", other)
    await server.until(lambda: server.requests and server.requests[-1].path == b"/other")
    server.requests[-1].head(end_stream=True)
    assert await other.end() == "done"
    assert not receiver.ends


async def test_pause_stops_the_answer_and_resume_lets_it_go(server: PeerServer, client: EgressClient) -> None:
    receiver = Receiver()
    leg = client.send(post(), b"hello", receiver)
    request = await server.request()
    leg.pause()
    request.head()
    request.data(bytes(5_000_000), end_stream=True)
    await receiver.until(lambda: len(receiver.body) == LEG_WINDOW)  # all the credit it had
    other = Receiver()
    client.send(post(b"/other"), b"", other)
    (await server.request(1)).head(end_stream=True)
    assert await other.end() == "done"
    assert (len(receiver.body), receiver.ends) == (LEG_WINDOW, [])
    leg.resume()
    assert await receiver.end() == "done"
    assert len(receiver.body) == 5_000_000
    leg.pause()  # over: no harm
    leg.resume()


async def test_a_leg_paused_before_it_has_left_stays_paused(server: PeerServer, client: EgressClient) -> None:
    receiver = Receiver()
    leg = client.send(post(), b"hello", receiver)  # waits for the connection
    leg.pause()
    request = await server.request()
    request.head()
    request.data(bytes(5_000_000), end_stream=True)
    await receiver.until(lambda: len(receiver.body) >= LEG_WINDOW)
    other = Receiver()
    client.send(post(b"/other"), b"", other)
    (await server.request(1)).head(end_stream=True)
    assert await other.end() == "done"
    assert len(receiver.body) <= 1 << 16  # HTTP/2's own window, if Envoy had not seen ours yet
    leg.resume()
    assert await receiver.end() == "done"


@pytest.mark.parametrize("trickles", [False, True])
async def test_what_still_comes_of_a_paused_answer_is_little_if_it_trickles(
    server: PeerServer,
    client: EgressClient,
    trickles: bool,  # noqa: FBT001
) -> None:
    receiver = Receiver()
    leg = client.send(post(), b"hello", receiver)
    if trickles:
        leg.trickle()
    request = await server.request()

    async def round_trip() -> None:
        other = Receiver()
        trips = len(server.requests)
        client.send(post(b"/other"), b"", other)
        (await server.request(trips)).head(end_stream=True)
        assert await other.end() == "done"

    request.head()
    request.data(bytes(LEG_WINDOW))
    await receiver.until(lambda: len(receiver.body) == LEG_WINDOW)
    await round_trip()
    leg.pause()
    await round_trip()
    request.data(bytes(3 * STREAM_WINDOW), end_stream=True)
    if trickles:
        await round_trip()
        assert len(receiver.body) <= 2 * LEG_WINDOW
    else:
        await receiver.until(lambda: len(receiver.body) > 2 * LEG_WINDOW)
    assert receiver.ends == []
    leg.resume()
    assert await receiver.end() == "done"
    assert len(receiver.body) == LEG_WINDOW + 3 * STREAM_WINDOW


async def test_an_answer_before_the_request_was_sent_in_full(path: str, client: EgressClient) -> None:
    async with peer_server(path, auto_window_update=False) as server:
        receiver = Receiver()
        client.send(post(), bytes(10_000_000), receiver)
        request = await server.request(complete=False)
        request.head(413, end_stream=True)
        assert await receiver.end() == "done"
        await server.until(lambda: request.reset is not None)
        assert (receiver.status, request.reset) == (413, ngh2.ErrorCode.NO_ERROR)


# lost


@pytest.mark.parametrize(
    ("code", "reason"),
    [(ngh2.ErrorCode.REFUSED_STREAM, Lost.REFUSED), (ngh2.ErrorCode.INTERNAL_ERROR, Lost.RESET), (0x99, Lost.RESET)],
)
async def test_a_reset_stream_is_lost(server: PeerServer, client: EgressClient, code: int, reason: Lost) -> None:
    receiver = Receiver()
    client.send(post(), b"hello", receiver)
    request = await server.request()
    request.peer.h2.reset_stream(request.stream, code)
    request.peer.flush()
    assert await receiver.end() is reason


async def test_a_broken_connection_loses_its_legs_and_the_next_one_serves(
    server: PeerServer, client: EgressClient
) -> None:
    receivers = [Receiver() for _ in range(3)]
    for receiver in receivers:
        client.send(post(), b"hello", receiver)
    await server.request(2)
    server.requests[0].head()
    server.peers[0].transport.abort()
    assert [await receiver.end() for receiver in receivers] == [Lost.RESET] * 3
    again = Receiver()
    client.send(post(), b"hello", again)  # waits for the connection
    (await server.request(3)).head(end_stream=True)
    assert await again.end() == "done"
    assert len(server.peers) == 2


async def test_without_a_listener_a_leg_is_unreachable_after_its_patience(client: EgressClient) -> None:
    receivers = [Receiver() for _ in range(3)]
    begin = time.monotonic()
    for receiver in receivers:
        client.send(post(), b"hello", receiver)
    client.send(post(), b"hello", Receiver()).cancel()
    assert [await receiver.end() for receiver in receivers] == [Lost.UNREACHABLE] * 3
    assert 2.0 <= time.monotonic() - begin < 30
    assert client.connections_up == 0


async def test_a_listener_that_comes_within_the_patience_serves(path: str) -> None:
    client = EgressClient(path, patience=PATIENCE)
    client.start()
    receiver, cancelled = Receiver(), Receiver()
    client.send(post(), b"hello", receiver)
    client.send(post(), b"hello", cancelled).cancel()
    async with peer_server(path) as server:
        (await server.request()).head(end_stream=True)
        assert await receiver.end() == "done"
        assert (len(server.requests), cancelled.ends) == (1, [])
        await client.stop()


async def test_a_listener_that_is_not_http2_is_no_connection(path: str, client: EgressClient) -> None:
    async with peer_server(path, greets=False):
        receiver = Receiver()
        client.send(post(), b"hello", receiver)
        assert await receiver.end() is Lost.UNREACHABLE


async def test_a_peer_that_breaks_the_protocol_is_left(server: PeerServer, client: EgressClient) -> None:
    receiver = Receiver()
    client.send(post(), b"hello", receiver)
    (await server.request()).peer.transport.write(b"\xff" * 100)
    assert await receiver.end() is Lost.RESET
    await server.until(lambda: len(server.peers) == 2)


async def test_goaway_lets_old_legs_end_refuses_later_ones_and_opens_a_new_connection(
    server: PeerServer, client: EgressClient
) -> None:
    old, refused, new = Receiver(), Receiver(), Receiver()
    client.send(post(b"/old"), b"", old)
    first = await server.request()
    client.send(post(b"/refused"), b"", refused)
    await server.request(1)
    first.peer.goaway(first.stream)
    assert await refused.end() is Lost.REFUSED
    client.send(post(b"/new"), b"", new)
    request = await server.request(2)
    assert (request.path, request.peer is first.peer) == (b"/new", False)
    first.head()
    first.data(b"late", end_stream=True)
    request.head(end_stream=True)
    assert (await old.end(), await new.end()) == ("done", "done")
    await first.peer.lost.wait()  # nothing is left to do there


async def test_stop_ends_everything(path: str) -> None:
    async with peer_server(path) as server:
        client = EgressClient(path)
        client.start()
        receivers = [Receiver(), Receiver()]
        for receiver in receivers:
            client.send(post(), b"hello", receiver)
        (await server.request(1)).head()
        await client.stop()
        assert [receiver.ends for receiver in receivers] == [[Lost.RESET]] * 2
        assert client.open_legs == 0
        await server.peers[0].lost.wait()
        late = Receiver()
        client.send(post(), b"hello", late)
        await client.stop()
        assert late.ends == [Lost.UNREACHABLE]


@pytest.mark.parametrize("where", ["head", "data", "done", "lost"])
async def test_a_failing_receiver_loses_its_own_leg_only(
    server: PeerServer, client: EgressClient, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Receiver(fail_in=where), Receiver()
    client.send(post(), b"hello", failing)
    client.send(post(), b"hello", other)
    first, second = await server.request(0), await server.request(1)
    if where == "lost":
        first.peer.h2.reset_stream(first.stream)
        first.peer.flush()
    else:
        first.head()
        first.data(b"data", end_stream=where == "done")
    await failing.end()
    second.head(end_stream=True)
    assert await other.end() == "done"
    assert f"told to fail in {where}" in caplog.text
    if where in {"head", "data"}:
        assert failing.ends == [Lost.RESET]
        await server.until(lambda: first.reset == ngh2.ErrorCode.CANCEL)


async def test_several_connections_are_used_in_turn_and_stand_in_for_each_other(path: str) -> None:
    async with peer_server(path) as server:
        client = EgressClient(path, connections=3)
        client.start()
        await server.until(lambda: len(server.peers) == 3)
        await until_connected(client, server, 3)
        receivers = [Receiver() for _ in range(6)]
        for receiver in receivers:
            client.send(post(), b"hello", receiver)
        await server.request(5)
        assert sorted(server.peers.index(each.peer) for each in server.requests) == [0, 0, 1, 1, 2, 2]
        for request in server.requests:
            request.head(end_stream=True)
        assert [await receiver.end() for receiver in receivers] == ["done"] * 6
        server.peers[1].transport.abort()
        await server.until(lambda: len(server.peers) == 4)
        await client.stop()


async def until_connected(client: EgressClient, server: PeerServer, count: int = 1) -> None:
    """Wait until ``count`` of the client's connections are up."""
    await server.until(lambda: len(server.peers) >= count)
    async with asyncio.timeout(PATIENCE):
        while client.connections_up < count:  # noqa: ASYNC110 -- nothing to wait on: no production code asks
            await asyncio.sleep(0)


async def test_a_listener_over_tcp() -> None:
    with silent_port() as port:
        client = EgressClient(TcpAddress("localhost", port), patience=PATIENCE)
        client.start()
        receiver = Receiver()
        client.send(post(), b"hello", receiver)
        async with peer_server(TcpAddress("127.0.0.1", port)) as server:
            request = await server.request()
            assert bytes(request.body) == b"hello"
            request.head(end_stream=True)
            assert await receiver.end() == "done"
            await client.stop()


async def test_nobody_listens_over_tcp() -> None:
    with silent_port() as port:
        client = EgressClient(TcpAddress("127.0.0.1", port), patience=0.05)
        client.start()
        receiver = Receiver()
        client.send(post(), b"hello", receiver)
        assert await receiver.end() is Lost.UNREACHABLE
        await client.stop()
