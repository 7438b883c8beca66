"""A client that leaves, at any moment: both legs end on their workers at once, and nothing is left of the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Exchange
from product import PROMPT, Product, names_of, soon

from extproc.mock import Fault, Outcome, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LOGPROBS = {"text": "hello", "return_logprob": True, "logprob_start_len": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "list": ("/v1/completions", {"prompt": ["a", "b"]}),
    "generate stream": ("/generate", {"text": "a", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 200}),
    "messages stream": ("/v1/messages", {**CHAT, "max_tokens": 200, "stream": True}),
    "responses stream": ("/v1/responses", {"input": "a", "stream": True}),
    "samples": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "samples stream": ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    "logprobs": ("/generate", LOGPROBS),
    "logprobs stream": ("/generate", {**LOGPROBS, "stream": True}),
}
STREAMS = [kind for kind in REQUESTS if kind.endswith("stream")]
KINDS = pytest.mark.parametrize("kind", REQUESTS)
LEAVE: dict[str, Callable[[Exchange], float]] = {"close": Exchange.close, "reset": Exchange.reset}
LEAVES = pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["envoy", "direct"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Product]:
    async with Product(egress=request.param) as product:
        yield product


# -- before anything was sent -----------------------------------------------------------------------------------------


@LEAVES
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["head", "half the body"])
async def test_during_the_upload(product: Product, leave, share):
    body = json.dumps({**CHAT, "padding": "x" * 300_000}).encode()
    exchange = await product.client.connect()
    head = product.client.request_head("POST", "/v1/chat/completions", [("content-length", str(len(body)))])
    await exchange.send(head + body[: int(len(body) * share)])
    await soon(lambda: product.gateway.alive == 1, "the request never began")
    leave(exchange)
    await product.settled()
    assert not [leg for mock in product.mocks for leg in mock.legs]
    (record,) = product.records.all
    assert (record.status, record.code) == (0, "")


# -- before the answer ------------------------------------------------------------------------------------------------


@LEAVES
@KINDS
async def test_while_the_prefill_works(product: Product, kind, leave):
    product.prefill.fail(Fault(delay_first_token=60))
    exchange = await product.client.open(*REQUESTS[kind])
    await _both_have_it(product, kind)
    await _leave(product, exchange, leave)
    assert all(leg.outcome is not Outcome.LIVE for mock in product.mocks for leg in mock.legs)


@LEAVES
@KINDS
async def test_while_both_workers_say_nothing_at_all(product: Product, kind, leave):
    for mock in product.mocks:
        mock.fail(Fault(status=200, hang=Point.BEFORE_HEAD))
    exchange = await product.client.open(*REQUESTS[kind])
    await _both_have_it(product, kind)
    await _leave(product, exchange, leave)
    assert {leg.outcome for mock in product.mocks for leg in mock.legs} == {Outcome.CLIENT_CLOSED}


@LEAVES
@KINDS
async def test_after_the_prefill_while_the_decode_is_silent(product: Product, kind, leave):
    for mock in product.decodes:
        mock.fail(Fault(delay_head=60))
    exchange = await product.client.open(*REQUESTS[kind])
    await _both_have_it(product, kind)
    if kind not in ("generate stream", "messages stream", "responses stream", "logprobs stream"):
        await product.prefill.idle()  # where a delayed head keeps the mock from meeting its partner, it stays
    await _leave(product, exchange, leave)
    for mock in product.decodes:
        assert {leg.outcome for leg in mock.legs} <= {Outcome.CLIENT_CLOSED}


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if not kind.startswith("messages")])
async def test_workers_are_told_by_name(product: Product, kind):
    """For the engine does not notice for seconds that a connection has gone."""
    product.prefill.fail(Fault(delay_first_token=60))
    exchange = await product.client.open(*REQUESTS[kind])
    await _both_have_it(product, kind)
    exchange.close()
    for mock in product.mocks:
        if mock.legs:
            named = [name for leg in mock.legs for name in names_of(leg)]
            aborts = await mock.received(len(named), "/abort_request")
            assert {abort.json["rid"] for abort in aborts} == set(named)


# -- in the answer ----------------------------------------------------------------------------------------------------


@LEAVES
@pytest.mark.parametrize("kind", STREAMS)
async def test_in_a_stream_that_flows(product: Product, kind, leave):
    for mock in product.decodes:
        mock.fail(Fault(delay_token=0.01, tokens=5000))
    exchange = await product.client.open(*REQUESTS[kind])
    for _ in range(3):
        await exchange.piece()
    await _leave(product, exchange, leave)
    await product.settled()
    assert product.records.all[0].status == 200


@LEAVES
@pytest.mark.parametrize("kind", STREAMS)
async def test_in_a_stream_that_has_fallen_silent(product: Product, kind, leave):
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, after_chunks=3))
    exchange = await product.client.open(*REQUESTS[kind])
    await exchange.piece()
    await product.prefill.idle()
    await _leave(product, exchange, leave)


@LEAVES
@pytest.mark.parametrize("kind", ["chat stream", "samples stream"])
async def test_after_not_reading_for_a_while(product: Product, kind, leave):
    """Whatever is queued for the client on the way is thrown away."""
    for mock in product.decodes:
        mock.fail(Fault(tokens=100_000))
    path, body = REQUESTS[kind]
    endless = {"ignore_eos": True, "max_tokens": 100_000, "logprobs": True, "top_logprobs": 20}
    exchange = await product.client.open(path, {**body, **endless}, buffer=1 << 16)
    await exchange.head()
    await soon(lambda: _written(product) > 1000, "the decode does not go on")
    await _leave(product, exchange, leave)


async def test_one_of_many_on_an_http2_connection(product: Product, http2: Http2Client):
    """The others go on."""
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=40))
    path, body = REQUESTS["chat stream"]
    streams = [http2.post(path, {**body, "rid": f"r{number}"}) for number in range(6)]
    for stream in streams:
        await stream.until(b"data: ")
    left = {f"r{number}": streams[number].reset() for number in (1, 4)}
    await soon(lambda: sum(len(mock.live) for mock in product.decodes) == 4, "those that left have not ended")
    go_on.set()
    answers = [await streams[number].whole() for number in (0, 2, 3, 5)]
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
    for mock in product.decodes:
        await mock.idle()
        for leg in mock.legs:
            if (at := left.get(leg.json["rid"])) is not None:
                assert leg.ended - at < PROMPT
                assert leg.outcome is Outcome.CLIENT_CLOSED


@pytest.mark.parametrize("count", [50])
async def test_many_at_once(product: Product, count):
    product.prefill.fail(Fault(delay_first_token=60))
    kinds = list(REQUESTS.values())
    asked = [kinds[number % len(kinds)] for number in range(count)]
    exchanges = [await product.client.open(*request) for request in asked]
    await product.prefill.received(sum(body.get("n", 1) for _, body in asked))
    for number, exchange in enumerate(exchanges):
        LEAVE["reset" if number % 2 else "close"](exchange)
    await product.settled()
    assert len(product.records.all) == count


# -- inside -----------------------------------------------------------------------------------------------------------


async def _leave(product: Product, exchange: Exchange, leave: Callable[[Exchange], float]) -> None:
    """Leave, and see every leg end promptly."""
    left = leave(exchange)
    for mock in product.mocks:
        await mock.idle()
    late = {mock.role: leg.ended - left for mock in product.mocks for leg in mock.legs if leg.ended - left > PROMPT}
    assert late == {}, "legs ended so many seconds after the client"


async def _both_have_it(product: Product, kind: str) -> None:
    """Wait until every leg has reached its worker."""
    samples = REQUESTS[kind][1].get("n", 1)
    await product.prefill.received(samples)
    await soon(lambda: _received(product) == samples, "a decode leg never came")


def _received(product: Product) -> int:
    return sum(leg.received is not None for mock in product.decodes for leg in mock.legs)


def _written(product: Product) -> int:
    return sum(sequence.written for mock in product.decodes for sequence in mock.engine.live.values())
