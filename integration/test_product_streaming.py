"""Tokens reach the client as they are made, whatever the prefill leg is still doing; what is counted meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from product import PROMPT, Product, held, soon

from extproc.mock import Fault, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LOGPROBS = {"text": "hello", "return_logprob": True, "logprob_start_len": 0}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "list": ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    "generate": ("/generate", {"text": "a", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
    "responses": ("/v1/responses", {"input": "a", "stream": True}),
    "samples": ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    "logprobs": ("/generate", {**LOGPROBS, "stream": True}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "whole chat": ("/v1/chat/completions", CHAT),
    "whole list": ("/v1/completions", {"prompt": ["a", "b"]}),
    "whole samples": ("/v1/chat/completions", {**CHAT, "n": 2}),
}
NEEDS_PREFILL = "logprobs"


class Turnstile:
    """Lets pass one by one, as told, and in the end everybody."""

    def __init__(self) -> None:
        self._passes = asyncio.Semaphore(0)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self._passes.release()

    async def wait(self) -> None:
        await self._passes.acquire()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product() as product:
        yield product


# -- the prefill leg holds nothing back -------------------------------------------------------------------------------

SLOW = {"before its head": Fault(until=asyncio.Event()), "in its body": Fault(hang=Point.MID_BODY)}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("kind", [kind for kind in STREAMS | WHOLE if kind != NEEDS_PREFILL])
async def test_a_prefill_that_does_not_finish_its_answer_holds_nothing_back(product: Product, kind, slow):
    """It has handed the KV cache over; only its own answer is late. It is ended when the decode is done."""
    product.prefill.fail(SLOW[slow])
    exchange = await product.client.open(*(STREAMS | WHOLE)[kind])
    answer = await exchange.whole()
    assert answer.status == 200
    await product.prefill.idle()
    assert all(leg.ended - answer.ended < PROMPT for leg in product.prefill.legs)


async def test_prompt_logprobs_wait_for_the_prefills_answer(product: Product):
    product.prefill.fail(Fault(delay_head=0.2))
    answer = await product.post(*STREAMS[NEEDS_PREFILL])
    assert answer.seconds >= 0.2
    first = json.loads(answer.events[0])
    assert len(first["meta_info"]["input_token_logprobs"]) == first["meta_info"]["prompt_tokens"]


@pytest.mark.parametrize("kind", ["generate", "messages", "responses"])
async def test_an_early_head_comes_early(product: Product, kind):
    with held([product.prefill]):
        exchange = await product.client.open(*STREAMS[kind])
        assert (await exchange.head()).status == 200
    assert (await exchange.whole()).events


# -- tokens come as they are made -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMS)
async def test_tokens_come_one_by_one(product: Product, kind):
    turnstile = Turnstile()
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, after_chunks=0, until=turnstile, tokens=9))
    exchange = await product.client.open(*STREAMS[kind])
    for _ in range(8):
        turnstile.turn()
        assert await exchange.piece()  # which does not wait for the next
    turnstile.turn(100)
    assert (await exchange.whole()).events


async def test_tokens_come_one_by_one_over_http2(product: Product, http2: Http2Client):
    turnstile = Turnstile()
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, after_chunks=0, until=turnstile, tokens=9))
    stream = http2.post(*STREAMS["chat"])
    for _ in range(8):
        before = len(stream.reply.body)
        turnstile.turn()
        while len(stream.reply.body) == before:
            await stream.progress()
    turnstile.turn(100)
    assert (await stream.whole()).events[-1] == "[DONE]"


@pytest.mark.parametrize("kind", ["chat", "samples"])
async def test_a_long_stream_is_whole(product: Product, kind):
    for mock in product.decodes:
        mock.fail(Fault(tokens=3000))
    path, body = STREAMS[kind]
    answer = await product.post(path, {**body, "max_tokens": 3000, "ignore_eos": True, "seed": 1})
    words: dict[int, int] = {}
    for event in answer.events[:-1]:
        (choice,) = json.loads(event)["choices"]
        words[choice["index"]] = words.get(choice["index"], 0) + len(choice["delta"].get("content", "").split())
    assert words == dict.fromkeys(range(body.get("n", 1)), 3000)


async def test_a_client_that_does_not_read_makes_the_worker_wait(product: Product):
    """Else what it does not read would have to be kept in memory.

    A relayed answer is kept by Envoy, which takes a local reply as fast as it is given (docs/behaviour.md).
    """
    for mock in product.decodes:
        mock.fail(Fault(tokens=100_000))
    path, body = STREAMS["chat"]
    endless = {"ignore_eos": True, "max_tokens": 100_000, "logprobs": True, "top_logprobs": 20}  # about 300 MB
    exchange = await product.client.open(path, {**body, **endless}, buffer=1 << 16)
    await exchange.head()
    peers = [mock._server.connections for mock in product.decodes]
    await soon(lambda: any(one.congested for some in peers for one in some), "the workers do not wait")


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "samples"])
async def test_a_workers_load_lasts_as_long_as_its_leg(product: Product, kind):
    samples = STREAMS[kind][1].get("n", 1)
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, after_chunks=2))
    with held([product.prefill]):
        exchange = await product.client.open(*STREAMS[kind])
        await product.prefill.received(samples)
        assert product.load[product.prefill.url] == samples
        assert sum(product.load.values()) == 2 * samples
    await exchange.piece()
    await product.prefill.idle()
    await soon(lambda: product.prefill.url not in product.load, "the prefill's load counts on")
    assert list(product.load.values()) == [samples]
    loads = (await product.client.get("/get_loads")).json["loads"]
    assert {load["worker"]: load["gateway_reqs"] for load in loads if load.get("gateway_reqs")} == product.load
    assert product.gateway.handoffs.live == samples
    exchange.close()
    await product.settled()


async def test_many_requests_at_once(product: Product):
    with held([product.prefill]):
        exchanges = [await product.client.open(*STREAMS["chat"]) for _ in range(100)]
        await product.prefill.received(100)
        assert product.gateway.alive == 100
        assert product.load[product.prefill.url] == 100
        assert sorted(product.load[mock.url] for mock in product.decodes) == [50, 50]
    answers = [await exchange.whole() for exchange in exchanges]
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
