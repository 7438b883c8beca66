"""Reading requests: what is accepted, what is refused and how it is said."""

import json

import pytest

from extproc.apis.request import InferenceRequest
from extproc.apis.table import (
    APIS,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    GENERATE,
    INFERENCE_GENERATE,
    MESSAGES,
    RERANK,
    RESPONSES,
    TOKENIZE,
)
from extproc.errors import GatewayError

NO_STRINGS = (None, True, 7, [], {}, ["a"])
# vLLM refuses these, too; its legs alone it would not: `["a"]` of the last but one is a prompt.
MIXED_PROMPTS = ([[1, 2], "a"], ["a", [1]], ["a", 5], ["a", None], [[1], None], [[1], {}], [["a"], ["b"]], [[1], [[2]]])
MESSAGE = [{"role": "user", "content": "hi"}]


def read(api, body):
    return InferenceRequest.read(api, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("api", "body", "prompts", "samples"),
    [
        (CHAT, {"messages": MESSAGE}, None, 1),
        (CHAT, {"messages": MESSAGE, "n": 3}, None, 3),
        (CHAT, {"messages": MESSAGE, "n": None, "stream": None, "model": None}, None, 1),
        (COMPLETIONS, {"prompt": "a"}, None, 1),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 2, 1),
        (COMPLETIONS, {"prompt": ["a"], "n": 2}, 1, 2),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, None, 1),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2, 1),
        (COMPLETIONS, b'{"prompt": [ [1, 2] , [3]]}', 2, 1),
        (COMPLETIONS, b'{"prompt":[ "a" ]}', 1, 1),
        (COMPLETIONS, {"prompt": ["a"] * 1024}, 1024, 1),
        (COMPLETIONS, {"prompt": [1] * 5000}, None, 1),
        (COMPLETIONS, b'{"prompt":[ [ 1 ],[ ],\n[\t-2]]}', 3, 1),
        (RESPONSES, {"input": "a", "request_id": ""}, None, 1),
        (GENERATE, {"text": "a"}, None, 1),
        (GENERATE, {"text": ["a", "b", "c"]}, 3, 1),
        (GENERATE, {"input_ids": [1, 2]}, None, 1),
        (GENERATE, {"input_ids": [[1], [2]]}, 2, 1),
        (GENERATE, {"input_embeds": [[0.1], [0.2]]}, None, 1),
        (GENERATE, {"input_embeds": [[[0.1]], [[0.2]]]}, 2, 1),
        (GENERATE, {"text": "a", "sampling_params": {"n": 4}}, None, 4),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 2, 2),
        (MESSAGES, {"messages": MESSAGE, "n": 5}, None, 1),  # this API has no samples
        (RESPONSES, {"input": "a"}, None, 1),
        (RESPONSES, {"input": [{"role": "user", "content": "a"}]}, None, 1),
        (COUNT_TOKENS, {"messages": MESSAGE}, None, 1),
        (RERANK, {"query": "q", "documents": ["d"]}, None, 1),
        (INFERENCE_GENERATE, {"token_ids": [1, 2], "sampling_params": {}}, None, 1),
        (INFERENCE_GENERATE, {"token_ids": [1, 2], "sampling_params": {"n": 2}}, None, 2),
        (TOKENIZE, {"prompt": "a"}, None, 1),
        (TOKENIZE, {"messages": MESSAGE}, None, 1),
        (DETOKENIZE, {"tokens": [1, 2]}, None, 1),
    ],
)
def test_prompts_and_samples_are_counted(api, body, prompts, samples):
    request = read(api, body)
    assert (request.prompts, request.samples) == (prompts, samples)


