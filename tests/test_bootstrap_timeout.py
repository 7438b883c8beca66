"""Legs that meet in a room have a time for that: beyond it the request is tried elsewhere, or ends with a 504."""

from __future__ import annotations

import json

import pytest
from fakes import Heard, Rig, mooncake, mutated, nixl, rejection, released, worker
from rpc_rig import Answer, RpcRig

from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS
from extproc.exchange.gateway import GatewayConfig
from extproc.settings import Settings
from extproc.workers.worker import Role

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": []}
SAY = CHAT | {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 9}
LIMIT = 280.0
BEGIN = [("x-pd-upstream", "127.0.0.1:11")]
BEGIN_BYTES = [(b"x-pd-upstream", b"127.0.0.1:11")]
# The engine's words (SGLang 0.5.23), by the leg that says them.
BY_PREFILL = (
    "Prefill bootstrap failed for request rank=0 req.rid='r' req.bootstrap_room=7 with exception "
    "KVTransferError(bootstrap_room=7): Request 7 timed out after 300.0s in KVPoll.Bootstrapping"
)
BY_DECODE = (
    "Decode transfer failed for request rank=0 decode_req.req.rid='r' decode_req.req.bootstrap_room=7 with exception "
    "KVTransferError(bootstrap_room=7): Request 7 timed out after 300.1s in KVPoll.WaitingForInput"
)


def pair(**config) -> Rig:
    rig = Rig(worker(Role.PREFILL, 1, bootstrap_port=8998), worker(Role.DECODE, 11), **config)
    for each in rig.workers:
        each.breaker = Heard()
    return rig


def room_of(leg) -> int:
    return leg.json["bootstrap_room"]


def pass_time(rig: Rig, seconds: float) -> None:
    """As the service does: deadlines are looked at once a second."""
    for _ in range(int(seconds)):
        rig.clock.advance(1.0)
        rig.gateway.expire()


@pytest.mark.parametrize("stream", [False, True])
def test_legs_that_do_not_meet_end_in_a_504_that_names_them_and_their_room(stream):
    rig = pair()
    client = rig.post(PATH, CHAT | {"stream": stream})
    released(client)
    (leg,) = rig.egress.out
    pass_time(rig, LIMIT - 1)
    assert client.call.take() == []
    pass_time(rig, 2)
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (504, "pd_bootstrap_timeout")
    assert json.loads(body)["error"]["message"] == (
        "prefill worker http://127.0.0.1:1 and decode worker http://127.0.0.1:11 have not met in room "
        f"{room_of(leg)}: not within 280 s"
    )
    assert leg.cancelled
    assert sorted(rig.egress.aborts) == [("decode", leg.json["rid"]), ("prefill", leg.json["rid"])]
    client.close()
    assert rig.records[0].code == "pd_bootstrap_timeout"
    assert [each.breaker.outcomes for each in rig.workers] == ["", ""]  # it says nothing of who is to blame
    rig.assert_nothing_is_left()


def test_another_pair_is_tried_with_a_room_of_its_own():
    rig = Rig()
    client = rig.post(PATH, CHAT)
    released(client)
    (first,) = rig.egress.out
    pass_time(rig, LIMIT + 1)
    rig.clock.advance(HEAD_SECONDS)
    second = client.late()
    assert second.found["x-pd-error-code"] == "pd_bootstrap_timeout"  # should that be all that the client hears
    client.close()
    rig.clock.advance(0.5)
    (prefill,), (decode,) = rig.egress.out_at("prefill"), rig.egress.out_at("decode")
    assert (prefill.cluster, prefill.destination) == ("prefill", "127.0.0.1:2")
    assert room_of(prefill) == room_of(decode) != room_of(first)
    second.close()
    rig.assert_nothing_is_left()


def test_legs_that_have_met_are_left_alone():
    rig = pair()
    answered = rig.post(PATH, CHAT)
    rig.egress.out[0].answer()
    answering = rig.post(PATH, CHAT | {"stream": True})
    answering.decode_head(headers=BEGIN)  # with its first token; the prefill's answer is late
    pass_time(rig, 2 * LIMIT)
    for client in (answered, answering):
        assert all(message.WhichOneof("response") != "immediate_response" for message in client.call.take())
    answered.decode_head(headers=BEGIN)
    assert mutated(answered.call.take()[0])["x-pd-kv"] == "handed"
    for client in (answered, answering):
        client.close()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


def test_the_engines_own_time_is_longer():
    """After 300 s each of them gives up for itself, in a way that tells a client nothing."""
    default = Settings.model_fields["pd_bootstrap_timeout_secs"].default
    assert default == GatewayConfig().bootstrap_timeout == LIMIT < 300


