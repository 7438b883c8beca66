"""Answers of several samples: any order and cut gives one well-formed answer; what cannot be merged is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_answers import accumulated, events, without_run

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.errors import GatewayError
from extproc.merge.answer import JoinedAnswer, joined_answer

PATIENT = settings(deadline=None, max_examples=50)  # machines that run this may be busy
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENS = st.lists(st.text(max_size=4), min_size=1, max_size=5)
# Texts of 1 to 3 samples of 1 to 3 prompts each.
TEXTS = st.integers(1, 3).flatmap(
    lambda prompts: st.lists(st.lists(TOKENS, min_size=prompts, max_size=prompts), min_size=2, max_size=4)
)


def request(path: str, prompts: int, samples: int, **fields: Any) -> InferenceRequest:
    body: dict[str, Any] = {"stream": True, **fields}
    if path == CHAT:
        body |= {"messages": [], "n": samples}
    elif path == COMPLETIONS:
        body |= {"prompt": ["p"] * prompts, "n": samples}
    else:
        body |= {"text": ["p"] * prompts, "sampling_params": {"n": samples}}
    return InferenceRequest.read(APIS[path], json.dumps(body).encode())


def usage(prompts: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 10 * prompts,
        "total_tokens": 10 * prompts + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": 4},
        "reasoning_tokens": completion // 2,
        "completion_tokens_details": {"reasoning_tokens": completion // 2},
    }


def openai_stream(sample: int, texts: list[list[str]]) -> bytes:
    """One sample's stream of text completions: a usage chunk at the end."""
    head = {"id": f"id{sample}", "object": "text_completion", "created": 100 + sample, "model": "m"}
    chunks: list[Any] = [
        head | {"choices": [{"index": prompt, "text": token, "finish_reason": None}]}
        for prompt, tokens in enumerate(texts)
        for token in tokens
    ]
    chunks += [
        head | {"choices": [{"index": prompt, "text": "", "finish_reason": "stop"}]} for prompt in range(len(texts))
    ]
    chunks.append(head | {"choices": [], "usage": usage(len(texts), sum(map(len, texts)))})
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def openai_body(sample: int, texts: list[list[str]]) -> bytes:
    choices = [
        {"index": prompt, "text": "".join(tokens), "finish_reason": "stop"} for prompt, tokens in enumerate(texts)
    ]
    body = {"id": f"id{sample}", "object": "text_completion", "created": 100 + sample, "model": "m", "choices": choices}
    return json.dumps(body | {"usage": usage(len(texts), sum(map(len, texts)))}).encode()


def feed(answer: JoinedAnswer, streams: list[bytes], order: st.DataObject) -> bytes:
    """Feed the samples' streams in an interleaving and with cuts that hypothesis chooses."""
    left = dict(enumerate(streams))
    out = b""
    while left:
        sample = order.draw(st.sampled_from(sorted(left)))
        size = order.draw(st.integers(0, len(left[sample])))
        if size == 0 and not left[sample]:
            out += answer.decode_done(sample)
            del left[sample]
            continue
        size = size or len(left[sample])
        out += answer.decode_data(sample, left[sample][:size])
        left[sample] = left[sample][size:]
    return out


@PATIENT
@given(TEXTS, st.data())
def test_a_merged_stream_accumulates_to_the_merged_body(texts: list[list[list[str]]], order: st.DataObject) -> None:
    prompts, samples = len(texts[0]), len(texts)
    streams = [openai_stream(sample, texts[sample]) for sample in range(samples)]
    answer = joined_answer(request(COMPLETIONS, prompts, samples))
    merged = feed(answer, streams, order)
    assert answer.complete
    assert len({chunk["id"] for chunk in events(merged)}) == 1

    whole = joined_answer(request(COMPLETIONS, prompts, samples, stream=False))
    bodies = [openai_body(sample, texts[sample]) for sample in range(samples)]
    body = json.loads(feed(whole, bodies, order))
    got = accumulated(merged)
    assert [got["choices"][index] for index in sorted(got["choices"])] == body["choices"]
    assert [chunk["usage"] for chunk in got["once"]] == [without_run(body["usage"])]
    assert [choice["text"] for choice in body["choices"]] == [
        "".join(texts[sample][prompt]) for prompt in range(prompts) for sample in range(samples)
    ]


