"""What is read of requests for gRPC workers: mapped, without effect, or refused by name."""

import json
from contextlib import suppress
from dataclasses import fields as dataclass_fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, GENERATE, MESSAGES
from extproc.errors import GatewayError
from extproc.generation import fields as rules
from extproc.generation.parse import parse, serves
from extproc.generation.sampling import Constraint, Sampling, Shape

MESSAGE = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
PROMPT = {CHAT: {"messages": MESSAGE}, COMPLETIONS: {"prompt": "a"}, GENERATE: {"text": "a"}}


def read(api=CHAT, **fields):
    return parse(InferenceRequest.read(api, json.dumps({**PROMPT[api], **fields}).encode()))


def native(**sampling):
    return read(GENERATE, sampling_params=sampling)


def refused(api=CHAT, **fields):
    with pytest.raises(GatewayError) as caught:
        read(api, **fields)
    return caught.value.fault.code, caught.value.param


# -- mapped ----------------------------------------------------------------------------------------------------------


def test_nothing_said_is_nothing_assumed_but_the_limits():
    assert read().sampling == Sampling()
    assert read(COMPLETIONS).sampling == Sampling(max_tokens=16)
    assert read(GENERATE).sampling == Sampling(max_tokens=128)


SAID = [
    ("temperature", 0, {"temperature": 0.0}),
    ("temperature", "0.5", {"temperature": 0.5}),
    ("top_p", 0.25, {"top_p": 0.25}),
    ("top_k", 7, {"top_k": 7}),
    ("top_k", 0, {"top_k": -1}),
    ("top_k", -1, {"top_k": -1}),
    ("min_p", 0.1, {"min_p": 0.1}),
    ("frequency_penalty", -2, {"frequency_penalty": -2.0}),
    ("presence_penalty", 2, {"presence_penalty": 2.0}),
    ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
    ("stop", "x", {"stop": ("x",)}),
    ("stop", ["x", "y", "x"], {"stop": ("x", "y")}),
    ("stop_token_ids", [3, None, 4, 3], {"stop_token_ids": (3, 4)}),
    ("ignore_eos", True, {"ignore_eos": True}),
    ("no_stop_trim", True, {"include_stop": True}),
    ("skip_special_tokens", False, {"skip_special_tokens": False}),
    ("spaces_between_special_tokens", False, {"spaces_between_special_tokens": False}),
    ("logit_bias", {"5": -100, "6": 1}, {"logit_bias": ((5, -100.0), (6, 1.0))}),
    ("regex", "a+", {"constraint": Constraint(Shape.REGEX, "a+")}),
    ("ebnf", "root ::= 'a'", {"constraint": Constraint(Shape.GRAMMAR, "root ::= 'a'")}),
    ("json_schema", SCHEMA_TEXT, {"constraint": Constraint(Shape.JSON_SCHEMA, SCHEMA_TEXT)}),
    ("json_schema", SCHEMA, {"constraint": Constraint(Shape.JSON_SCHEMA, SCHEMA_TEXT)}),
]


