"""Prompts that a vLLM server cuts to fit: they are one worker's, since a leg of one token may cut elsewhere.

What the engine makes of a value was asked of its own classes (0.32, ``build_tok_params``), whose types the mock has.
"""

import json

import pytest
from pydantic import ValidationError

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, INFERENCE_GENERATE, MESSAGES, RESPONSES
from extproc.handoff.handoff import Kv
from extproc.handoff.vllm import alone
from extproc.mock.vllm import bodies
from extproc.workers.worker import Role

MESSAGE = [{"role": "user", "content": "a"}]
BODIES = {
    CHAT: {"messages": MESSAGE},
    COMPLETIONS: {"prompt": "a"},
    MESSAGES: {"messages": MESSAGE},
    RESPONSES: {"input": "a"},
    INFERENCE_GENERATE: {"token_ids": [1], "sampling_params": {}},
}
REFUSED = "refused"
# What the engine makes of a value of truncate_prompt_tokens, as JSON.
TOKENS = {
    "-1": -1,
    "-1.0": -1,
    "-10e-1": -1,
    '"-1"': -1,
    '" -1\\n"': -1,
    '"\\u00a0-1"': -1,
    '"-1.00"': -1,
    '"-01"': -1,
    '"-0_1"': -1,
    '"-0__1.0"': -1,
    "null": None,
    "true": 1,
    "false": 0,
    "0": 0,
    "7": 7,
    '"7"': 7,
    '"+1"': 1,
    "-2": REFUSED,
    "-1.5": REFUSED,
    '""': REFUSED,
    '"-1."': REFUSED,
    '"-1e0"': REFUSED,
    '"- 1"': REFUSED,
    '"-_1"': REFUSED,
    '"-1_0"': REFUSED,
    '"\\u22121"': REFUSED,
    "[-1]": REFUSED,
    "{}": REFUSED,
}
# Whether it cuts for a value of truncation.
WORDS = {"null": True, '"auto"': True, '"disabled"': False}
UNKNOWN_WORDS = ['"Auto"', '""', "true", "0", "[]"]


def is_cut(api, field, value):
    raw = json.dumps(BODIES[api])[:-1] + f',"{field}":{value}}}'
    found = alone(InferenceRequest.read(api, raw.encode()))
    if found is None:
        return False
    assert (found.role, found.kv) == (Role.DECODE, Kv.RECOMPUTED)
    assert "cut" in found.why
    return True


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=lambda api: api.name)
@pytest.mark.parametrize(("value", "made"), TOKENS.items())
def test_minus_one_in_whatever_form_has_the_prompt_cut_to_fit(api, value, made):
    assert is_cut(api, "truncate_prompt_tokens", value) is (made == -1)
    model = bodies.Chat if api is CHAT else bodies.Completion
    body = {**BODIES[api], "truncate_prompt_tokens": json.loads(value)}
    if made is REFUSED:
        with pytest.raises(ValidationError):
            model(**body)
    else:
        assert model(**body).truncate_prompt_tokens == made


@pytest.mark.parametrize(("value", "made"), WORDS.items())
def test_all_but_disabled_has_a_responses_input_cut(value, made):
    assert is_cut(RESPONSES, "truncation", value) is made
    assert bodies.Responses(input="a", truncation=json.loads(value)).truncation == json.loads(value)


@pytest.mark.parametrize("value", UNKNOWN_WORDS)
def test_an_unknown_word_is_refused_by_the_one_worker_that_is_asked(value):
    assert is_cut(RESPONSES, "truncation", value)
    with pytest.raises(ValidationError):
        bodies.Responses(input="a", truncation=json.loads(value))


@pytest.mark.parametrize(
    ("api", "field"),
    [
        *((api, "truncation") for api in BODIES if api is not RESPONSES),
        *((api, "truncate_prompt_tokens") for api in (MESSAGES, RESPONSES, INFERENCE_GENERATE)),
    ],
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_fields_of_other_apis_mean_nothing(api, field):
    value = '"auto"' if field == "truncation" else "-1"
    assert not is_cut(api, field, value)


@pytest.mark.parametrize("api", BODIES, ids=lambda api: api.name)
def test_nothing_is_cut_unasked(api):
    assert not is_cut(api, "user", '"u"')
