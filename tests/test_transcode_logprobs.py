"""Log probabilities: a row for every token, whatever becomes of its text, and text offsets that are offsets."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2, tokenspeed_scheduler_pb2
from transcode_rig import (
    BOS,
    EOS,
    TOKENS,
    SmallTokenizer,
    asked_of,
    chunk,
    complete,
    ids,
    prefill_of,
    reply,
    transcoder_of,
)

from extproc.engines.table import engine_of
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder
from extproc.transcode.vocabulary import Vocabulary

HELLO, WORLD, RIVER = ids("Hello", " world", " river")
WAVE = ids(bytes.fromhex("f09f"), bytes.fromhex("8c8a"))
BODY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "/v1/completions": {"prompt": "Hello world"},
}


def transcoder(path: str, prompt: Prepared | None = None, **fields: Any) -> Transcoder:
    asked = asked_of(path, BODY[path] | fields)
    return transcoder_of(asked, prompt) if prompt else transcoder_of(asked)


def chat(prompt: Prepared | None = None, **fields: Any) -> Transcoder:
    return transcoder("/v1/chat/completions", prompt, **fields)


def completions(prompt: Prepared | None = None, **fields: Any) -> Transcoder:
    return transcoder("/v1/completions", prompt, **fields)


def logprobs_of(made: Transcoder, messages: list[Any]) -> Any:
    return json.loads(made.feed(reply(messages)) + made.end(0))["choices"][0]["logprobs"]


def test_tokens_whose_text_is_held_back_have_their_rows_at_once() -> None:
    made = chat(stream=True, stop=["river runs"])
    made.feed(reply([chunk([HELLO], 0)]))
    for token in (*WAVE[:1], *ids(" river")):
        out = made.feed(reply([chunk([token], 0)]))
        (row,) = json.loads(out.removeprefix(b"data: "))["choices"][0]["logprobs"]["content"]
        assert row["logprob"] == -token / 8


def test_the_last_token_of_a_character_is_shown_as_all_of_it() -> None:
    tokens = [HELLO, *WAVE, RIVER]
    rows = logprobs_of(chat(), [complete(tokens, alternatives=0)])["content"]
    assert [row["token"] for row in rows] == ["Hello", "", "🌊", " river"]
    assert b"".join(bytes(row["bytes"]) for row in rows) == "Hello🌊 river".encode()
    assert logprobs_of(completions(logprobs=0), [complete(tokens, alternatives=0)]) == {
        "text_offset": [0, 5, 5, 6],
        "token_logprobs": [-token / 8 for token in tokens],
        "tokens": ["Hello", "", "🌊", " river"],
        "top_logprobs": [{text: -token / 8} for text, token in zip(("Hello", "", "🌊", " river"), tokens, strict=True)],
    }


def test_a_stream_has_the_rows_of_the_body() -> None:
    tokens = [HELLO, *WAVE, RIVER, WORLD]
    for path, fields in (("/v1/chat/completions", {"top_logprobs": 2}), ("/v1/completions", {"logprobs": 2})):
        body = logprobs_of(transcoder(path, **fields), [complete(tokens, alternatives=2)])
        made = transcoder(path, **fields, stream=True)
        out = b"".join(made.feed(reply([chunk([token], 2)])) for token in tokens)
        events = [json.loads(event[6:]) for event in out.decode().split("\n\n") if event]
        parts = [one["choices"][0]["logprobs"] for one in events if one["choices"][0]["logprobs"]]
        assert {key: [row for part in parts for row in part[key]] for key in body} == body


def test_what_the_engine_does_not_tell_has_vllms_least_value() -> None:
    message = complete([HELLO, WORLD, RIVER], alternatives=0)
    del message.complete.output_logprobs.token_ids[1], message.complete.output_logprobs.token_logprobs[1]
    rows = logprobs_of(chat(), [message])["content"]
    assert [row["logprob"] for row in rows] == [-HELLO / 8, -9999.0, -RIVER / 8]
    assert [row["token"] for row in rows] == ["Hello", " world", " river"]
    rows = logprobs_of(completions(logprobs=1), [complete([HELLO])])
    assert rows["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -12345.0])
def test_numbers_that_json_has_not_are_vllms_least_value(value: float) -> None:
    message = complete([HELLO], alternatives=2)
    message.complete.output_logprobs.token_logprobs[0] = value
    message.complete.output_logprobs.top_logprobs[0].values[1] = value
    (row,) = logprobs_of(chat(top_logprobs=2), [message])["content"]
    assert [row["logprob"], row["top_logprobs"][1]["logprob"]] == [-9999.0, -9999.0]


def with_tops(token: int, value: float, tops: list[tuple[int, float]]) -> Any:
    message = complete([token], alternatives=0)
    said = message.complete.output_logprobs
    said.token_logprobs[0] = value
    said.top_logprobs.add(token_ids=[one for one, _ in tops], values=[its for _, its in tops])
    return message


@pytest.mark.parametrize(
    ("tops", "expected"),
    [
        # vLLM's server names the token first, and counts it; SGLang's only the likeliest.
        ([(HELLO, -1.0), (WORLD, -2.0)], ["Hello", " world"]),
        ([(HELLO, -1.0), (WORLD, -2.0), (RIVER, -3.0)], ["Hello", " world"]),
        ([(HELLO, -1.0), (WORLD, -0.25), (RIVER, -0.5)], ["Hello", " world", " river"]),
        ([(WORLD, -0.25), (RIVER, -0.5)], ["Hello", " world", " river"]),
        ([(WORLD, -0.25), (HELLO, -1.0)], ["Hello", " world"]),
        ([], ["Hello"]),
    ],
)
def test_completions_list_the_token_and_the_likeliest_beside_it(tops: Any, expected: list[str]) -> None:
    (listed,) = logprobs_of(completions(logprobs=2), [with_tops(HELLO, -1.0, tops)])["top_logprobs"]
    assert list(listed) == expected
    assert listed["Hello"] == -1.0


FIRST, LAST = WAVE
OTHER = ids(bytes.fromhex("e4bd"))[0]
REPLACED = ["\ufffd", "\ufffd\ufffd", "\ufffd"]


@pytest.mark.parametrize(
    ("runtime", "shown"),
    [
        # (completions, chat), of a token that begins a character, one that ends it, and one that would not.
        ("vllm", (["Hello", "", "🌊", ""], ["Hello", "", "🌊", ""])),
        ("sglang", (["Hello", "\xf0\x9f", "\x8c\x8a", "\xe4\xbd"], ["Hello", *REPLACED])),
        ("tokenspeed", (["Hello", *REPLACED], ["Hello", *REPLACED])),
    ],
)
def test_parts_of_characters_are_shown_as_the_engines_own_server_shows_them(
    runtime: str, shown: tuple[list[str], list[str]]
) -> None:
    tokens = [HELLO, FIRST, LAST, OTHER]
    engine = engine_of(runtime)
    bodies = (("/v1/completions", {"logprobs": 0}), ("/v1/chat/completions", {}))
    for (path, fields), expected in zip(bodies, shown, strict=True):
        answer = transcoder_of(asked_of(path, BODY[path] | fields), engine=engine)
        message = complete(tokens, alternatives=0)
        if runtime != "vllm":
            message = of_runtime(runtime, message)
        told = logprobs_of(answer, [message])
        assert (told["tokens"] if "tokens" in told else [row["token"] for row in told["content"]]) == expected


def of_runtime(runtime: str, message: Any) -> Any:
    """The same of another engine's messages, which have fields of the same names."""
    pb = {"sglang": sglang_scheduler_pb2, "tokenspeed": tokenspeed_scheduler_pb2}[runtime]
    said, own = message.complete.output_logprobs, pb.GenerateResponse()
    own.complete.output_ids[:] = message.complete.output_ids
    own.complete.finish_reason = "length"
    own.complete.output_logprobs.token_ids[:] = said.token_ids
    own.complete.output_logprobs.token_logprobs[:] = said.token_logprobs
    return own