@pytest.mark.parametrize(("name", "value", "expected"), SAID)
def test_what_all_apis_call_alike(name, value, expected):
    for api, limit in ((CHAT, None), (COMPLETIONS, 16)):
        assert read(api, **{name: value}).sampling == Sampling(max_tokens=limit, **expected)
    assert native(**{name: value}).sampling == Sampling(max_tokens=128, **expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 5, {"max_tokens": 5}),
        ("min_tokens", 2, {"min_tokens": 2}),
        ("include_stop_str_in_output", True, {"include_stop": True}),
        ("seed", -(2**63), {"seed": -(2**63)}),
        ("response_format", {"type": "text"}, {}),
        ("response_format", {"type": "json_object"}, {"constraint": Constraint(Shape.JSON_OBJECT)}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            {"constraint": Constraint(Shape.JSON_SCHEMA, SCHEMA_TEXT)},
        ),
        (
            "response_format",
            {"type": "structural_tag", "format": {"type": "any_text"}},
            {"constraint": Constraint(Shape.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}')},
        ),
        ("structured_outputs", {"choice": ["a", "b"]}, {"constraint": Constraint(Shape.CHOICE, '["a","b"]')}),
        ("structured_outputs", {"json": SCHEMA}, {"constraint": Constraint(Shape.JSON_SCHEMA, SCHEMA_TEXT)}),
        ("structured_outputs", {"grammar": "g"}, {"constraint": Constraint(Shape.GRAMMAR, "g")}),
        ("structured_outputs", {"json_object": True}, {"constraint": Constraint(Shape.JSON_OBJECT)}),
        ("structured_outputs", {"structural_tag": "{}"}, {"constraint": Constraint(Shape.STRUCTURAL_TAG, "{}")}),
        ("guided_json", SCHEMA, {"constraint": Constraint(Shape.JSON_SCHEMA, SCHEMA_TEXT)}),
        ("guided_regex", "a", {"constraint": Constraint(Shape.REGEX, "a")}),
        ("guided_choice", ["a"], {"constraint": Constraint(Shape.CHOICE, '["a"]')}),
        ("guided_grammar", "g", {"constraint": Constraint(Shape.GRAMMAR, "g")}),
    ],
)
def test_what_both_openai_apis_call_alike(name, value, expected):
    for api, limit in ((CHAT, None), (COMPLETIONS, 16)):
        assert read(api, **{name: value}).sampling == Sampling(**{"max_tokens": limit, **expected})


def test_sampling_params_have_names_of_their_own():
    found = native(max_new_tokens=0, min_new_tokens=0, sampling_seed=7, structural_tag="{}").sampling
    assert found == Sampling(max_tokens=0, seed=7, constraint=Constraint(Shape.STRUCTURAL_TAG, "{}"))
    assert native(min_new_tokens=3).sampling.min_tokens == 3


@pytest.mark.parametrize(
    ("said", "expected"), [({"max_completion_tokens": 3, "max_tokens": 9}, 3), ({"max_tokens": 9}, 9), ({}, None)]
)
def test_the_newer_limit_of_a_chat_counts(said, expected):
    assert read(**said).sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_log_probabilities_of_a_chat(said, expected):
    assert read(**said).top_logprobs == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (None, None, False)),
        ({"logprobs": 0}, (0, None, False)),
        ({"logprobs": 3, "echo": True}, (3, 3, True)),
        ({"echo": True}, (None, None, True)),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 1}, (3, 1, True)),
        ({"prompt_logprobs": 2}, (None, 2, False)),
        ({"echo": True, "max_tokens": 0}, (None, None, True)),
    ],
)
def test_log_probabilities_of_a_completion(said, expected):
    found = read(COMPLETIONS, **said)
    assert (found.top_logprobs, found.prompt_logprobs, found.echo) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (None, None, None)),
        ({"top_logprobs_num": 3, "logprob_start_len": 0}, (None, None, None)),
        ({"return_logprob": True}, (0, None, None)),
        ({"return_logprob": True, "top_logprobs_num": 3}, (3, None, None)),
        ({"return_logprob": True, "logprob_start_len": -1}, (0, None, None)),
        ({"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 1}, (1, 1, 2)),
    ],
)
def test_log_probabilities_of_generate(said, expected):
    found = read(GENERATE, **said)
    assert (found.top_logprobs, found.prompt_logprobs, found.logprob_start) == expected


@pytest.mark.parametrize(
    ("api", "key", "value", "prompts", "batched"),
    [
        (COMPLETIONS, "prompt", "a", ("a",), False),
        (COMPLETIONS, "prompt", ["a"], ("a",), True),
        (COMPLETIONS, "prompt", ["a", "b"], ("a", "b"), True),
        (COMPLETIONS, "prompt", [1, 2], ((1, 2),), False),
        (COMPLETIONS, "prompt", [[1], [2, 3]], ((1,), (2, 3)), True),
        (COMPLETIONS, "prompt", [1, 2.0, True, "3"], ((1, 2, 1, 3),), False),
        (GENERATE, "text", ["a", "b"], ("a", "b"), True),
        (GENERATE, "input_ids", [1, 2], ((1, 2),), False),
        (GENERATE, "input_ids", [[1]], ((1,),), True),
    ],
)
def test_prompts(api, key, value, prompts, batched):
    request = InferenceRequest.read(api, json.dumps({key: value}).encode())
    found = parse(request)
    assert (found.prompts, found.batched, found.chat) == (prompts, batched, None)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_token_ids_stay_what_they_are(ids):
    assert read(COMPLETIONS, prompt=ids).prompts == (tuple(ids),)


