"""``--request-timeout-secs``: what it ends, wherever the request is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from product import PROMPT, Product
from standstill import Within

from extproc.mock import Fault, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 2.0  # the legs of a request are out long before
LOOK = 1.0  # seconds between two looks of the service
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "samples": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "logprobs": ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 0}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(decodes=1, request_timeout_secs=LIMIT) as product:
        yield product


async def test_requests_that_take_too_long(product: Product):
    """All kinds at once: both workers silent, so that nothing but the deadline ends them."""
    for mock in product.mocks:
        mock.fail(Fault(status=200, hang=Point.BEFORE_HEAD))
    exchanges = [await product.client.open(*request) for request in [*KINDS.values(), ("/rerank", _RERANK)]]
    answers = [await exchange.whole() for exchange in exchanges]
    for answer in answers:
        assert (answer.status, answer.code) == (504, "request_timeout")
        assert LIMIT <= answer.seconds < Within(LIMIT + LOOK + PROMPT)
    for mock in product.mocks:
        await mock.idle()
        assert max(leg.ended for leg in mock.legs) - max(answer.ended for answer in answers) < PROMPT
    await product.settled()
    assert {record.code for record in product.records.all} == {"request_timeout"}


async def test_legs_are_ended_by_name_as_well(product: Product):
    product.prefill.fail(Fault(delay_first_token=60))
    answer = await product.post(*KINDS["chat"])
    assert answer.code == "request_timeout"
    prefill, decode = product.legs
    for mock in product.mocks:
        (abort,) = await mock.received(1, "/abort_request")
        assert abort.json["rid"] == prefill.json["rid"] == decode.json["rid"]


async def test_answers_that_take_too_long(product: Product):
    """Their heads are out: a direct one is cut, a relayed one gets an error event."""
    product.decode.fail(Fault(delay_token=0.05, tokens=2000))
    direct = await product.client.open("/v1/chat/completions", {**CHAT, "stream": True})
    relayed = await product.client.open("/v1/chat/completions", {**CHAT, "stream": True, "n": 2})
    assert b"[DONE]" not in await direct.cut()
    answer = await relayed.whole()
    assert '"request_timeout"' in answer.events[-2]
    await product.decode.idle()
    assert '"abort"' not in direct.reply.body.decode() + answer.body.decode()


async def test_an_upload_that_takes_too_long(product: Product):
    body = json.dumps(CHAT).encode()
    exchange = await product.client.connect()
    await exchange.send(
        product.client.request_head("POST", "/v1/chat/completions", [("content-length", "1000")]) + body
    )
    exchange.sent()
    answer = await exchange.whole()
    assert (answer.status, answer.code) == (504, "request_timeout")
    assert not product.prefill.legs


async def test_a_request_within_the_time(product: Product):
    product.decode.fail(Fault(delay_token=0.01, tokens=10))
    answers = await asyncio.gather(*(product.post(*request) for request in KINDS.values()))
    assert {answer.status for answer in answers} == {200}


_RERANK = {"query": "q", "documents": ["d"]}
