"""The vLLM mock and ``kv_transfer_params.prompt_token_ids``, against what the real engine (0.32.0) answers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extproc.mock import Fault, VllmMock
from tests.mock_client import Answer, ask

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GENERATE = "/inference/v1/generate"
USER = [{"role": "user", "content": "Say hi to the world"}]
OTHER = [{"role": "user", "content": "Say something else, and say it at length"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 5},
    MESSAGES: {"model": "mock-model", "messages": USER, "max_tokens": 5},
    RESPONSES: {"input": "Once upon", "max_output_tokens": 5, "store": False},
    COMPLETIONS: {"prompt": "Once upon", "max_tokens": 5},
    GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}},
}
TAKING = (CHAT, MESSAGES, RESPONSES)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PARAM = "kv_transfer_params.prompt_token_ids"
MALFORMED = (
    "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. "
    "(parameter=kv_transfer_params.prompt_token_ids)"
)


@pytest.fixture
async def mock() -> AsyncIterator[VllmMock]:
    async with VllmMock("aggregated", max_model_len=2048, prefix_caching=False) as mock:
        yield mock


async def told(mock: VllmMock, path: str, ids: object, **fields: Any) -> Answer:
    """The answer to a request with these ids in the place of its prompt."""
    return await ask(mock, path, {**BODIES[path], "kv_transfer_params": {"prompt_token_ids": ids}, **fields})


async def ids_of(mock: VllmMock, messages: list[dict[str, str]]) -> list[int]:
    """A conversation's tokens."""
    tokens: list[int] = (await ask(mock, "/tokenize", {"messages": messages})).json["tokens"]
    return tokens


def text_of(answer: Answer) -> str:
    """What a chat's answer says."""
    return str(answer.json["choices"][0]["message"]["content"])


@pytest.mark.parametrize("ids", [[], "x", 5, {}, [-1], [True], [1.5], ["a"]])
async def test_what_is_no_list_of_ids_is_refused_in_the_engines_words(mock: VllmMock, ids: object) -> None:
    answer = await told(mock, CHAT, ids)
    error = {"message": MALFORMED, "type": "BadRequestError", "param": PARAM, "code": 400}
    assert (answer.status, answer.json) == (400, {"error": error})


async def test_ids_out_of_the_vocabulary_are_refused(mock: VllmMock) -> None:
    answer = await told(mock, CHAT, [5, 4096])
    assert answer.status == 400
    assert answer.json["error"]["message"] == f"Token id 4096 is out of vocabulary (parameter={PARAM})"
    assert answer.json["error"]["param"] == PARAM
    assert (await told(mock, CHAT, [5, 4095])).status == 200


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (CHAT, "Input length (2049) exceeds model's maximum context length (2048)."),
        (MESSAGES, "Input length (2049) exceeds model's maximum context length (2048)."),
        (RESPONSES, "The engine prompt length 2049 exceeds the max_model_len 2048. Please reduce prompt."),
    ],
)
async def test_ids_that_exceed_the_context(mock: VllmMock, path: str, said: str) -> None:
    answer = await told(mock, path, [5] * 2049)
    assert (answer.status, answer.json["error"]["message"]) == (400, said)


async def test_messages_words_a_refusal_its_own_way(mock: VllmMock) -> None:
    answer = await told(mock, MESSAGES, [])
    assert answer.json == {"type": "error", "error": {"type": "BadRequestError", "message": MALFORMED}}


@pytest.mark.parametrize("path", TAKING)
async def test_the_prompt_is_the_ids(mock: VllmMock, path: str) -> None:
    own = (await ask(mock, path, BODIES[path])).json
    assert not mock.legs[-1].ids_reused
    answer = (await told(mock, path, [11, 12, 13])).json
    assert mock.legs[-1].ids_reused
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == 3
    key = {CHAT: "choices", MESSAGES: "content", RESPONSES: "output"}[path]
    assert str(answer[key]) != str(own[key])


@pytest.mark.parametrize("stream", [False, True])
async def test_other_ids_give_the_other_prompts_answer(mock: VllmMock, *, stream: bool) -> None:
    more = {"return_token_ids": True, "stream": stream, "request_id": "mine"}
    answer = await told(mock, CHAT, await ids_of(mock, OTHER), **more)
    expected = await ask(mock, CHAT, {**BODIES[CHAT], **more, "messages": OTHER})
    assert [record.ids_reused for record in await mock.received(2, CHAT)] == [True, False]
    assert _lasting(answer) == _lasting(expected)


async def test_its_own_ids_change_nothing(mock: VllmMock) -> None:
    more = {"prompt_logprobs": 1, "request_id": "mine"}
    answer = await told(mock, CHAT, await ids_of(mock, USER), **more)
    assert mock.legs[-1].ids_reused
    assert _lasting(answer) == _lasting(await ask(mock, CHAT, {**BODIES[CHAT], **more}))


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
@pytest.mark.parametrize("ids", [[], [11, 12, 13]])
async def test_apis_that_ignore_them(mock: VllmMock, path: str, ids: list[int]) -> None:
    own = (await ask(mock, path, BODIES[path])).json["choices"]
    assert (await told(mock, path, ids)).json["choices"] == own
    assert not any(record.ids_reused for record in mock.requests)


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
TEXT_PARTS = {"role": "user", "content": [{"type": "text", "text": "Say hi"}]}