def test_what_the_template_is_told():
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = read(
        tools=tools, tool_choice="none", chat_template_kwargs={"a": 1}, chat_template="t", documents=[{"text": "d"}]
    ).chat
    assert chat.messages == MESSAGE
    assert (chat.tools, chat.template_kwargs, chat.chat_template) == (tools, {"a": 1}, "t")
    assert (chat.documents, chat.add_special_tokens) == ([{"text": "d"}], False)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)
    chat = read(continue_final_message=True, add_special_tokens=True).chat
    assert (chat.add_generation_prompt, chat.continue_final_message, chat.add_special_tokens) == (False, True, True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "thinking": True, "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", "thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enabled": True}}, {"thinking": True, "enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False, "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "thinking": True, "enable_thinking": False},
        ),
    ],
)
def test_what_the_template_is_told_of_reasoning(said, expected):
    assert read(**said).chat.template_kwargs == expected


@pytest.mark.parametrize(
    "content",
    [
        None,
        "a",
        ["a"],
        [{"type": "text", "text": "a"}],
        [{"text": "a"}],
        [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
    ],
)
def test_content_that_is_text_is_left_to_the_template(content):
    messages = [{"role": "user", "content": content}]
    assert read(messages=messages).chat.messages == messages


def test_options_of_streams():
    found = read(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (found.stream, found.include_usage, found.continuous_usage) == (True, True, True)
    found = read(stream=True, stream_options={"continuous_usage_stats": True})
    assert (found.include_usage, found.continuous_usage) == (False, False)


def test_other_options():
    found = read(n=3, return_token_ids=True, return_tokens_as_token_ids=True, rid="r", model="m")
    assert (found.samples, found.return_token_ids, found.tokens_as_ids) == (3, True, True)
    assert (found.rids, found.model, found.api) == (("r",), "m", CHAT)
    assert read(COMPLETIONS, add_special_tokens=False).special is False
    assert read(GENERATE, return_text_in_logprobs=True).text_in_logprobs is True
    assert read(COMPLETIONS, best_of=2, n=2).samples == 2


def test_each_prompt_of_generate_may_have_its_own_sampling():
    found = read(GENERATE, text=["a", "b"], sampling_params=[{"top_k": 1}, {"top_k": 2}], return_logprob=[True, True])
    assert [sampling.top_k for sampling in found.samplings] == [1, 2]
    assert (found.sampling, found.top_logprobs) == (found.samplings[0], 0)
    assert read(GENERATE, text=["a", "b"], sampling_params=[{}, {}]).samplings == ()


# -- without effect --------------------------------------------------------------------------------------------------

RULES = {CHAT: rules.CHAT, COMPLETIONS: rules.COMPLETIONS, GENERATE: rules.GENERATE}


@pytest.mark.parametrize(("api", "rule"), RULES.items(), ids=lambda value: getattr(value, "name", ""))
def test_what_changes_nothing_is_accepted(api, rule):
    plain = read(api)
    for name in [*sorted(rule.ignored), "no_field_of_anybody"]:
        assert read(api, **{name: {"a": 1}}) == plain, name
    assert read(api, **dict.fromkeys(sorted(rule.refused))) == plain, "null says nothing"


def test_no_field_is_two_things():
    for rule in (*RULES.values(), rules.SAMPLING_PARAMS):
        assert not rule.mapped & rule.ignored
        assert not rule.mapped & rule.refused.keys()
        assert not rule.ignored & rule.refused.keys()
        assert rule.harmless.keys() <= rule.refused.keys()


@pytest.mark.parametrize(
    ("api", "name", "value"),
    [(api, name, value) for api, rule in RULES.items() for name, values in rule.harmless.items() for value in values],
)
def test_a_value_that_says_nothing_is_accepted(api, name, value):
    assert read(api, **{name: value}) == read(api)


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "name"),
    [(api, name) for api, rule in RULES.items() for name in sorted(rule.refused) if name != "input_embeds"],
)
def test_what_workers_cannot_be_told_is_refused_by_name(api, name):
    assert refused(api, **{name: ["x"]}) == ("unsupported_parameter", name)


