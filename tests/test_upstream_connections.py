"""How the service's own connections to workers are kept, used again and given up."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from raw_server import Connection, RawServer, raw_server
from transport_peer import Receiver
from upstream_rig import asked, direct_egress, post, told, workers

from extproc.transport.interface import Lost
from extproc.upstream import host
from extproc.upstream.egress import DirectEgress
from extproc.upstream.host import Http1Host
from extproc.upstream.http1 import Http1Connection
from extproc.workers.endpoints import Endpoint, Health, Snapshot


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with raw_server() as server:
        yield server


@pytest.fixture
async def egress() -> AsyncIterator[DirectEgress]:
    async with direct_egress() as egress:
        yield egress


# -- connections ------------------------------------------------------------------------------------------------------


async def test_a_connection_is_used_again(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    for _ in range(3):
        receiver, connection, _ = await asked(egress, server)
        connection.answer()
        assert await receiver.end() == "done"
    assert len(server.connections) == egress.connections == 1


async def test_legs_at_once_have_connections_of_their_own(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    first, one, _ = await asked(egress, server)
    second, other, _ = await asked(egress, server, 1)
    other.answer(b"second")
    assert await second.end() == "done"
    one.answer(b"first")
    assert await first.end() == "done"
    assert (bytes(first.body), bytes(second.body)) == (b"first", b"second")


@pytest.mark.parametrize("extra", ["connection: close\r\n", "Connection: Close\r\n"])
async def test_a_worker_that_says_close_gets_another(egress: DirectEgress, server: RawServer, extra: str) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.answer(extra=extra)
    assert await receiver.end() == "done"
    again, connection, _ = await asked(egress, server, 1)
    connection.answer()
    assert await again.end() == "done"


async def test_what_comes_behind_an_answer_is_no_other_requests(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
    assert await receiver.end() == "done"
    assert receiver.body == b"ok"
    again, connection, _ = await asked(egress, server, 1)
    connection.answer(b"right")
    assert await again.end() == "done"
    assert again.body == b"right"


async def test_an_answer_before_the_request_is_whole_costs_the_connection(
    egress: DirectEgress, server: RawServer
) -> None:
    egress.publish(workers(server.port))
    receiver = Receiver()
    body = bytes(50_000_000)
    egress.send(post(server.port, size=len(body)), body, receiver)
    connection = await server.connection()
    await connection.reader.readuntil(b"\r\n\r\n")
    connection.answer(b"no", "413 Payload Too Large")
    assert await receiver.end() == "done"
    assert receiver.status == 413
    again, connection, _ = await asked(egress, server, 1)
    connection.answer()
    assert await again.end() == "done"


async def test_an_idle_connection_is_closed_in_time(
    egress: DirectEgress, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.answer()
    assert await receiver.end() == "done"
    monkeypatch.setattr(host, "IDLE_SECONDS", 0.0)
    again, _, _ = await asked(egress, server, 1)
    assert not again.ends
    assert await connection.left()


async def test_a_worker_that_is_no_more_keeps_what_it_has_and_no_idle_connection(
    egress: DirectEgress, server: RawServer
) -> None:
    egress.publish(workers(server.port))
    first, idle, _ = await asked(egress, server)
    second, busy, _ = await asked(egress, server, 1)
    idle.answer()
    assert await first.end() == "done"
    egress.publish(Snapshot())
    assert await idle.left()
    busy.answer()
    assert await second.end() == "done"
    assert await busy.left()
    gone = Receiver()
    egress.send(post(server.port), b"", gone)
    assert await gone.end() == "done"
    assert told(gone) == (503, b"UH", None)


async def test_what_is_under_way_when_it_stops_is_lost(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connecting = Receiver()
    egress.send(post(server.port, size=1), b"x", connecting)
    await egress.stop()
    assert [await receiver.end(), await connecting.end()] == [Lost.RESET, Lost.RESET]
    await connection.left()


async def test_a_worker_whose_health_changes_keeps_its_connections(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.answer()
    assert await receiver.end() == "done"
    endpoint = Endpoint("127.0.0.1", server.port, "w0", health=Health.UNHEALTHY)
    egress.publish(Snapshot(prefill=(endpoint,)))
    again, connection, _ = await asked(egress, server, 0)
    connection.answer()
    assert await again.end() == "done"


# -- a connection that the worker has just closed ---------------------------------------------------------------------


async def _idle(egress: DirectEgress, server: RawServer) -> Connection:
    """The connection that the next leg will have."""
    receiver, connection, _ = await asked(egress, server)
    connection.answer()
    assert await receiver.end() == "done"
    return connection


async def test_an_idle_connection_that_was_closed_is_not_used(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    connection = await _idle(egress, server)
    connection.close()
    await connection.writer.wait_closed()
    receiver, connection, _ = await asked(egress, server, 1)
    connection.answer(b"new")
    assert await receiver.end() == "done"
    assert receiver.body == b"new"


async def test_a_connection_on_which_an_idle_worker_speaks_is_not_used(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    await _idle(egress, server)
    (host,) = egress._hosts()
    assert isinstance(host, Http1Host)
    host._idle[-1].data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")  # in the same turn of the loop as the leg
    receiver, connection, _ = await asked(egress, server, 1)
    connection.answer(b"new")
    assert await receiver.end() == "done"
    assert (receiver.status, bytes(receiver.body)) == (200, b"new")


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_whose_end_we_have_not_looked_at_is_not_used(
    egress: DirectEgress, server: RawServer, how: str
) -> None:
    egress.publish(workers(server.port))
    connection = await _idle(egress, server)
    if how == "reset":
        linger = struct.pack("ii", 1, 0)
        connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.reset()
    await asyncio.sleep(0)  # the server's end is closed, and our loop has not looked yet
    receiver, fresh, _ = await asked(egress, server, 1)
    fresh.answer(b"new")
    assert await receiver.end() == "done"
    assert (receiver.status, bytes(receiver.body)) == (200, b"new")


async def test_a_request_that_crosses_the_close_is_sent_again(egress: DirectEgress, server: RawServer) -> None:
    """The worker's machine has sent the end before the request came, of which it takes no byte."""
    egress.publish(workers(server.port))
    connection = await _idle(egress, server)
    receiver = Receiver()
    with late_writes():
        egress.send(post(server.port, size=5), b"again", receiver)
        connection.reset()
        await asyncio.sleep(0)
    fresh = await server.connection(1)
    assert (await fresh.request())[2] == b"again"
    fresh.answer(b"new")
    assert await receiver.end() == "done"
    assert (receiver.status, bytes(receiver.body)) == (200, b"new")


@contextmanager
def late_writes() -> Iterator[None]:
    """What is sent meanwhile is on its way: it leaves at the end, when the worker has closed."""
    held: list[tuple[Http1Connection, bytes]] = []
    write = Http1Connection._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Http1Connection, "_write", lambda self, data: held.append((self, data)))
        yield
    for connection, data in held:
        write(connection, data)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_request_that_the_worker_has_had_is_not_sent_again(
    egress: DirectEgress, server: RawServer, how: str
) -> None:
    egress.publish(workers(server.port))
    connection = await _idle(egress, server)
    receiver = Receiver()
    egress.send(post(server.port, size=5), b"again", receiver)
    await connection.request()
    getattr(connection, how)()
    assert await receiver.end() == "done"
    assert told(receiver)[:2] == (503, b"UC")
    assert len(server.connections) == 1
