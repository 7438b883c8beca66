"""``return_routed_experts``: the prompt's rows are the prefill's, which alone has run its tokens."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from fakes import Rig, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.errors import GatewayError
from extproc.merge.answer import joined_answer
from extproc.merge.parts import joint_of
from extproc.workers.worker import Role

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ASK = {"return_routed_experts": True}
ROW = 24  # bytes: three layers, two experts each, of 32 bits


def rows(*numbers: int) -> str:
    """So many rows, each of one byte's value, as an engine tells them."""
    return base64.b64encode(b"".join(bytes([number]) * ROW for number in numbers)).decode()


# Three tokens of a prompt and the first one's successor; the decode has run none of the prompt's.
KNOWN, OWN, WHOLE = rows(1, 2, 3), rows(9, 9, 9, 4, 5), rows(1, 2, 3, 4, 5)


def request(path: str, **fields: Any) -> InferenceRequest:
    body = {CHAT: {"messages": []}, COMPLETIONS: {"prompt": "p"}, GENERATE: {"text": "p"}}[path]
    return InferenceRequest.read(APIS[path], json.dumps(body | fields).encode())


def joined(asked: InferenceRequest, prefill: Any, decode: bytes, parts: int = 1) -> bytes:
    answer = joined_answer(asked)
    assert answer.needs_prefill
    out = b""
    for part in range(parts):
        out += answer.decode_data(part, decode)
        out += answer.prefill_done(part, json.dumps(prefill).encode())
        out += answer.decode_done(part)
    assert answer.complete
    return out


def generated(experts: str | None, **meta: Any) -> dict[str, Any]:
    return {"text": "x", "output_ids": [7], "meta_info": {"id": "r", **meta, "routed_experts": experts}}


def test_generate():
    answer = json.loads(joined(request(GENERATE, **ASK), generated(KNOWN), json.dumps(generated(OWN)).encode()))
    assert answer == generated(WHOLE)


def test_each_prompt_of_a_list_has_its_own():
    asked = request(GENERATE, text=["p", "q"], return_routed_experts=[False, True])
    prefill, decode = [generated(None), generated(rows(1))], [generated(None), generated(rows(9, 2))]
    assert json.loads(joined(asked, prefill, json.dumps(decode).encode())) == [generated(None), generated(rows(1, 2))]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_completions_are_in_its_extension(path):
    def answer(experts: str) -> dict[str, Any]:
        details = {"device": 4, "host": 0}
        return {"choices": [{"index": 0}], "sglext": {"routed_experts": experts, "cached_tokens_details": details}}

    assert json.loads(joined(request(path, **ASK), answer(KNOWN), json.dumps(answer(OWN)).encode())) == answer(WHOLE)


def test_a_chats_may_be_in_its_choices():
    def answer(*experts: str) -> dict[str, Any]:
        return {"choices": [{"index": at, "meta_info": {"routed_experts": one}} for at, one in enumerate(experts)]}

    asked = request(CHAT, **ASK, return_meta_info=True)
    assert json.loads(joined(asked, answer(KNOWN), json.dumps(answer(OWN)).encode())) == answer(WHOLE)


def test_a_stream_tells_them_in_a_chunk_of_no_choices():
    chunks = [
        {"id": "r", "choices": [{"index": 0, "delta": {"content": "x"}}]},
        {"id": "r", "choices": [], "sglext": {"routed_experts": OWN}},
    ]
    stream = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
    prefill = {"choices": [{"index": 0}], "sglext": {"routed_experts": KNOWN}}
    told = joined(request(CHAT, **ASK, stream=True), prefill, stream).decode().split("\n\n")
    assert [json.loads(event.removeprefix("data: ")) for event in told[:2]] == [
        chunks[0],
        chunks[1] | {"sglext": {"routed_experts": WHOLE}},
    ]
    assert told[2:] == ["data: [DONE]", ""]


def test_log_probabilities_of_the_prompt_come_as_well():
    meta = {"input_token_logprobs": [[-1.0, 5, None]]}
    asked = request(GENERATE, **ASK, return_logprob=True, logprob_start_len=0)
    decode = json.dumps(generated(OWN, input_token_logprobs=[])).encode()
    assert json.loads(joined(asked, generated(KNOWN, **meta), decode)) == generated(WHOLE, **meta)


def test_every_sample_has_the_prompts():
    answer = {"text": "x", "meta_info": {"id": "r", "routed_experts": OWN}}
    asked = request(GENERATE, **ASK, sampling_params={"n": 2})
    told = json.loads(joined(asked, generated(KNOWN), json.dumps(answer).encode(), parts=2))
    assert [item["meta_info"]["routed_experts"] for item in told] == [WHOLE, WHOLE]


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_the_answer_has_as_many_bytes_as_the_decodes(known, own):
    prefill = generated(base64.b64encode(known).decode())
    decode = json.dumps(generated(base64.b64encode(own).decode())).encode()
    told = json.loads(joined(request(GENERATE, **ASK), prefill, decode))["meta_info"]["routed_experts"]
    assert base64.b64decode(told) == (known + own[len(known) :])[: len(own)]


@pytest.mark.parametrize(
    ("known", "own"), [(None, OWN), (KNOWN, None)], ids=["not told by the prefill", "not told by the decode"]
)
def test_what_one_side_does_not_tell_is_not_made_up(known, own):
    decode = json.dumps(generated(own)).encode()
    assert json.loads(joined(request(GENERATE, **ASK), generated(known), decode)) == generated(own)


@pytest.mark.parametrize("wrong", [7, "%%%%x", ["a"]])
def test_what_is_none_is_no_answer(wrong):
    with pytest.raises(GatewayError, match="routed_experts"):
        joined(request(GENERATE, **ASK), generated(KNOWN), json.dumps(generated(wrong)).encode())


@pytest.mark.parametrize("asked", [False, None, [False]])
def test_who_does_not_ask_is_served_directly(asked):
    joint = joint_of(request(GENERATE, return_routed_experts=asked), "sglang")
    assert (joint.parts, joint.needs_prefill) == (1, False)


def test_a_request_for_them_is_relayed_and_completed():
    rig = Rig(worker(Role.PREFILL, 1, bootstrap_port=8998), worker(Role.DECODE, 11))
    client = rig.post(GENERATE, {"text": "p", **ASK})
    (prefill,), (decode,) = rig.egress.out_at("prefill"), rig.egress.out_at("decode")
    assert prefill.json["return_routed_experts"] is decode.json["return_routed_experts"] is True
    decode.answer(body=json.dumps(generated(OWN)).encode(), headers=[(b"x-pd-upstream", b"127.0.0.1:11")])
    prefill.answer(body=json.dumps(generated(KNOWN)).encode())
    bodies = [message for message in client.call.take() if isinstance(message, bytes)]
    assert WHOLE.encode() in b"".join(bodies)
    client.close()
    rig.assert_nothing_is_left()