@pytest.mark.parametrize("name", [*sorted(rules.SAMPLING_PARAMS.refused), "max_tokens", "temprature"])
def test_sampling_params_are_closed_as_sglangs_are(name):
    assert refused(GENERATE, sampling_params={name: 2}) == ("unsupported_parameter", f"sampling_params.{name}")


@pytest.mark.parametrize(
    ("said", "code", "param"),
    [
        ({"temperature": -0.1}, "invalid_type", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": []}, "invalid_type", "temperature"),
        ({"top_p": 0}, "invalid_type", "top_p"),
        ({"top_p": 1.1}, "invalid_type", "top_p"),
        ({"top_k": -2}, "invalid_type", "top_k"),
        ({"top_k": 1.5}, "invalid_type", "top_k"),
        ({"min_p": 1.1}, "invalid_type", "min_p"),
        ({"frequency_penalty": 2.1}, "invalid_type", "frequency_penalty"),
        ({"presence_penalty": -2.1}, "invalid_type", "presence_penalty"),
        ({"repetition_penalty": 0}, "invalid_type", "repetition_penalty"),
        ({"max_tokens": -1}, "invalid_type", "max_tokens"),
        ({"max_tokens": 2**31}, "invalid_type", "max_tokens"),
        ({"min_tokens": -1}, "invalid_type", "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
        ({"stop": [""]}, "invalid_type", "stop"),
        ({"stop": [1]}, "invalid_type", "stop"),
        ({"stop": [str(i) for i in range(33)]}, "invalid_type", "stop"),
        ({"stop_token_ids": [-1]}, "invalid_type", "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "invalid_type", "stop_token_ids"),
        ({"stop_token_ids": 3}, "invalid_type", "stop_token_ids"),
        ({"ignore_eos": "maybe"}, "invalid_type", "ignore_eos"),
        ({"seed": 1.5}, "invalid_type", "seed"),
        ({"logit_bias": {"a": 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {str(2**31): 1}}, "invalid_type", "logit_bias"),
        ({"seed": "9" * 5000}, "invalid_type", "seed"),
        ({"logit_bias": {"1": "x"}}, "invalid_type", "logit_bias"),
        ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
        ({"response_format": {"type": "xml"}}, "invalid_type", "response_format.type"),
        ({"response_format": "json"}, "invalid_type", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value", "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "invalid_type", "response_format"),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "invalid_type", "structured_outputs.choice"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
            "unsupported_parameter",
            "structured_outputs.whitespace_pattern",
        ),
        ({"regex": "a", "ebnf": "b"}, "invalid_value", "ebnf"),
        ({"guided_json": "{"}, "invalid_type", "guided_json"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "unsupported_parameter", "prompt_logprobs"),
    ],
)
def test_impossible_values(said, code, param):
    for api in (CHAT, COMPLETIONS):
        assert refused(api, **said) == (code, param)


@pytest.mark.parametrize(
    ("said", "code", "param"),
    [
        ({"messages": [{"content": "a"}]}, "invalid_type", "messages[0].role"),
        ({"messages": []}, "invalid_type", "messages"),
        ({"messages": ["a"]}, "invalid_type", "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "invalid_type", "messages[0].content"),
        (
            {"messages": [*MESSAGE, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "unsupported_parameter",
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "invalid_type",
            "messages[0].content.text",
        ),
        ({"messages": [{**MESSAGE[0], "tools": [{}]}]}, "unsupported_parameter", "messages[0].tools"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "unsupported_parameter", "tools"),
        ({"tools": []}, "invalid_value", "tools"),
        ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "any"}, "invalid_type", "tool_choice"),
        ({"max_completion_tokens": 0}, "invalid_type", "max_completion_tokens"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "unsupported_parameter", "top_logprobs"),
        ({"logprobs": 5}, "invalid_type", "logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
        (
            {"chat_template_kwargs": {"chat_template": "t"}},
            "unsupported_parameter",
            "chat_template_kwargs.chat_template",
        ),
        ({"reasoning_effort": "huge"}, "invalid_type", "reasoning_effort"),
        ({"reasoning_effort": True}, "invalid_type", "reasoning_effort"),
        ({"separate_reasoning": True}, "unsupported_parameter", "separate_reasoning"),
        ({"include_reasoning": "x"}, "unsupported_parameter", "include_reasoning"),
    ],
)
def test_what_is_refused_of_a_chat(said, code, param):
    if said.get("messages") != [] and "messages" in said and not isinstance(said["messages"][0], dict):
        code, param = "invalid_type", "messages"
    assert refused(CHAT, **said) == (code, param)


@pytest.mark.parametrize(
    ("said", "code", "param"),
    [
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_type", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_value", "prompt"),
        ({"prompt": [[1], []]}, "invalid_value", "prompt"),
        ({"prompt": [1, "a"]}, "invalid_type", "prompt"),
        ({"prompt": [1, None]}, "invalid_type", "prompt"),
        ({"prompt": [1, [2]]}, "invalid_type", "prompt"),
        ({"prompt": ["a", 1]}, "invalid_type", "prompt"),
        ({"prompt": [[1], "a"]}, "invalid_type", "prompt"),
        ({"prompt": [1.5]}, "invalid_type", "prompt"),
        ({"prompt": [-1]}, "invalid_type", "prompt"),
        ({"prompt": [2**31]}, "invalid_type", "prompt"),
        ({"prompt": [2**40]}, "invalid_type", "prompt"),
        ({"max_tokens": 0}, "invalid_type", "max_tokens"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"logprobs": -1}, "unsupported_parameter", "logprobs"),
        ({"logprobs": "many"}, "invalid_type", "logprobs"),
    ],
)
def test_what_is_refused_of_a_completion(said, code, param):
    assert refused(COMPLETIONS, **said) == (code, param)


@pytest.mark.parametrize(
    ("said", "code", "param"),
    [
        ({"input_ids": [1]}, "invalid_type", "input_ids"),
        ({"text": None, "input_ids": ["a"]}, "invalid_type", "input_ids"),
        ({"text": [1, 2]}, "invalid_type", "text"),
        ({"text": None, "input_embeds": [[0.5]]}, "unsupported_parameter", "input_embeds"),
        ({"logprob_start_len": -2}, "invalid_type", "logprob_start_len"),
        ({"text": ["a", "b"], "return_logprob": [True, False]}, "unsupported_parameter", "return_logprob"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "invalid_value", "top_logprobs_num"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "invalid_value", "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "invalid_type", "sampling_params.temperature"),
        ({"sampling_params": {"json_schema": "{}", "regex": "a"}}, "invalid_value", "sampling_params.json_schema"),
    ],
)
def test_what_is_refused_of_generate(said, code, param):
    assert refused(GENERATE, **said) == (code, param)


def test_a_number_that_is_none():
    request = InferenceRequest.read(COMPLETIONS, b'{"prompt":"a","temperature":1e400}')
    with pytest.raises(GatewayError) as caught:
        parse(request)
    assert caught.value.fault.code == "invalid_json"


def test_other_apis_are_not_served():
    assert not serves(MESSAGES)
    request = InferenceRequest.read(MESSAGES, json.dumps({"messages": MESSAGE, "max_tokens": 1}).encode())
    with pytest.raises(GatewayError) as caught:
        parse(request)
    assert caught.value.fault.code == "not_implemented"


@given(
    st.dictionaries(
        st.sampled_from(sorted(rules.CHAT.mapped - {"messages", "n", "stream", "model"})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_whatever_a_client_sends_is_read_or_refused(members):
    for api in (CHAT, COMPLETIONS):
        with suppress(GatewayError):
            assert isinstance(read(api, **members).sampling, Sampling)


def test_sampling_says_nothing_by_default():
    said = {field.name: getattr(Sampling(), field.name) for field in dataclass_fields(Sampling)}
    assert {name for name, value in said.items() if value is True} == {
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
