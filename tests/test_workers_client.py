"""Asking workers directly: what is sent, what counts as an answer, and how a failure reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from fleet import LONG, engine

from extproc.workers.client import Answer, NoAnswerError, UnreachableError, WorkerClient
from extproc.workers.worker import Role, Worker, WorkerUrl

ENGINE_PEM = Path(__file__).parent / "data" / "tls" / "engine.pem"


@pytest.fixture
async def client() -> AsyncIterator[WorkerClient]:
    async with WorkerClient() as made:
        yield made


def worker(url: str, **more: object) -> Worker:
    return Worker("id", WorkerUrl.parse(url), Role.PREFILL, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[Worker]:
    """A worker that sends ``answer`` to whoever asks, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield worker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    await server.wait_closed()


async def test_what_is_asked(client: WorkerClient) -> None:
    async with engine() as server:
        named = worker(f"http://engine:{server.port}", api_key="k", endpoint=f"127.0.0.1:{server.port}")
        answer = await client.get(named, "/health?deep=1", within=LONG)
        assert answer == Answer(200, "", b"")
        assert answer.ok
        path, headers = server.requests[0]
        assert path == "/health"
        assert headers["host"] == f"engine:{server.port}"
        assert headers["authorization"] == "Bearer k"
        await client.get(worker(server.url), "/health", within=LONG, ip="127.0.0.1")
        assert "authorization" not in server.requests[1][1]


async def test_what_a_probe_asks(client: WorkerClient) -> None:
    async with engine(health=503) as server:
        named = worker(f"http://engine:{server.port}", api_key="k")
        assert await client.probe(named, "/health?deep=1", within=LONG, ip="127.0.0.1") == 503
        path, headers = server.requests[0]
        assert path == "/health"
        assert headers == {
            "host": f"engine:{server.port}",
            "authorization": "Bearer k",
            "accept": "*/*",
            "accept-encoding": "identity",
            "connection": "close",
        }
        server.health = 204
        assert await client.probe(worker(server.url), "/health", within=LONG, ip="127.0.0.1") == 204
        assert "authorization" not in server.requests[1][1]


async def test_what_is_posted(client: WorkerClient) -> None:
    async with engine() as server:
        named = worker(f"http://engine:{server.port}", api_key="k", endpoint=f"127.0.0.1:{server.port}")
        answer = await client.post(named, "/x", {"a": [1]}, within=LONG, headers={"x-data-parallel-rank": "1"})
        assert answer.status == 404
        assert server.posts == [("/x", {"a": [1]})]
        _, headers = server.requests[0]
        assert headers["host"] == f"engine:{server.port}"
        assert headers["authorization"] == "Bearer k"
        assert headers["content-type"] == "application/json"
        assert headers["x-data-parallel-rank"] == "1"


async def test_a_post_that_fails_says_so(client: WorkerClient) -> None:
    async with engine(hang_posts=True) as server:
        with pytest.raises(NoAnswerError, match=r"POST /x: no answer within 0\.02 s"):
            await client.post(worker(server.url), "/x", {}, within=0.02, ip="127.0.0.1")


async def test_a_worker_without_an_address(client: WorkerClient) -> None:
    with pytest.raises(UnreachableError, match="has no address"):
        await client.get(worker("http://engine:1"), "/health", within=LONG)