def test_an_alternative_that_completes_a_character_is_shown_as_it() -> None:
    message = complete([HELLO, FIRST, RIVER], alternatives=0)
    said = message.complete.output_logprobs
    for token, other in zip(said.token_ids, (LAST, LAST, LAST), strict=True):
        said.top_logprobs.add(token_ids=[token, other], values=[-1.0, -2.0])
    listed = logprobs_of(completions(logprobs=2), [message])["top_logprobs"]
    assert [list(one)[1] if len(one) > 1 else "" for one in listed] == ["", "", "🌊"]
    assert listed[0] == {"Hello": -HELLO / 8, "": -2.0}
    assert listed[1] == {"": -2.0}  # the token itself is half a character, and so is the other


def test_of_alternatives_that_look_alike_the_last_value_counts() -> None:
    (listed,) = logprobs_of(
        completions(logprobs=3), [with_tops(HELLO, -1.0, [(HELLO, -1.0), (FIRST, -2.0), (OTHER, -3.0)])]
    )["top_logprobs"]
    assert listed == {"Hello": -1.0, "": -3.0}


def test_tokens_of_a_prompt_are_shown_by_those_before_but_for_its_first() -> None:
    made = chat(Prepared("", (FIRST, FIRST, LAST)), prompt_logprobs=1)
    made.prefilled(prefill_of([FIRST, FIRST, LAST], logprobs=True))
    told = json.loads(made.feed(reply([complete([RIVER], alternatives=0)])) + made.end(0))["prompt_logprobs"]
    assert [one and one[str(token)]["decoded_token"] for one, token in zip(told, (0, FIRST, LAST), strict=True)] == [
        None,
        "",
        "🌊",
    ]


