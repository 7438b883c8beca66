"""Requests whose answer is made here, in turn, and their other attempts; until the client has heard something."""

import json

import pytest
from fakes import Rig, mooncake, mutated, nixl, rejection, released
from test_relayed import relayed

from extproc.errors import GatewayError
from extproc.exchange.attempts import KvMissing, OnPrefillFailure, RetryPolicy
from extproc.transport.interface import Lost

PATH = "/v1/completions"
LIST = {"model": "tiny", "prompt": ["a", "b"]}
SAMPLES = {"model": "tiny", "messages": [], "n": 2}
STEADY = RetryPolicy(jitter=0)
ONCE = RetryPolicy(attempts=1)


def params(name):
    return {
        "do_remote_prefill": True,
        "remote_block_ids": [1],
        "remote_engine_id": name,
        "remote_request_id": name,
        "remote_host": "h",
        "remote_port": 1,
    }


def prefilled(name):
    answer = {
        "id": "p",
        "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        "kv_transfer_params": params(name),
    }
    return json.dumps(answer).encode()


def completion(text):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    whole = {"id": f"cmpl-{text}", "object": "text_completion", "created": 1, "model": "tiny"}
    return json.dumps({**whole, "choices": [choice], "usage": usage}).encode()


def event(text):
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "created": 1, "choices": [choice]}).encode() + b"\n\n"


def out(rig):
    """The legs that are out: prefills, decodes."""
    return rig.egress.out_at("prefill"), rig.egress.out_at("decode")


def forgotten(rig):
    return [order.json["kv_transfer_params"]["remote_engine_id"] for order in rig.egress.orders]


def end(rig, client):
    client.close()
    rig.clock.advance(100)
    rig.assert_nothing_is_left()
    (record,) = rig.records
    return record


def serve(rig, *texts):
    """Let the attempt that is under way do well."""
    for leg in out(rig)[0]:
        leg.answer(body=prefilled(leg.json["prompt"]))
    for leg, text in zip(out(rig)[1], texts, strict=True):
        leg.answer(body=completion(text), headers=[(b"x-pd-upstream", leg.destination.split(",")[0].encode())])


# -- a list of prompts, in turn ----------------------------------------------------------------------------------------


@pytest.fixture
def rig():
    return Rig(*nixl(), retry=ONCE)


@pytest.mark.parametrize("first", [0, 1])
def test_each_decode_leg_starts_when_its_own_prefill_is_done(rig, first):
    client = rig.post(PATH, LIST)
    prefills, decodes = out(rig)
    assert [leg.json["prompt"] for leg in prefills] == ["a", "b"]
    assert decodes == []
    assert [w.load for w in rig.workers] == [2, 0, 0, 0]
    for part in (first, 1 - first):
        prefills[part].answer(body=prefilled("ab"[part]))
        decode = out(rig)[1][-1]
        assert decode.json["prompt"] == "ab"[part]
        assert decode.json["kv_transfer_params"] == params("ab"[part])
    assert [w.load for w in rig.workers] == [0, 0, 2, 0]
    ids = [dict(leg.headers)[b"x-request-id"] for leg in rig.egress.legs]
    assert len(set(ids)) == 2  # the two legs of a part have the same
    end(rig, client)


def test_the_answers_come_back_as_one(rig):
    client = rig.post(PATH, LIST)
    serve(rig, "x", "y")
    head, body, ended = relayed(client)
    assert (head[":status"], head["x-pd-kv"], head["x-pd-handoff"]) == ("200", "handed", "nixl")
    answer = json.loads(body)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "x"), (1, "y")]
    assert answer["usage"]["prompt_tokens"] == 6
    assert ended
    record = end(rig, client)
    assert (record.status, record.kv, record.attempts) == (200, "handed", 1)


def test_one_prefill_that_fails_ends_all_and_frees_what_the_others_hold(rig):
    client = rig.post(PATH, LIST)
    first, second = out(rig)[0]
    first.answer(body=prefilled("a"))
    (decode,) = out(rig)[1]
    second.answer(400, b"too long")
    assert (rejection(client)[0], decode.cancelled) == (400, True)
    assert forgotten(rig) == ["a"]
    end(rig, client)


