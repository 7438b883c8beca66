"""One sequence's answer: what is sent when, what ends it, and what becomes of what goes wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_answers import events
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as tokenspeed_pb
from transcode_rig import (
    EOS,
    TOKENS,
    asked_of,
    chunk,
    complete,
    ids,
    prefill_of,
    reply,
    stream_of,
    transcoder_of,
)

from extproc.engines.frames import PREFIX, frame
from extproc.engines.table import engine_of
from extproc.errors import GatewayError
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO, WORLD, RIVER = ids("Hello", " world", " river")
WAVE = ids(bytes.fromhex("f09f"), bytes.fromhex("8c8a"))


def chat(**fields: Any) -> Transcoder:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    return transcoder_of(asked_of(CHAT, body))


def completions(**fields: Any) -> Transcoder:
    return transcoder_of(asked_of(COMPLETIONS, {"prompt": "Hello world", "stream": True, **fields}))


def generate(sampling: dict[str, Any] | None = None, **fields: Any) -> Transcoder:
    body = {"text": "Hello world", "stream": True, "sampling_params": sampling or {}, **fields}
    return transcoder_of(asked_of("/generate", body))


def chunks(stream: bytes) -> list[Any]:
    """A stream's events as JSON, whether it has ended or not."""
    return [json.loads(event.removeprefix("data: ")) for event in stream.decode().split("\n\n") if "{" in event]


def text_of(stream: bytes) -> str:
    return "".join(
        choice["delta"]["content"] if "delta" in choice else choice["text"]
        for one in chunks(stream)
        for choice in one.get("choices", ())
    )


def whole(transcoder: Transcoder, messages: list[Any], status: int = 0) -> bytes:
    return transcoder.feed(reply(messages)) + transcoder.end(status)


# -- what is sent, and when ---------------------------------------------------------------------------------------


def test_the_first_token_is_sent_at_once_behind_the_role() -> None:
    transcoder = chat()
    out = transcoder.feed(reply([chunk([HELLO])]))
    assert [one["choices"][0]["delta"] for one in chunks(out)] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
    ]
    assert out.endswith(b"\n\n")
    assert out.count(b"data: ") == 2


def test_messages_that_came_together_are_one_chunk() -> None:
    transcoder = chat()
    transcoder.feed(reply([chunk([HELLO])]))
    out = transcoder.feed(reply([chunk([WORLD]), chunk([RIVER]), chunk([HELLO])]))
    assert [one["choices"][0]["delta"]["content"] for one in chunks(out)] == [" world riverHello"]


def test_a_message_cut_in_two_is_one() -> None:
    transcoder = chat()
    data = reply([chunk([HELLO])])
    assert transcoder.feed(data[:3]) == b""
    assert transcoder.feed(data[3:9]) == b""
    assert text_of(transcoder.feed(data[9:])) == "Hello"


def test_a_message_without_tokens_opens_the_answer() -> None:
    """TokenSpeed sends one before the first token."""
    assert chunks(chat().feed(reply([chunk([])])))[0]["choices"][0]["delta"]["role"] == "assistant"
    assert completions().feed(reply([chunk([])])) == b""


def test_nothing_is_sent_while_nothing_is_certain() -> None:
    transcoder = chat()
    transcoder.feed(reply([chunk([HELLO])]))
    assert transcoder.feed(reply([chunk(WAVE[:1])])) == b""
    assert text_of(transcoder.feed(reply([chunk(WAVE[1:])]))) == "🌊"


def test_half_a_character_at_the_end_is_what_the_engines_own_server_makes_of_it() -> None:
    messages = stream_of([[HELLO], WAVE[:1]])
    assert text_of(whole(chat(), messages)) == "Hello"
    body = json.loads(whole(chat(stream=False), [complete([HELLO, WAVE[0]])]))
    assert body["choices"][0]["message"]["content"] == "Hello"
    said = sglang_pb.GenerateResponse(
        complete=sglang_pb.GenerateComplete(output_ids=[HELLO, WAVE[0]], finish_reason="length", completion_tokens=2)
    )
    made = transcoder_of(asked_of("/v1/completions", {"prompt": "hi"}), engine=engine_of("sglang"))
    assert json.loads(whole(made, [said]))["choices"][0]["text"] == "Hello\ufffd"
    made = transcoder_of(asked_of("/generate", {"text": "hi"}))
    assert json.loads(whole(made, [complete([HELLO, WAVE[0]])]))["text"] == "Hello\ufffd"


