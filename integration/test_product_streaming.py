"""Tokens reach the client as they are made, whatever the prefill leg is still doing; what is counted meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from product import PROMPT, Product, soon

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
PACE = 0.03


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product() as product:
        yield product


# -- the prefill leg holds nothing back -------------------------------------------------------------------------------

SLOW = {"before its head": Fault(delay_head=1), "in its body": Fault(hang=Point.MID_BODY)}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("kind", [kind for kind in STREAMS | WHOLE if kind != NEEDS_PREFILL])
async def test_a_prefill_that_does_not_finish_its_answer_holds_nothing_back(product: Product, kind, slow):
    """It has handed the KV cache over; only its own answer is late. It is ended when the decode is done."""
    product.prefill.fail(SLOW[slow])
    exchange = await product.client.open(*(STREAMS | WHOLE)[kind])
    answer = await exchange.whole()
    assert answer.status == 200
    assert answer.seconds < PROMPT
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
    product.prefill.fail(Fault(delay_first_token=0.3))
    exchange = await product.client.open(*STREAMS[kind])
    await exchange.head()
    assert exchange.reply.headed - exchange.reply.started < PROMPT
    answer = await exchange.whole()
    assert answer.seconds >= 0.3


# -- tokens come as they are made -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMS)
async def test_tokens_come_one_by_one(product: Product, kind):
    for mock in product.decodes:
        mock.fail(Fault(delay_token=PACE, tokens=9))
    exchange = await product.client.open(*STREAMS[kind])
    await exchange.head()
    times = []
    while await exchange.piece():
        times.append(time.time())
    bursts = [times[0], *(later for earlier, later in pairwise(times) if later - earlier > PACE / 2)]
    assert len(bursts) >= 8, "tokens came together"
    assert times[-1] - times[0] == pytest.approx(8 * PACE, abs=PROMPT)


async def test_tokens_come_one_by_one_over_http2(product: Product, http2: Http2Client):
    for mock in product.decodes:
        mock.fail(Fault(delay_token=PACE, tokens=9))
    stream = http2.post(*STREAMS["chat"])
    times = []
    for count in range(2, 10):
        while stream.reply.body.count(b"data: ") < count:
            await stream.progress()
        times.append(time.time())
    await stream.whole()
    assert min(later - earlier for earlier, later in pairwise(times)) > PACE / 2


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
    await soon(lambda: any(one.congested for some in peers for one in some), "the workers do not wait", within=3)


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "samples"])
async def test_a_workers_load_lasts_as_long_as_its_leg(product: Product, kind):
    samples = STREAMS[kind][1].get("n", 1)
    product.prefill.fail(Fault(delay_first_token=0.1))
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, after_chunks=2))
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
    product.prefill.fail(Fault(delay_first_token=1))
    exchanges = [await product.client.open(*STREAMS["chat"]) for _ in range(100)]
    await product.prefill.received(100)
    assert product.gateway.alive == 100
    assert product.load[product.prefill.url] == 100
    assert sorted(product.load[mock.url] for mock in product.decodes) == [50, 50]
    answers = [await exchange.whole() for exchange in exchanges]
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
