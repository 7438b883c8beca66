"""Both legs are out, the prefill fails before the decode's head has gone to the client: another pair answers, late.

With vLLM's Mooncake and with SGLang both legs go out at once: Envoy has the decode leg when the prefill fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Client, Reply
from product import PROMPT, Product, soon
from vllm_product import WAYS, Together, VllmProduct, once
from vllm_requests import CHAT, LOOSE, MODEL, ONE, TEXT, Question, answer_of, streamed

from extproc.mock import Fault, Outcome, Point, Record, SglangMock
from extproc.mock.vllm.worker import VllmMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATE: Question = ("/generate", {**MODEL, "text": TEXT})
KINDS: dict[str, dict[str, Question]] = {
    "mooncake": ONE | {f"{name} stream": streamed(question) for name, question in ONE.items()},
    "sglang": {
        "chat": ("/v1/chat/completions", CHAT),
        "chat stream": streamed(("/v1/chat/completions", CHAT)),
        "generate": GENERATE,
        "responses": ("/v1/responses", {**MODEL, "input": TEXT}),
        "messages": ("/v1/messages", {**CHAT, "max_tokens": 9}),
    },
}
AT_ONCE = "at once"
FAILURES: dict[str, Fault] = {
    AT_ONCE: Fault(status=500),
    "after a moment": Fault(status=500, delay_head=0.1),
    "reset": Fault(status=200, drop=Point.BEFORE_HEAD, delay_head=0.1),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Product]:
    two = {"prefills": 2, "decodes": 2}
    async with VllmProduct(way=WAYS["mooncake"], **two) if request.param == "mooncake" else Product(**two) as product:
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated(running: Product) -> AsyncIterator[Client]:
    plain = {"model": "tiny", "prompt_tokens_details": False, "prefix_caching": False}
    async with VllmMock("aggregated", **plain) if is_vllm(running) else SglangMock("regular") as mock:
        client = Client(mock.host, mock.port)
        yield client
        await client.close()


def is_vllm(product: Product) -> bool:
    """Whether the workers are vLLM's."""
    return isinstance(product, VllmProduct)


def decodes(product: Product) -> list[Record]:
    """The decode legs."""
    return [leg for mock in product.decodes for leg in mock.legs if leg.json.get("prompt") != "x"]


def live(product: Product) -> dict[str, int]:
    """How many legs each worker has."""
    return {mock.url: len(mock.live) for mock in product.mocks if mock.live}


def fails(product: Product, failure: str) -> None:
    """Let the next prefill leg fail: at once, or when the decode leg has come to its worker."""
    fault = FAILURES[failure]
    once(product.prefills, fault if failure == AT_ONCE else replace(fault, until=Together(product.decodes, 1)))


async def see_late(
    product: Product, aggregated: Client, question: Question, answer: Reply, failure: str = "after a moment"
) -> None:
    """See one right answer, and that the first decode leg was ended, which may have come nowhere if all was at once."""
    expected = await aggregated.post(*question)
    assert (answer.status, answer.code) == (200, None), answer.body
    assert answer_of(answer, LOOSE) == answer_of(expected, LOOSE)
    assert answer.header("content-type") == expected.header("content-type")
    assert answer.header("x-pd-attempts") == "2"
    assert not [name for name, _ in answer.headers if name in ("x-pd-late", "x-pd-upstream", "x-pd-error-code")]
    assert len([name for name, _ in answer.headers if name == "x-request-id"]) == 1
    await product.settled()
    (record,) = product.records.all
    assert (record.status, record.code, record.attempts) == (200, "", 2)
    *former, second = sorted(decodes(product), key=lambda leg: leg.arrived)
    assert (second.outcome, second.status) == (Outcome.COMPLETED, 200)
    assert len(former) == 1 or (failure == AT_ONCE and not former)
    for first in former:
        assert first.ended is not None
        assert first.ended - answer.ended < PROMPT
        if is_vllm(product):  # SGLang's is told to end, and answers that it did
            assert first.outcome is Outcome.CLIENT_CLOSED


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        *((kind, AT_ONCE) for kind in sorted(KINDS["mooncake"] | KINDS["sglang"])),
        *(
            (kind, failure)
            for kind in ("chat", "chat stream", "responses")
            for failure in FAILURES
            if failure != AT_ONCE
        ),
    ],
)
async def test_the_second_pairs_answer_is_the_clients(product: Product, aggregated: Client, kind, failure):
    question = KINDS["mooncake" if is_vllm(product) else "sglang"].get(kind)
    if question is None:
        pytest.skip("only the other engine is asked so")
    fails(product, failure)
    await see_late(product, aggregated, question, await product.post(*question), failure)