def test_an_answer_that_is_not_streamed_comes_at_the_end() -> None:
    transcoder = chat(stream=False)
    assert transcoder.content_type == b"application/json"
    assert transcoder.feed(reply([complete([HELLO, WORLD])])) == b""
    assert not transcoder.complete
    assert json.loads(transcoder.end(0))["choices"][0]["message"]["content"] == "Hello world"
    assert transcoder.complete


def test_an_answer_that_is_not_streamed_may_come_as_a_stream() -> None:
    body = json.loads(whole(chat(stream=False), stream_of([[HELLO], [WORLD]])))
    assert body["choices"][0]["message"]["content"] == "Hello world"
    assert body["usage"]["completion_tokens"] == 2


def test_a_continued_message_keeps_its_role() -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "He"}]
    fields = {"messages": said, "add_generation_prompt": False, "continue_final_message": True}
    assert chunks(chat(**fields).feed(reply([chunk([HELLO])])))[0]["choices"][0]["delta"]["role"] == "tool"
    body = json.loads(whole(chat(**fields, stream=False), [complete([HELLO])]))
    assert body["choices"][0]["message"]["role"] == "tool"


def test_every_event_of_generate_has_all_of_the_text() -> None:
    transcoder = generate()
    out = b"".join(transcoder.feed(reply([message])) for message in stream_of([[HELLO], WAVE[:1], WAVE[1:]]))
    assert [(one["text"], one["output_ids"]) for one in chunks(out)] == [
        ("Hello", [HELLO]),
        ("Hello", [HELLO, WAVE[0]]),
        ("Hello🌊", [HELLO, *WAVE]),
        ("Hello🌊", [HELLO, *WAVE]),  # with the finish, which came alone
    ]
    assert transcoder.end(0) == b"data: [DONE]\n\n"


def test_text_is_escaped_as_json_needs_it() -> None:
    tokens = ids('"', "\\", "\n", bytes([1]), bytes.fromhex("e4bd"), bytes.fromhex("a0"))
    for transcoder in (chat(), completions(), generate()):
        out = whole(transcoder, stream_of([[one] for one in tokens]))
        said = chunks(out)[-1]["text"] if "meta_info" in chunks(out)[0] else text_of(out)
        assert said == '"\\\n\x01你'


# -- what ends an answer ------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_before_the_engine_does() -> None:
    transcoder = chat(stop=["STOP"], stream_options={"include_usage": True})
    transcoder.prefilled(prefill_of([HELLO, WORLD]))
    out = transcoder.feed(reply([chunk([RIVER]), chunk(ids(" STO")), chunk(ids("PED")), chunk([HELLO])]))
    assert transcoder.stopped
    assert transcoder.complete
    said = events(out)
    assert text_of(out) == " river "
    assert said[-2]["choices"][0]["finish_reason"] == "stop"
    assert said[-2]["choices"][0]["stop_reason"] == "STOP"
    assert said[-1]["usage"]["completion_tokens"] == 3
    assert transcoder.feed(reply([chunk([WORLD])])) == b""
    assert transcoder.end(1, "cancelled, as asked for") == b""
    assert transcoder.failed is None


def test_a_stop_string_may_be_left_in_the_text() -> None:
    transcoder = completions(stop=["STOP"], include_stop_str_in_output=True)
    assert text_of(transcoder.feed(reply([chunk(ids(" STO", "PED", "Hello"))]))) == " STOP"
    assert transcoder.stopped


def test_what_may_begin_a_stop_string_is_given_out_at_the_end() -> None:
    transcoder = chat(stop=["STOP"])
    assert text_of(transcoder.feed(reply([chunk(ids(" STO"))]))) == " "
    assert text_of(transcoder.feed(reply([complete(ids(" STO"))]))) == "STO"


def test_tokens_behind_the_one_that_stops_do_not_count() -> None:
    fields = {"stop": ["STOP"], "logprobs": True, "return_token_ids": True}
    tokens = ids("Hello", " STO", "P", " world")
    for messages in (stream_of([tokens], alternatives=0), stream_of([[one] for one in tokens], alternatives=0)):
        out = chat(**fields).feed(reply(messages))
        choices = [one["choices"][0] for one in chunks(out)][1:]
        assert [token for choice in choices for token in choice["token_ids"]] == tokens[:3]
        assert sum(len(choice["logprobs"]["content"]) for choice in choices) == 3


