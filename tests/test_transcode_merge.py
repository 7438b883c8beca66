"""Transcoded sequences become one right answer: choices in order, what was used summed as it was used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from sglang_answers import events
from transcode_rig import chunk, complete, ids, prefill_of, reply, stream_of, transcoder_of

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.generation.parse import parse
from extproc.merge.answer import JoinedAnswer
from extproc.merge.sequences import sequences_answer
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

HELLO, WORLD, RIVER, STOP = ids("Hello", " world", " river", "STOP")
PROMPTS = {"one": Prepared("Hello", (HELLO,)), "two": Prepared("Hello world", (HELLO, WORLD))}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
LIST: dict[str, Any] = {"prompt": ["Hello", "Hello world"], "n": 2}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def parts_of(path: str, body: dict[str, Any], prompts: Sequence[str]) -> tuple[JoinedAnswer, list[Transcoder]]:
    """The answer to a request, and what makes each of its sequences; the prefills have answered."""
    request = InferenceRequest.read(APIS[path], json.dumps(body).encode())
    asked = parse(request)
    made = []
    for prompt in prompts:
        for _ in range(asked.samples):
            transcoder = transcoder_of(asked, PROMPTS[prompt], id=f"an-id-{len(made)}")
            transcoder.prefilled(prefill_of(PROMPTS[prompt].ids, cached=len(PROMPTS[prompt].ids), logprobs=True))
            made.append(transcoder)
    return sequences_answer(request, len(made), asked.samples, batched=asked.batched), made


def run(path: str, body: dict[str, Any], prompts: Sequence[str], tokens: Sequence[Sequence[int]]) -> bytes:
    """The answer, with the sequences' messages interleaved."""
    joined, transcoders = parts_of(path, body, prompts)
    alternatives = 2 if body.get("logprobs") else None
    replies = [
        stream_of([[token] for token in own], alternatives=alternatives)
        if body.get("stream")
        else [complete(own, alternatives=alternatives)]
        for own in tokens
    ]
    out = b""
    for turn in range(max(map(len, replies))):
        for part, own in enumerate(replies):
            if turn < len(own):
                out += joined.decode_data(part, transcoders[part].feed(reply([own[turn]])))
    for part, transcoder in reversed(list(enumerate(transcoders))):
        out += joined.decode_data(part, transcoder.end(0)) + joined.decode_done(part)
    assert joined.complete
    return out


def test_samples_of_a_chat_are_its_choices() -> None:
    answer = json.loads(run("/v1/chat/completions", CHAT, ["two"], [[HELLO], [WORLD, RIVER]]))
    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [
        (0, "Hello"),
        (1, " world river"),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": None,
    }
    assert answer["id"] == "an-id-0"


def test_streamed_samples_are_chunks_of_one_answer() -> None:
    said = events(run("/v1/chat/completions", CHAT | USAGE, ["two"], [[HELLO], [WORLD, RIVER]]))
    assert {one["id"] for one in said} == {"an-id-0"}
    texts = {0: "", 1: ""}
    roles = []
    for one in said[:-1]:
        (choice,) = one["choices"]
        roles += [choice["index"]] * ("role" in choice["delta"])
        texts[choice["index"]] += choice["delta"]["content"]
    assert roles == [0, 1]
    assert texts == {0: "Hello", 1: " world river"}
    assert said[-1]["choices"] == []
    assert said[-1]["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


SEQUENCES = [[HELLO], [WORLD], [RIVER, HELLO], [HELLO, WORLD, RIVER]]
TEXTS = ["Hello", " world", " riverHello", "Hello world river"]
USED = {"prompt_tokens": 3, "total_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}


def test_samples_of_prompts_are_choices_prompt_by_prompt() -> None:
    answer = json.loads(run("/v1/completions", LIST, ["one", "two"], SEQUENCES))
    assert [(one["index"], one["text"]) for one in answer["choices"]] == list(enumerate(TEXTS))
    assert answer["usage"] == USED | {"completion_tokens_details": None}


def test_a_stream_of_samples_of_prompts() -> None:
    body = LIST | USAGE | {"logprobs": 1, "echo": True}
    said = events(run("/v1/completions", body, ["one", "two"], SEQUENCES))
    texts, rows = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), 0)
    for one in said[:-1]:
        (choice,) = one["choices"]
        texts[choice["index"]] += choice["text"]
        rows[choice["index"]] += len((choice["logprobs"] or {"tokens": ()})["tokens"])
    echoes = ["Hello", "Hello", "Hello world", "Hello world"]
    assert list(texts.values()) == [echo + text for echo, text in zip(echoes, TEXTS, strict=True)]
    assert list(rows.values()) == [2, 2, 4, 5]
    assert said[-1]["usage"] == USED


@pytest.mark.parametrize("prompts", [["two"], ["one", "two"]])
def test_generate_answers_a_list_with_a_list(prompts: list[str]) -> None:
    body = {"text": [PROMPTS[prompt].text for prompt in prompts]}
    tokens = SEQUENCES[: len(prompts)]
    answer = json.loads(run("/generate", body, prompts, tokens))
    assert [one["output_ids"] for one in answer] == tokens
    last = {
        one["index"]: one["output_ids"] for one in events(run("/generate", body | {"stream": True}, prompts, tokens))
    }
    assert last == dict(enumerate(tokens))


def test_one_sequence_is_the_answer_as_it_is() -> None:
    body = CHAT | USAGE | {"n": 1}
    _, (alone,) = parts_of("/v1/chat/completions", body, ["two"])
    messages = stream_of([[HELLO], [WORLD]])
    whole = b"".join(alone.feed(reply([message])) for message in messages) + alone.end(0)
    assert run("/v1/chat/completions", body, ["two"], [[HELLO, WORLD]]) == whole


def test_a_sequence_that_a_stop_string_ended_is_done_while_others_go_on() -> None:
    joined, (first, second) = parts_of("/v1/chat/completions", CHAT | USAGE | {"stop": "STOP"}, ["two"])
    out = joined.decode_data(0, first.feed(reply([chunk([STOP])])))
    assert first.complete
    assert b"[DONE]" not in out
    out += joined.decode_data(1, second.feed(reply(stream_of([[HELLO]]))))
    out += joined.decode_data(1, second.end(0))
    assert joined.complete
    assert events(out)[-1]["usage"]["completion_tokens"] == 2


def test_a_sequence_that_fails_ends_all_of_the_answer() -> None:
    joined, (first, second) = parts_of("/v1/chat/completions", CHAT | USAGE, ["two"])
    out = joined.decode_data(0, first.feed(reply([chunk([HELLO])])))
    out += joined.decode_data(1, second.feed(reply([chunk([HELLO])])))
    out += joined.decode_data(0, first.end(13, "gone"))
    assert joined.complete
    assert b"[DONE]" not in out
    assert json.loads(out.split(b"data: ")[-1])["error"]["code"] == "decode_failed"
