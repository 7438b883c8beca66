"""What differs between the client's request for n samples and the requests for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.merge.split import sample_edits

PATIENT = settings(deadline=None, max_examples=50)  # machines that run this may be busy
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def request(path: str, body: dict[str, Any]) -> InferenceRequest:
    return InferenceRequest.read(APIS[path], json.dumps(body).encode())


def edits(path: str, body: dict[str, Any], sample: int) -> dict[str, Any]:
    return {key: json.loads(raw) for key, raw in sample_edits(request(path, body), sample).items()}


@pytest.mark.parametrize("body", [CHAT, CHAT | {"n": 1, "seed": 3, "rid": "r"}, CHAT | {"n": None}])
def test_one_sample_is_left_alone(body: dict[str, Any]) -> None:
    assert edits("/v1/chat/completions", body, 0) == {}


@pytest.mark.parametrize("sample", [0, 1, 2])
def test_chat(sample: int) -> None:
    assert edits("/v1/chat/completions", CHAT | {"n": 3}, sample) == {"n": 1}


def test_a_rid_is_told_apart() -> None:
    assert edits("/v1/chat/completions", CHAT | {"n": 2, "rid": "r"}, 1) == {"n": 1, "rid": "r_1"}


def test_a_list_of_prompts_stays_whole_and_its_rids_are_told_apart() -> None:
    body = {"prompt": ["a", "b"], "n": 2, "rid": ["x", "y"]}
    assert edits("/v1/completions", body, 1) == {"n": 1, "rid": ["x_1", "y_1"]}


@PATIENT
@given(st.integers(min_value=-(2**63), max_value=2**63 - 1), st.integers(min_value=0, max_value=127))
def test_seeds_differ_and_stay_within_64_bits(seed: int, sample: int) -> None:
    own = edits("/v1/chat/completions", CHAT | {"n": 128, "seed": seed}, sample)["seed"]
    assert -(2**63) <= own < 2**63
    assert (own - seed) % 2**64 == sample


@pytest.mark.parametrize("seed", ["7", 1.5, None, True])
def test_what_is_no_seed_is_left_to_the_engine(seed: Any) -> None:
    assert edits("/v1/chat/completions", CHAT | {"n": 2, "seed": seed}, 1) == {"n": 1}


def test_generate() -> None:
    body = {"text": "a", "sampling_params": {"n": 2, "sampling_seed": 5, "top_p": 0.5}}
    assert edits("/generate", body, 0) == {"sampling_params": {"n": 1, "sampling_seed": 5, "top_p": 0.5}}
    assert edits("/generate", body, 1) == {"sampling_params": {"n": 1, "sampling_seed": 6, "top_p": 0.5}}


def test_generate_with_sampling_params_per_prompt() -> None:
    body = {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2, "sampling_seed": 1}], "rid": ["x", "y"]}
    assert edits("/generate", body, 1) == {
        "sampling_params": [{"n": 1}, {"n": 1, "sampling_seed": 2}],
        "rid": ["x_1", "y_1"],
    }


def test_the_rest_of_sampling_params_keeps_its_bytes() -> None:
    raw = b'{"text":"a","sampling_params":{"n" : 2,"custom": 1.10000000000000000001e5,"stop":"\\u00e9"}}'
    found = sample_edits(InferenceRequest.read(APIS["/generate"], raw), 1)
    assert found["sampling_params"] == b'{"n" : 1,"custom": 1.10000000000000000001e5,"stop":"\\u00e9"}'
