"""OpenAI's own Python client asks gRPC workers through a real Envoy, and takes what it gets as its types say."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from product import soon
from rpc_strict import FLOWS, RECEIVING, StrictProduct

from extproc.mock import Fault, Rule
from extproc.mock.engine import Pace
from extproc.mock.generation import logprob
from extproc.mock.rpc import model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
PROMPTS = ["def foo(", "Grüße, 日本 🙂"]
COMPLETION: dict[str, Any] = {"model": "tiny", "max_tokens": 9}
USAGE: Any = {"include_usage": True}
SLOW = Pace(token=0.01, tokens=1000)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(FLOWS))
async def running(request: pytest.FixtureRequest) -> AsyncIterator[StrictProduct]:
    async with StrictProduct(request.param, disable_retries=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(flow: StrictProduct) -> AsyncIterator[AsyncOpenAI]:
    """A client that refuses what is not as its types say."""
    async with _client(flow, strict=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def lenient(flow: StrictProduct) -> AsyncIterator[AsyncOpenAI]:
    """The same as people have it: its type of a completion has no place for a finish that is not there yet."""
    async with _client(flow, strict=False) as made:
        yield made


def _client(flow: StrictProduct, *, strict: bool) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key="none",
        base_url=f"http://{flow.client.host}:{flow.client.port}/v1",
        max_retries=0,
        timeout=60,
        _strict_response_validation=strict,
    )


def fail(mock: Any, fault: Fault) -> None:
    """Have it fail its legs, but not the orders that the gateway gives besides, which may speak of legs."""
    mock.fail(Rule(fault, body_contains=b"\n2chatcmpl-"))  # the first field, of 50 bytes: the leg's name


# -- chat -------------------------------------------------------------------------------------------------------------


async def test_a_chat(flow: StrictProduct, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT)
    ids = flow.chat_ids("hello")
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == flow.text(ids, max_new_tokens=12)
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)
    assert answer.usage.total_tokens == len(ids) + 12


async def test_a_chat_streamed(flow: StrictProduct, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**CHAT, stream=True, stream_options=USAGE)
    said = [chunk async for chunk in stream]
    assert said[0].choices[0].delta.role == "assistant"
    content = "".join(chunk.choices[0].delta.content or "" for chunk in said if chunk.choices)
    assert content == flow.text(flow.chat_ids("hello"), max_new_tokens=12)
    assert [chunk.choices[0].finish_reason for chunk in said if chunk.choices][-1] == "length"
    assert len({chunk.id for chunk in said}) == 1
    assert said[-1].choices == []
    assert said[-1].usage is not None
    assert said[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in said[:-1])


async def test_the_clients_helper_puts_a_stream_together(flow: StrictProduct, client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2) as stream:
        final = await stream.get_final_completion()  # of what was cut at a limit it would make an error
    (choice,) = final.choices
    ids = flow.written(flow.chat_ids("hello"))
    if flow.engine == "tokenspeed":  # leaves the end of text out
        ids.pop()
    assert choice.message.content == flow.text(flow.chat_ids("hello"))
    assert choice.logprobs is not None
    assert [row.logprob for row in choice.logprobs.content or ()] == pytest.approx([logprob(token) for token in ids])


async def test_samples_of_a_chat(flow: StrictProduct, client: AsyncOpenAI) -> None:
    text = flow.text(flow.chat_ids("hello"), max_new_tokens=12)
    answer = await client.chat.completions.create(**CHAT, n=2, temperature=0.7)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, text), (1, text)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    stream = await client.chat.completions.create(**CHAT, n=2, temperature=0.7, stream=True, stream_options=USAGE)
    texts: dict[int, str] = defaultdict(str)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: text, 1: text}
    assert len(flow.prefill.legs) == 4


async def test_log_probabilities_of_a_chat(flow: StrictProduct, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    ids = flow.written(flow.chat_ids("hello"), max_new_tokens=12)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    rows = choice.logprobs.content or []
    assert [row.logprob for row in rows] == pytest.approx([logprob(token) for token in ids])
    assert b"".join(bytes(row.bytes or ()) for row in rows) == b"".join(model.pieces()[token] for token in ids)
    assert {len(row.top_logprobs) for row in rows} == {2}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_of_a_chat(flow: StrictProduct, client: AsyncOpenAI, stream: bool) -> None:  # noqa: FBT001
    whole = flow.text(flow.chat_ids("hello"))
    stop = whole[20:24]
    body = CHAT | {"max_tokens": 1000, "stop": ["nowhere", stop], "extra_body": {"ignore_eos": True}}
    if stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = (await client.chat.completions.create(**body)).choices
        content, finish = choice.message.content or "", choice.finish_reason
    assert (content, finish) == (whole[: whole.index(stop)], "stop")


async def test_a_schema_is_the_engines(flow: StrictProduct, client: AsyncOpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = await client.chat.completions.create(**CHAT, response_format=shape)
    assert answer.choices[0].message.content
    _, decode = flow.legs
    sampling = decode.message.sampling_params
    assert json.loads(sampling.json_schema) == SCHEMA
    for mock in flow.mocks:
        await mock.idle()
        mock.clear()
    await client.chat.completions.create(**CHAT, response_format={"type": "json_object"})
    _, decode = flow.legs
    sampling = decode.message.sampling_params
    assert sampling.json_object if flow.engine == "vllm" else json.loads(sampling.json_schema) == {"type": "object"}


# -- completions ------------------------------------------------------------------------------------------------------


async def test_prompts_and_samples_of_completions(flow: StrictProduct, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(**COMPLETION, prompt=PROMPTS, n=2, temperature=0.7)
    texts = [flow.text(flow.ids(prompt), max_new_tokens=9) for prompt in PROMPTS for _ in range(2)]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(flow.ids(prompt)) for prompt in PROMPTS)
    assert answer.usage.completion_tokens == 4 * 9


async def test_prompts_of_token_ids(flow: StrictProduct, client: AsyncOpenAI) -> None:
    prompts = [[5, 600, 700], [1, 900]]
    answer = await client.completions.create(**COMPLETION, prompt=prompts)
    assert [choice.text for choice in answer.choices] == [flow.text(ids, max_new_tokens=9) for ids in prompts]
    (choice,) = (await client.completions.create(**COMPLETION, prompt=prompts[0])).choices
    assert choice.text == flow.text(prompts[0], max_new_tokens=9)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
async def test_completions_streamed(flow: StrictProduct, lenient: AsyncOpenAI, prompts: list[str]) -> None:
    stream = await lenient.completions.create(**COMPLETION, prompt=prompts, stream=True, stream_options=USAGE)
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    last = None
    async for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == {at: flow.text(flow.ids(prompt), max_new_tokens=9) for at, prompt in enumerate(prompts)}
    assert ends == dict.fromkeys(range(len(prompts)), "length")
    assert last is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == 9 * len(prompts)


async def test_log_probabilities_of_completions(flow: StrictProduct, client: AsyncOpenAI) -> None:
    prompt = PROMPTS[0]
    answer = await client.completions.create(**COMPLETION, prompt=prompt, logprobs=2, stop=None)
    told = answer.choices[0].logprobs
    assert told is not None
    ids = flow.written(flow.ids(prompt), max_new_tokens=9)
    assert told.token_logprobs == pytest.approx([logprob(token) for token in ids])
    assert told.tokens is not None
    assert told.text_offset is not None
    assert len(told.tokens) == len(told.text_offset) == len(told.top_logprobs or ()) == 9
    assert told.text_offset == sorted(told.text_offset)


async def test_a_stop_string_of_a_completion(flow: StrictProduct, client: AsyncOpenAI) -> None:
    whole = flow.text(flow.ids(PROMPTS[0]))
    stop = whole[10:14]
    body = COMPLETION | {"max_tokens": 500}
    (choice,) = (await client.completions.create(**body, prompt=PROMPTS[0], stop=stop)).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long(flow: StrictProduct, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**COMPLETION, prompt=[5] * (model.CONTEXT + 1))
    assert caught.value.code == "context_length_exceeded"
    content = "hello " * model.CONTEXT
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                **CHAT | {"messages": [{"role": "user", "content": content}]}, stream=stream
            )
        assert caught.value.code == "context_length_exceeded"
    assert not [leg for mock in flow.mocks for leg in mock.legs]


async def test_what_is_refused_is_named(flow: StrictProduct, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT, extra_body={"cache_salt": "x"})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "cache_salt")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT, temperature="hot")  # type: ignore[call-overload]
    assert (caught.value.code, caught.value.param) == ("invalid_type", "temperature")
    assert not flow.prefill.legs


async def test_a_model_that_nobody_has(flow: StrictProduct, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**CHAT | {"model": "huge"})
    assert caught.value.status_code in (404, 503)
    assert not flow.prefill.legs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("status", "raised"),
    [(503, openai.InternalServerError), (429, openai.RateLimitError), (400, openai.BadRequestError)],
)
async def test_an_engines_error(
    flow: StrictProduct,
    client: AsyncOpenAI,
    status: int,
    raised: type[openai.APIStatusError],
    role: str,
    stream: bool,  # noqa: FBT001
) -> None:
    for mock in flow.decodes if role == "decode" else flow.prefills:
        fail(mock, Fault(status=status, body="as told"))
    with pytest.raises(raised, match="as told") as caught:
        await client.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == f"{role}_{'rejected' if status < 500 else 'failed'}"


async def test_an_error_in_the_stream(flow: StrictProduct, client: AsyncOpenAI) -> None:
    for mock in flow.decodes:
        fail(mock, Fault(truncate=True, after_chunks=2))
    stream = await client.chat.completions.create(**CHAT, stream=True)
    content: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            content.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - it ends with an exception

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert caught.value.code == "decode_bad_reply"
    assert "".join(content)
    assert flow.text(flow.chat_ids("hello"), max_new_tokens=12).startswith("".join(content))


# -- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_is_left_early(flow: StrictProduct, client: AsyncOpenAI, n: int) -> None:
    for mock in flow.decodes:
        mock.pace = SLOW
    body = CHAT | {"max_tokens": 900, "n": n, "temperature": 0.7}
    stream = await client.chat.completions.create(**body, stream=True)
    async with stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await soon(lambda: sum(len(mock.legs) for mock in flow.decodes) == n, "not all are decoded")
    await soon(lambda: not any(mock.running for mock in flow.decodes), "it is decoded on")
    asked = [leg.message.request_id for mock in flow.decodes for leg in mock.legs]
    assert len(asked) == n
    await soon(lambda: set(asked) <= set(aborted(flow.decodes)), "the decodes were not told")


async def test_an_answer_that_is_left_while_both_legs_are_out(flow: StrictProduct, client: AsyncOpenAI) -> None:
    finishes = flow.flow == "mooncake"  # a prefill leg is let finish, which frees what its decode waits for
    flow.prefill.pace = Pace(first_token=2 if finishes else 30)
    asking = asyncio.create_task(client.chat.completions.create(**CHAT, stream=True))
    in_turn = flow.flow == "nixl"
    await soon(lambda: bool(flow.prefill.legs) and flow.prefill.running > 0, "nothing is prefilled")
    if not in_turn:
        await soon(lambda: any(mock.running for mock in flow.decodes), "no decode waits for it")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    name = flow.prefill.legs[0].message.request_id
    told = [*([] if finishes else [flow.prefills]), *([] if in_turn else [flow.decodes])]
    for mocks in told:
        await soon(lambda mocks=mocks: name in aborted(mocks), "it was not told", RECEIVING + 10)
    await soon(lambda: not any(mock.running for mock in flow.mocks), "something goes on")


def aborted(mocks: Any) -> list[str]:
    """The names of requests that workers were asked to end."""
    calls = itertools.chain.from_iterable(mock.calls for mock in mocks)
    names = [call.request for call in calls if call.method == "Abort"]
    return [one for said in names for one in (said.request_ids if hasattr(said, "request_ids") else [said.request_id])]