async def test_nobody_listens(client: WorkerClient) -> None:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        dead = worker(f"http://127.0.0.1:{unbound.getsockname()[1]}")
        with pytest.raises(UnreachableError, match="GET /health: Connection refused"):
            await client.get(dead, "/health", within=LONG, ip="127.0.0.1")
        with pytest.raises(UnreachableError, match="GET /health: Connection refused"):
            await client.probe(dead, "/health", within=LONG, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", UnreachableError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", NoAnswerError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", NoAnswerError),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", NoAnswerError),
    ],
)
async def test_answers_that_are_none(client: WorkerClient, answer: bytes, kind: type[Exception]) -> None:
    async with raw_server(answer) as broken:
        with pytest.raises(kind, match=r"GET /health: ."):
            await client.get(broken, "/health", within=LONG, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (b"", UnreachableError, "closed without an answer"),
        (b"HTTP/1.1 200", UnreachableError, "closed without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", NoAnswerError, "not HTTP: b'SSH-2.0"),
        (b"HTTP/1.1 ok\r\n\r\n", NoAnswerError, "not HTTP"),
        (b"HTTP/1.1 102 Processing\r\n\r\n", UnreachableError, "closed without an answer"),
        (b"\r\n\r\n", NoAnswerError, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 100_000, NoAnswerError, "a head of more than 65536 bytes"),
    ],
)
async def test_what_is_no_answer_to_a_probe(
    client: WorkerClient, answer: bytes, kind: type[Exception], said: str
) -> None:
    async with raw_server(answer) as broken:
        with pytest.raises(kind, match=f"GET /health: {said}"):
            await client.probe(broken, "/health", within=LONG, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 102 .\r\n\r\nHTTP/1.1 503 .\r\n\r\nbusy", 503),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 101),
    ],
)
async def test_what_is_said_before_the_answer_is_none(client: WorkerClient, answer: bytes, status: int) -> None:
    async with raw_server(answer) as wordy:
        assert await client.probe(wordy, "/health", within=LONG, ip="127.0.0.1") == status


async def test_a_probe_needs_no_body(client: WorkerClient) -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n") as brief:
        assert await client.probe(brief, "/health", within=LONG, ip="127.0.0.1") == 200


async def test_an_answer_without_end(client: WorkerClient) -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"x" * (17 << 20)) as endless:
        with pytest.raises(NoAnswerError, match="answer of more than 16777216 bytes"):
            await client.get(endless, "/server_info", within=LONG, ip="127.0.0.1")


async def test_silence(client: WorkerClient) -> None:
    async with engine(hang=True) as server:
        with pytest.raises(NoAnswerError, match=r"GET /health: no answer within 0\.02 s") as silence:
            await client.get(worker(server.url), "/health", within=0.02, ip="127.0.0.1")
        assert not isinstance(silence.value, UnreachableError)  # it may only be busy
        with pytest.raises(NoAnswerError, match=r"GET /health: no answer within 0\.02 s") as silence:
            await client.probe(worker(server.url), "/health", within=0.02, ip="127.0.0.1")
        assert not isinstance(silence.value, UnreachableError)


async def test_a_connection_that_is_not_made() -> None:
    async with contextlib.AsyncExitStack() as sockets:
        client = await sockets.enter_async_context(WorkerClient(connect_limit=0.02))
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # its queue is full
            waiting = sockets.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(listener.getsockname())
        full = worker(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(UnreachableError, match=r"GET /health: no connection within 0\.02 s"):
            await client.get(full, "/health", within=LONG, ip="127.0.0.1")
        with pytest.raises(UnreachableError, match=r"GET /health: no connection within 0\.02 s"):
            await client.probe(full, "/health", within=LONG, ip="127.0.0.1")


async def test_tls_is_verified_by_the_workers_name() -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(ENGINE_PEM)
    names: list[str | None] = []
    serving.sni_callback = lambda _socket, name, _context: names.append(name)  # type: ignore[assignment]
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=serving).start()
    port = runner.addresses[0][1]
    trusting = WorkerClient(ssl.create_default_context(cafile=ENGINE_PEM))
    distrusting = WorkerClient()
    try:
        answer = await trusting.get(worker(f"https://engine:{port}"), "/", within=LONG, ip="127.0.0.1")
        assert answer.status == 404
        assert names == ["engine"]
        with pytest.raises(UnreachableError, match="Hostname mismatch"):
            await trusting.get(worker(f"https://other:{port}"), "/", within=LONG, ip="127.0.0.1")
        with pytest.raises(UnreachableError, match="self-signed certificate"):
            await distrusting.get(worker(f"https://engine:{port}"), "/", within=LONG, ip="127.0.0.1")
        assert await trusting.probe(worker(f"https://engine:{port}"), "/", within=LONG, ip="127.0.0.1") == 404
        with pytest.raises(UnreachableError, match="Hostname mismatch"):
            await trusting.probe(worker(f"https://other:{port}"), "/", within=LONG, ip="127.0.0.1")
        with pytest.raises(UnreachableError, match="self-signed certificate"):
            await distrusting.probe(worker(f"https://engine:{port}"), "/", within=LONG, ip="127.0.0.1")
    finally:
        await trusting.close()
        await distrusting.close()
        await runner.cleanup()
