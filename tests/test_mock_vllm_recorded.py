"""The vLLM mock beside answers recorded from a real NIXL pair and an aggregated worker: the same but for values.

``data/mock/vllm-0.32.0.json`` holds ``answers``, requests with what an aggregated worker said and, for some, what a
prefill said to the one-token ``leg`` and a decode to the request with the parameters that came back; and ``others``,
refusals and requests that run nothing, as an aggregated worker answered them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extproc.mock import VllmMock
from tests.mock_client import Answer, ask
from tests.test_mock_recorded import body_shape

RECORDED = json.loads((Path(__file__).parent / "data" / "mock" / "vllm-0.32.0.json").read_text())
PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
SETUP: dict[str, Any] = {"model": "tiny", "max_model_len": 2048, "root": "tiny-model"}
VARIABLE = ("/version", "/v1/models", "/tokenize", "/detokenize", "/v1/messages/count_tokens")  # not word for word


def check(answer: Answer, expected: dict[str, Any]) -> None:
    assert answer.status == expected["status"]
    assert list(answer.headers) == expected["headers"]
    assert body_shape(plain(answer.body.decode())) == body_shape(plain(expected["body"]))


def plain(body: str) -> str:
    """A body without names that are values, and without the real tokenizer's tokens that have no text of their own."""
    body = re.sub(r'"\d+":(\{"logprob")', r'"token":\1', body)
    body = re.sub(r'"bytes":\[[^]]*\]', '"bytes":[1]', body)
    return body.replace('"delta":{}', '"delta":{"content":"x"}')


@pytest.mark.parametrize("case", RECORDED["answers"], ids=[case["case"] for case in RECORDED["answers"]])
async def test_shape_is_the_engines(case: dict[str, Any]) -> None:
    path, request, expected = case["path"], case["request"], case["answers"]
    async with VllmMock("aggregated", **SETUP) as aggregated:
        check(await ask(aggregated, path, request), expected["aggregated"])
    if "leg" not in case:
        return
    async with VllmMock("prefill", **SETUP) as prefill, VllmMock("decode", **SETUP) as decode:
        leg = await ask(prefill, path, case["leg"] | PREFILL)
        check(leg, expected["prefill"])
        params = {"kv_transfer_params": leg.json["kv_transfer_params"]}
        check(await ask(decode, path, request | params), expected["decode"])


@pytest.mark.parametrize("case", RECORDED["others"], ids=[case["case"] for case in RECORDED["others"]])
async def test_refusals_are_the_engines(case: dict[str, Any]) -> None:
    request, expected = case["request"], case["answer"]
    body = request.encode() if isinstance(request, str) else request
    async with VllmMock("aggregated", **SETUP) as mock:
        answer = await ask(mock, case["path"], body, case["method"] or "", case["request_headers"])
    assert answer.status == expected["status"]
    assert sorted(answer.headers) == sorted(expected["headers"])
    if answer.status == 200 and case["path"] in VARIABLE:
        assert body_shape(answer.body.decode()) == body_shape(expected["body"])
    else:
        assert answer.body.decode() == expected["body"]
