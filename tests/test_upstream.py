"""Legs on the service's own connections, against a server that does byte by byte what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from raw_server import RawServer, raw_server
from transport_peer import Receiver
from upstream_rig import UNREACHABLE_PORT, asked, direct_egress, post, told, workers

from extproc.transport.interface import Lost
from extproc.upstream import host
from extproc.upstream.egress import DirectEgress, ProxyEgress
from extproc.workers.endpoints import Endpoint, Snapshot


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with raw_server() as server:
        yield server


@pytest.fixture
async def egress() -> AsyncIterator[DirectEgress]:
    async with direct_egress() as egress:
        yield egress


# -- requests and answers ---------------------------------------------------------------------------------------------


async def test_a_request_and_its_answer(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver, connection, (line, headers, body) = await asked(egress, server)
    assert line == "POST /p?q=1 HTTP/1.1"
    assert headers == {
        "host": f"w0:{server.port}",
        "content-type": "application/json",
        "content-length": "5",
    }
    assert body == b"hello"
    connection.say(
        b"HTTP/1.1 201 Created\r\nX-A: 1\r\nConnection: keep-alive\r\nX-PD-Local-Reply: UF\r\nx-pd-late: 1\r\n"
        b"transfer-encoding: chunked\r\n\r\n3\r\nwor\r\n"
    )
    await receiver.until(lambda: receiver.body == b"wor")
    connection.say(b"2\r\nld\r\n0\r\n\r\n")
    assert await receiver.end() == "done"
    assert receiver.status == 201
    assert receiver.headers == [(b"x-a", b"1"), (b"x-pd-upstream", f"127.0.0.1:{server.port}".encode())]
    assert receiver.body == b"world"


@pytest.mark.parametrize("extra", ["", "content-length: 0\r\n"])
async def test_an_answer_without_a_body(egress: DirectEgress, server: RawServer, extra: str) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server, body=b"")
    status = "204 No Content" if not extra else "200 OK"
    connection.say(f"HTTP/1.1 {status}\r\n{extra}\r\n".encode())
    assert await receiver.end() == "done"
    assert receiver.body == b""


async def test_interim_answers_are_passed_over(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.say(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
    connection.answer(b"yes")
    assert await receiver.end() == "done"
    assert (receiver.status, bytes(receiver.body)) == (200, b"yes")
    assert b"link" not in dict(receiver.headers)


async def test_an_answer_that_ends_with_its_connection(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.say(b"HTTP/1.0 200 OK\r\n\r\nall of it")
    connection.close()
    assert await receiver.end() == "done"
    assert receiver.body == b"all of it"


async def test_a_large_body_and_a_large_answer(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    body = bytes(range(256)) * 40_000  # 10 MB
    receiver, connection, (_, _, came) = await asked(egress, server, body=body)
    assert came == body
    connection.answer(body)
    assert await receiver.end() == "done"
    assert receiver.body == body


async def test_a_paused_leg_makes_the_worker_wait(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver = Receiver()
    leg = egress.send(post(server.port, size=1), b"x", receiver)
    leg.pause()
    connection = await server.connection()
    await connection.request()
    whole = bytes(30_000_000)
    connection.answer(whole)
    draining = asyncio.create_task(connection.writer.drain())
    done, _ = await asyncio.wait([draining], timeout=0.3)
    assert not done, "the kernel's buffers take some megabytes, not all"
    assert len(receiver.body) < len(whole) / 2
    leg.resume()
    assert await receiver.end() == "done"
    assert len(receiver.body) == len(whole)
    await draining


# -- failures, in the words of Envoy's listener -----------------------------------------------------------------------


async def test_a_worker_that_refuses_leads_to_the_next(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(UNREACHABLE_PORT, server.port))
    receiver = Receiver()
    egress.send(post(UNREACHABLE_PORT, server.port, size=1), b"x", receiver)
    connection = await server.connection()
    _, headers, _ = await connection.request()
    assert headers["host"] == f"w1:{server.port}"
    connection.answer()
    assert await receiver.end() == "done"
    assert told(receiver) == (200, None, f"127.0.0.1:{server.port}".encode())


async def test_an_idle_connection_of_the_next_one_will_do(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(UNREACHABLE_PORT, server.port))
    for _ in range(2):
        receiver = Receiver()
        egress.send(post(UNREACHABLE_PORT, server.port, size=1), b"x", receiver)
        connection = await server.connection()
        await connection.request()
        connection.answer()
        assert await receiver.end() == "done"
    assert len(server.connections) == 1


async def test_all_refuse(egress: DirectEgress) -> None:
    egress.publish(workers(UNREACHABLE_PORT, 2))
    receiver = Receiver()
    egress.send(post(UNREACHABLE_PORT, 2, size=1), b"x", receiver)
    assert not receiver.ends, "nothing is told before send has returned"
    assert await receiver.end() == "done"
    assert told(receiver) == (503, b"UF", None)


async def test_a_connection_that_does_not_come_about_in_time(
    egress: DirectEgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CONNECT_SECONDS", 0.05)
    snapshot = Snapshot(prefill=(Endpoint("192.0.2.1", 9, "w"),))  # TEST-NET-1: nobody answers
    egress.publish(snapshot)
    receiver = Receiver()
    headers = [
        (name, b"192.0.2.1:9" if name == b"x-gateway-destination-endpoint" else value) for name, value in post(9)
    ]
    egress.send(headers, b"", receiver)
    assert await receiver.end() == "done"
    assert told(receiver)[:2] == (503, b"UF")


async def test_a_worker_of_another_role_is_not_known(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver = Receiver()
    egress.send(post(server.port, cluster="decode"), b"", receiver)
    assert await receiver.end() == "done"
    assert told(receiver) == (503, b"UH", None)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_that_ends_before_the_head(egress: DirectEgress, server: RawServer, how: str) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    getattr(connection, how)()
    assert await receiver.end() == "done"
    assert told(receiver) == (503, b"UC", f"127.0.0.1:{server.port}".encode())
    assert len(server.connections) == 1, "it may have been begun"


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhal", b"HTTP/1.1 200 OK\r\ncon"])
async def test_a_connection_that_ends_within_an_answer(egress: DirectEgress, server: RawServer, said: bytes) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.say(said)
    connection.close()
    headed = b"\r\n\r\n" in said
    assert await receiver.end() == (Lost.RESET if headed else "done")
    assert told(receiver)[:2] == ((200, None) if headed else (503, b"UC"))


@pytest.mark.parametrize(
    "junk",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 100_000,
    ],
)
async def test_what_is_no_http(egress: DirectEgress, server: RawServer, junk: bytes) -> None:
    egress.publish(workers(server.port))
    receiver, connection, _ = await asked(egress, server)
    connection.say(junk)
    assert await receiver.end() == "done"
    assert told(receiver) == (503, b"UPE", f"127.0.0.1:{server.port}".encode())


async def test_cancel_closes_the_connection(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver = Receiver()
    leg = egress.send(post(server.port, size=1), b"x", receiver)
    connection = await server.connection()
    await connection.request()
    leg.cancel()
    await connection.left()
    assert not receiver.ends
    assert egress.open_legs == 0


async def test_cancel_while_connecting(egress: DirectEgress, server: RawServer) -> None:
    egress.publish(workers(server.port))
    receiver = Receiver()
    leg = egress.send(post(server.port, size=1), b"x", receiver)
    leg.cancel()
    assert egress.open_legs == 0
    again, connection, _ = await asked(egress, server, len(server.connections))
    connection.answer()
    assert await again.end() == "done"
    assert not receiver.ends


@pytest.mark.parametrize("fail_in", ["head", "data", "done"])
async def test_a_receiver_that_fails_hurts_nobody_else(egress: DirectEgress, server: RawServer, fail_in: str) -> None:
    egress.publish(workers(server.port))
    failing = Receiver(fail_in)
    egress.send(post(server.port, size=1), b"x", failing)
    connection = await server.connection()
    await connection.request()
    connection.answer()
    assert await failing.end() == ("done" if fail_in == "done" else Lost.RESET)
    again, connection, _ = await asked(egress, server, 0 if fail_in == "done" else 1)
    connection.answer()
    assert await again.end() == "done"


# -- through a proxy --------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def proxied(server: RawServer) -> AsyncIterator[ProxyEgress]:
    egress = ProxyEgress("localhost", server.port)
    egress.start()
    yield egress
    await egress.stop()


async def test_a_proxy_is_told_the_worker(proxied: ProxyEgress, server: RawServer) -> None:
    receiver = Receiver()
    proxied.send(post(7, 8, size=5), b"hello", receiver)
    connection = await server.connection()
    line, headers, body = await connection.request()
    assert line == "POST http://first:1/p?q=1 HTTP/1.1"
    assert body == b"hello"
    assert headers["host"] == "first:1"
    assert headers["x-pd-cluster"] == "prefill"
    assert headers["x-gateway-destination-endpoint"] == "127.0.0.1:7,127.0.0.1:8"
    connection.answer(extra="x-pd-upstream: 127.0.0.1:8\r\n")
    assert await receiver.end() == "done"
    assert told(receiver) == (200, None, b"127.0.0.1:8")


async def test_a_proxys_own_answer_is_known_by_its_header(proxied: ProxyEgress, server: RawServer) -> None:
    receiver, connection, _ = await asked(proxied, server)  # the worker's port is the proxy's here
    connection.answer(status="503 Service Unavailable", extra="x-pd-local-reply: UF\r\n")
    assert await receiver.end() == "done"
    assert told(receiver)[:2] == (503, b"UF")


async def test_a_proxy_that_is_not_there_is_no_workers_fault() -> None:
    egress = ProxyEgress("127.0.0.1", UNREACHABLE_PORT)
    egress.start()
    receiver = Receiver()
    egress.send(post(7, size=1), b"x", receiver)
    assert await receiver.end() is Lost.UNREACHABLE
    await egress.stop()