def test_tokens_may_be_shown_as_their_ids() -> None:
    message = complete([WAVE[0], HELLO], alternatives=2)
    rows = logprobs_of(chat(top_logprobs=2, return_tokens_as_token_ids=True), [message])["content"]
    assert [row["token"] for row in rows] == [f"token_id:{WAVE[0]}", f"token_id:{HELLO}"]
    assert rows[1]["bytes"] == list(b"Hello")
    assert [top["token"] for top in rows[1]["top_logprobs"]] == [f"token_id:{HELLO}", f"token_id:{HELLO + 1}"]
    told = logprobs_of(
        completions(logprobs=1, return_tokens_as_token_ids=True), [complete([HELLO, RIVER], alternatives=2)]
    )
    assert told["tokens"] == [f"token_id:{HELLO}", f"token_id:{RIVER}"]
    assert told["text_offset"] == [0, 5]


def test_an_end_of_text_has_a_row_and_no_room_in_the_text() -> None:
    told = logprobs_of(completions(logprobs=0), [complete([HELLO, EOS], "stop", 0)])
    assert (told["tokens"], told["text_offset"]) == (["Hello", "</s>"], [0, 5])


def echoed(prompt: Prepared, **fields: Any) -> Any:
    made = completions(prompt, echo=True, logprobs=1, **fields)
    made.prefilled(prefill_of(prompt.ids, logprobs=True))
    return json.loads(made.feed(reply([complete([RIVER], alternatives=2)])) + made.end(0))["choices"][0]


def test_offsets_of_an_echo_are_into_the_text_though_the_prompt_has_more_tokens() -> None:
    choice = echoed(Prepared("Hello🌊", (BOS, HELLO, *WAVE)))
    assert choice["text"] == "Hello🌊 river"
    assert choice["logprobs"]["tokens"] == ["<s>", "Hello", "", "🌊", " river"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 5, 6]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -HELLO / 8]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"Hello": -HELLO / 8}]


def test_special_tokens_that_the_client_wrote_are_part_of_the_text() -> None:
    choice = echoed(Prepared("<s>Hello", (BOS, BOS, HELLO)))
    assert choice["logprobs"]["text_offset"] == [0, 3, 3, 8]


def test_a_space_that_only_the_tokenizer_knows_of_shifts_nothing() -> None:
    choice = echoed(Prepared("world river", (BOS, WORLD, RIVER)))
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 11]


