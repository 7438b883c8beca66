"""The prefill leg as a request of one token."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis.json_object import NO_EDITS, Edits, JsonObject
from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS, CHAT, COMPLETIONS, GENERATE, INFERENCE_GENERATE, Flow
from extproc.handoff.one_token import one_token

GOLDEN = json.loads((Path(__file__).parent / "data/one_token_bodies.json").read_text())
PAIRED = [api for api in APIS.values() if api.flow is Flow.PAIR]
MESSAGES = [{"role": "user", "content": "a"}]
PROMPTS = {"messages": MESSAGES, "prompt": "a", "text": "a", "input": "a", "token_ids": [1]}


def leg(api, raw, edits=NO_EDITS, *, keep=False):
    request = InferenceRequest.read(api, raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    made = one_token(request, edits, keep_prompt_logprobs=keep)
    assert made.put.keys().isdisjoint(made.drop)
    return request.body.edited(*made)


@pytest.mark.parametrize("golden", GOLDEN, ids=[f"{one['api']}: {one['name']}" for one in GOLDEN])
@pytest.mark.parametrize("spaces", [None, (", ", " : "), (" ,\n\t", ":\r\n")], ids=["plain", "spaced", "odd"])
def test_golden_bodies(golden, spaces):
    raw = json.dumps(golden["client"], separators=spaces or (",", ":"))
    if spaces:
        raw = f" \n{{ {raw[1:-1]}\t}} "
    made = json.loads(leg(APIS[golden["path"]], raw.encode(), keep=golden["keep_prompt_logprobs"]))
    assert made == golden["leg"]


def test_every_api_of_a_pair_has_golden_bodies():
    counted = {api.path: sum(golden["path"] == api.path for golden in GOLDEN) for api in PAIRED}
    assert min(counted.values()) >= 6, counted


KNOWN = {key for golden in GOLDEN for key in golden["client"]} - {*PROMPTS, "sampling_params"}
# What may have any value; a request that has another type in one of the others is refused before it comes here.
NOT_READ = sorted(KNOWN - {"model", "stream", "n", "input_ids"})
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aé"\\')
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3), max_leaves=6
)
members = st.dictionaries(st.sampled_from(NOT_READ) | st.text("abc", min_size=1), values, max_size=8)


@given(st.sampled_from(PAIRED), members, st.booleans(), st.booleans(), st.booleans())
def test_members_that_are_no_business_of_one_token_keep_their_bytes(api, body, keep, ascii_only, stream):
    body = {api.prompt_keys[0]: PROMPTS[api.prompt_keys[0]], "stream": stream, **body}
    if api is INFERENCE_GENERATE:
        body["sampling_params"] = {}
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    request = InferenceRequest.read(api, raw)
    made = one_token(request, keep_prompt_logprobs=keep)
    for value in made.put.values():
        json.loads(value)
    edited = JsonObject(request.body.edited(*made))
    assert json.loads(edited.raw)["stream"] is False
    for key in body:
        if key in made.drop:
            assert key not in edited
        else:
            assert edited.raw_value(key) == made.put.get(key, request.body.raw_value(key))
    touched = {*made.put, *made.drop}
    assert touched.isdisjoint({key for key in body if set(key) <= set("abc")})
    assert api.prompt_keys[0] not in touched


def test_the_pairs_own_edits_stay():
    edits = Edits({"prompt": b'"second"', "return_token_ids": b"true", "seed": b"8"}, {"priority"})
    body = {"prompt": ["first", "second"], "return_token_ids": False, "priority": 3, "seed": 7, "max_tokens": 9}
    made = json.loads(leg(COMPLETIONS, body, edits))
    assert made == {"prompt": "second", "return_token_ids": True, "seed": 8, "max_tokens": 1, "ignore_eos": True}


def test_a_rule_wins_over_the_pairs_own_edits():
    edits = Edits({"n": b"3", "stream": b"true"}, {"ignore_eos", "top_k"})
    made = json.loads(leg(CHAT, {"messages": MESSAGES, "ignore_eos": False, "top_k": 5}, edits))
    assert made == {"messages": MESSAGES, "n": 1, "stream": False, "max_tokens": 1, "ignore_eos": True}


def test_but_a_cap_of_the_pairs_own_stays():
    made = json.loads(leg(COMPLETIONS, {"prompt": "a", "max_tokens": 7}, Edits({"max_tokens": b"0"})))
    assert made == {"prompt": "a", "max_tokens": 0, "ignore_eos": True}


def test_parameters_of_the_pairs_own_edits_are_the_ones_that_are_capped():
    edits = Edits({"sampling_params": b'{"n":1,"sampling_seed":4,"max_new_tokens":50}'})
    made = json.loads(leg(GENERATE, {"text": "a", "sampling_params": {"n": 2}}, edits))
    assert made["sampling_params"] == {"n": 1, "sampling_seed": 4, "max_new_tokens": 1, "ignore_eos": True}


def test_parameters_keep_the_bytes_of_what_is_not_edited():
    raw = b'{"token_ids":[1], "sampling_params" : { "top_p":1.0e0 ,"max_tokens" : 1e2, "seed":9007199254740993 }}'
    assert leg(INFERENCE_GENERATE, raw) == (
        b'{"token_ids":[1], "sampling_params" : '
        b'{"top_p":1.0e0 ,"max_tokens" : 1,"seed":9007199254740993,"ignore_eos":true}}'
    )


def test_a_cap_that_occurs_twice_is_set_twice():
    assert leg(CHAT, b'{"messages":[],"max_tokens":5,"max_\\u0074okens":6}').count(b":1") == 2


def test_a_cap_inside_an_object_that_the_api_does_not_know_is_set_too():
    made = json.loads(leg(CHAT, {"messages": MESSAGES, "sampling_params": {"max_tokens": 9, "min_tokens": 4}}))
    assert made["sampling_params"] == {"max_tokens": 1, "ignore_eos": True}


def test_parameters_are_made_once_for_all_legs_of_a_list_of_prompts(monkeypatch):
    body = {"prompt": ["a", "b", "c"], "sampling_params": [{"max_tokens": 9, "top_k": 3}] * 5}
    request = InferenceRequest.read(COMPLETIONS, json.dumps(body).encode())
    read = Mock(side_effect=JsonObject)
    monkeypatch.setattr("extproc.handoff.one_token.JsonObject", read)
    for prompt in body["prompt"]:
        edits = Edits({"prompt": json.dumps(prompt).encode()})
        made = json.loads(request.body.edited(*one_token(request, edits, keep_prompt_logprobs=False)))
        assert made["prompt"] == prompt
        assert made["sampling_params"] == [{"max_tokens": 1, "top_k": 3, "ignore_eos": True}] * 5
    assert read.call_count == 1 + 5  # the list and what it holds


@pytest.mark.parametrize("value", [7, "a", [7, None, [{}]]])
def test_parameters_of_the_wrong_type_are_left_to_the_engine(value):
    made = json.loads(leg(CHAT, {"messages": MESSAGES, "sampling_params": value}))
    assert made["sampling_params"] == value


def test_lists_nested_as_deep_as_a_body_may_be_are_no_error_of_ours():
    deep = b"[" * 900 + b"]" * 900
    assert deep in leg(CHAT, b'{"messages":[],"sampling_params":%b}' % deep)
