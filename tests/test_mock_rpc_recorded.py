"""The mocks' answers beside those of real servers: message for message the same, but for tokens and probabilities.

Recorded from vLLM 0.32 (NIXL) and SGLang 0.5.23 with smg-grpc-servicer 0.14.1; see test_engines_recorded.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from extproc.mock import RpcMock
from extproc.mock.rpc.engines import NIXL
from tests.rpc_asks import ASK, ask, to_rooms, to_vllm

RECORDED = json.loads((Path(__file__).parent / "data/rpc_answers.json").read_text())
IDS = list(range(5, 25))
CASES: dict[str, dict[str, Any]] = {"whole": {}, "streamed": {"stream": True}, "logprobs": {}}
TOKENS = {"whole": 3, "streamed": 3, "logprobs": 2}
OWN = {"request_id", "cached_tokens"}  # of the run that was recorded


def outline(value: Any) -> Any:
    """What a message has, without tokens and probabilities."""
    if isinstance(value, dict):
        kept = {name: outline(entry) for name, entry in value.items() if name not in OWN}
        if "kv_transfer_params_json" in value:
            kept["kv_transfer_params_json"] = sorted(json.loads(value["kv_transfer_params_json"]))
            kept["kv_transfer_params"] = sorted(value["kv_transfer_params"])
        return kept
    if isinstance(value, list):
        return [outline(entry) if isinstance(entry, dict) else type(entry).__name__ for entry in value]
    return "a number" if isinstance(value, float) else value


def outlines(messages: list[Any]) -> list[Any]:
    return [outline(MessageToDict(message, preserving_proto_field_name=True)) for message in messages]


@pytest.mark.parametrize("case", list(CASES))
async def test_sglang(case: str) -> None:
    more = {"top": 2, "start": 0} if case == "logprobs" else {}
    async with RpcMock("sglang", "prefill") as prefill, RpcMock("sglang", "decode") as decode:
        legs = [
            to_rooms(prefill, IDS, max_new_tokens=TOKENS[case], ignore_eos=True, **more, **fields)
            for fields in ({}, CASES[case])
        ]
        legs[1].logprob_start_len = -1
        answers = await asyncio.gather(ask(prefill, legs[0]), ask(decode, legs[1]))
    response = prefill.facts.messages().GenerateResponse
    for answer, role in zip(answers, ("prefill", "decode"), strict=True):
        real = [response.FromString(bytes.fromhex(message)) for message in RECORDED["sglang"][case][role]]
        assert outlines(answer.messages) == outlines(real)


@pytest.mark.parametrize("case", list(CASES))
async def test_vllm(case: str) -> None:
    of_prompt, of_answer = ({"prompt_logprobs": 2}, {"logprobs": 2}) if case == "logprobs" else ({}, {})
    async with (
        RpcMock("vllm", "prefill", connector=NIXL) as prefill,
        RpcMock("vllm", "decode", connector=NIXL) as decode,
    ):
        first = await ask(prefill, to_vllm(IDS, params=ASK, max_tokens=1, ignore_eos=True, **of_prompt))
        params = first.complete.kv_transfer_params_json
        leg = to_vllm(IDS, params=params, max_tokens=TOKENS[case], ignore_eos=True, **of_answer, **CASES[case])
        second = await ask(decode, leg)
    response = prefill.facts.messages().GenerateResponse
    for answer, role in ((first, "prefill"), (second, "decode")):
        real = [response.FromString(bytes.fromhex(message)) for message in RECORDED["vllm"][case][role]]
        assert outlines(answer.messages) == outlines(real)
