"""Whatever a reply is cut into, and whether it is streamed: the same answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_answers import events
from transcode_rig import TOKENIZER, TOKENS, asked_of, complete, cut, ids, prefill_of, reply, stream_of, transcoder_of

from extproc.engines.frames import PREFIX, frame
from extproc.errors import GatewayError
from extproc.text.tokenizer import Prepared
from extproc.transcode import logprobs
from extproc.transcode.frames import Frames

PROMPT = Prepared("Hello world", tuple(ids("Hello", " world")))
WRITTEN = [ids(one)[0] for one in ("Hello", " STO", "P", "PED", " river", "STOP", "\n", " END", "é", "</s>", "<|end|>")]
HALVES = ids(*(bytes.fromhex(half) for half in ("f09f", "8c8a", "20f09f8c", "8a21", "e4bd", "a0", "ff")))
TOKEN = st.one_of(st.sampled_from(WRITTEN), st.sampled_from(HALVES), st.integers(0, len(TOKENS) - 1))
STEPS = st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=8)
FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.lists(st.sampled_from(["STOP", "OP", "river", " ", "P\n", "\ufffd", "éH"]), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 5),
        "return_token_ids": st.booleans(),
    },
)
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "chat_logprobs": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
    ),
    "completions": ("/v1/completions", {"prompt": "Hello world"}),
    "completions_logprobs": ("/v1/completions", {"prompt": "Hello world", "logprobs": 1, "echo": True}),
}


def answer(path: str, body: dict[str, Any], pieces: Sequence[bytes]) -> bytes:
    transcoder = transcoder_of(asked_of(path, body), PROMPT)
    transcoder.prefilled(prefill_of(PROMPT.ids, logprobs=True))
    out = b"".join(map(transcoder.feed, pieces)) + transcoder.end(0)
    assert transcoder.complete
    return out


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize("meanwhile", [1, 2, 3])
def test_what_comes_while_a_long_prompt_is_made_comes_behind_it(
    fields: dict[str, Any], meanwhile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's rows are made in a thread, and the answer's meanwhile."""
    prompt = Prepared("Hello world" * 60, tuple(ids("Hello", " world") * 60))
    path, body = APIS["completions_logprobs"]
    asked = asked_of(path, body | fields)
    data = reply(stream_of([ids("Hello"), ids(" river"), ids("</s>")], alternatives=1))
    pieces: list[bytes | None] = [*cut(data, [40, 60]), None]

    def said(during: int) -> bytes:
        transcoder = transcoder_of(asked, prompt)
        work = transcoder.prefilled(prefill_of(prompt.ids, logprobs=True))
        assert work is not None
        out: list[bytes] = []
        left = list(pieces)

        def come(count: int) -> None:
            now = [left.pop(0) for _ in range(min(count, len(left)))]
            out.extend(transcoder.end(0) if piece is None else transcoder.feed(piece) for piece in now)

        behind, rows = logprobs._behind, 0

        def interrupted(*row: Any) -> int:
            nonlocal rows
            rows += 1
            if rows == len(prompt.ids) // 2:
                come(during)
            return behind(*row)

        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "_behind", interrupted)
            work()
        assert not any(out)
        transcoder.prompt_made()
        out.append(transcoder.feed(b""))
        come(len(left))
        assert transcoder.complete
        return b"".join(out)

    assert joined_rows(said(meanwhile)) == joined_rows(said(0))


def joined_rows(answer: bytes) -> list[Any]:
    """Of each token text, value and offset, in order."""
    said = [line.removeprefix(b"data: ") for line in answer.splitlines()]
    choices = [choice for each in said if each[:1] == b"{" for choice in json.loads(each)["choices"]]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    members = ("tokens", "token_logprobs", "text_offset")
    return [row for each in found for row in zip(*(each[member] for member in members), strict=True)]


def joined(stream: bytes) -> Any:
    """What a client has at a stream's end: text, and lists joined; the rest as it was said last."""
    state: dict[str, Any] = {}
    for said in events(stream):
        for choice in said["choices"]:
            parts = {"text": choice.get("text"), "token_ids": choice.get("token_ids"), **choice.pop("delta", {})}
            parts |= {f"logprobs.{key}": value for key, value in (choice["logprobs"] or {}).items()}
            for key, value in parts.items():
                if value is not None:
                    state[key] = state[key] + value if key in state and key != "role" else value
            if choice["finish_reason"]:
                state["finish"] = choice["finish_reason"], choice["stop_reason"]
        if said.get("usage"):
            state["usage"] = said["usage"]
    return state


