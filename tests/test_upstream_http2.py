"""The service's own connections to gRPC workers, and to those with TLS."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ngh2
import pytest
from fleet import eventually
from raw_server import raw_server
from transport_peer import Peer, PeerServer, Receiver

from extproc.transport.interface import Header, Lost
from extproc.upstream import host
from extproc.upstream.egress import DirectEgress
from extproc.upstream.host import Http2Host
from extproc.upstream.tls import WorkerTls
from extproc.workers.endpoints import Endpoint, Snapshot


class TcpPeers(PeerServer):
    """A PeerServer on a port of 127.0.0.1."""

    port = 0

    async def listen(self, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]


@asynccontextmanager
async def peers(settings: dict[int, int] | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[TcpPeers]:
    """A gRPC worker that a test plays."""
    server = TcpPeers(settings)
    await server.listen(tls)
    yield server
    await server.stop()


@asynccontextmanager
async def to(
    *ports: int, ca: Path | None = None, name: str = "worker.test", grpc: bool = True
) -> AsyncIterator[DirectEgress]:
    """An egress that knows prefill workers at ``ports``, with TLS if there is a ``ca``."""
    egress = DirectEgress(WorkerTls(ca))
    egress.start()
    endpoints = tuple(Endpoint("127.0.0.1", port, name, tls=ca is not None, grpc=grpc) for port in ports)
    egress.publish(Snapshot(prefill=endpoints))
    yield egress
    await egress.stop()
    assert egress.open_legs == 0


def call(*ports: int, cluster: str = "prefill_grpc") -> list[Header]:
    """The head of a call to workers at these ports."""
    destinations = ",".join(f"127.0.0.1:{port}" for port in ports)
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":authority", b"first:1"),
        (b":path", b"/svc/Method"),
        (b"x-pd-cluster", cluster.encode()),
        (b"x-gateway-destination-endpoint", destinations.encode()),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]


def flags(receiver: Receiver) -> tuple[int, bytes | None]:
    """Status, and Envoy's flags where nobody answered."""
    return receiver.status, dict(receiver.headers).get(b"x-pd-local-reply")