def test_an_echo_and_no_more() -> None:
    prompt = Prepared("Hello world", (HELLO, WORLD))
    choice = echoed(prompt, max_tokens=0)
    assert choice["text"] == "Hello world"
    assert choice["logprobs"]["tokens"] == ["Hello", " world"]


def test_prompt_logprobs_tell_ranks_as_far_as_they_are_known() -> None:
    made = chat(Prepared("Hello world river", (HELLO, WORLD, RIVER)), prompt_logprobs=2)
    prefill = prefill_of([HELLO, WORLD, RIVER], logprobs=True)
    assert prefill.prompt_logprobs is not None
    tops = [
        ([], []),
        ([WORLD, HELLO, RIVER], [-WORLD / 8, -1.0, -99.0]),
        ([HELLO, WORLD], [-1.0, -2.0]),
    ]
    made.prefilled(prefill._replace(prompt_logprobs=prefill.prompt_logprobs._replace(tops=tops)))
    told = json.loads(made.feed(reply([complete([RIVER], alternatives=0)])) + made.end(0))["prompt_logprobs"]
    assert told == [
        None,
        {
            str(WORLD): {"logprob": -WORLD / 8, "rank": 2, "decoded_token": " world"},
            str(HELLO): {"logprob": -1.0, "rank": 1, "decoded_token": "Hello"},
        },
        {
            str(RIVER): {"logprob": -RIVER / 8, "rank": None, "decoded_token": " river"},
            str(HELLO): {"logprob": -1.0, "rank": 1, "decoded_token": "Hello"},
            str(WORLD): {"logprob": -2.0, "rank": 2, "decoded_token": " world"},
        },
    ]


def test_generate_shows_texts_where_they_are_asked_for() -> None:
    for texts, shown in ((True, ["Hello", "\ufffd"]), (False, [None, None])):
        asked = asked_of(
            "/generate", {"text": "hi", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": texts}
        )
        made = transcoder_of(asked)
        meta = json.loads(made.feed(reply([complete([HELLO, WAVE[0]], alternatives=2)])) + made.end(0))["meta_info"]
        assert [row[2] for row in meta["output_token_logprobs"]] == shown
        assert [row[:2] for row in meta["output_token_logprobs"]] == [[-HELLO / 8, HELLO], [-WAVE[0] / 8, WAVE[0]]]
        assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2]
        assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []


@pytest.mark.parametrize("names_it", [True, False])  # vLLM's server does, SGLang's does not
def test_generate_tells_the_alternatives_to_a_token_that_was_not_asked_for(*, names_it: bool) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 2, "sampling_params": {"max_new_tokens": 0}}
    for stream in (False, True):
        made = transcoder_of(asked_of("/generate", {"text": "hi", "stream": stream, **fields}))
        messages = (
            [chunk([HELLO], 2), complete([HELLO], alternatives=2)] if stream else [complete([HELLO], alternatives=2)]
        )
        for message in () if names_it else messages:
            kind = message.WhichOneof("response")
            getattr(message, kind).ClearField("token_ids" if kind == "chunk" else "output_ids")
        out = (made.feed(reply(messages)) + made.end(0)).decode().split("data: ")
        meta = json.loads(out[-2] if stream else out[0])["meta_info"]
        assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
        assert [[one[1] for one in row] for row in meta["output_top_logprobs"]] == [[HELLO, HELLO + 1]]


def test_what_is_known_of_a_tokenizer_goes_with_it() -> None:
    gone = SmallTokenizer()
    assert Vocabulary(gone)[HELLO] is Vocabulary(gone)[HELLO]
    assert Vocabulary(gone, as_ids=True)[HELLO].text == b'"token_id:%d"' % HELLO
    kept = weakref.ref(gone)
    del gone
    gc.collect()
    assert kept() is None


def test_the_vocabulary_is_known_of_every_token() -> None:
    tokens = list(range(3, len(TOKENS)))
    rows = logprobs_of(chat(ignore_eos=True), [complete(tokens, alternatives=0)])["content"]
    assert b"".join(bytes(row["bytes"]) for row in rows) == b"".join(TOKENS[3:])
