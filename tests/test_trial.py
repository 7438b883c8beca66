"""The gateway's own request for ``/health_generate``: placed, sent, tried again and ended as a client's is."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes import Rig, mooncake, nixl, worker

from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.trial import Trial
from extproc.trying import try_pair
from extproc.workers.worker import MOONCAKE, Role


class Told(list):
    """What a trial told of its end."""

    @property
    def one(self):
        (record,) = self
        return record


def begun(rig, model="tiny"):
    told = Told()
    return Trial(rig.gateway, model, told.append), told


def answer():
    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    return json.dumps(
        {"id": "x", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
    ).encode()


def legs(rig):
    (prefill,) = rig.egress.out_at("prefill")
    (decode,) = rig.egress.out_at("decode")
    return prefill, decode


def over(rig, told):
    rig.clock.advance(1)
    rig.assert_nothing_is_left()
    assert rig.records[-1] is told.one
    return told.one


def test_both_legs_are_sent_as_the_handoff_has_them():
    rig = Rig()
    _, told = begun(rig)
    prefill, decode = legs(rig)
    assert prefill.path == decode.path == "/v1/completions"
    assert prefill.json["bootstrap_room"] == decode.json["bootstrap_room"]
    assert (decode.json["model"], decode.json["max_tokens"]) == ("tiny", 2)
    prefill.answer(body=answer())
    decode.answer(body=answer())
    record = over(rig, told)
    assert (record.status, record.code, record.kv, record.handoff) == (200, "", "handed", "sglang")
    assert (record.prefill, record.decode) == ("http://127.0.0.1:1", "http://127.0.0.1:11")


def test_each_has_a_prompt_that_no_prefix_cache_knows():
    rig = Rig()
    prompts = []
    for _ in range(2):
        trial, _ = begun(rig)
        prompts.append(legs(rig)[0].json["prompt"])
        trial.leave()
    assert prompts[0][:16] != prompts[1][:16]
    assert len(prompts[0].split()) > 32


def test_a_handoff_in_turn():
    rig = Rig(*nixl())
    _, told = begun(rig, None)
    (prefill,) = rig.egress.out
    assert "model" not in prefill.json
    params = {"remote_engine_id": "e", "remote_block_ids": [1], "remote_host": "h", "remote_port": 1}
    params |= {"remote_request_id": "r", "do_remote_prefill": True, "do_remote_decode": False}
    prefill.answer(body=json.dumps(json.loads(answer()) | {"kv_transfer_params": params}).encode())
    (decode,) = rig.egress.out_at("decode")
    decode.answer(body=answer())
    assert over(rig, told).kv == "handed"


def test_another_pair_is_tried():
    rig = Rig(retry=RetryPolicy(jitter=0))
    _, told = begun(rig)
    _, decode = legs(rig)
    decode.answer(status=500)
    rig.clock.advance(0.1)
    prefill, decode = legs(rig)
    prefill.answer(body=answer())
    decode.answer(body=answer())
    record = over(rig, told)
    assert (record.status, record.attempts, record.decode) == (200, 2, "http://127.0.0.1:12")


def test_a_failure_is_told_with_its_code():
    rig = Rig(retry=RetryPolicy(attempts=1))
    _, told = begun(rig)
    _, decode = legs(rig)
    decode.answer(status=500)
    record = over(rig, told)
    assert (record.status, record.code) == (500, "decode_failed")


@pytest.mark.parametrize(
    ("rig", "model", "code"),
    [
        (Rig(worker(Role.DECODE, 11)), "tiny", "no_available_workers"),
        (Rig(), "other", "model_not_found"),
        (Rig(*nixl((1,), ()), *mooncake((), (11,))), "tiny", "no_compatible_pd_pair"),
    ],
)
def test_nobody_is_there(rig, model, code):
    _, told = begun(rig, model)
    assert over(rig, told).code == code
    assert rig.egress.legs == []


def test_a_prefill_that_hands_nothing_over_does_not_pass():
    rig = Rig(
        worker(Role.PREFILL, 1, runtime="vllm", kv_connector=MOONCAKE),
        worker(Role.DECODE, 11, runtime="vllm", kv_connector=MOONCAKE),
    )
    _, told = begun(rig)
    record = over(rig, told)
    assert record.code == "kv_missing"
    assert "hands nothing over" in record.message


def test_who_waits_no_longer_ends_the_legs():
    rig = Rig()
    trial, told = begun(rig)
    assert len(rig.egress.out) == 2
    trial.leave()
    trial.leave()
    assert over(rig, told).status == 0


def test_the_gateways_key_is_not_in_the_way_and_is_not_passed_on():
    rig = Rig(api_key="s3cret")
    begun(rig)
    assert all("s3cret" not in str(leg.headers) for leg in legs(rig))


def test_a_gateway_that_stops_does_not_pass():
    rig = Rig()
    rig.gateway.draining = True
    _, told = begun(rig)
    assert over(rig, told).code == "draining"


async def test_an_answer_that_does_not_come_is_not_waited_for_long():
    rig = Rig()
    result = await try_pair(rig.gateway, "tiny", 0.01)
    assert (result.ok, result.code, result.message) == (False, "request_timeout", "no answer within 0.01 s")
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


async def test_what_is_told_of_one_that_comes():
    rig = Rig()
    asking = asyncio.create_task(try_pair(rig.gateway, "tiny", 20))
    await asyncio.sleep(0)
    for leg in legs(rig):
        leg.answer(body=answer())
    rig.clock.advance(1)
    result = await asking
    assert (result.ok, result.code, result.kv, result.attempts) == (True, "", "handed", 1)
    assert (result.prefill, result.decode) == ("http://127.0.0.1:1", "http://127.0.0.1:11")
