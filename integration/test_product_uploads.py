"""How requests may come: sizes, pieces, HTTP versions, connections that are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Client, Exchange
from product import Product, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
KIB, MIB = 1024, 1024 * 1024
# Around the pieces that Envoy's buffers, gRPC messages and HTTP/2 frames come in.
SIZES = [16 * KIB - 1, 16 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, 20_000_000]
JSON = ("content-type", "application/json")


def chat(content: str = "hello", **fields: object) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
    return json.dumps(body, separators=(",", ":")).encode()


def chat_of(size: int) -> bytes:
    """A chat body of exactly so many bytes; most of them beside the prompt, whose length the engine limits."""
    return chat(padding="x" * (size - len(chat(padding=""))))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product() as product:
        yield product


# -- sizes and pieces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [1, 2], ids=["direct", "relayed"])
async def test_a_body_of_any_size_reaches_both_legs(product: Product, size, samples):
    body = chat_of(size)
    if samples == 2:
        body = body[:-1] + b',"n":2}'
    answer = await product.post(PATH, body)
    assert answer.status == 200
    given = body.removesuffix(b',"n":2}').removesuffix(b"}")
    legs = [leg for mock in product.mocks for leg in mock.legs]
    assert len(legs) == 2 * samples
    for leg in legs:
        assert leg.body.startswith(given), "the client's bytes are not what the leg got"
        assert leg.header("content-length") == str(len(leg.body))


@pytest.mark.parametrize("size", [64 * KIB + 1, 20_000_000])
@pytest.mark.parametrize("piece", [1000, 70_000, 4 * MIB])
async def test_a_chunked_upload_is_whole_for_both_legs(product: Product, size, piece):
    body = chat_of(size)
    exchange = await _opened(product.client, [("transfer-encoding", "chunked"), JSON])
    for at in range(0, len(body), piece):
        await exchange.send(_chunk(body[at : at + piece]))
    await exchange.send(b"0\r\n\r\n")
    assert (await exchange.whole()).status == 200
    exchange.close()
    for leg in product.legs:
        assert leg.body.startswith(body[:-1])
        assert leg.header("content-length") == str(len(leg.body))
        assert leg.header("transfer-encoding") is None


async def test_nothing_is_sent_before_the_request_is_whole(product: Product):
    body = chat()
    exchange = await _opened(product.client, [("content-length", str(len(body))), JSON])
    for byte in range(len(body) - 1):
        await exchange.send(body[byte : byte + 1])
    await soon(lambda: product.gateway.alive == 1, "the request has not come")
    await product.client.get("/liveness")  # Envoy has had time to pass on what it wanted to
    assert product.gateway.alive == 1
    assert not [leg for mock in product.mocks for leg in mock.legs]
    await exchange.send(body[-1:])
    assert (await exchange.whole()).status == 200
    exchange.close()


async def test_an_http1_client_may_send_trailers(product: Product):
    exchange = await _opened(product.client, [("transfer-encoding", "chunked"), ("trailer", "x-checksum"), JSON])
    await exchange.send(_chunk(chat()) + b"0\r\nx-checksum: 1\r\n\r\n")
    assert (await exchange.whole()).status == 200
    exchange.close()
    for leg in product.legs:
        assert leg.header("trailer") is None


# -- Expect: 100-continue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 20_000_000])
async def test_a_client_that_expects_100_gets_it(product: Product, size):
    body = chat_of(size)
    headers = [("content-length", str(len(body))), ("expect", "100-continue"), JSON]
    exchange = await _opened(product.client, headers)
    async with asyncio.timeout(60):
        assert await exchange._reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await exchange.send(body)
    assert (await exchange.whole()).status == 200
    exchange.close()
    for leg in product.legs:
        assert leg.header("expect") is None
        assert leg.body.startswith(body[:-1])


# -- connections that are kept ----------------------------------------------------------------------------------------


async def test_one_connection_serves_request_after_request(product: Product):
    exchange = await product.client.connect()
    for number in range(10):
        answer = await _again(product.client, exchange, chat(str(number), stream=number % 2 == 1))
        assert answer.status == 200
        exchange = Exchange(exchange._reader, exchange._writer)
    exchange.close()
    assert len(product.prefill.legs) == 10


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (chat(n=0), 400),
        (chat(model="unknown"), 404),
        (chat(temperature="x"), 400),  # these two by the worker
        (chat(n=2, temperature="x"), 400),
    ],
)
async def test_a_connection_is_kept_after_errors(product: Product, body, status):
    exchange = await product.client.connect()
    for expected, sent in ((status, body), (200, chat()), (status, body)):
        assert (await _again(product.client, exchange, sent)).status == expected
        exchange = Exchange(exchange._reader, exchange._writer)


async def test_pipelined_requests_are_answered_in_order(product: Product):
    exchange = await product.client.connect()
    bodies = [chat(str(number), max_tokens=number + 1, rid=f"r{number}") for number in range(5)]
    await exchange.send(b"".join(_whole(product.client, body) for body in bodies))
    ids = []
    for _ in bodies:
        ids.append((await exchange.whole()).json["id"])
        exchange = Exchange(exchange._reader, exchange._writer)
    exchange.close()
    assert ids == [f"r{number}" for number in range(5)]


async def test_an_http_1_0_client_is_served(product: Product):
    exchange = await product.client.connect()
    body = chat()
    head = f"POST {PATH} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    await exchange.send(head.encode() + body)
    assert (await exchange.whole()).json["choices"][0]["finish_reason"] == "stop"
    await exchange.gone()
    exchange.close()


# -- HTTP/2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 64 * KIB, 20_000_000])
@pytest.mark.parametrize("samples", [1, 2], ids=["direct", "relayed"])
async def test_an_http2_client_is_served(product: Product, http2: Http2Client, size, samples):
    answer = await http2.post(PATH, chat_of(size)[:-1] + b',"n":%d}' % samples).whole()
    assert answer.status == 200
    assert len(answer.json["choices"]) == samples
    assert len(product.prefill.legs) == samples


@pytest.mark.parametrize("samples", [1, 2], ids=["direct", "relayed"])
async def test_an_http2_client_may_send_trailers(product: Product, http2: Http2Client, samples):
    for _ in range(2 * len(product.decodes)):  # what one request leaves on a worker's connection is the next one's
        stream = http2.open(PATH, [JSON])
        stream.send(chat(n=samples))
        stream.trailers([("x-checksum", "1")])
        answer = await stream.whole()
        assert answer.status == 200
        assert len(answer.json["choices"]) == samples
    own = {"/health", "/v1/loads", "/server_info", "/model_info"}  # the gateway asks these itself, now and then
    assert {leg.method for mock in product.mocks for leg in mock.requests if leg.path not in own} == {"POST"}


async def test_an_http2_client_may_upload_without_a_length(product: Product, http2: Http2Client):
    body = chat_of(MIB)
    stream = http2.open(PATH, [JSON])
    for at in range(0, len(body), 10_000):
        stream.send(body[at : at + 10_000], end=at + 10_000 >= len(body))
    assert (await stream.whole()).status == 200
    for leg in product.legs:
        assert leg.header("content-length") == str(len(leg.body))


async def test_one_http2_connection_carries_many_requests_at_once(product: Product, http2: Http2Client):
    streams = [http2.post(PATH, chat(str(number), stream=True, n=1 + number % 2)) for number in range(60)]
    answers = [await stream.whole() for stream in streams]
    assert {answer.status for answer in answers} == {200}
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
    assert len(product.prefill.legs) == 90


async def test_an_error_leaves_the_http2_connection_alone(product: Product, http2: Http2Client):
    other = http2.post(PATH, chat(stream=True))
    refused = await http2.post(PATH, b"{").whole()
    assert (refused.status, refused.code) == (400, "invalid_json")
    assert (await other.whole()).status == 200
    assert len(product.prefill.legs) == 1


# -- inside -----------------------------------------------------------------------------------------------------------


async def _opened(client: Client, headers: list[tuple[str, str]]) -> Exchange:
    exchange = await client.connect()
    await exchange.send(client.request_head("POST", PATH, headers))
    return exchange


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(client: Client, body: bytes) -> bytes:
    return client.request_head("POST", PATH, [JSON, ("content-length", str(len(body)))]) + body


async def _again(client: Client, exchange: Exchange, body: bytes):
    await exchange.send(_whole(client, body))
    return await exchange.whole()