@pytest.mark.parametrize("kind", ["chat", "chat stream", "messages", "responses"])
async def test_the_prefill_dies_while_the_decode_waits(product: Product, aggregated: Client, kind):
    question = KINDS["mooncake" if is_vllm(product) else "sglang"][kind]
    if isinstance(product, VllmProduct):
        await product.acquaint()
    once(product.prefills, Fault(delay_first_token=60))
    exchange = await product.client.open(*question)
    await soon(lambda: any(mock.live for mock in product.prefills), "the prefill leg never came")
    await soon(lambda: any(leg.received for leg in decodes(product)), "the decode leg never came")
    dying = next(mock for mock in product.prefills if mock.live)
    dying.crash()
    answer = await exchange.whole()
    if isinstance(product, VllmProduct):
        await product.restart(dying)
    else:
        again = SglangMock("prefill", port=dying.port, bootstrap_port=dying.bootstrap_port)
        await product._stack.enter_async_context(again)
        for mocks in (product.prefills, product.mocks):
            mocks[:] = [again if mock is dying else mock for mock in mocks]
    await see_late(product, aggregated, question, answer)


@pytest.mark.parametrize("kind", ["chat", "chat stream"])
async def test_legs_count_while_they_live(product: Product, kind):
    """The load says what is there; one that SGLang has ended at the gateway's word may count until the answer ends."""
    path, body = KINDS["mooncake" if is_vllm(product) else "sglang"][kind]
    fails(product, "after a moment")
    once(product.decodes, Fault(delay_token=0.02, tokens=60), times=2)  # the first waits for the prefill
    exchange = await product.client.open(path, {**body, "max_tokens": 60})
    await soon(lambda: len(decodes(product)) == 2, "there was no second attempt")
    ours = {mock.url for mock in product.decodes}
    await soon(lambda: product.load.keys() | live(product).keys() <= ours, "a prefill works on")
    if is_vllm(product):
        await soon(lambda: product.load == live(product), f"{product.load} is not {live(product)}", within=PROMPT)
    there, counted = live(product), product.load
    assert len(there) >= 1
    assert {url: count for url, count in counted.items() if url in there} == there
    answer = await exchange.whole()
    assert (answer.status, answer.header("x-pd-attempts")) == (200, "2")
    await product.settled()


@pytest.mark.parametrize("kind", ["chat", "chat stream"])
async def test_over_http2(product: Product, aggregated: Client, http2: Http2Client, kind):
    question = KINDS["mooncake" if is_vllm(product) else "sglang"][kind]
    fails(product, "after a moment")
    answer = await http2.post(*question).whole()
    await see_late(product, aggregated, question, answer)


@pytest.mark.parametrize("kind", ["chat", "chat stream"])
async def test_an_error_of_the_second_pair_is_the_clients_too(product: Product, kind):
    question = KINDS["mooncake" if is_vllm(product) else "sglang"][kind]
    fails(product, "after a moment")
    once(product.prefills, Fault(status=503, headers=(("retry-after", "7"),)))
    answer = await product.post(*question)
    assert (answer.status, answer.code, answer.header("retry-after")) == (503, "prefill_failed", "7")
    assert answer.header("x-pd-attempts") == "2"
