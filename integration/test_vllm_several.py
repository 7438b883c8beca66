"""vLLM: lists of prompts, several samples, prompts' log probabilities, and requests that one worker answers alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from http_client import Client
from vllm_product import HANDING, WAYS, VllmProduct, params
from vllm_requests import (
    ABOUT_TOKENS,
    CHAT,
    COMPLETION,
    DECODE_ALONE,
    LISTS,
    OF_PROMPT,
    OTHER,
    PREFILL_ALONE,
    TEXT,
    cases,
    names,
    same,
)

from extproc.mock.vllm.worker import VllmMock

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=HANDING)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    async with VllmProduct(way=WAYS[request.param], prefills=2, decodes=2) as product:
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated() -> AsyncIterator[Client]:
    async with VllmMock("aggregated", model="tiny", prompt_tokens_details=False, prefix_caching=False) as mock:
        client = Client(mock.host, mock.port)
        yield client
        await client.close()


# -- lists of prompts -------------------------------------------------------------------------------------------------


@cases(LISTS)
async def test_each_prompt_of_a_list_has_a_pair_of_legs(product: VllmProduct, aggregated: Client, question, stream):
    answer = await same(product, aggregated, question, stream=stream)
    assert names(answer)[:2] == (product.way.handoff, "handed")
    prompts = question[1]["prompt"]
    await product.settled()
    by_role = []
    for mocks in (product.prefills, product.decodes):
        (mock,) = [mock for mock in mocks if mock.legs]  # all are on one pair
        assert answer.header(f"x-pd-{mock.role}") == mock.url
        assert sorted(json.dumps(leg.json["prompt"]) for leg in mock.legs) == sorted(map(json.dumps, prompts))
        by_role.append(mock.legs)
    prefills, decodes = by_role
    assert {leg.kv for leg in decodes} == {"transferred"}
    assert len({leg.header("x-request-id") for leg in decodes}) == len(prompts)
    key = "transfer_id" if product.way.handoff == "mooncake" else "remote_request_id"
    assert len({params(leg)[key] for leg in decodes}) == len(prompts)
    assert {leg.json["max_tokens"] for leg in prefills} == {1}


@pytest.mark.parametrize("extra", [{}, {"continuous_usage_stats": True}], ids=["usage", "usage in every chunk"])
@pytest.mark.parametrize("prompt", [TEXT, [TEXT, OTHER]], ids=["one", "list"])
async def test_a_streams_usage_is_that_of_one_server(product: VllmProduct, aggregated: Client, prompt, extra):
    options = {"stream": True, "stream_options": {"include_usage": True, **extra}}
    answer = await same(product, aggregated, ("/v1/completions", {**COMPLETION, "prompt": prompt, **options}))
    assert '"usage"' in answer.events[-2]


# -- log probabilities of the prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("question", OF_PROMPT.values(), ids=OF_PROMPT)
async def test_the_prefill_tells_of_the_prompt(product: VllmProduct, aggregated: Client, question):
    answer = await same(product, aggregated, question)
    assert names(answer)[:2] == (product.way.handoff, "handed")
    await product.settled()
    assert {leg.kv for mock in product.decodes for leg in mock.legs} == {"transferred"}


@pytest.mark.parametrize("name", ["echo, logprobs", "list, echo, logprobs", "generate"])
async def test_a_stream_is_told_of_the_prompt(product: VllmProduct, aggregated: Client, name):
    answer = await same(product, aggregated, OF_PROMPT[name], stream=True)
    assert names(answer)[1] == "handed"


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_a_stream_cannot_be_told_of_the_prompt_otherwise(product: VllmProduct, aggregated: Client, name):
    path, body = OF_PROMPT[name]
    body = {**body, "stream": True}
    answer, expected = await product.post(path, body), await aggregated.post(path, body)
    assert (answer.status, answer.code) == (expected.status, "invalid_type") == (400, "invalid_type")
    assert answer.json["error"]["message"] in expected.json["error"]["message"]
    assert not [leg for mock in product.mocks for leg in mock.legs]


# -- one worker -------------------------------------------------------------------------------------------------------


@cases(DECODE_ALONE)
async def test_the_decode_answers_alone(product: VllmProduct, aggregated: Client, question, stream):
    answer = await same(product, aggregated, question, stream=stream)
    assert names(answer)[1:3] == ("recomputed", None)
    (leg,) = [leg for mock in product.decodes for leg in mock.legs]
    assert not [leg for mock in product.prefills for leg in mock.legs]
    assert (leg.kv, params(leg)) == ("recomputed", None)
    await product.settled()
    (record,) = product.records.all
    assert record.kv == "recomputed"
    assert record.note


@cases({name: question for name, question in PREFILL_ALONE.items() if "prompt_logprobs" not in question[1]})
async def test_the_prefill_answers_alone(product: VllmProduct, aggregated: Client, question, stream):
    answer = await same(product, aggregated, question, stream=stream)
    assert names(answer)[1] == "none"
    assert names(answer)[3] is None
    (leg,) = [leg for mock in product.prefills for leg in mock.legs]
    assert not [leg for mock in product.decodes for leg in mock.legs]
    assert params(leg) is None
    assert not product.prefills[0].pinned + product.prefills[1].pinned


async def test_the_prefill_answers_alone_of_the_prompt(product: VllmProduct, aggregated: Client):
    answer = await same(product, aggregated, PREFILL_ALONE["chat, logprobs"])
    assert names(answer)[1] == "none"


@pytest.mark.parametrize("question", ABOUT_TOKENS.values(), ids=ABOUT_TOKENS)
async def test_one_prefill_answers_about_tokens(product: VllmProduct, aggregated: Client, question):
    answer = await same(product, aggregated, question)
    assert answer.header("x-pd-prefill") in {mock.url for mock in product.prefills}
    assert not [leg for mock in product.decodes for leg in mock.legs]


async def test_a_continued_response_is_not_prefilled(product: VllmProduct):
    """Whatever the prompt's length: only the worker that made the first knows what it goes on from."""
    first = await product.post("/v1/responses", {"model": "tiny", "input": TEXT})
    answer = await product.post(
        "/v1/responses", {"model": "tiny", "input": OTHER, "previous_response_id": first.json["id"]}
    )
    assert answer.status == 200
    assert names(answer)[1:] == ("recomputed", None, first.header("x-pd-decode"))


async def test_what_the_request_says_decides_not_its_order(product: VllmProduct):
    """An ``n`` of 1 is one sequence."""
    answer = await product.post("/v1/chat/completions", {**CHAT, "n": 1, "best_of": 1, "use_beam_search": False})
    assert names(answer)[1] == "handed"