def test_a_decode_that_has_its_request_frees_the_cache_itself(rig):
    client = rig.post(PATH, LIST | {"stream": True})
    for leg in out(rig)[0]:
        leg.answer(body=prefilled(leg.json["prompt"]))
    out(rig)[1][0].receiver.head(200, [])
    client.close()
    assert forgotten(rig) == ["b"]
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("answered", range(5))
def test_a_client_that_leaves_at_any_moment(rig, answered):
    client = rig.post(PATH, LIST)
    for _ in range(answered):
        prefills, decodes = out(rig)
        leg = (prefills + decodes)[0]
        leg.answer(body=prefilled("p") if leg in prefills else completion("x"))
    end(rig, client)
    assert len(forgotten(rig)) == {0: 0, 1: 1, 2: 2, 3: 1, 4: 0}[answered]


def test_without_parameters_a_decode_recomputes(rig):
    client = rig.post(PATH, LIST)
    first, second = out(rig)[0]
    first.answer(body=b"{}")
    second.answer(body=prefilled("b"))
    bodies = [leg.json for leg in out(rig)[1]]
    assert ["kv_transfer_params" in body for body in bodies] == [False, True]
    for leg in out(rig)[1]:
        leg.answer(body=completion("x"))
    assert relayed(client)[0]["x-pd-kv"] == "recomputed"
    record = end(rig, client)
    assert record.kv == "recomputed"
    assert "kv_transfer_params" in record.note


def test_or_the_request_fails_where_the_operator_wants_that():
    rig = Rig(*nixl(), kv_missing=KvMissing.FAIL)
    client = rig.post(PATH, LIST)
    first, second = out(rig)[0]
    second.answer(body=prefilled("b"))
    first.answer(body=b"{}")
    status, headers, _ = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (502, "kv_missing")
    assert "x-pd-kv" not in headers
    assert forgotten(rig) == ["b"]
    assert end(rig, client).code == "kv_missing"


@pytest.mark.parametrize("workers", [nixl, mooncake])
def test_decode_only_does_without_any_prefill(workers):
    policy = RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY)
    rig = Rig(*workers(), retry=policy, mooncake_in_turn=True)
    client = rig.post(PATH, LIST)
    first, second = out(rig)[0]
    second.answer(500)
    prefills, decodes = out(rig)
    assert (prefills, first.cancelled) == ([], True)
    assert [leg.json for leg in decodes] == [{"model": "tiny", "prompt": prompt} for prompt in "ab"]
    for leg in decodes:
        leg.answer(body=completion("x"))
    assert relayed(client)[0]["x-pd-kv"] == "recomputed"
    record = end(rig, client)
    assert (record.kv, record.status) == ("recomputed", 200)
    assert "decode-only" in record.note


