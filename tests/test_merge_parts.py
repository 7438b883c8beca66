"""Into which legs a request is split, what they are asked for, and how answers that no engine gave are merged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.apis.json_object import Edits
from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.errors import GatewayError
from extproc.merge.answer import joined_answer
from extproc.merge.parts import Joint, Split, joint_of, leg_edits

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]


def request(path: str, raw: bytes = b"", **fields: Any) -> InferenceRequest:
    prompts: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TOKENS: {"token_ids": [1]}}
    own = prompts.get(path, {"prompt": "p"})
    return InferenceRequest.read(APIS[path], raw or json.dumps(own | fields).encode())


def applied(asked: InferenceRequest, edits: Edits) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asked.body.edited(edits.put, edits.drop))
    return body


def legs(asked: InferenceRequest, part: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    edits = leg_edits(asked, joint_of(asked, "vllm"), part)
    return applied(asked, edits.prefill), applied(asked, edits.decode)


# -- the split ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "split", "parts"),
    [
        ({"prompt": "a"}, Split.NONE, 1),
        ({"prompt": [1, 2, 3]}, Split.NONE, 1),
        ({"prompt": ["a"]}, Split.NONE, 1),
        ({"prompt": [[1, 2]]}, Split.NONE, 1),
        ({"prompt": ["a", "b", "c"]}, Split.PROMPTS, 3),
        ({"prompt": [[1, 2], [3]]}, Split.PROMPTS, 2),
        ({"prompt": ["a", "b"], "n": 2}, Split.NONE, 1),  # served by the decode worker alone
    ],
)
def test_vllm_splits_lists_of_prompts(fields: dict[str, Any], split: Split, parts: int) -> None:
    joint = joint_of(request(COMPLETIONS, **fields), "vllm")
    assert (joint.split, joint.parts) == (split, parts)


def test_sglang_splits_samples() -> None:
    asked = request(COMPLETIONS, prompt=["a", "b"], n=3, echo=True, logprobs=1, seed=4)
    joint = joint_of(asked, "sglang")
    assert joint == Joint("sglang", Split.SAMPLES, 3, prompt_logprobs=True)
    edits = leg_edits(asked, joint, 2)
    assert edits.prefill == edits.decode == Edits({"n": b"1", "seed": b"6"})
    assert edits.prompt_logprobs


def test_each_prompt_keeps_its_bytes_and_the_rest_is_the_clients() -> None:
    raw = b'{"prompt":["a\\u00e9" , "b"],"seed":7,"request_id":"mine","top_p":0.10}'
    asked = request(COMPLETIONS, raw)
    edits = leg_edits(asked, joint_of(asked, "vllm"), 0)
    assert edits.prefill == edits.decode == Edits({"prompt": b'"a\\u00e9"'})
    assert asked.body.edited(*edits.decode) == b'{"prompt":"a\\u00e9","seed":7,"request_id":"mine","top_p":0.10}'


# -- who is asked for the prompt's log probabilities -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        (CHAT, {"prompt_logprobs": 0}, True),
        (CHAT, {"prompt_logprobs": -1}, True),
        (CHAT, {"prompt_logprobs": None}, False),
        (CHAT, {"prompt_logprobs": False}, False),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, False),  # nobody would see them
        (CHAT, {"prompt_logprobs": 1, "n": 2}, False),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, False),
        (COMPLETIONS, {"prompt_logprobs": 2}, True),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, True),
        (COMPLETIONS, {"echo": True, "logprobs": 2, "stream": True}, True),
        (COMPLETIONS, {"echo": True, "logprobs": None}, False),
        (COMPLETIONS, {"echo": False, "logprobs": 2}, False),
        (COMPLETIONS, {"logprobs": 2}, False),
        (TOKENS, {"sampling_params": {"prompt_logprobs": 0}}, True),
        (TOKENS, {"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, True),
        (TOKENS, {"sampling_params": {"prompt_logprobs": 1}, "stream": True}, False),
        (TOKENS, {"sampling_params": {"logprobs": 1}}, False),
        ("/v1/messages", {"messages": MESSAGES, "prompt_logprobs": 1}, False),
    ],
)
def test_prompt_logprobs_are_wanted(path: str, fields: dict[str, Any], *, wanted: bool) -> None:
    asked = request(path, **fields)
    joint = joint_of(asked, "vllm")
    assert joint.prompt_logprobs is wanted
    assert leg_edits(asked, joint, 0).prompt_logprobs is wanted


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("number", [1, -1])
def test_prompt_logprobs_in_a_stream_are_refused_as_by_the_engine(path: str, number: int) -> None:
    with pytest.raises(GatewayError) as caught:
        joint_of(request(path, prompt_logprobs=number, stream=True), "vllm")
    assert (caught.value.status, caught.value.param) == (400, "prompt_logprobs")


def test_the_decode_is_not_asked_for_prompt_logprobs() -> None:
    prefill, decode = legs(request(CHAT, prompt_logprobs=1, logprobs=True))
    assert prefill["prompt_logprobs"] == 1
    assert decode == {"messages": MESSAGES, "logprobs": True}


def test_the_decode_of_token_ids_is_not_asked_for_them_either() -> None:
    params = {"max_tokens": 9, "prompt_logprobs": 1, "prompt_logprob_token_ids": [[1]], "logprobs": 1}
    prefill, decode = legs(request(TOKENS, sampling_params=params))
    assert prefill["sampling_params"] == params
    assert decode["sampling_params"] == {"max_tokens": 9, "logprobs": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_is_the_prefills(*, stream: bool) -> None:
    asked = request(COMPLETIONS, prompt=["a", "b"], echo=True, logprobs=2, max_tokens=9, stream=stream)
    prefill, decode = legs(asked, 1)
    common = {"prompt": "b", "logprobs": 2, "stream": stream}
    assert prefill == {**common, "echo": True, "max_tokens": 0}
    assert decode == {**common, "max_tokens": 9} | ({"return_token_ids": True} if stream else {})


def test_an_echo_of_chosen_token_ids_lists_all_candidates_of_the_prompt() -> None:
    fields: dict[str, Any] = {
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 3,
        "logprob_token_ids": [5],
        "return_token_ids": True,
    }
    prefill, decode = legs(request(COMPLETIONS, **fields))
    assert prefill == {
        "prompt": "p",
        "echo": True,
        "logprobs": 3,
        "prompt_logprobs": 3,
        "return_token_ids": True,
        "max_tokens": 0,
    }
    assert decode == {"prompt": "p", "logprobs": 1, "logprob_token_ids": [5], "return_token_ids": True}


def test_an_echo_without_logprobs_is_left_to_the_decode() -> None:
    prefill, decode = legs(request(COMPLETIONS, prompt=["a", "b"], echo=True))
    assert prefill == decode == {"prompt": "a", "echo": True}


def test_without_prefills_the_decodes_are_asked_for_all() -> None:
    asked = request(COMPLETIONS, prompt=["a", "b"], echo=True, logprobs=2)
    joint = joint_of(asked, "vllm").without_prefills()
    assert applied(asked, leg_edits(asked, joint, 1).decode) == {"prompt": "b", "echo": True, "logprobs": 2}
    answer = joined_answer(asked, joint)
    assert not answer.needs_prefill
    for part in range(2):
        answer.decode_data(part, json.dumps(completion(1, 1, 0)).encode())
        out = answer.decode_done(part)
    assert answer.complete
    assert [choice["index"] for choice in json.loads(out)["choices"]] == [0, 1]


# -- answers -----------------------------------------------------------------------------------------------------------


def completion(prompt: int, output: int, cached: int) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "created_cache_tokens": None},
        "completion_tokens_details": None,
    }
    return {
        "id": "cmpl-x",
        "model": "m",
        "choices": [{"index": 0, "text": "t", "finish_reason": "stop"}],
        "usage": usage,
        "kv_transfer_params": {"remote_host": "secret"},
        "metrics": {"time": 1.5},
    }


def test_usage_is_summed_and_what_was_cached_is_the_prefills() -> None:
    asked = request(COMPLETIONS, prompt=["a", "b"])
    answer = joined_answer(asked, joint_of(asked, "vllm"))
    assert not answer.needs_prefill
    for part in range(2):
        assert answer.prefill_done(part, json.dumps(completion(7 + part, 1, 3 + part)).encode()) == b""
        answer.decode_data(part, json.dumps(completion(7 + part, 5, 6)).encode())
        out = answer.decode_done(part)
    merged = json.loads(out)
    assert merged["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 10,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 7, "created_cache_tokens": None},
        "completion_tokens_details": None,
    }
    assert merged["kv_transfer_params"] is None
    assert merged["metrics"] is None


def test_answers_without_details_are_merged_without() -> None:
    asked = request(COMPLETIONS, prompt=["a", "b"])
    answer = joined_answer(asked, joint_of(asked, "vllm"))
    usage = b'{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,"prompt_tokens_details":null}'
    for part in range(2):
        answer.decode_data(part, b'{"choices":[{"index":0}],"usage":%b}' % usage)
        out = answer.decode_done(part)
    assert json.loads(out)["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": None,
    }


def test_an_error_in_one_prompts_stream_ends_the_answer() -> None:
    asked = request(COMPLETIONS, prompt=["a", "b"], stream=True)
    answer = joined_answer(asked, joint_of(asked, "vllm"))
    error = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'
    assert answer.decode_data(1, error + b"data: [DONE]\n\n") == error + b"data: [DONE]\n\n"
    assert answer.complete


def echoed(text: str, tokens: list[str], prompt_tokens: int) -> bytes:
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    logprobs = {"text_offset": offsets, "tokens": tokens, "token_logprobs": [None, *[-1.0] * (len(tokens) - 1)]}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1}
    return json.dumps({"choices": [{"index": 0, "text": text, "logprobs": logprobs}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("prefill", "text"),
    [
        (echoed("é\n", ["<s>", "é", "\n"], 3), "é\nout"),
        (echoed("é\nnext", ["<s>", "é", "\n", "next"], 3), "é\nout"),  # of a leg that was asked for a token
        (echoed("é\n", ["<s>", "é", "\n", "</s>"], 3), "é\nout"),  # which shows in no text
    ],
)
def test_an_echos_lists_begin_with_the_prompts(prefill: bytes, text: str) -> None:
    asked = request(COMPLETIONS, echo=True, logprobs=0)
    answer = joined_answer(asked, joint_of(asked, "vllm"))
    answer.decode_data(0, echoed("out", ["o", "ut"], 3))
    assert answer.decode_done(0) == b""
    choice = json.loads(answer.prefill_done(0, prefill))["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"] == ["<s>", "é", "\n", "o", "ut"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "prefill",
    [
        b"",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{"index":0,"text":"p","logprobs":null}],"usage":{"prompt_tokens":1}}',
        echoed("p", ["p"], 2),
        echoed("p", [], 0),
        echoed("p", ["p"], 1).replace(b'"text": "p"', b'"text": null'),
        echoed("p", ["p"], 1).replace(b'"usage"', b'"usages"'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prefill_answers_that_cannot_be_merged(prefill: bytes, *, stream: bool) -> None:
    asked = request(COMPLETIONS, echo=True, logprobs=0, stream=stream)
    answer = joined_answer(asked, joint_of(asked, "vllm"))
    whole = echoed("out", ["out"], 1)
    answer.decode_data(0, b"data: %b\n\ndata: [DONE]\n\n" % whole if stream else whole)
    answer.decode_done(0)
    with pytest.raises(GatewayError) as caught:
        answer.prefill_done(0, prefill)
    assert caught.value.fault.code == "decode_bad_reply"
