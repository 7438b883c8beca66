"""A prefill leg that fails is the request's failure at once: the client is told, the waiting decode leg is ended, and
nothing is left. On the engine alone each of these would hang for minutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Reply
from product import PROMPT, Product, names_of, soon

from extproc.mock import Fault, Outcome, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LOGPROBS = {"text": "hello", "return_logprob": True, "logprob_start_len": 0}
DIRECT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "list": ("/v1/completions", {"prompt": ["a", "b"]}),
    "list stream": ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    "generate": ("/generate", {"text": "a"}),
    "generate stream": ("/generate", {"text": "a", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 5}),
    "messages stream": ("/v1/messages", {**CHAT, "max_tokens": 5, "stream": True}),
    "responses stream": ("/v1/responses", {"model": "tiny", "input": "a", "stream": True}),
}
RELAYED: dict[str, tuple[str, dict[str, Any]]] = {
    "samples": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "samples stream": ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    "logprobs": ("/generate", LOGPROBS),
    "logprobs stream": ("/generate", {**LOGPROBS, "stream": True}),
}
ALL = DIRECT | RELAYED
EARLY_HEAD = ["generate stream", "messages stream", "responses stream"]
KINDS = pytest.mark.parametrize("kind", ALL)

# The prefill does not reach its engine: no decode will ever get a KV cache.
REJECTED = '{"object":"error","message":"too long","code":400}'
FAILURES: dict[str, tuple[Fault, int, str]] = {
    "400": (Fault(status=400, body=REJECTED), 400, "prefill_rejected"),
    "401": (Fault(status=401, body="no", headers=(("content-type", "text/plain"),)), 401, "prefill_rejected"),
    "429": (Fault(status=429, body=REJECTED, headers=(("retry-after", "7"),)), 429, "prefill_rejected"),
    "500": (Fault(status=500), 502, "prefill_failed"),
    "503": (Fault(status=503, headers=(("retry-after", "9"),)), 503, "prefill_failed"),
    "504": (Fault(status=504), 504, "prefill_failed"),
    "a redirect": (Fault(status=307, headers=(("location", "http://10.0.0.1/"),)), 502, "prefill_failed"),
    "reset before its head": (Fault(status=200, drop=Point.BEFORE_HEAD), 502, "prefill_connection_lost"),
    "reset after its head": (Fault(status=200, drop=Point.AFTER_HEAD), 502, "prefill_connection_lost"),
    "reset in its body": (Fault(status=200, drop=Point.MID_BODY), 502, "prefill_connection_lost"),
    "closed in its body": (Fault(status=200, truncate=True), 502, "prefill_connection_lost"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["envoy", "direct"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Product]:
    async with Product(disable_retries=True, egress=request.param) as product:
        yield product


@pytest.mark.parametrize("failure", FAILURES)
@KINDS
async def test_the_client_hears_at_once(product: Product, kind, failure):
    fault, status, code = FAILURES[failure]
    product.prefill.fail(fault)
    answer = await product.post(*ALL[kind])
    assert (answer.status, answer.code) == (status, code)
    assert answer.seconds < PROMPT
    if code == "prefill_rejected":
        assert answer.body.decode() == fault.body
        assert answer.header("content-type") == dict(fault.headers).get("content-type", "application/json")
    else:
        assert product.prefill.url in answer.json["error"]["message"]
    assert answer.header("retry-after") == dict(fault.headers).get("retry-after")
    assert answer.header("x-request-id")
    await _decodes_end(product, answer)
    await product.settled()
    (record,) = product.records.all
    assert (record.status, record.code) == (status, code)


@KINDS
async def test_a_prefill_that_refuses_the_connection(product: Product, kind):
    await product.prefill.refuse()
    answer = await product.post(*ALL[kind])
    assert (answer.status, answer.code) == (503, "prefill_unreachable")
    assert answer.seconds < PROMPT
    assert answer.header("retry-after")
    await _decodes_end(product, answer)


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in ("messages", "messages stream")])
async def test_the_decode_leg_is_ended_by_name(product: Product, kind):
    """One that has not yet reached its worker when the prefill fails is ended by name, too."""
    product.prefill.fail(Fault(status=500))
    await product.post(*ALL[kind])
    await product.settled()
    named = set()
    for mock in product.decodes:
        for leg in mock.legs:
            named |= names_of(leg)
    aborts = []
    for mock in product.decodes:
        aborts += await mock.received(sum(len(names_of(leg)) for leg in mock.legs), "/abort_request")
    assert {abort.json["rid"] for abort in aborts} >= named
    assert aborts


@pytest.mark.parametrize("kind", ["messages", "messages stream"])
async def test_a_decode_leg_without_a_name_is_left_by_its_connection(product: Product, kind):
    product.prefill.fail(Fault(status=500))
    answer = await product.post(*ALL[kind])
    await _decodes_end(product, answer)
    legs = [leg for mock in product.decodes for leg in mock.legs]
    assert {leg.outcome for leg in legs} <= {Outcome.CLIENT_CLOSED}
    assert not [record for mock in product.decodes for record in mock.requests if record.path == "/abort_request"]


@pytest.mark.parametrize("kind", ["samples", "samples stream"])
async def test_one_samples_failure_ends_all(product: Product, kind):
    both_have_come = asyncio.Event()
    product.prefill.fail(Fault(status=500, until=both_have_come), times=1)
    product.prefill.fail(Fault(status=200, hang=Point.BEFORE_HEAD))
    exchange = await product.client.open(*ALL[kind])
    await product.prefill.received(2)
    both_have_come.set()
    answer = await exchange.whole()
    assert (answer.status, answer.code) == (502, "prefill_failed")
    failed = min(leg.ended for leg in product.prefill.legs if leg.ended)
    assert answer.ended - failed < PROMPT
    await _decodes_end(product, answer)
    assert len(product.prefill.legs) == 2


# -- after the answer's head ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EARLY_HEAD)
async def test_a_stream_whose_head_is_out_is_cut(product: Product, http2: Http2Client, kind):
    head_is_out = asyncio.Event()
    product.prefill.fail(Fault(status=500, until=head_is_out))
    stream = http2.post(*ALL[kind])
    await stream.head()
    assert stream.reply.status == 200
    head_is_out.set()
    await stream.cut()
    heard = time.time()
    await _is_over(product)
    assert heard - product.legs[0].ended < PROMPT
    assert product.records.all[0].code == "prefill_failed"


async def test_a_stream_that_flows_is_cut_when_the_prefill_breaks(product: Product, http2: Http2Client):
    _decode_slowly(product)
    it_flows = asyncio.Event()
    product.prefill.fail(Fault(until=it_flows, drop=Point.MID_BODY))  # after it handed the KV cache over
    stream = http2.post(*ALL["chat stream"])
    await stream.until(b"data: ")
    it_flows.set()
    received = await stream.cut()
    heard = time.time()
    assert received.startswith(b"data: ")
    assert b"[DONE]" not in received
    await _is_over(product)
    prefill, decode = product.legs
    assert heard - prefill.ended < PROMPT
    # ended by its connection: one that is ended by name tells the client a proper end
    assert decode.outcome is Outcome.CLIENT_CLOSED


async def test_an_http1_client_sees_its_connection_end(product: Product):
    """About a second later, for so long Envoy lets it take what was sent; the worker need not wait for that."""
    _decode_slowly(product)
    it_flows = asyncio.Event()
    product.prefill.fail(Fault(until=it_flows, drop=Point.MID_BODY))
    exchange = await product.client.open(*ALL["chat stream"])
    await exchange.until(b"data: ")
    it_flows.set()
    assert b"[DONE]" not in await exchange.cut()
    await _is_over(product)


async def test_a_relayed_stream_that_flows_gets_an_error_event(product: Product):
    _decode_slowly(product)
    it_flows = asyncio.Event()
    product.prefill.fail(Fault(until=it_flows, status=500), times=1)
    exchange = await product.client.open(*ALL["samples stream"])
    await exchange.until(b"data: ")
    it_flows.set()
    answer = await exchange.whole()
    assert answer.status == 200
    *told, error, done = answer.events
    assert told
    assert '"prefill_failed"' in error
    assert done == "[DONE]"
    await _is_over(product)
    assert product.records.all[0].code == "prefill_failed"


# -- a prefill that does nothing --------------------------------------------------------------------------------------


@KINDS
async def test_a_prefill_that_hangs_until_the_client_gives_up(product: Product, kind):
    product.prefill.fail(Fault(status=200, hang=Point.BEFORE_HEAD))
    exchange = await product.client.open(*ALL[kind])
    await product.prefill.received(1)
    await soon(lambda: any(mock.legs for mock in product.decodes), "no decode leg has come")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):  # the client's deadline
            await exchange.whole()
    left = exchange.close()
    await product.settled()
    legs = [leg for mock in product.mocks for leg in mock.legs]
    assert len(legs) >= 2
    assert max(leg.ended - left for leg in legs) < PROMPT


def _decode_slowly(product: Product) -> None:
    for mock in product.decodes:
        mock.fail(Fault(delay_token=0.02, tokens=2000))


async def _decodes_end(product: Product, answer: Reply) -> None:
    """See every decode leg end, and no later than promptly after the client heard."""
    for mock in product.decodes:
        await mock.idle()
        for leg in mock.legs:
            assert leg.ended - answer.ended < PROMPT


async def _is_over(product: Product) -> None:
    """See both legs over, the decode's by our doing: it would have gone on."""
    await product.settled()
    failed = max(leg.ended for leg in product.prefill.legs)
    for mock in product.decodes:
        for leg in mock.legs:
            assert leg.ended - failed < PROMPT
