"""What is made here is what OpenAI's own Python client takes, as its types say, and gives to its user."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transcode_rig import asked_of, chunk, complete, ids, prefill_of, reply, stream_of, transcoder_of

from extproc.transcode.transcoder import Transcoder

HELLO, WORLD, RIVER, STOP = ids("Hello", " world", " river", "STOP")
WAVE = ids(bytes.fromhex("f09f"), bytes.fromhex("8c8a"))
MESSAGES: Any = [{"role": "user", "content": "hi"}]
Replies = Callable[[Transcoder], bytes]


def client(replies: Replies, *, strict: bool = True) -> openai.OpenAI:
    """A client of a server that transcodes: ``replies`` feeds the decode's reply in, and gives the answer back."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        asked = asked_of(request.url.path, json.loads(request.content))
        transcoder = transcoder_of(asked)
        transcoder.prefilled(prefill_of([HELLO, WORLD], logprobs=True))
        body = replies(transcoder)
        return httpx2.Response(200, headers={"content-type": transcoder.content_type.decode()}, content=body)

    return openai.OpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        http_client=httpx2.Client(transport=httpx2.MockTransport(respond)),
        _strict_response_validation=strict,
    )


def message_by_message(messages: list[Any]) -> Replies:
    return lambda transcoder: b"".join(transcoder.feed(reply([one])) for one in messages) + transcoder.end(0)


def test_a_chat() -> None:
    replies = message_by_message([complete([HELLO, *WAVE], "stop", 3)])
    answer = client(replies).chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == "Hello🌊"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert [row.token for row in choice.logprobs.content or ()] == ["Hello", "", "🌊"]
    assert [len(row.top_logprobs) for row in choice.logprobs.content or ()] == [2, 2, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 3)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_a_stream_of_chat() -> None:
    replies = message_by_message(stream_of([[HELLO], WAVE[:1], WAVE[1:]], alternatives=2))
    stream = client(replies).chat.completions.create(
        model="m", messages=MESSAGES, stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    said = list(stream)
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in said if one.choices) == "Hello🌊"
    assert [one.choices[0].finish_reason for one in said if one.choices][-1] == "length"
    assert said[-1].choices == []
    assert said[-1].usage is not None
    assert said[-1].usage.total_tokens == 5


def test_a_streams_pieces_are_put_together_by_the_clients_helper() -> None:
    replies = message_by_message(stream_of([[HELLO], [STOP], [RIVER]], alternatives=0))
    with client(replies).chat.completions.stream(model="m", messages=MESSAGES, logprobs=True, stop="STOP") as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello"
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) == 2


def test_completions() -> None:
    replies = message_by_message([complete([RIVER], "stop", 2)])
    answer = client(replies).completions.create(model="m", prompt="Hello world", logprobs=1, max_tokens=4)
    (choice,) = answer.choices
    assert choice.text == " river"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [" river"]
    assert choice.logprobs.text_offset == [0]
    assert choice.logprobs.top_logprobs == [{" river": -RIVER / 8}]


def test_a_stream_of_completions_is_read() -> None:
    """Its type has no place for a finish that is not there yet, as OpenAI's own chunks have it."""
    replies = message_by_message(stream_of([[HELLO], [WORLD]]))
    stream = client(replies, strict=False).completions.create(
        model="m", prompt="Hello world", stream=True, echo=True, stream_options={"include_usage": True}
    )
    said = list(stream)
    assert "".join(one.choices[0].text for one in said if one.choices) == "Hello worldHello world"
    assert said[-1].usage is not None
    assert said[-1].usage.completion_tokens == 2


def test_an_error_in_a_stream_is_the_clients_exception() -> None:
    def replies(transcoder: Transcoder) -> bytes:
        return transcoder.feed(reply([chunk([HELLO])])) + transcoder.end(14, "the engine is gone")

    stream = client(replies).chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == "Hello"
    with pytest.raises(openai.APIError, match="the engine is gone") as caught:
        next(stream)
    assert caught.value.code == "decode_failed"


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}])
def test_all_of_a_chat_is_as_the_types_say_strictly(fields: dict[str, Any]) -> None:
    alternatives = 2 if fields.get("logprobs") else None
    body = {"messages": MESSAGES, **fields}
    whole = transcoder_of(asked_of("/v1/chat/completions", body))
    ChatCompletion.model_validate_json(
        message_by_message([complete([HELLO, *WAVE], "stop", alternatives)])(whole), strict=True
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = transcoder_of(asked_of("/v1/chat/completions", body | {"stream": True, "stream_options": options}))
    out = message_by_message(stream_of([[HELLO], WAVE[:1], WAVE[1:]], alternatives=alternatives))(streamed)
    said = [event.removeprefix("data: ") for event in out.decode().split("\n\n") if event]
    assert said.pop() == "[DONE]"
    for one in said:
        ChatCompletionChunk.model_validate_json(one, strict=True)


def test_all_of_a_completion_is_as_the_types_say_strictly() -> None:
    for fields in ({}, {"logprobs": 2}, {"echo": True}, {"return_token_ids": True}):
        transcoder = transcoder_of(asked_of("/v1/completions", {"prompt": "Hello world", **fields}))
        messages = [complete([HELLO, *WAVE], "length", 3 if "logprobs" in fields else None)]
        Completion.model_validate_json(message_by_message(messages)(transcoder), strict=True)