def test_the_time_is_the_operators():
    rig = pair(bootstrap_timeout=10.0)
    client = rig.post(PATH, CHAT)
    released(client)
    pass_time(rig, 11)
    assert rejection(client)[0] == 504
    client.close()
    forever = pair(bootstrap_timeout=0.0, request_timeout=1000.0)
    client = forever.post(PATH, CHAT)
    released(client)
    pass_time(forever, 999)
    assert client.call.take() == []
    pass_time(forever, 2)
    assert json.loads(rejection(client)[2])["error"]["code"] == "request_timeout"
    client.close()
    forever.assert_nothing_is_left()


@pytest.mark.parametrize("workers", [nixl, mooncake])
def test_only_legs_that_meet_in_a_room_have_it(workers):
    """A NIXL decode comes after its prefill; a Mooncake prefill's answer does not mean that the cache is there."""
    rig = Rig(*workers())
    client = rig.post(PATH, CHAT)
    client.call.take()
    pass_time(rig, LIMIT + 1)
    assert client.call.take() == []
    client.close()


@pytest.mark.parametrize("samples", [2, 3])
def test_of_several_samples_each_has_a_room_and_one_is_enough(samples):
    rig = pair()
    client = rig.post(PATH, CHAT | {"n": samples})
    legs = rig.egress.out_at("prefill")
    legs[0].answer()
    pass_time(rig, LIMIT + 1)
    status, _, body = rejection(client)
    message = json.loads(body)["error"]["message"]
    assert status == 504
    assert any(f"have not met in room {room_of(leg)}: not within 280 s" in message for leg in legs[1:])
    client.close()
    rig.assert_nothing_is_left()


def test_an_engines_own_time_is_told_as_the_same():
    """Where its time is shorter than the gateway's: a 500 that says nothing else to a client."""
    rig = pair(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, CHAT)
    released(client)
    (leg,) = rig.egress.out
    leg.answer(500, json.dumps({"object": "error", "message": BY_PREFILL}).encode())
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (504, "pd_bootstrap_timeout")
    message = json.loads(body)["error"]["message"]
    assert f"http://127.0.0.1:1 and decode worker http://127.0.0.1:11 have not met in room {room_of(leg)}: " in message
    assert BY_PREFILL[:200] in message
    client.close()
    assert [each.breaker.outcomes for each in rig.workers] == ["", ""]


def test_so_is_that_of_a_decode_whose_answer_is_relayed():
    rig = pair(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, CHAT | {"n": 2})
    decode = rig.egress.out_at("decode")[0]
    for leg in rig.egress.out_at("prefill"):
        leg.answer()
    decode.answer(500, json.dumps({"object": "error", "message": BY_DECODE}).encode(), headers=BEGIN_BYTES)
    status, _, body = rejection(client)
    assert status == 504
    message = json.loads(body)["error"]["message"]
    assert f"have not met in room {room_of(decode)}: decode worker http://127.0.0.1:11 answered 500" in message
    client.close()


def test_other_errors_of_an_engine_stay_what_they_are():
    rig = pair(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.out[0].answer(500, b'{"message": "Prefill bootstrap failed: Aborted by AbortReq."}')
    assert rejection(client)[1]["x-pd-error-code"] == "prefill_failed"
    client.close()


# -- over gRPC --------------------------------------------------------------------------------------------------------


def test_calls_that_do_not_meet_end_in_the_same_error():
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, SAY)
    released(client)
    (leg,) = rig.prefills
    pass_time(rig, LIMIT + 1)
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (504, "pd_bootstrap_timeout")
    assert "decode worker grpc://127.0.0.1:11 have not met in room " in json.loads(body)["error"]["message"]
    assert leg.cancelled
    client.close()
    rig.assert_nothing_is_left()


def test_a_call_whose_first_token_is_there_has_met_its_prefill():
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, SAY | {"stream": True})
    released(client)
    client.decode_head(headers=[("content-type", "application/grpc"), *BEGIN])
    answer = Answer(rig, client)
    answer.feed(rig.chunk("Hi"))
    pass_time(rig, LIMIT + 1)
    (leg,) = rig.prefills
    assert not leg.cancelled
    client.close()
    answer.close()


def test_what_an_engine_says_of_its_own_time_over_grpc():
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, SAY)
    released(client)
    (leg,) = rig.prefills
    rig.refused(leg, 13, BY_PREFILL.encode())
    status, headers, _ = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (504, "pd_bootstrap_timeout")
    client.close()