def test_decode_only_does_without_the_only_prefill_worker():
    rig = Rig(*nixl(prefills=(1,)), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    client = rig.post(PATH, LIST)
    rig.workers[0].endpoint = None  # its probe has failed, too
    out(rig)[0][0].answer(503, b"", [(b"x-pd-local-reply", b"UF")])
    assert len(out(rig)[1]) == 2
    end(rig, client)


@pytest.mark.parametrize("question", [LIST, SAMPLES, LIST | {"stream": True}])
def test_decode_only_goes_on_when_there_is_no_prefill_worker_any_more(question):
    rig = Rig(*nixl(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    for prefill in rig.workers[:2]:
        prefill.endpoint = None
    path = PATH if "prompt" in question else "/v1/chat/completions"
    client = rig.post(path, question)
    body, _, destinations = released(client)
    assert json.loads(body) == question
    assert set(destinations) <= {"127.0.0.1:11", "127.0.0.1:12"}
    record = end(rig, client)
    assert (record.kv, record.prefill) == ("recomputed", "")
    assert "decode-only" in record.note


@pytest.mark.parametrize(
    ("workers", "policy"),
    [(nixl, OnPrefillFailure.RETRY), (nixl, OnPrefillFailure.FAIL), (tuple, OnPrefillFailure.DECODE_ONLY)],
)
def test_else_there_is_nobody(workers, policy):
    rig = Rig(*workers(), retry=RetryPolicy(on_prefill_failure=policy))
    for prefill in rig.workers[:2]:
        prefill.endpoint = None
    status, headers, _ = rejection(rig.post(PATH, LIST))
    assert (status, headers["x-pd-error-code"]) == (503, "no_available_workers")


def test_decode_only_is_not_for_what_the_decode_would_refuse_just_so():
    rig = Rig(*nixl(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    client = rig.post(PATH, LIST)
    out(rig)[0][0].answer(400)
    assert rejection(client)[0] == 400
    end(rig, client)


def test_decode_only_has_the_decode_compute_the_prompts_log_probabilities():
    rig = Rig(*nixl(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    client = rig.post(PATH, {"model": "tiny", "prompt": "a", "prompt_logprobs": 1})
    out(rig)[0][0].answer(500)
    (decode,) = out(rig)[1]
    assert decode.json["prompt_logprobs"] == 1
    decode.answer(body=b"what it says")
    assert relayed(client)[1:] == (b"what it says", True)
    end(rig, client)


# -- other attempts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["first prefill", "all prefills", "a decode's head", "a decode's answer"])
def test_a_failed_prefill_or_decode_is_tried_on_another_pair(after):
    rig = Rig(*nixl(), retry=RetryPolicy(initial=2, jitter=0))
    client = rig.post(PATH, LIST)
    prefills, _ = out(rig)
    if after == "first prefill":
        prefills[0].answer(body=prefilled("a"))
        prefills[1].receiver.lost(Lost.RESET, "RST_STREAM")
        assert rig.failing == [rig.workers[0]]
    else:
        for leg in prefills:
            leg.answer(body=prefilled("p"))
        one, other = out(rig)[1]
        if after == "a decode's head":
            one.receiver.head(200, [(b"x-pd-upstream", b"127.0.0.1:11")])
        elif after == "a decode's answer":
            one.answer(body=completion("x"), headers=[(b"x-pd-upstream", b"127.0.0.1:11")])
        other.answer(503, b"", [(b"x-pd-upstream", b"127.0.0.1:11")])
    assert client.call.take() == []
    assert rig.egress.out == []
    assert [w.load for w in rig.workers] == [0, 0, 0, 0]
    rig.clock.advance(2.1)
    serve(rig, "x", "y")
    head, body, ended = relayed(client)
    assert [c["text"] for c in json.loads(body)["choices"]] == ["x", "y"]
    assert (head["x-pd-attempts"], ended) == ("2", True)
    if after == "first prefill":
        assert head["x-pd-prefill"] == "http://127.0.0.1:2"
    else:
        assert head["x-pd-decode"] == "http://127.0.0.1:12"
    record = end(rig, client)
    assert (record.attempts, record.status, record.code, record.kv) == (2, 200, "", "handed")


@pytest.mark.parametrize("flags", [b"UC", b"UT", b"UPE"])
@pytest.mark.parametrize("body", [LIST, SAMPLES])
def test_one_decode_whose_connection_broke_is_not_all_decodes(flags, body):
    """Envoy's word has nobody's name. Only where it reached none of the list were all of them tried."""
    workers = nixl() if body is LIST else ()
    rig = Rig(*workers, retry=STEADY)
    client = rig.post(PATH if body is LIST else "/v1/chat/completions", body)
    for leg in out(rig)[0]:
        leg.answer(body=prefilled("p"))
    out(rig)[1][0].answer(503, b"", [(b"x-pd-local-reply", flags)])
    assert rig.failing in ([], [rig.workers[2]])
    assert client.call.take() == []
    rig.clock.advance(1)
    assert len(rig.egress.out) > 0
    end(rig, client)


def test_decodes_that_cannot_be_reached_are_left_out_with_their_kin():
    rig = Rig(*nixl(decodes=(11, 12, 13, 14, 15)), retry=STEADY)
    client = rig.post(PATH, LIST)
    for leg in out(rig)[0]:
        leg.answer(body=prefilled(leg.json["prompt"]))
    out(rig)[1][0].answer(503, b"", [(b"x-pd-local-reply", b"UF")])
    assert rig.unreachable == list(rig.workers[2:6])
    assert {order.destination for order in rig.egress.orders} == {"127.0.0.1:15"}
    rig.clock.advance(1)
    for leg in out(rig)[0]:
        leg.answer(body=prefilled(leg.json["prompt"]))
    assert {leg.destination for leg in out(rig)[1]} == {"127.0.0.1:15"}
    end(rig, client)


def test_samples_of_sglang_are_tried_in_new_rooms():
    rig = Rig(retry=STEADY)
    client = rig.post("/v1/chat/completions", SAMPLES)
    first = {leg.json["bootstrap_room"] for leg in rig.egress.out}
    out(rig)[0][0].answer(500)
    assert rig.gateway.handoffs.live == 0
    rig.clock.advance(1)
    legs = rig.egress.out
    assert len(legs) == 4
    assert first.isdisjoint({leg.json["bootstrap_room"] for leg in legs})
    assert {leg.destination for leg in out(rig)[0]} == {"127.0.0.1:2"}
    end(rig, client)


def test_what_the_client_named_is_not_tried_again_once_it_is_sent():
    """The failed attempt's legs may still have the name on their workers, and SGLang takes none twice."""
    rig = Rig(retry=STEADY)
    client = rig.post("/v1/chat/completions", SAMPLES | {"rid": "mine"})
    out(rig)[0][0].answer(500, b"kaputt")
    assert rejection(client)[0] == 502
    assert end(rig, client).attempts == 1


def test_the_log_says_what_the_client_does_not_hear_of(caplog):
    caplog.set_level("INFO", "extproc.exchange.session")
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, LIST)
    out(rig)[0][0].answer(500, b"kaputt")
    (line,) = caplog.records
    assert (line.prefill, line.attempt, line.code) == ("http://127.0.0.1:1", 1, "prefill_failed")
    assert "kaputt" in line.reason
    assert line.request_id == client.session.record.request_id.decode()
    end(rig, client)


def test_the_last_error_is_told():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, LIST)
    out(rig)[0][0].answer(500, b"first")
    rig.clock.advance(1)
    out(rig)[0][1].answer(500, b"second")
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-attempts"]) == (502, "2")
    assert b"second" in body
    assert end(rig, client).attempts == 2


def test_who_is_left_only_before_the_pause_is_no_help():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, LIST)
    out(rig)[0][0].answer(500, b"first")
    rig.workers[1].endpoint = None
    rig.clock.advance(1)
    assert b"first" in rejection(client)[2]
    end(rig, client)


def test_a_like_worker_that_cannot_hand_over_is_no_second_choice():
    rig = Rig(*mooncake(), retry=STEADY)
    client = rig.post(PATH, LIST)
    rig.workers[1].kv_engines = ()
    out(rig)[0][0].answer(500, b"first")
    rig.clock.advance(1)
    assert b"first" in rejection(client)[2]
    for leg in rig.egress.out:
        leg.answer()
    end(rig, client)


def test_once_the_client_has_heard_something_nothing_is_tried_again():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, LIST | {"stream": True})
    first, second = out(rig)[0]
    first.answer(body=prefilled("a"))
    decode = out(rig)[1][0]
    decode.receiver.head(200, [])
    decode.receiver.data(event("x"))
    second.answer(500)
    _, body, ended = relayed(client)
    assert b'"prefill_failed"' in body
    assert ended
    rig.clock.advance(1)
    assert rig.egress.out == []
    record = end(rig, client)
    assert (record.status, record.code, record.attempts) == (200, "prefill_failed", 1)


def test_a_client_that_leaves_between_two_attempts():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, LIST)
    out(rig)[0][0].answer(500)
    record = end(rig, client)
    assert len(rig.egress.legs) == 2
    assert record.status == 0


@pytest.mark.parametrize("ends", ["deadline", "stop"])
def test_a_request_that_ends_between_two_attempts(ends):
    rig = Rig(*nixl(), retry=RetryPolicy(initial=5, jitter=0), request_timeout=10)
    client = rig.post(PATH, LIST)
    out(rig)[0][0].answer(500)
    if ends == "deadline":
        rig.clock.time += 10
        rig.gateway.expire()
    else:
        rig.gateway.end_all(GatewayError("draining", "the gateway is stopping"))
    (message,) = client.call.take()
    assert message.immediate_response.status.code == (504 if ends == "deadline" else 503)
    rig.clock.advance(10)
    assert len(rig.egress.legs) == 2
    assert mutated(message)["x-pd-error-code"] == end(rig, client).code


def test_the_egress_listeners_trouble_is_waited_out_on_the_same_pair():
    rig = Rig(*nixl(prefills=(1,)), retry=STEADY)
    client = rig.post(PATH, LIST)
    out(rig)[0][0].receiver.lost(Lost.UNREACHABLE, "no connection")
    rig.clock.advance(1)
    serve(rig, "x", "y")
    assert relayed(client)[2]
    end(rig, client)