@PATIENT
@given(TEXTS)
def test_usage_counts_the_prompt_once_and_sums_the_rest(texts: list[list[list[str]]]) -> None:
    prompts, samples = len(texts[0]), len(texts)
    answer = joined_answer(request(COMPLETIONS, prompts, samples, stream=False))
    out = b""
    for sample in range(samples):
        answer.decode_data(sample, openai_body(sample, texts[sample]))
        out += answer.decode_done(sample)
    counts = [sum(map(len, sample)) for sample in texts]
    assert json.loads(out)["usage"] == usage(prompts, 0) | {
        "completion_tokens": sum(counts),
        "total_tokens": 10 * prompts + sum(counts),
        "reasoning_tokens": sum(count // 2 for count in counts),
        "completion_tokens_details": {"reasoning_tokens": sum(count // 2 for count in counts)},
    }


@PATIENT
@given(TEXTS, st.data())
def test_generate_items_are_numbered_prompt_major(texts: list[list[list[str]]], order: st.DataObject) -> None:
    prompts, samples = len(texts[0]), len(texts)
    streams = []
    for sample in texts:
        chunks = [
            {"text": "".join(tokens[: end + 1]), "index": prompt}
            for prompt, tokens in enumerate(sample)
            for end in range(len(tokens))
        ]
        streams.append(b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n")
    merged = accumulated(feed(joined_answer(request(GENERATE, prompts, samples)), streams, order))["choices"]
    assert [merged[index]["text"] for index in range(prompts * samples)] == [
        "".join(texts[sample][prompt]) for prompt in range(prompts) for sample in range(samples)
    ]


def test_generate_batches_are_interleaved() -> None:
    answer = joined_answer(request(GENERATE, 2, 2, stream=False))
    answer.decode_data(0, b'[{"text":"a0"}, {"text":"b0"}]')
    answer.decode_data(1, b'[{"text":"a1"},{"text":"b1", "x":1.10}]')
    assert answer.decode_done(1) == b""
    assert answer.decode_done(0) == b'[{"text":"a0"},{"text":"a1"},{"text":"b0"},{"text":"b1", "x":1.10}]'


def test_extensions_are_listed_per_sample() -> None:
    def body(ids: list[int], accepted: int) -> bytes:
        ext = {"input_ids": [1, 2], "output_ids": [ids], "spec_tokens_details": {"accepted": accepted}}
        return json.dumps({"id": "i", "choices": [{"index": 0}], "sglext": ext}).encode()

    answer = joined_answer(request(CHAT, 1, 2, stream=False))
    answer.decode_data(0, body([3], 5))
    answer.decode_data(1, body([4, 5], 6))
    answer.decode_done(0)
    assert json.loads(answer.decode_done(1))["sglext"] == {
        "input_ids": [1, 2],
        "output_ids": [[3], [4, 5]],
        "spec_tokens_details": [{"accepted": 5}, {"accepted": 6}],
    }


def test_what_a_stream_has_once_is_in_the_order_of_samples() -> None:
    def stream(prompt_tokens: int, ids: list[int]) -> bytes:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
        chunks = [{"choices": [], "sglext": {"output_ids": [ids]}}, {"choices": [], "usage": usage}]
        return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"

    answer = joined_answer(request(CHAT, 1, 2))
    assert answer.decode_data(1, stream(9, [2])) == b""
    assert events(answer.decode_data(0, stream(5, [1]))) == [
        {"choices": [], "sglext": {"output_ids": [[1], [2]]}},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}},
    ]


def test_comments_and_event_names_pass() -> None:
    answer = joined_answer(request(GENERATE, 1, 2))
    assert answer.decode_data(0, b": ping\n\n") == b": ping\n\n"
    assert answer.decode_data(1, b'event: x\ndata: {"a":1}\n\n') == b'event: x\ndata: {"a":1,"index":1}\n\n'


def test_a_multi_line_value_stays_one_event() -> None:
    answer = joined_answer(request(GENERATE, 1, 2))
    out = answer.decode_data(0, b'data: {"a":[1,\ndata: 2]}\n\ndata: [DONE]\n\n') + answer.decode_data(
        1, b"data: [DONE]\n\n"
    )
    assert events(out) == [{"a": [1, 2], "index": 0}]


def test_an_error_event_ends_the_answer() -> None:
    answer = joined_answer(request(CHAT, 1, 2))
    error = b'data: {"error": {"object": "error", "message": "boom", "code": 500}}\n\n'
    assert answer.decode_data(1, error + b"data: [DONE]\n\n") == error + b"data: [DONE]\n\n"
    assert answer.complete
    assert answer.decode_data(0, openai_stream(0, [["x"]])) == b""
    assert answer.decode_done(0) == b""


def test_failing_a_stream_tells_the_client_and_ends_it() -> None:
    answer = joined_answer(request(CHAT, 1, 2))
    answer.decode_data(0, openai_stream(0, [["x"]]))
    error = GatewayError("decode_connection_lost", "gone")
    assert answer.fail(error) == b"data: %b\n\ndata: [DONE]\n\n" % error.body
    assert answer.complete
    assert answer.fail(error) == b""


def refuses(action: Callable[[], None]) -> None:
    with pytest.raises(GatewayError) as caught:
        action()
    assert caught.value.fault.code == "decode_bad_reply"


def refused(answer: JoinedAnswer, *bodies: bytes) -> None:
    def fed() -> None:
        for sample, body in enumerate(bodies):
            answer.decode_data(sample, body)
            answer.decode_done(sample)

    refuses(fed)


GOOD = openai_body(0, [["x"]])


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"Internal Server Error",
        b"[]",
        b'{"choices":null}',
        b'{"choices":[]}',
        b'{"choices":[{"index":1}],"usage":null}',
        b'{"choices":[{"index":0},{"index":1}],"usage":null}',
        b'{"choices":[{"index":"0"}]}',
        b'{"choices":[7]}',
        b'{"choices":[{"index":0}]}',
        b'{"choices":[{"index":0}],"usage":{"completion_tokens":"many"}}',
        b'{"choices":' + b"[" * 100_000,
        GOOD[:-1],
    ],
)
def test_bodies_that_cannot_be_merged(bad: bytes) -> None:
    refused(joined_answer(request(CHAT, 1, 2, stream=False)), GOOD, bad)