@pytest.mark.parametrize("fields", [{"echo": True}, {"messages": [IMAGE]}], ids=["echo", "media"])
async def test_what_must_be_rendered_is(mock: VllmMock, fields: dict[str, Any]) -> None:
    own = text_of(await ask(mock, CHAT, BODIES[CHAT] | fields))
    for ids in ([], [11, 12, 13]):
        assert text_of(await told(mock, CHAT, ids, **fields)) == own
    assert (await told(mock, CHAT, None)).status == 200
    assert not any(record.ids_reused for record in mock.requests)


@pytest.mark.parametrize("messages", [[], [TEXT_PARTS]], ids=["none", "text parts"])
async def test_the_messages_do_not_matter_to_others(mock: VllmMock, messages: list[Any]) -> None:
    assert (await told(mock, CHAT, [11, 12, 13], messages=messages)).json["usage"]["prompt_tokens"] == 3
    assert (await told(mock, CHAT, [], messages=messages)).json["error"]["param"] == PARAM


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "nope"}, "model"),
        ({"max_tokens": 99_999}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"min_tokens": 9}, PARAM),
        ({"max_tokens": 0}, PARAM),
        ({"prompt_logprobs": 99}, PARAM),
        ({"stream": True}, PARAM),
    ],
)
async def test_which_refusal_comes_first(mock: VllmMock, fields: dict[str, Any], param: str) -> None:
    assert (await told(mock, CHAT, [], **fields)).json["error"]["param"] == param


async def test_an_older_engine_does_not_know_the_key() -> None:
    async with VllmMock("aggregated", knows_token_ids=False) as mock:
        own = text_of(await ask(mock, CHAT, BODIES[CHAT]))
        for ids in ([], [11, 12, 13], "x"):
            answer = await told(mock, CHAT, ids)
            assert (answer.status, text_of(answer)) == (200, own)
        assert not any(record.ids_reused for record in mock.requests)


@pytest.mark.parametrize("knows", [True, False])
async def test_an_empty_list_is_a_probe_and_no_leg(*, knows: bool) -> None:
    async with VllmMock("decode", knows_token_ids=knows) as mock:
        mock.fail(Fault(status=503), times=1)
        assert (await told(mock, CHAT, [])).status == (400 if knows else 200)  # faults are for legs
        assert (await ask(mock, CHAT, b'{"messages":[],"kv_transfer_params":{"prompt_token_ids" : [ ]}}')).status == 400
        assert (mock.legs, len(mock.requests)) == ([], 2)
        await mock.idle()
        assert (await told(mock, CHAT, [11])).status == 503
        text = BODIES[CHAT] | {"messages": [{"role": "user", "content": '{"prompt_token_ids":[]}'}]}
        assert (await ask(mock, CHAT, text)).status == 200
        assert len(mock.legs) == 2


async def test_a_prefills_ids_go_to_the_decode(mock: VllmMock) -> None:
    async with VllmMock("prefill", prefix_caching=False) as prefill, VllmMock("decode", prefix_caching=False) as decode:
        leg = BODIES[CHAT] | {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": PREFILL}
        first = (await ask(prefill, CHAT, leg)).json
        ids = first["prompt_token_ids"]
        assert ids == await ids_of(prefill, USER)
        params = first["kv_transfer_params"] | {"prompt_token_ids": ids}
        answer = await ask(decode, CHAT, BODIES[CHAT] | {"kv_transfer_params": params})
        assert text_of(answer) == text_of(await ask(mock, CHAT, BODIES[CHAT]))
        (record,) = decode.legs
        assert (record.kv, record.ids_reused) == ("transferred", True)
        await prefill.freed()


async def test_a_cache_of_another_prompt_than_the_ids_is_foreign() -> None:
    async with VllmMock("prefill") as prefill, VllmMock("decode") as decode:
        first = (await ask(prefill, CHAT, BODIES[CHAT] | {"max_tokens": 1, "kv_transfer_params": PREFILL})).json
        params = first["kv_transfer_params"] | {"prompt_token_ids": [11, 12, 13]}
        await ask(decode, CHAT, BODIES[CHAT] | {"kv_transfer_params": params})
        assert decode.legs[-1].kv == "foreign"


async def test_a_refusal_of_the_ids_frees() -> None:
    async with VllmMock("prefill") as prefill, VllmMock("decode") as decode:
        first = (await ask(prefill, CHAT, BODIES[CHAT] | {"max_tokens": 1, "kv_transfer_params": PREFILL})).json
        assert prefill.pinned
        params = first["kv_transfer_params"] | {"prompt_token_ids": [-1]}
        assert (await ask(decode, CHAT, BODIES[CHAT] | {"kv_transfer_params": params})).status == 400
        await prefill.freed()


def _lasting(answer: Answer) -> str:
    """An answer without the moment it was made."""
    assert answer.status == 200, answer.body
    return re.sub(r'"created":[0-9]+', '"created":0', answer.body.decode())