def test_a_stop_string_of_a_body() -> None:
    transcoder = chat(stream=False, stop=["STOP"])
    body = json.loads(
        transcoder.feed(reply([complete(ids("Hello", "STOP", " world"), "stop", matched_stop_str="STOP")]))
    )
    assert transcoder.stopped
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["stop_reason"] == "STOP"
    assert body["usage"]["completion_tokens"] == 2


def test_the_end_of_text_has_no_text() -> None:
    transcoder = chat(skip_special_tokens=False)
    out = transcoder.feed(reply([chunk([HELLO])]))
    assert transcoder.feed(reply([chunk([EOS])])) == b""  # until it is known whether it is the end
    out += transcoder.feed(reply([complete([EOS], "stop")]))
    assert text_of(out) == "Hello"
    assert chunks(out)[-1]["choices"][0] | {"delta": None} == {
        "index": 0,
        "delta": None,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
    }


def test_what_looks_like_the_end_and_is_not_is_given_out() -> None:
    transcoder = chat(skip_special_tokens=False, logprobs=True)
    messages = [*(chunk([one], 0) for one in (EOS, HELLO, EOS)), complete([EOS], "length", 0)]
    out = b"".join(transcoder.feed(reply([message])) for message in messages)
    assert text_of(out) == "</s>Hello</s>"
    rows = [row for one in chunks(out) for row in (one["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [row["token"] for row in rows] == ["</s>", "Hello", "</s>"]


def test_an_ignored_end_of_text_is_a_token_as_any() -> None:
    out = chat(ignore_eos=True, skip_special_tokens=False).feed(reply([chunk([EOS])]))
    assert text_of(out) == "</s>"


def test_an_end_that_only_the_engine_knows_has_no_text_either() -> None:
    transcoder = chat(stream=False)
    body = json.loads(whole(transcoder, [complete([HELLO, RIVER], "stop", matched_token_id=RIVER)]))
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["stop_reason"] == RIVER


def test_an_engines_stop_string_is_told() -> None:
    out = chat().feed(reply(stream_of([[HELLO]], "stop", matched_stop_str="by the engine")))
    assert chunks(out)[-1]["choices"][0]["stop_reason"] == "by the engine"


def sglang_stream(tokens: list[int], finish: str, **more: Any) -> list[Any]:
    said = [
        sglang_pb.GenerateResponse(
            chunk=sglang_pb.GenerateStreamChunk(token_ids=[one], prompt_tokens=2, completion_tokens=at + 1)
        )
        for at, one in enumerate(tokens)
    ]
    last = sglang_pb.GenerateComplete(
        output_ids=tokens[-1:], finish_reason=finish, prompt_tokens=2, completion_tokens=len(tokens), **more
    )
    return [*said, sglang_pb.GenerateResponse(complete=last)]


@pytest.mark.parametrize(
    ("fields", "end", "told", "stop_reason", "matched_stop"),
    [
        ({}, EOS, {"matched_token_id": EOS}, None, EOS),
        ({"stop_token_ids": [RIVER]}, RIVER, {"matched_token_id": RIVER}, RIVER, RIVER),
        ({"stop": ["STOP"]}, ids("STOP")[0], {"matched_stop_str": "STOP"}, "STOP", "STOP"),
    ],
)
def test_sglang_says_what_it_matched(
    fields: Any, end: int, told: Any, stop_reason: object, matched_stop: object
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    transcoder = transcoder_of(asked_of(CHAT, body), engine=engine_of("sglang"))
    out = transcoder.feed(reply(sglang_stream([HELLO, end], "stop", **told)))
    last = [one for one in chunks(out) if one["choices"]][-1]["choices"][0]
    assert (last["stop_reason"], last["matched_stop"]) == (stop_reason, matched_stop)
    assert text_of(out) == "Hello"


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish", "told", "expected"),
    [
        ({}, [HELLO, EOS], "stop", {"matched_token_id": EOS}, {"type": "stop", "matched": EOS}),
        ({"max_new_tokens": 2}, [HELLO, WORLD], "length", {}, {"type": "length", "length": 2}),
        ({"stop": "STOP"}, ids("Hello", "STOP"), "stop", {}, {"type": "stop", "matched": "STOP"}),
        ({"max_new_tokens": 0}, [HELLO], "length", {}, {"type": "length", "length": 0}),
    ],
)
def test_generate_says_why_it_ended(sampling: Any, tokens: Any, finish: str, told: Any, expected: Any) -> None:
    asked = asked_of("/generate", {"text": "Hello world", "stream": True, "sampling_params": sampling})
    transcoder = transcoder_of(asked, engine=engine_of("sglang"))
    last = chunks(transcoder.feed(reply(sglang_stream(tokens, finish, **told))))[-1]
    assert last["meta_info"]["finish_reason"] == expected
    if expected["type"] == "length":
        assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) == expected["length"]


def test_vllms_unnamed_end_of_text_is_named_by_generate() -> None:
    last = chunks(generate().feed(reply(stream_of([[HELLO], [EOS]], "stop"))))[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_an_end_that_tokenspeed_leaves_out_counts() -> None:
    pb = tokenspeed_pb
    messages = [
        pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[HELLO], prompt_tokens=2, completion_tokens=1)),
        pb.GenerateResponse(
            complete=pb.GenerateComplete(
                finish_reason="stop", prompt_tokens=2, completion_tokens=2, matched_token_id=EOS
            )
        ),
    ]
    asked = asked_of(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    body = json.loads(whole(transcoder_of(asked, engine=engine_of("tokenspeed")), messages))
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["matched_stop"] == EOS
    assert body["usage"]["completion_tokens"] == 2


# -- usage --------------------------------------------------------------------------------------------------------


def test_the_prompts_counts_are_the_prefills_and_the_outputs_the_decodes() -> None:
    transcoder = chat(stream_options={"include_usage": True})
    transcoder.feed(reply([chunk([HELLO])]))
    transcoder.prefilled(prefill_of([HELLO] * 7, cached=4))
    transcoder.feed(reply([chunk([WORLD]), complete([WORLD])]))
    assert chunks(transcoder.end(0))[-1]["usage"] == {
        "prompt_tokens": 7,
        "total_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_without_a_prefill_all_counts_are_the_decodes() -> None:
    transcoder = chat(stream=False)
    transcoder.prefilled(None)
    usage = json.loads(whole(transcoder, [complete([HELLO])]))["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (2, {"cached_tokens": 2})


def test_reasoning_tokens_are_told_where_there_are_some() -> None:
    messages = sglang_stream([HELLO, WORLD], "length", reasoning_tokens=1)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for stream in (False, True):
        fields = body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
        out = whole(transcoder_of(asked_of(CHAT, fields), engine=engine_of("sglang")), messages)
        usage = (chunks(out)[-1] if stream else json.loads(out))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}


# -- errors -------------------------------------------------------------------------------------------------------

STATUSES = [(1, 502), (3, 400), (4, 504), (5, 404), (8, 429), (12, 501), (13, 500), (14, 503), (16, 401), (99, 500)]


@pytest.mark.parametrize(("grpc", "http"), STATUSES)
def test_a_status_before_the_first_byte_is_raised(grpc: int, http: int) -> None:
    transcoder = chat()
    with pytest.raises(GatewayError, match="as the worker says") as caught:
        transcoder.end(grpc, "as the worker says")
    assert caught.value.status == caught.value.answered == http
    assert transcoder.complete
    assert transcoder.failed is caught.value
    assert transcoder.end(grpc) == b""


def test_a_constraint_that_cannot_be_kept_is_the_requests_fault() -> None:
    with pytest.raises(GatewayError) as caught:
        chat().end(9, "no", constraint=True)
    assert caught.value.status == 422


def ended_with_an_error(out: bytes, code: str) -> bool:
    last = chunks(out)[-1]
    return last["error"]["code"] == code and b"[DONE]" not in out and out.endswith(b"}\n\n")


@pytest.mark.parametrize("transcoder", [chat(), completions(), generate()], ids=["chat", "completions", "generate"])
def test_a_status_behind_the_first_byte_is_an_event_and_the_end(transcoder: Transcoder) -> None:
    transcoder.feed(reply([chunk([HELLO])]))
    out = transcoder.end(13, "gone")
    assert ended_with_an_error(out, "decode_failed")
    assert transcoder.complete
    assert transcoder.failed is not None
    assert transcoder.feed(reply([chunk([HELLO])])) == b""
    assert transcoder.end(0) == b""


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_a_sequence_that_was_broken_off_is_no_answer(finish: str) -> None:
    for stream in (False, True):
        with pytest.raises(GatewayError) as caught:
            chat(stream=stream).feed(reply([complete([HELLO], finish)]))
        assert caught.value.fault.code == "decode_failed"
    transcoder = chat()
    transcoder.feed(reply([chunk([HELLO])]))
    assert ended_with_an_error(transcoder.feed(reply([complete([HELLO], finish)])), "decode_failed")


BAD = {
    "compressed": PREFIX.pack(1, 1) + b"x",
    "too long": PREFIX.pack(0, 1 << 30),
    "no message": frame(b"\xff\xff"),
    "an empty message": frame(b""),
    "beyond the vocabulary": reply([chunk([len(TOKENS)])]),
    "goes on behind the end": reply([complete([HELLO]), chunk([HELLO])]),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        chat().feed(data)
    assert caught.value.fault.code == "decode_bad_reply"
    transcoder = chat()
    transcoder.feed(reply([chunk([WORLD])]))
    assert ended_with_an_error(transcoder.feed(data), "decode_bad_reply")


def test_tokens_of_the_model_that_the_tokenizer_has_not_have_no_text() -> None:
    """Models have some more, to fill up."""
    more, body = len(TOKENS) + 2, {"messages": [{"role": "user", "content": "hi"}]}
    for stream in (True, False):
        transcoder = transcoder_of(asked_of(CHAT, body | {"stream": stream}), vocabulary=more)
        given = transcoder.feed(reply([chunk([HELLO, more - 1]), complete([HELLO, more - 1])])) + transcoder.end(0)
        assert b"error" not in given
        assert b'"Hello"' in given
    with pytest.raises(GatewayError):
        transcoder_of(asked_of(CHAT, body), vocabulary=more).feed(reply([chunk([more])]))


def test_a_body_of_tokens_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(GatewayError) as caught:
        chat(stream=False).feed(reply([complete([HELLO, len(TOKENS)])]))
    assert caught.value.fault.code == "decode_bad_reply"


def test_what_is_certain_before_the_error_is_still_given_out() -> None:
    transcoder = chat()
    transcoder.feed(reply([chunk([HELLO])]))
    out = transcoder.feed(reply([chunk([WORLD])]) + BAD["compressed"])
    assert [one["choices"][0]["delta"]["content"] for one in chunks(out)[:-1]] == [" world"]
    assert ended_with_an_error(out, "decode_bad_reply")


@pytest.mark.parametrize("data", [b"", reply([chunk([HELLO])]), reply([complete([HELLO])])[:-1]])
def test_a_reply_that_ends_too_soon_is_no_answer(data: bytes) -> None:
    transcoder = chat(stream=False)
    transcoder.feed(data)
    with pytest.raises(GatewayError) as caught:
        transcoder.end(0)
    assert caught.value.fault.code == "decode_bad_reply"


def test_an_error_from_outside_ends_the_answer_in_the_same_way() -> None:
    transcoder = chat()
    error = GatewayError("prefill_failed", "the prefill worker is gone")
    with pytest.raises(GatewayError):
        transcoder.fail(error)
    transcoder = chat()
    transcoder.feed(reply([chunk([HELLO])]))
    assert ended_with_an_error(transcoder.fail(error), "prefill_failed")
    assert transcoder.fail(error) == b""


# -- what the prefill knows ---------------------------------------------------------------------------------------


def test_an_answer_that_begins_with_what_the_prefill_knows_waits_for_it() -> None:
    transcoder = completions(echo=True, logprobs=1)
    assert transcoder.waits
    assert transcoder.feed(reply([chunk([RIVER], 2)])) == b""
    transcoder.prefilled(prefill_of([HELLO, WORLD], logprobs=True))
    assert not transcoder.waits
    out = transcoder.feed(reply([chunk([HELLO], 2)]))
    (said,) = chunks(out)
    assert said["choices"][0]["text"] == "Hello world riverHello"
    assert said["choices"][0]["logprobs"]["tokens"] == ["Hello", " world", " river", "Hello"]
    assert said["choices"][0]["logprobs"]["text_offset"] == [0, 5, 11, 17]
    assert said["choices"][0]["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_prefill_may_answer_last(stream: bool) -> None:  # noqa: FBT001
    transcoder = completions(echo=True, logprobs=1, stream=stream)
    messages = stream_of([[RIVER]], alternatives=2) if stream else [complete([RIVER], alternatives=2)]
    assert whole(transcoder, messages) == b""
    assert not transcoder.complete
    transcoder.prefilled(prefill_of([HELLO, WORLD], logprobs=True))
    out = transcoder.feed(b"")
    assert transcoder.complete
    choice = (events(out)[0] if stream else json.loads(out))["choices"][0]
    assert choice["text"] == "Hello world river"
    assert choice["finish_reason"] == "length"


def test_a_stop_string_waits_for_the_prefill_too() -> None:
    transcoder = completions(echo=True, logprobs=1, stop=["STOP"])
    assert transcoder.feed(reply([chunk(ids("STOP"), 2)])) == b""
    assert transcoder.stopped
    assert not transcoder.complete
    assert transcoder.feed(reply([chunk([RIVER], 2)])) == b""
    transcoder.prefilled(prefill_of([HELLO, WORLD], logprobs=True))
    assert text_of(transcoder.feed(b"")) == "Hello world"
    assert transcoder.complete


def test_a_prefill_that_does_not_tell_what_was_asked_for_fails_the_answer() -> None:
    for transcoder in (completions(echo=True, logprobs=1), chat(stream=False, prompt_logprobs=1)):
        for told in (prefill_of([HELLO, WORLD]), prefill_of([HELLO], logprobs=True)):
            with pytest.raises(GatewayError) as caught:
                transcoder.prefilled(told)
            assert caught.value.fault.code == "decode_bad_reply"


@pytest.mark.parametrize(("start", "rows"), [(0, 2), (1, 1), (2, 0)])
def test_generate_tells_of_the_prompt_from_where_it_was_asked(start: int, rows: int) -> None:
    transcoder = generate(stream=False, return_logprob=True, logprob_start_len=start)
    transcoder.prefilled(prefill_of([HELLO, WORLD][start:], logprobs=start < 2))
    meta = json.loads(whole(transcoder, [complete([RIVER], alternatives=0)]))["meta_info"]
    assert len(meta["input_token_logprobs"]) == rows


def test_without_a_prefill_the_decode_tells_of_the_prompt() -> None:
    for transcoder in (chat(stream=False, prompt_logprobs=1), completions(stream=False, prompt_logprobs=1)):
        message = complete([RIVER])
        prompt = message.complete.input_logprobs
        prompt.token_ids.extend([HELLO, WORLD])
        prompt.token_logprobs.add()
        prompt.token_logprobs.add(value=-0.5)
        assert transcoder.feed(reply([message])) == b""
        transcoder.prefilled(None)
        body = json.loads(transcoder.end(0))
        told = body["prompt_logprobs"] if "message" in body["choices"][0] else body["choices"][0]["prompt_logprobs"]
        assert told == [None, {str(WORLD): {"logprob": -0.5, "rank": None, "decoded_token": " world"}}]


def test_a_stream_of_chat_does_not_wait_for_what_it_does_not_show() -> None:
    assert not chat(prompt_logprobs=0).waits
    assert not completions(prompt_logprobs=0).waits
    assert generate(return_logprob=True, logprob_start_len=0).waits
    assert not generate(return_logprob=True).waits


def test_an_echo_of_token_ids_is_their_text() -> None:
    prompt = Prepared("", (HELLO, WORLD))
    transcoder = transcoder_of(asked_of(COMPLETIONS, {"prompt": [HELLO, WORLD], "echo": True}), prompt)
    assert json.loads(whole(transcoder, [complete([RIVER])]))["choices"][0]["text"] == "Hello world river"


def test_generate_tells_its_times_where_it_knows_them() -> None:
    times = iter([10.0, 10.5, 12.0])
    asked = asked_of("/generate", {"text": "hi", "stream": True})
    transcoder = transcoder_of(asked, now=lambda: next(times))
    first, last = (one["meta_info"] for one in (*chunks(transcoder.feed(reply([chunk([HELLO])]))), *chunks(
        transcoder.feed(reply([complete([HELLO])]))
    )))  # fmt: skip
    assert first["response_sent_to_client_ts"] == 10.5
    assert "e2e_latency" not in first
    assert last["e2e_latency"] == 2.0