@pytest.mark.parametrize(
    ("api", "body", "code", "param"),
    [
        (CHAT, b"", "invalid_json", None),
        (CHAT, b"[]", "invalid_json", None),
        (CHAT, {}, "missing_required_parameter", "messages"),
        (CHAT, {"messages": None}, "missing_required_parameter", "messages"),
        (CHAT, {"messages": "hi"}, "invalid_type", "messages"),
        (CHAT, {"messages": {}}, "invalid_type", "messages"),
        (CHAT, {"messages": MESSAGE, "model": 7}, "invalid_type", "model"),
        (CHAT, {"messages": MESSAGE, "stream": "yes"}, "invalid_type", "stream"),
        (CHAT, {"messages": MESSAGE, "stream": 1}, "invalid_type", "stream"),
        (CHAT, {"messages": MESSAGE, "n": 0}, "invalid_type", "n"),
        (CHAT, {"messages": MESSAGE, "n": -1}, "invalid_type", "n"),
        (CHAT, {"messages": MESSAGE, "n": 129}, "invalid_type", "n"),
        (CHAT, {"messages": MESSAGE, "n": 1.5}, "invalid_type", "n"),
        (CHAT, {"messages": MESSAGE, "n": True}, "invalid_type", "n"),
        (CHAT, {"messages": MESSAGE, "n": "2"}, "invalid_type", "n"),
        (COMPLETIONS, {"prompt": []}, "invalid_type", "prompt"),
        (COMPLETIONS, {"prompt": 5}, "invalid_type", "prompt"),
        (GENERATE, {}, "missing_required_parameter", "text"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "invalid_type", "input_ids"),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 3}]}, "invalid_type", "sampling_params.n"),
        (COMPLETIONS, b'{"prompt": [ ] }', "invalid_type", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, "invalid_type", "prompt"),
        (GENERATE, {"input_ids": [[1]] * 1025}, "invalid_type", "input_ids"),
        (GENERATE, {"text": "a", "sampling_params": [{}] * 1025}, "invalid_type", "sampling_params"),
        (RESPONSES, {"input": "a", "background": True}, "invalid_type", "background"),
        *((RESPONSES, {"input": "a", "request_id": wrong}, "invalid_type", "request_id") for wrong in NO_STRINGS),
        *((COMPLETIONS, {"prompt": mixed}, "invalid_type", "prompt") for mixed in MIXED_PROMPTS),
        (RERANK, {"query": "q"}, "missing_required_parameter", "documents"),
        (INFERENCE_GENERATE, {"sampling_params": {}}, "missing_required_parameter", "token_ids"),
        (INFERENCE_GENERATE, {"token_ids": "a", "sampling_params": {}}, "invalid_type", "token_ids"),
        (INFERENCE_GENERATE, {"token_ids": [1]}, "missing_required_parameter", "sampling_params"),
        (
            INFERENCE_GENERATE,
            {"token_ids": [1], "sampling_params": None},
            "missing_required_parameter",
            "sampling_params",
        ),
        (INFERENCE_GENERATE, {"token_ids": [1], "sampling_params": []}, "invalid_type", "sampling_params"),
        (TOKENIZE, {}, "missing_required_parameter", "prompt"),
        (DETOKENIZE, {"tokens": "a"}, "invalid_type", "tokens"),
        (CHAT, b'{"messages":[],"messages":[]}', "duplicate_parameter", "messages"),
        (CHAT, b'{"messages":[],"stream":true,"str\\u0065am":false}', "duplicate_parameter", "stream"),
        (CHAT, b'{"messages":[],"bootstrap_room":1,"bootstrap_room":2}', "duplicate_parameter", "bootstrap_room"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(api, body, code, param):
    with pytest.raises(GatewayError) as refused:
        read(api, body)
    assert (refused.value.fault.code, refused.value.param) == (code, param)
    assert refused.value.status == 400


MANY = b",".join([b'"a":1'] * 1001)


@pytest.mark.parametrize(
    "member",
    [
        MANY,
        b'"sampling_params":{%b}' % MANY,
        b'"sampling_params":[{},{%b}]' % MANY,
        b'"sampling_params":{"extra_args":{%b}}' % MANY,
        b'"vllm_xargs":{%b}' % MANY,
    ],
    ids=["body", "sampling_params", "one of sampling_params", "extra_args", "vllm_xargs"],
)
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, GENERATE])
def test_objects_of_more_members_than_any_has_are_refused_before_they_are_edited_leg_by_leg(api, member):
    prompt = b'"%b":["a","b"]' % api.prompt_keys[0].encode()
    with pytest.raises(GatewayError, match="more than 1000 members") as refused:
        read(api, b"{%b,%b}" % (prompt, member))
    assert refused.value.fault.code == "invalid_json"


