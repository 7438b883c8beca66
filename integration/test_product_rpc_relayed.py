"""gRPC workers whose calls are all the gateway's own, through a real Envoy: TokenSpeed's, and clients that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from product import soon
from rpc_engine import Leg, never
from rpc_product import TEXT, RpcProduct

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
STREAM = CHAT | {"stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RpcProduct]:
    async with RpcProduct("tokenspeed", tmp_path_factory.mktemp("model") / "tiny", sse_keepalive_secs=0.3) as made:
        yield made


async def test_an_answer(product: RpcProduct) -> None:
    reply = await product.post("/v1/chat/completions", CHAT)
    assert (reply.status, reply.json["choices"][0]["message"]["content"]) == (200, TEXT)
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert reply.header("x-pd-handoff") == "tokenspeed"


async def test_a_stream(product: RpcProduct) -> None:
    reply = await product.post("/v1/chat/completions", STREAM)
    assert reply.events[-1] == "[DONE]"


async def test_comments_until_the_prefill_is_done(product: RpcProduct) -> None:
    go_on = asyncio.Event()

    async def slowly(leg: Leg) -> None:
        await go_on.wait()
        await leg.engine.default(leg)

    for mock in product.mocks:
        mock.behave = slowly  # type: ignore[attr-defined]
    exchange = await product.client.open("/v1/chat/completions", STREAM)
    reply = await exchange.head()
    assert (reply.status, reply.header("content-type")) == (200, "text/event-stream; charset=utf-8")
    await exchange.until(b": keep-alive\n\n: keep-alive\n\n")
    go_on.set()
    assert (await exchange.whole()).events[-1] == "[DONE]"


async def test_a_decode_that_receives_is_not_interrupted(product: RpcProduct) -> None:
    """Its client has left; its call goes on until it shows a token."""
    go_on = asyncio.Event()
    product.prefill.behave = never

    async def receives(leg: Leg) -> None:
        await go_on.wait()
        await leg.chunk([70], 1)
        await never(leg)

    for mock in product.decodes:
        mock.behave = receives
    exchange = await product.client.open("/v1/chat/completions", CHAT)
    prefill = await product.prefill.arrived()
    await soon(lambda: any(mock.legs for mock in product.decodes), "the decode leg has not come")
    exchange.reset()
    async with asyncio.timeout(60):
        await prefill.ended.wait()
    (decode,) = [leg for mock in product.decodes for leg in mock.legs]
    assert not decode.ended.is_set()
    assert decode.engine.aborted == []
    assert product.load == {decode.engine.url: 1}
    go_on.set()
    async with asyncio.timeout(60):
        await decode.ended.wait()
    assert decode.cancelled