async def test_a_call_with_its_trailers() -> None:
    async with peers() as server, to(server.port) as egress:
        receiver = Receiver()
        egress.send(call(server.port), b"ask", receiver)
        request = await server.request()
        assert request.headers == (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", f"worker.test:{server.port}".encode()),
            (b":path", b"/svc/Method"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
        request.head(200, (b"content-type", b"application/grpc"), (b"x-pd-late", b"1"))
        request.data(b"message")
        request.peer.h2.send_trailers(request.stream, ((b"grpc-status", b"0"),))
        request.peer.flush()
        assert await receiver.end() == "done"
        assert (receiver.status, bytes(receiver.body)) == (200, b"message")
        assert dict(receiver.headers) == {
            b"content-type": b"application/grpc",
            b"x-pd-upstream": f"127.0.0.1:{server.port}".encode(),
        }
        assert tuple(receiver.last) == ((b"grpc-status", b"0"),)


async def test_calls_share_a_connection_and_those_that_come_at_once_share_its_making() -> None:
    async with peers() as server, to(server.port) as egress:
        receivers = [Receiver() for _ in range(20)]
        for receiver in receivers:
            egress.send(call(server.port), b"x", receiver)
        await server.until(lambda: len(server.requests) == 20)
        for request in server.requests:
            request.head(200, end_stream=True)
        assert [await receiver.end() for receiver in receivers] == ["done"] * 20
        assert len(server.peers) == egress.connections == 1


async def test_a_worker_that_takes_few_streams_gets_more_connections() -> None:
    async with peers({ngh2.Setting.MAX_CONCURRENT_STREAMS: 2}) as server, to(server.port) as egress:
        receivers = []
        for count in range(1, 6):
            receivers.append(Receiver())
            egress.send(call(server.port), b"x", receivers[-1])
            await server.until(lambda count=count: len(server.requests) == count)
        assert len(server.peers) == 3
        for request in server.requests:
            request.head(200, end_stream=True)
        assert [await receiver.end() for receiver in receivers] == ["done"] * 5


async def test_a_worker_that_goes_while_it_is_connected_to_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, connected, swept, sweep = asyncio.Event(), host._connected, [], Http2Host.sweep

    async def late(place: host.Place, factory: Callable[[], Any]) -> Any:
        await gate.wait()
        return await connected(place, factory)

    def counted(self: Http2Host, before: float) -> None:
        swept.append(before)
        sweep(self, before)

    monkeypatch.setattr(host, "_connected", late)
    monkeypatch.setattr(Http2Host, "sweep", counted)
    monkeypatch.setattr("extproc.upstream.egress._SWEEP_SECONDS", 0.01)
    async with peers() as server, to(server.port) as egress:
        receiver = Receiver()
        egress.send(call(server.port), b"x", receiver)
        await asyncio.sleep(0)
        egress.publish(Snapshot())
        await eventually(lambda: len(swept) > 3)  # it is still looked after
        gate.set()
        (await server.request()).head(200, end_stream=True)
        assert await receiver.end() == "done"
        await eventually(lambda: egress.connections == 0)


async def test_a_connection_that_says_goodbye_finishes_its_calls() -> None:
    async with peers() as server, to(server.port) as egress:
        first = Receiver()
        egress.send(call(server.port), b"x", first)
        request = await server.request()
        request.peer.goaway()
        second = Receiver()
        (host,) = egress._hosts()
        (connection,) = host._open
        async with asyncio.timeout(60):
            await connection.retired()
        egress.send(call(server.port), b"y", second)
        await server.until(lambda: len(server.requests) == 2)
        assert len(server.peers) == 2
        for each in server.requests:
            each.head(200, end_stream=True)
        assert [await first.end(), await second.end()] == ["done", "done"]


async def test_a_stream_that_was_refused_is_sent_again_once() -> None:
    async with peers() as server, to(server.port) as egress:
        receiver = Receiver()
        egress.send(call(server.port), b"x", receiver)
        for number in range(2):
            request = await server.request(number)
            request.peer.h2.reset_stream(request.stream, ngh2.ErrorCode.REFUSED_STREAM)
            request.peer.flush()
        assert await receiver.end() == "done"
        assert flags(receiver) == (503, b"UC")
        assert len(server.requests) == 2


async def test_a_stream_that_is_reset_was_perhaps_begun() -> None:
    async with peers() as server, to(server.port) as egress:
        receiver = Receiver()
        egress.send(call(server.port), b"x", receiver)
        request = await server.request()
        request.peer.h2.reset_stream(request.stream, ngh2.ErrorCode.INTERNAL_ERROR)
        request.peer.flush()
        assert await receiver.end() == "done"
        assert flags(receiver) == (503, b"UC")
        assert len(server.requests) == 1


async def test_a_connection_that_breaks_within_an_answer() -> None:
    async with peers() as server, to(server.port) as egress:
        receiver = Receiver()
        egress.send(call(server.port), b"x", receiver)
        request = await server.request()
        request.head(200)
        await receiver.until(lambda: receiver.status)
        request.peer.transport.abort()
        assert await receiver.end() is Lost.RESET


async def test_cancel_resets_the_stream_and_nothing_else() -> None:
    async with peers() as server, to(server.port) as egress:
        cancelled, other = Receiver(), Receiver()
        leg = egress.send(call(server.port), b"x", cancelled)
        egress.send(call(server.port), b"y", other)
        await server.until(lambda: len(server.requests) == 2)
        leg.cancel()
        await server.until(lambda: server.requests[0].reset == ngh2.ErrorCode.CANCEL)
        server.requests[1].head(200, end_stream=True)
        assert await other.end() == "done"
        assert not cancelled.ends


@pytest.mark.parametrize("first", ["refuses", "speaks no HTTP/2"])
async def test_a_worker_that_cannot_be_spoken_to_leads_to_the_next(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.upstream.host._GREETING_SECONDS", 0.1)
    async with peers() as server, raw_server() as mute:
        bad = 1 if first == "refuses" else mute.port
        async with to(bad, server.port) as egress:
            receiver = Receiver()
            egress.send(call(bad, server.port), b"x", receiver)
            (await server.request()).head(200, end_stream=True)
            assert await receiver.end() == "done"
            assert dict(receiver.headers)[b"x-pd-upstream"] == f"127.0.0.1:{server.port}".encode()


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``, and ``worker.pem`` with ``worker.key`` for ``worker.test``."""
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subject = ("-subj", "/CN=worker", "-addext", "subjectAltName=DNS:worker.test")
    command = ["openssl", "req", "-x509", *key, "-keyout", "worker.key", "-out", "worker.pem", *subject]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "ca.pem").write_bytes((folder / "worker.pem").read_bytes())
    return folder


def serving(folder: Path, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "worker.pem", folder / "worker.key")
    context.set_alpn_protocols([protocol])
    return context


async def test_https(certificates: Path) -> None:
    async with (
        raw_server(serving(certificates, "http/1.1")) as server,
        to(server.port, ca=certificates / "ca.pem", grpc=False) as egress,
    ):
        for _ in range(2):
            receiver = Receiver()
            egress.send([*call(server.port, cluster="prefill"), (b"content-length", b"1")], b"x", receiver)
            connection = await server.connection()
            _, headers, body = await connection.request()
            assert (headers["host"], body) == ("worker.test", b"x")
            connection.answer()
            assert await receiver.end() == "done"
            assert receiver.status == 200
        assert len(server.connections) == 1


async def test_grpcs(certificates: Path) -> None:
    async with (
        peers(tls=serving(certificates, "h2")) as server,
        to(server.port, ca=certificates / "ca.pem") as egress,
    ):
        receiver = Receiver()
        egress.send(call(server.port), b"x", receiver)
        request = await server.request()
        assert dict(request.headers)[b":scheme"] == b"https"
        assert dict(request.headers)[b":authority"] == b"worker.test"
        request.head(200, end_stream=True)
        assert await receiver.end() == "done"


@pytest.mark.parametrize("wrong", ["name", "authority", "protocol"])
async def test_a_worker_that_cannot_be_trusted_is_not_reached(certificates: Path, wrong: str) -> None:
    tls = None if wrong == "protocol" else serving(certificates, "http/1.1")
    authority = Path(ssl.get_default_verify_paths().openssl_cafile) if wrong == "authority" else None
    if authority is not None and not authority.exists():
        pytest.skip("the system has no certificate authorities")
    name = "other.test" if wrong == "name" else "worker.test"
    async with (
        raw_server(tls) as server,
        to(server.port, ca=authority or certificates / "ca.pem", name=name, grpc=False) as egress,
    ):
        receiver = Receiver()
        egress.send(call(server.port, cluster="prefill"), b"", receiver)
        if wrong == "protocol":
            (await server.connection()).say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert await receiver.end() == "done"
        assert flags(receiver) == (503, b"UF")