@pytest.mark.parametrize("bad", [b'{"text":"one"}', b"[{}]", b"[{},{},{}]", b"[", b'[{},{"a":}]'])
def test_batches_that_cannot_be_merged(bad: bytes) -> None:
    refused(joined_answer(request(GENERATE, 2, 2, stream=False)), b"[{},{}]", bad)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"data: {}\n\n",
        b"data: nonsense\n\n",
        b'data: {"choices":[{"index":"a"}]}\n\n',
        b'data: {"choices":[{"index":0}]}\n\n',  # no [DONE]
        b"data: [DONE]\n\n",  # no usage, which the other sample has
    ],
)
def test_streams_that_cannot_be_merged(bad: bytes) -> None:
    refused(joined_answer(request(CHAT, 1, 2)), openai_stream(0, [["x"]]), bad)


@pytest.mark.parametrize("prefill", [b"", b"[]", b"{}", b'{"choices":[{"logprobs":{}}]}', b'{"meta_info":7}'])
@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_prefill_answers_that_cannot_be_merged(path: str, prefill: bytes, *, stream: bool) -> None:
    fields = {"echo": True, "logprobs": 1} if path == COMPLETIONS else {"return_logprob": True, "logprob_start_len": 0}
    prompt = {"prompt": "p"} if path == COMPLETIONS else {"text": "p"}
    answer = joined_answer(
        InferenceRequest.read(APIS[path], json.dumps({"stream": stream, **prompt, **fields}).encode())
    )
    assert answer.needs_prefill

    def fed() -> None:
        answer.prefill_done(0, prefill)
        answer.decode_data(0, b'{"choices":[{"index":0,"logprobs":{}}],"meta_info":{}}')
        answer.decode_done(0)

    refuses(fed)
