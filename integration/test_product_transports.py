"""The main rows over both implementations of the ext_proc server, and with the service on TCP instead of sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from http2_client import Http2Client
from processes import free_port
from product import PROMPT, Product

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
SAMPLES = pytest.mark.parametrize("n", [1, 2], ids=["direct", "relayed"])


def _tcp() -> dict[str, str]:
    return {name: f"127.0.0.1:{free_port()}" for name in ("extproc_address", "ads_address", "control_address")}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ngh2", "grpcio", "ngh2 on TCP", "grpcio on TCP"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Product]:
    transport, _, tcp = request.param.partition(" on ")
    async with Product(grpc_transport=transport, **(_tcp() if tcp else {})) as product:
        yield product


@SAMPLES
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer(product: Product, n, stream):
    answer = await product.post(PATH, {**CHAT, "n": n, "stream": stream, "seed": 1})
    assert answer.status == 200
    if stream:
        assert answer.events[-1] == "[DONE]"
    else:
        assert len(answer.json["choices"]) == n


@SAMPLES
async def test_a_large_body(product: Product, n):
    answer = await product.post(PATH, {**CHAT, "n": n, "padding": "x" * 5_000_000})
    assert answer.status == 200
    assert all(len(leg.body) > 5_000_000 for mock in product.mocks for leg in mock.legs)


@SAMPLES
async def test_an_upload_with_trailers(product: Product, http2: Http2Client, n):
    for _ in range(2 * len(product.decodes)):
        stream = http2.open(PATH)
        stream.send(json.dumps({**CHAT, "n": n}).encode())
        stream.trailers([("x-checksum", "1")])
        assert (await stream.whole()).status == 200
    assert len(product.prefill.legs) == 2 * len(product.decodes) * n


async def test_many_at_once(product: Product, http2: Http2Client):
    streams = [http2.post(PATH, {**CHAT, "stream": True}) for _ in range(50)]
    assert all([(await stream.whole()).events[-1] == "[DONE]" for stream in streams])
    assert len(product.prefill.legs) == 50


@SAMPLES
async def test_a_prefill_that_fails(product: Product, n):
    product.prefill.fail(Fault(status=500))
    answer = await product.post(PATH, {**CHAT, "n": n})
    assert (answer.status, answer.code) == (502, "prefill_failed")
    assert answer.seconds < PROMPT
    for mock in product.decodes:
        await mock.idle()


@SAMPLES
async def test_a_decode_that_refuses(product: Product, n):
    await product.decodes[0].refuse()
    for _ in range(2):
        answer = await product.post(PATH, {**CHAT, "n": n})
        assert answer.status == 200
        assert answer.header("x-pd-decode") == product.decodes[1].url


@SAMPLES
async def test_a_client_that_leaves_a_silent_request(product: Product, n):
    product.prefill.fail(Fault(delay_first_token=60))
    exchange = await product.client.open(PATH, {**CHAT, "n": n})
    await product.prefill.received(n)
    left = exchange.close()
    await product.settled()
    assert max(leg.ended for mock in product.mocks for leg in mock.legs) - left < PROMPT


@SAMPLES
async def test_a_client_that_leaves_a_stream(product: Product, n):
    for mock in product.decodes:
        mock.fail(Fault(delay_token=0.01, tokens=5000))
    exchange = await product.client.open(PATH, {**CHAT, "n": n, "stream": True})
    await exchange.until(b"data: ")
    left = exchange.reset()
    await product.settled()
    assert max(leg.ended for mock in product.mocks for leg in mock.legs) - left < PROMPT


async def test_a_refusal(product: Product):
    answer = await product.post(PATH, b"{")
    assert (answer.status, answer.code) == (400, "invalid_json")
    answer = await product.post(PATH, {**CHAT, "model": "unknown"})
    assert (answer.status, answer.code) == (404, "model_not_found")
