"""A prefill/decode pair behind the gateway answers as one aggregated server would: every API, streamed or not, single
prompts, lists, several samples, log probabilities."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from http_client import Client, Reply
from product import Product

from extproc.mock import SglangMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox \N{FOX FACE} jumps"
OTHER = "over the lazy dog"
IDS, OTHER_IDS = [11, 22, 33, 44, 55], [7, 8, 9]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
TEXT = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
TEXTS = {"model": "tiny", "prompt": [PROMPT, OTHER], "max_tokens": 6}
SEEDED = {"n": 2, "seed": 41}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, max_tokens": ("/v1/chat/completions", {**CHAT, "max_tokens": 3}),
    "chat, stop": ("/v1/chat/completions", {**CHAT, "stop": [" "], "max_tokens": 9}),
    "chat, n=2": ("/v1/chat/completions", {**CHAT, **SEEDED}),
    "chat, logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat, n=2, logprobs": ("/v1/chat/completions", {**CHAT, **SEEDED, "logprobs": True, "top_logprobs": 1}),
    "completions": ("/v1/completions", TEXT),
    "completions, list": ("/v1/completions", TEXTS),
    "completions, list of one": ("/v1/completions", {**TEXTS, "prompt": [PROMPT]}),
    "completions, token ids": ("/v1/completions", {**TEXT, "prompt": IDS}),
    "completions, lists of token ids": ("/v1/completions", {**TEXT, "prompt": [IDS, OTHER_IDS]}),
    "completions, n=2": ("/v1/completions", {**TEXT, **SEEDED}),
    "completions, list, n=2": ("/v1/completions", {**TEXTS, **SEEDED}),
    "completions, echo": ("/v1/completions", {**TEXT, "echo": True}),
    "completions, logprobs": ("/v1/completions", {**TEXT, "logprobs": 2}),
    "completions, list, logprobs": ("/v1/completions", {**TEXTS, "logprobs": 2}),
    "completions, echo, logprobs": ("/v1/completions", {**TEXT, "echo": True, "logprobs": 2}),
    "completions, list, echo, logprobs": ("/v1/completions", {**TEXTS, "echo": True, "logprobs": 2}),
    "completions, n=2, echo, logprobs": ("/v1/completions", {**TEXT, **SEEDED, "echo": True, "logprobs": 1}),
    "completions, list, n=2, echo, logprobs": ("/v1/completions", {**TEXTS, **SEEDED, "echo": True, "logprobs": 1}),
    "generate": ("/generate", {"text": PROMPT}),
    "generate, list": ("/generate", {"text": [PROMPT, OTHER]}),
    "generate, token ids": ("/generate", {"input_ids": IDS}),
    "generate, lists of token ids": ("/generate", {"input_ids": [IDS, OTHER_IDS]}),
    "generate, n=2": ("/generate", {"text": PROMPT, "sampling_params": {"n": 2, "sampling_seed": 5}}),
    "generate, list, n=2": ("/generate", {"text": [PROMPT, OTHER], "sampling_params": {"n": 2, "sampling_seed": 5}}),
    "generate, logprobs of the output": ("/generate", {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2}),
    "generate, logprobs": ("/generate", {"text": PROMPT, **LOGPROBS}),
    "generate, logprobs from 2, top, text": (
        "/generate",
        {
            "text": PROMPT,
            "return_logprob": True,
            "logprob_start_len": 2,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        },
    ),
    "generate, logprobs of token ids": ("/generate", {"text": PROMPT, **LOGPROBS, "token_ids_logprob": [5, 6]}),
    "generate, list, logprobs": ("/generate", {"text": [PROMPT, OTHER], **LOGPROBS, "top_logprobs_num": 1}),
    "generate, n=2, logprobs": (
        "/generate",
        {"text": PROMPT, "sampling_params": {"n": 2, "sampling_seed": 5}, **LOGPROBS},
    ),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 9}),
    "responses": ("/v1/responses", {"model": "tiny", "input": PROMPT}),
    "responses, items": ("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": PROMPT}]}),
}
NOT_STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "rerank": ("/v1/rerank", {"query": PROMPT, "documents": [OTHER, PROMPT]}),
    "count_tokens": ("/v1/messages/count_tokens", {**CHAT}),
}
# What no two answers have in common.
PASSING = {"id", "created", "created_at", "completed_at", "item_id", "e2e_latency", "response_sent_to_client_ts"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product() as product:
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated() -> AsyncIterator[Client]:
    async with SglangMock("regular") as mock:
        client = Client(mock.host, mock.port)
        yield client
        await client.close()


@pytest.mark.parametrize(("path", "body"), (CASES | NOT_STREAMED).values(), ids=CASES | NOT_STREAMED)
async def test_an_answer_is_that_of_one_server(product: Product, aggregated: Client, path, body):
    answer = await product.post(path, body)
    expected = await aggregated.post(path, body)
    assert answer.status == expected.status
    assert answer.header("content-type") == expected.header("content-type")
    assert lasting(answer.json) == lasting(expected.json)


@pytest.mark.parametrize(("path", "body"), CASES.values(), ids=CASES)
async def test_a_stream_is_that_of_one_server(product: Product, aggregated: Client, path, body):
    body = {**body, "stream": True}
    answer = await product.post(path, body)
    expected = await aggregated.post(path, body)
    assert expected.status == 200, expected.body
    assert answer.status == 200
    assert answer.header("content-type") == expected.header("content-type")
    assert told(answer) == told(expected)


@pytest.mark.parametrize("extra", [{}, {"continuous_usage_stats": True}], ids=["usage", "usage in every chunk"])
@pytest.mark.parametrize("name", ["chat", "chat, n=2", "completions", "completions, list", "completions, list, n=2"])
async def test_a_streams_usage_is_that_of_one_server(product: Product, aggregated: Client, name, extra):
    path, body = CASES[name]
    body = {**body, "stream": True, "stream_options": {"include_usage": True, **extra}}
    answer, expected = told(await product.post(path, body)), told(await aggregated.post(path, body))
    assert any('"usage"' in event for event in expected[None])
    assert answer == expected


async def test_all_samples_of_a_stream_bear_one_id(product: Product):
    answer = await product.post("/v1/chat/completions", {**CHAT, **SEEDED, "stream": True})
    assert len({json.loads(event)["id"] for event in answer.events if event != "[DONE]"}) == 1


async def test_samples_differ_where_the_engine_samples(product: Product):
    answer = await product.post("/v1/completions", {**TEXT, "n": 4, "seed": 1})
    assert len({choice["text"] for choice in answer.json["choices"]}) == 4


def lasting(value: Any) -> Any:
    """A JSON value without what no two answers have in common."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if key not in PASSING}
    return [lasting(item) for item in value] if isinstance(value, list) else value


def told(reply: Reply) -> dict[int | None, list[str]]:
    """What a stream says of each choice in order, and, under None, what it says of all. Choices may be interleaved."""
    streams: defaultdict[int | None, list[str]] = defaultdict(list)
    for event in reply.body.decode().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        if not data.startswith("{"):
            streams[None].append(event)
            continue
        chunk = json.loads(data)
        index = chunk["choices"][0]["index"] if chunk.get("choices") else chunk.get("index")
        streams[index].append(name + json.dumps(lasting(chunk), sort_keys=True))
    return dict(streams)
