"""The cheap GET: how answers may come, and what is none."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from fleet import LONG

from extproc.workers.client import NoAnswerError, UnreachableError, WorkerClient
from extproc.workers.worker import Role, Worker, WorkerUrl

ENGINE_PEM = Path(__file__).parent / "data" / "tls" / "engine.pem"
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"loads": []}'

pytestmark = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])


class Server:
    """Sends pieces to whoever asks, one after the other."""

    def __init__(self, pieces: Sequence[bytes], *, hangs_up: bool) -> None:
        self.pieces = pieces
        self.hangs_up = hangs_up
        self.request = b""
        self.ended = asyncio.Event()
        self.serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            self.request = await reader.readuntil(b"\r\n\r\n")
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            if not self.hangs_up:
                await reader.read()
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # it has heard enough
        self.ended.set()


@asynccontextmanager
async def serving(
    *pieces: bytes, hangs_up: bool = False, tls: ssl.SSLContext | None = None, name: str = "127.0.0.1"
) -> AsyncIterator[tuple[Server, Worker]]:
    server = Server(pieces, hangs_up=hangs_up)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    url = WorkerUrl("https" if tls else "http", name, port)
    yield server, Worker("id", url, Role.PREFILL, api_key="k", endpoint=f"127.0.0.1:{port}")
    listener.close()
    await listener.wait_closed()
    if server.serving:
        await asyncio.wait(server.serving)


async def ask(worker: Worker, most: int = 1000, within: float = LONG, client: WorkerClient | None = None):
    return await (client or WorkerClient()).get_often(worker, "/v1/loads?a=b", within=within, most=most)


def run(coroutine, loop_factory) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(coroutine)


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"content-length: 13\r\n\r\n" + BODY],
        [HEAD + b"content-length: 13\r\n\r\n", BODY[:5], BODY[5:]],
        [HEAD[:9], HEAD[9:], b"Content-Length:13\r", b"\n\r\n" + BODY],
        [CHUNKED + b"d\r\n" + BODY + b"\r\n0\r\n\r\n"],
        [CHUNKED + b"5;a=b\r\n" + BODY[:5], b"\r\n8\r\n" + BODY[5:] + b"\r\n0\r\n", b"\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + HEAD, b"content-length: 13\r\n\r\n" + BODY],
        [*[bytes((byte,)) for byte in HEAD + b"content-length: 13\r\n\r\n" + BODY]],
    ],
)
def test_answers_of_servers_that_stay(pieces, loop_factory):
    async def test() -> None:
        async with serving(*pieces) as (server, worker):
            answer = await ask(worker)
            assert (answer.status, answer.body) == (200, BODY)
            assert server.request == (
                b"GET /v1/loads?a=b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\naccept-encoding: identity\r\n"
                b"authorization: Bearer k\r\nconnection: close\r\n\r\n" % worker.url.authority.encode()
            )
            await asyncio.wait_for(server.ended.wait(), LONG)  # the connection is closed

    run(test(), loop_factory)


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([HEAD + b"\r\n", BODY], BODY),
        ([CHUNKED + b"d\r\n" + BODY + b"\r\n0\r\nx-trailer: 1\r\n\r\n"], BODY),
        ([CHUNKED + b"8\r\nab0\r\n\r\n", b"c\r\n0\r\n\r\n"], b"ab0\r\n\r\nc"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ],
)
def test_answers_of_servers_that_hang_up(pieces, body, loop_factory):
    async def test() -> None:
        async with serving(*pieces, hangs_up=True) as (_, worker):
            assert (await ask(worker)).body == body

    run(test(), loop_factory)


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([], UnreachableError, "Server disconnected"),
        ([HEAD], UnreachableError, "Server disconnected"),
        ([HEAD + b"content-length: 13\r\n\r\n" + BODY[:5]], UnreachableError, "Server disconnected"),
        ([CHUNKED + b"d\r\n" + BODY[:5]], UnreachableError, "Server disconnected"),
        ([CHUNKED + b"x\r\n" + BODY], NoAnswerError, "a chunk without a size"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], NoAnswerError, "not an answer"),
        ([HEAD + b"content-length: x\r\n\r\n"], NoAnswerError, "content-length is no number"),
        ([HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n"], NoAnswerError, "content-length is no number"),
        ([HEAD + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx"], NoAnswerError, "compressed"),
        ([HEAD + b"content-length: 1001\r\n\r\n"], NoAnswerError, "more than 1000 bytes"),
        ([HEAD + b"\r\n" + b"x" * 1001], NoAnswerError, "more than 1000 bytes"),
        ([CHUNKED + b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"], NoAnswerError, "more than 1000 bytes"),
        ([CHUNKED] + [b"3e8\r\n" + b"x" * 1000 + b"\r\n"] * 1000, NoAnswerError, "more than 1000 bytes"),
        ([HEAD + b"\r\n"] + [b"x" * 10_000] * 1000, NoAnswerError, "more than 1000 bytes"),
        ([b"x" * 10_000] * 1000, NoAnswerError, "a head of more than 65536 bytes"),
    ],
)
def test_what_is_no_answer(pieces, kind, message, loop_factory):
    async def test() -> None:
        async with serving(*pieces, hangs_up=True) as (_, worker):
            with pytest.raises(NoAnswerError, match=message) as caught:
                await ask(worker)
            assert type(caught.value) is kind

    run(test(), loop_factory)


def test_silence(loop_factory):
    async def test() -> None:
        async with serving(HEAD) as (server, worker):
            with pytest.raises(NoAnswerError, match=r"GET /v1/loads\?a=b: no answer within 0\.05 s"):
                await ask(worker, within=0.05)
            await asyncio.wait_for(server.ended.wait(), LONG)

    run(test(), loop_factory)


def test_nobody_listens(loop_factory):
    async def test() -> None:
        with socket.socket() as unbound:
            unbound.bind(("127.0.0.1", 0))
            port = unbound.getsockname()[1]
            worker = Worker("id", WorkerUrl("http", "127.0.0.1", port), Role.DECODE, endpoint=f"127.0.0.1:{port}")
            with pytest.raises(UnreachableError, match="Connection refused"):
                await ask(worker)
            worker.endpoint = None
            with pytest.raises(UnreachableError, match="has no address"):
                await ask(worker)

    run(test(), loop_factory)


def test_tls_is_verified_by_the_workers_name(loop_factory):
    async def test() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(ENGINE_PEM)
        trusting = WorkerClient(ssl.create_default_context(cafile=ENGINE_PEM))
        reply = HEAD + b"content-length: 13\r\n\r\n" + BODY
        async with serving(reply, tls=context, name="engine") as (_, worker):
            assert (await ask(worker, client=trusting)).body == BODY
            with pytest.raises(UnreachableError, match="self-signed certificate"):
                await ask(worker)
        async with serving(reply, tls=context, name="other") as (_, worker):
            with pytest.raises(UnreachableError, match="Hostname mismatch"):
                await ask(worker, client=trusting)

    run(test(), loop_factory)
