"""What both servers owe Envoy: the whole of one request's ext_proc stream, in the mode the product uses."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from conformance_rig import PATIENCE, SERVERS, Server
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from transport_rig import TransportEnvoy, Worker

from extproc.transport.ngh2_server import Ngh2ProcessServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from extproc.transport.interface import Call

_CHUNK = 1 << 16
_BODY = random.Random(1).randbytes(20_000_000)


class Exchange:
    """A trivial handler: holds the request until it is whole, then releases it unchanged.

    The ``x-do`` request header names anything else it should do.
    """

    def __init__(self, call: Call, exchanges: Exchanges) -> None:
        self.call = call
        self.exchanges = exchanges
        self.do = ""
        self.chunks: list[bytes] = []
        self.peak = 0  # bytes that waited here for Envoy, at most
        self.drains = 0
        self.ends = 0

    @property
    def size(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    def received(self, message: bytes) -> None:
        request = ep.ProcessingRequest.FromString(message)
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            headers = request.request_headers.headers.headers
            self.do = next((header.raw_value.decode() for header in headers if header.key == "x-do"), "")
            self._begin()
            if request.request_headers.end_of_stream:
                self._release(None)
        elif kind == "request_body":
            self.chunks.append(request.request_body.body)
            if request.request_body.end_of_stream and self.do != "hold":
                self._release(b"".join(self.chunks))
        elif kind == "response_headers":
            self._answer("response_headers")
        elif kind == "response_trailers":
            self._answer("response_trailers")
        self.exchanges.changed.set()

    def _begin(self) -> None:
        if self.do == "fail":
            raise RuntimeError("told to fail")
        if self.do == "abort":
            self.call.abort(14, "told to abort")
        elif self.do == "pause":
            self.call.pause()
        elif self.do == "immediate":
            response = ep.ProcessingResponse()
            response.immediate_response.status.code = 418
            response.immediate_response.body = b"immediately"
            self.call.send(response.SerializeToString())

    def _answer(self, kind: str) -> None:
        response = ep.ProcessingResponse()
        getattr(response, kind).SetInParent()
        self.call.send(response.SerializeToString())

    def _release(self, body: bytes | None) -> None:
        self._answer("request_headers")
        if body is None:
            return
        for start in range(0, max(len(body), 1), _CHUNK):
            response = ep.ProcessingResponse()
            piece = response.request_body.response.body_mutation.streamed_response
            piece.body = body[start : start + _CHUNK]
            piece.end_of_stream = start + _CHUNK >= len(body)
            self.call.send(response.SerializeToString())
            self.peak = max(self.peak, self.call.queued)

    def drained(self) -> None:
        self.drains += 1
        self.exchanges.changed.set()

    def closed(self) -> None:
        self.ends += 1
        self.exchanges.changed.set()


class Exchanges:
    """All exchanges of a test."""

    def __init__(self) -> None:
        self.all: list[Exchange] = []
        self.changed = asyncio.Event()

    def process(self, call: Call) -> Exchange:
        exchange = Exchange(call, self)
        self.all.append(exchange)
        return exchange

    async def until(self, condition: object) -> None:
        """Wait for what an exchange will have seen."""
        assert callable(condition)
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def all_ended(self, count: int) -> None:
        await self.until(lambda: len(self.all) >= count and all(each.ends for each in self.all))
        assert [each.ends for each in self.all] == [1] * count


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransportEnvoy]:
    yield from TransportEnvoy(tmp_path_factory.mktemp("envoy")).run()


@pytest.fixture(params=SERVERS, ids=lambda each: each.__name__)
def server_type(request: pytest.FixtureRequest) -> type[Server]:
    return request.param


@pytest.fixture
def exchanges() -> Exchanges:
    return Exchanges()


@asynccontextmanager
async def serving(server_type: type[Server], envoy: TransportEnvoy, exchanges: Exchanges) -> AsyncIterator[Server]:
    """A server that Envoy has forgotten when the block is left."""
    server = server_type()
    await server.start(f"unix:{envoy.ext_proc}", exchanges.process)
    try:
        yield server
    finally:
        await server.drain(0)
    await envoy.until_statistic("cluster.ext_proc.upstream_cx_active", 0)


@pytest.fixture
async def server(server_type: type[Server], envoy: TransportEnvoy, exchanges: Exchanges) -> AsyncIterator[Server]:
    async with serving(server_type, envoy, exchanges) as server:
        yield server
        await exchanges.until(lambda: all(each.ends for each in exchanges.all))
    assert server.open_calls == 0
    assert [each.ends for each in exchanges.all] == [1] * len(exchanges.all)


@pytest.fixture
async def worker(envoy: TransportEnvoy) -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.start(envoy.worker)
    yield worker
    await worker.stop()
    Path(envoy.worker).unlink(missing_ok=True)  # noqa: ASYNC240


@pytest.fixture
async def client(envoy: TransportEnvoy, server: Server, worker: Worker) -> AsyncIterator[aiohttp.ClientSession]:
    assert server.address
    assert not worker.left.is_set()
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{envoy.port}", timeout=timeout) as client:
        yield client


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 65_536, 65_537, 1 << 20, 20_000_000])
async def test_a_body_passes_unchanged(client: aiohttp.ClientSession, exchanges: Exchanges, size: int) -> None:
    body = _BODY[:size]
    async with client.post("/sha", data=BytesIO(body)) as answer:
        assert (answer.status, await answer.text()) == (200, hashlib.sha256(body).hexdigest())
    await exchanges.all_ended(1)


async def test_a_chunked_upload_passes_unchanged(client: aiohttp.ClientSession) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, 3_000_000, 100_000):
            yield _BODY[start : start + 100_000]

    async with client.post("/sha", data=pieces()) as answer:
        assert await answer.text() == hashlib.sha256(_BODY[:3_000_000]).hexdigest()


async def test_a_large_answer_passes(client: aiohttp.ClientSession) -> None:
    async with client.post("/big", data=b"20000000") as answer:
        assert len(await answer.read()) == 20_000_000


async def test_many_requests_at_once(client: aiohttp.ClientSession, exchanges: Exchanges) -> None:
    async def post(index: int) -> None:
        body = _BODY[index : index * 300]
        async with client.post("/sha", data=BytesIO(body)) as answer:
            assert (answer.status, await answer.text()) == (200, hashlib.sha256(body).hexdigest())

    await asyncio.gather(*(post(index) for index in range(300)))
    await exchanges.all_ended(300)


async def test_a_client_that_leaves_while_its_request_is_held_closes_the_call(
    client: aiohttp.ClientSession, exchanges: Exchanges
) -> None:
    posting = asyncio.create_task(client.post("/sha", data=b"x", headers={"x-do": "hold"}))
    await exchanges.until(lambda: bool(exchanges.all) and exchanges.all[0].chunks[-1:] == [b""])
    assert exchanges.all[0].ends == 0
    posting.cancel()
    await exchanges.all_ended(1)


async def test_a_client_that_leaves_before_the_answer_closes_the_call(
    client: aiohttp.ClientSession, exchanges: Exchanges, worker: Worker
) -> None:
    posting = asyncio.create_task(client.post("/hang", data=b"x"))
    await worker.waiting.wait()
    assert exchanges.all[0].ends == 0
    posting.cancel()
    await exchanges.all_ended(1)


async def test_the_call_is_open_until_the_answers_last_byte(
    client: aiohttp.ClientSession, exchanges: Exchanges, worker: Worker
) -> None:
    async with client.post("/stream", data=b"x") as answer:
        assert await answer.content.readany() == b"first"
        assert exchanges.all[0].ends == 0
        worker.release.set()
        assert await answer.read() == b"last"
    await exchanges.all_ended(1)


async def test_a_client_that_leaves_in_the_middle_of_the_answer_closes_the_call(
    client: aiohttp.ClientSession, exchanges: Exchanges, worker: Worker
) -> None:
    answer = await client.post("/stream", data=b"x")
    assert await answer.content.readany() == b"first"
    answer.close()
    await exchanges.all_ended(1)
    await worker.left.wait()


@pytest.mark.parametrize("do", ["abort", "fail"])
async def test_an_aborted_call_is_an_error_for_this_client_only(
    client: aiohttp.ClientSession, exchanges: Exchanges, worker: Worker, do: str
) -> None:
    neighbour = asyncio.create_task(client.post("/hang", data=b"x"))
    await worker.waiting.wait()
    async with client.post("/sha", data=b"x", headers={"x-do": do}) as answer:
        assert answer.status == 503
    worker.release.set()
    assert (await neighbour).status == 200
    await exchanges.all_ended(2)


async def test_an_immediate_response(client: aiohttp.ClientSession, exchanges: Exchanges) -> None:
    async with client.post("/sha", data=b"x", headers={"x-do": "immediate"}) as answer:
        assert (answer.status, await answer.text()) == (418, "immediately")
    await exchanges.all_ended(1)


async def test_pause_holds_an_upload_back_through_envoy(client: aiohttp.ClientSession, exchanges: Exchanges) -> None:
    posting = asyncio.create_task(client.post("/sha", data=BytesIO(_BODY), headers={"x-do": "pause"}))
    await exchanges.until(lambda: bool(exchanges.all) and exchanges.all[0].do == "pause")
    done, _ = await asyncio.wait([posting], timeout=0.3)
    assert not done
    exchange = exchanges.all[0]
    assert exchange.size < 3 << 20
    exchange.call.resume()
    answer = await posting
    assert await answer.text() == hashlib.sha256(_BODY).hexdigest()
    assert exchange.size == len(_BODY)


async def test_a_worker_that_does_not_read_is_seen_as_a_queue(
    client: aiohttp.ClientSession, exchanges: Exchanges, worker: Worker, server_type: type[Server]
) -> None:
    """What is left of the queue later depends on what Envoy has read by then; its peak does not."""
    posting = asyncio.create_task(client.post("/slow", data=BytesIO(_BODY)))
    await worker.waiting.wait()
    exchange = exchanges.all[0]
    if server_type is Ngh2ProcessServer:  # grpcio hands its engine what fits into Envoy's 16 MiB window
        assert exchange.peak > 0
    worker.release.set()
    answer = await posting
    assert await answer.text() == hashlib.sha256(_BODY).hexdigest()
    assert exchange.drains == 1


async def test_without_a_server_clients_get_503_and_with_the_next_one_200(
    envoy: TransportEnvoy, server_type: type[Server], worker: Worker
) -> None:
    assert not worker.left.is_set()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{envoy.port}") as client:
        for _ in range(2):
            async with client.post("/sha", data=b"x") as answer:
                assert answer.status == 503
            async with serving(server_type, envoy, Exchanges()), client.post("/sha", data=b"x") as answer:
                assert answer.status == 200


async def test_drain_lets_the_request_end_and_the_next_one_find_the_successor(
    client: aiohttp.ClientSession,
    envoy: TransportEnvoy,
    server: Server,
    server_type: type[Server],
    exchanges: Exchanges,
    worker: Worker,
) -> None:
    answer = await client.post("/stream", data=b"x")
    assert await answer.content.readany() == b"first"
    noticed = "cluster.ext_proc.upstream_cx_close_notify"
    before = envoy.statistic(noticed)
    draining = asyncio.create_task(server.drain(PATIENCE))
    await envoy.until_statistic(noticed, before + 1)
    successor, later = server_type(), Exchanges()
    await successor.start(f"unix:{envoy.ext_proc}", later.process)
    async with client.post("/sha", data=b"x") as other:
        assert other.status == 200
    assert (len(exchanges.all), len(later.all)) == (1, 1)
    assert not draining.done()
    worker.release.set()
    assert await answer.read() == b"last"
    await draining
    await exchanges.all_ended(1)
    await successor.drain(0)


async def test_envoys_health_check_follows_readiness(envoy: TransportEnvoy, server_type: type[Server]) -> None:
    server = server_type()
    await server.start(f"unix:{envoy.watched}", Exchanges().process)
    healthy = "cluster.watched.membership_healthy"
    await envoy.until_statistic(healthy, 0)
    server.set_serving("readiness", serving=True)
    await envoy.until_statistic(healthy, 1)
    server.set_serving("readiness", serving=False)
    await envoy.until_statistic(healthy, 0)
    await server.drain(0)