def test_duplicates_of_fields_that_decide_nothing_are_the_engines_business():
    assert read(CHAT, b'{"messages":[],"temperature":0,"temperature":1}').samples == 1


@pytest.mark.parametrize(
    ("api", "extra", "wanted"),
    [
        (GENERATE, {}, False),
        (GENERATE, {"return_logprob": True}, False),  # output tokens only: the decode leg has them all
        (GENERATE, {"return_logprob": True, "logprob_start_len": -1}, False),
        (GENERATE, {"return_logprob": True, "logprob_start_len": 0}, True),
        (GENERATE, {"return_logprob": False, "logprob_start_len": 0}, False),
        (GENERATE, {"return_logprob": True, "token_ids_logprob": [5]}, True),
        (GENERATE, {"return_logprob": [False, True], "logprob_start_len": [0, 3]}, True),
        (COMPLETIONS, {"logprobs": 2}, False),
        (COMPLETIONS, {"logprobs": 2, "echo": True}, True),
        (COMPLETIONS, {"logprobs": 0, "echo": True}, False),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, False),
    ],
)
def test_prompt_logprobs_are_noticed(api, extra, wanted):
    prompt = {"messages": MESSAGE} if api is CHAT else {"prompt": "a"} if api is COMPLETIONS else {"text": ["a", "b"]}
    assert read(api, prompt | extra).prompt_logprobs is wanted


@pytest.mark.parametrize(
    ("api", "body", "tokens"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 4000}]}, 1011),
        (COMPLETIONS, {"prompt": "x" * 400}, 103),
        (COMPLETIONS, {"prompt": ["x" * 400, "y" * 400]}, 205),
        (COMPLETIONS, b'{"prompt": [ "' + b"x" * 400 + b'"]}', 104),
        (COMPLETIONS, {"prompt": [7]}, 1),
        (COMPLETIONS, {"prompt": [7, 8, 9]}, 3),
        (COMPLETIONS, {"prompt": [[7, 8], [9]]}, 3),
        (GENERATE, {"input_ids": [1234] * 80}, 80),
        (GENERATE, {"text": "x" * 400}, 103),
        (INFERENCE_GENERATE, {"token_ids": [1, 2], "sampling_params": {}}, 2),
        (RERANK, {"query": "x" * 40, "documents": ["y" * 400]}, 118),
    ],
)
def test_about_how_long_the_prompts_are(api, body, tokens):
    assert read(api, body).prompt_tokens() == tokens


@pytest.mark.parametrize("width", [1, 4, 6])
def test_many_token_ids_are_not_all_counted(width):
    ids = [10 ** (width - 1)] * 50_000
    assert read(GENERATE, {"input_ids": ids}).prompt_tokens() == pytest.approx(50_000, rel=0.02)


@pytest.mark.parametrize(
    ("path", "body", "context"),
    [
        ("/v1/chat/completions", {"messages": []}, b""),
        ("/v1/chat/completions", {"tools": [{"a": 1}], "messages": [], "cache_salt": "s"}, b'[{"a": 1}]"s"'),
        ("/v1/messages", {"messages": [], "system": "be brief"}, b'"be brief"'),
        ("/v1/responses", {"input": "x", "instructions": "be brief"}, b'"be brief"'),
    ],
)
def test_what_the_model_reads_before_its_prompt(path, body, context):
    assert InferenceRequest.read(APIS[path], json.dumps(body).encode()).prompt_context() == context


@pytest.mark.parametrize("body", [{"prompt": "x" * 50}, {"prompt": [7] * 50}, {"prompt": ""}, {"input": "x"}])
def test_the_beginning_of_a_prompt(body):
    request = read(COMPLETIONS, {"prompt": "p"} | body)
    for most in (0, 1, 10, 10_000):
        assert request.prompt_bytes(most) == request.prompt_bytes()[:most]


@pytest.mark.parametrize(
    ("rid", "expected"),
    [("conv_t1", "conv_t1"), ("caf\u00e9", "caf\u00e9"), ("", ""), (["a", "b"], ""), (None, ""), (7, "")],
)
def test_the_id_in_the_body(rid, expected):
    assert read(GENERATE, {"text": "x", "rid": rid}).own_id() == expected
    assert read(GENERATE, {"text": "x"}).own_id() == ""