@pytest.mark.parametrize("api", APIS)
@settings(deadline=None, max_examples=60)
@given(steps=STEPS, fields=FIELDS, places=st.lists(st.integers(min_value=0), max_size=12), finish=st.booleans())
def test_any_cut_gives_the_same_stream_and_the_stream_is_the_body(
    api: str,
    steps: list[list[int]],
    fields: dict[str, Any],
    places: list[int],
    finish: bool,  # noqa: FBT001
) -> None:
    path, body = APIS[api]
    alternatives = 2 if "logprobs" in api else None
    said = "stop" if finish else "length"
    data = reply(stream_of(steps, said, alternatives))
    asked = body | fields | {"stream": True, "stream_options": {"include_usage": True}}
    expected = joined(answer(path, asked, [data]))
    assert joined(answer(path, asked, cut(data, places))) == expected

    tokens = [token for step in steps for token in step]
    whole = json.loads(answer(path, body | fields, [reply([complete(tokens, said, alternatives)])]))
    (choice,) = whole["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert text == expected.get("content", expected.get("text"))
    assert (choice["finish_reason"], choice["stop_reason"]) == expected["finish"]
    assert whole["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    for key, value in (choice["logprobs"] or {}).items():
        assert value == expected[f"logprobs.{key}"]
    if fields.get("return_token_ids"):
        assert choice["token_ids"] == expected["token_ids"]


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, skip=st.booleans(), places=st.lists(st.integers(min_value=0), max_size=12))
def test_the_text_is_that_of_the_tokens_as_a_whole(steps: list[list[int]], skip: bool, places: list[int]) -> None:  # noqa: FBT001
    fields = {"skip_special_tokens": skip, "ignore_eos": True, "stream": True}
    path, body = APIS["chat"]
    out = answer(path, body | fields, cut(reply(stream_of(steps)), places))
    tokens = [token for step in steps for token in step]
    whole = TOKENIZER.decode(tokens, skip_special=skip)
    half = TOKENIZER.detokenizer((), skip_special=skip).add(tokens) != whole  # which vLLM leaves out
    assert joined(out)["content"] == (whole[:-1] if half else whole)


@settings(deadline=None, max_examples=40)
@given(steps=STEPS, places=st.lists(st.integers(min_value=0), max_size=12))
def test_the_last_event_of_generate_is_its_body(steps: list[list[int]], places: list[int]) -> None:
    fields = {"text": "Hello world", "return_logprob": True, "sampling_params": {"stop": ["STOP"]}}
    out = answer("/generate", fields | {"stream": True}, cut(reply(stream_of(steps, "length", 1)), places))
    tokens = [token for step in steps for token in step]
    body = answer("/generate", fields, [reply([complete(tokens, "length", 1)])])
    assert events(out)[-1] == json.loads(body)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(min_value=0), max_size=12))
def test_frames_survive_any_cut(messages: list[bytes], places: list[int]) -> None:
    frames, found = Frames(), []
    data = b"".join(frame(message) for message in messages)
    for piece in cut(data, places):
        found += frames.feed(piece)
    assert found == messages
    assert not frames.unfinished


def test_a_frame_without_its_end_is_held() -> None:
    frames = Frames()
    assert list(frames.feed(frame(b"one") + frame(b"two")[:4])) == [b"one"]
    assert frames.unfinished
    assert list(frames.feed(frame(b"two")[4:6])) == []
    assert list(frames.feed(frame(b"two")[6:] + b"")) == [b"two"]
    assert not frames.unfinished


def test_a_frames_size_is_bounded_before_it_is_there() -> None:
    frames = Frames(limit=10)
    assert list(frames.feed(frame(bytes(10)))) == [bytes(10)]
    with pytest.raises(GatewayError, match="11 bytes"):
        list(frames.feed(PREFIX.pack(0, 11)))
