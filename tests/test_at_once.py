"""Mooncake's legs, both at once: neither may be left waiting for the other."""

import json

import pytest
from fakes import Rig, mooncake, mutated, rejection, released

from extproc.exchange.attempts import KvMissing, OnPrefillFailure, RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS, LEFTOVER_SECONDS, TAKEN_SECONDS
from extproc.transport.interface import Lost
from extproc.workers.worker import KvEngine

CHAT = {"model": "tiny", "messages": []}
STREAM = CHAT | {"stream": True}
LIST = {"model": "tiny", "prompt": ["a", "b"]}
PATH = "/v1/chat/completions"
ONCE = RetryPolicy(attempts=1)


@pytest.fixture
def rig():
    return Rig(*mooncake(), retry=ONCE)


def transfer(body):
    return (body if isinstance(body, dict) else json.loads(body))["kv_transfer_params"]["transfer_id"]


def prefills(rig):
    return [leg for leg in rig.egress.legs if leg.cluster == "prefill" and not leg.is_order]


def unpinned(rig):
    """(worker, transfer id) of the orders to free a decode that waits."""
    orders = [order for order in rig.egress.orders if order.cluster == "prefill"]
    assert all(order.path == "/v1/completions" for order in orders)
    return [(order.destination, transfer(order.body)) for order in orders]


def test_both_legs_leave_in_one_step_under_one_transfer(rig):
    client = rig.post(PATH, CHAT)
    body, _, destinations = released(client)
    (leg,) = rig.egress.out
    assert (leg.cluster, leg.destination) == ("prefill", "127.0.0.1:1")
    assert leg.json["max_tokens"] == 1
    params = json.loads(body)["kv_transfer_params"]
    assert params["transfer_id"] == transfer(leg.body)
    assert (params["remote_engine_id"], params["remote_bootstrap_addr"]) == ("engine-1", "http://127.0.0.1:8001")
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]
    assert [w.load for w in rig.workers] == [1, 0, 1, 0]


def test_of_several_engine_cores_the_prefill_is_pinned_to_the_one_that_the_decode_is_told(rig):
    rig.workers[0].kv_engines = (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1"))
    client = rig.post(PATH, CHAT, headers=[("x-data-parallel-rank", "7")])
    body, _, _ = released(client)
    ranks = [value for name, value in rig.egress.out[0].headers if name == b"x-data-parallel-rank"]
    assert [f"e_dp{int(rank)}" for rank in ranks] == [json.loads(body)["kv_transfer_params"]["remote_engine_id"]]


def test_without_an_engine_id_the_decode_is_alone_and_that_is_said(rig):
    rig.workers[0].kv_engines = ()
    client = rig.post(PATH, CHAT)
    body, _, _ = released(client)
    assert json.loads(body) == CHAT
    assert rig.egress.legs == []
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    named = mutated(client.call.take()[0])
    assert named["x-pd-kv"] == "recomputed"
    assert "x-pd-prefill" not in named
    client.close()
    rig.assert_nothing_is_left()
    assert "engine id" in rig.records[0].note


@pytest.mark.parametrize("question", [CHAT, STREAM])
def test_or_the_request_fails_where_the_operator_wants_that(question):
    rig = Rig(*mooncake(), kv_missing=KvMissing.FAIL)
    for prefill in rig.workers[:2]:
        prefill.kv_engines = ()
    client = rig.post(PATH, question)
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (502, "kv_missing")
    assert "engine id" in json.loads(body)["error"]["message"]
    client.close()
    rig.assert_nothing_is_left()


# -- the head of a stream, which comes before anything is known ------------------------------------------------------


def test_a_streams_head_waits_for_the_prefill(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    rig.clock.advance(15)
    assert client.call.take() == []
    rig.egress.out[0].answer()
    assert mutated(client.call.take()[0])["x-pd-kv"] == "handed"
    client.close()
    rig.assert_nothing_is_left()


def test_but_not_longer_than_envoy_does(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    client.decode_head()
    rig.clock.advance(20)
    assert len(client.call.take()) == 1
    rig.egress.out[0].answer()
    client.close()
    rig.assert_nothing_is_left()


def test_a_whole_answers_head_does_not_wait(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head()
    assert len(client.call.take()) == 1


def test_a_client_whose_head_was_held_hears_of_the_prefills_refusal(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    client.decode_head()
    rig.egress.out[0].answer(400, b"no")
    assert (rejection(client)[0], rig.egress.out) == (400, [])


# -- a prefill leg that nobody wants any more --------------------------------------------------------------------------


def leaves(rig, client):
    assert rig.gateway.alive == 1
    client.close()


def expires(rig, client):
    rig.clock.time += rig.gateway.config.request_timeout
    rig.gateway.expire()
    client.close()


def is_refused(rig, client):
    assert rig.gateway.alive == 1
    client.decode_head(503, [("x-pd-upstream", "127.0.0.1:11")])
    client.close()


UNWANTED = pytest.mark.parametrize("why", [leaves, expires, is_refused])


@UNWANTED
@pytest.mark.parametrize(
    "finish",
    [lambda leg: leg.answer(), lambda leg: leg.answer(500), lambda leg: leg.receiver.lost(Lost.RESET, "")],
)
def test_it_is_let_finish_and_counts_until_then(rig, why, finish):
    client = rig.post(PATH, CHAT)
    released(client)
    (leg,) = rig.egress.out
    why(rig, client)
    assert leg.out
    assert [w.load for w in rig.workers] == [1, 0, 0, 0]
    rig.clock.advance(LEFTOVER_SECONDS - 1)
    assert leg.out
    finish(leg)
    rig.assert_nothing_is_left()
    rig.clock.advance(LEFTOVER_SECONDS)
    rig.assert_nothing_is_left()  # given back once


@pytest.mark.parametrize("body", [CHAT, LIST])
@pytest.mark.parametrize(
    ("after", "headed", "prefilled", "told"),
    [
        (0.0, False, False, True),
        (TAKEN_SECONDS - 0.1, False, False, True),
        (TAKEN_SECONDS, False, False, False),  # whatever has the request by now, tells the prefill itself
        (0.0, True, False, False),
        (0.0, False, True, False),  # it would wait for 480 s, should the decode have told the prefill already
    ],
)
def test_a_decode_that_may_never_have_heard_of_it_has_the_cache_freed(rig, body, after, headed, prefilled, told):
    path = "/v1/completions" if body is LIST else PATH
    client = rig.post(path, body)
    caches = {transfer(leg.json) for leg in prefills(rig)}
    if headed and body is CHAT:
        client.decode_head()
    elif headed:
        for leg in rig.egress.out_at("decode"):
            leg.receiver.head(200, [])
    if prefilled:
        for leg in prefills(rig):
            leg.answer()
    rig.clock.advance(after)
    client.close()
    forgotten = {transfer(leg.json) for leg in rig.egress.orders}
    assert forgotten == (caches if told else set())
    assert {leg.cluster for leg in rig.egress.orders} <= {"decode"}
    for leg in list(rig.egress.out):
        leg.answer()
    rig.clock.advance(LEFTOVER_SECONDS)
    rig.assert_nothing_is_left()


@UNWANTED
def test_but_not_for_ever(rig, why):
    client = rig.post(PATH, CHAT)
    (leg,) = rig.egress.out
    why(rig, client)
    rig.clock.advance(LEFTOVER_SECONDS)
    assert leg.cancelled
    rig.assert_nothing_is_left()


def test_it_is_let_finish_after_the_decodes_answer(rig):
    client = rig.post(PATH, CHAT)
    client.decode_head()
    client.close()
    rig.clock.advance(1)
    (leg,) = rig.egress.out
    leg.answer()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("in_turn", [False, True])
def test_those_of_a_list_of_prompts_too(in_turn):
    rig = Rig(*mooncake(), retry=ONCE, mooncake_in_turn=in_turn)
    client = rig.post("/v1/completions", LIST)
    client.close()
    assert [leg.cancelled for leg in prefills(rig)] == [in_turn, in_turn]
    assert rig.workers[0].load == (0 if in_turn else 2)
    for leg in rig.egress.out:
        leg.answer()
    rig.assert_nothing_is_left()


# -- a decode that waits for a prefill that does not come --------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
def test_a_decode_whose_prefill_was_refused_is_freed_once_its_leg_has_ended(rig, status):
    client = rig.post(PATH, CHAT)
    released(client)
    (leg,) = rig.egress.out
    leg.answer(status)
    assert rig.egress.orders == []  # Envoy must have ended the decode leg first
    rig.clock.advance(0.1)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]
    client.close()
    rig.assert_nothing_is_left()


def test_a_prefill_that_cannot_be_reached_frees_nobody(rig):
    client = rig.post(PATH, CHAT)
    rig.egress.out[0].answer(503, b"", [(b"x-pd-local-reply", b"UF")])
    rig.clock.advance(1)
    assert rig.egress.orders == []
    client.close()


def test_in_turn_no_decode_waits():
    rig = Rig(*mooncake(), retry=ONCE, mooncake_in_turn=True)
    client = rig.post(PATH, CHAT)
    rig.egress.out[0].answer(500)
    rig.clock.advance(1)
    assert rig.egress.orders == []
    client.close()


@pytest.mark.parametrize("which", [0, 1])
def test_of_a_list_of_prompts_the_one_whose_prefill_failed_is_freed(rig, which):
    client = rig.post("/v1/completions", LIST)
    failed = prefills(rig)[which]
    failed.answer(500)
    rig.clock.advance(0.1)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(failed.body))]
    for leg in rig.egress.out:
        leg.answer()
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("why", [leaves, expires])
def test_a_decode_is_freed_too_when_a_prefill_that_was_let_finish_fails(rig, why):
    """Its memory is kept although its own leg has ended: for that the prefill is let finish."""
    client = rig.post(PATH, CHAT)
    (leg,) = rig.egress.out
    why(rig, client)
    leg.answer(500)
    rig.clock.advance(0.1)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]


def test_a_decode_of_a_list_is_freed_too_when_a_prefill_that_was_let_finish_fails(rig):
    client = rig.post("/v1/completions", LIST)
    legs = prefills(rig)
    client.close()
    legs[1].answer(500)
    rig.clock.advance(0.1)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(legs[1].body))]
    legs[0].answer()


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_prefill_fails_the_request_where_the_operator_wants_that():
    rig = Rig(*mooncake(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.FAIL))
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.out[0].answer(500)
    assert rejection(client)[0] == 502
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_decode_only_asks_a_decode_anew_since_the_first_one_waits_for_its_prefill(asked, status):
    rig = Rig(*mooncake(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    client = rig.post(PATH, STREAM)
    released(client)
    if asked:
        client.decode_head()
    (leg,) = rig.egress.out
    leg.answer(status)
    if not asked:
        rig.clock.advance(HEAD_SECONDS)
    (decode,) = rig.egress.out
    assert (decode.cluster, decode.json) == ("decode", STREAM)
    assert sum(w.load for w in rig.workers) == 1 + asked  # Envoy keeps a leg of which it has the head to the end
    second = client.late()
    decode.receiver.head(200, [(b"x-pd-upstream", decode.destination.partition(",")[0].encode())])
    decode.receiver.data(b"data: x")
    headers, body, _ = second.answer()
    assert (headers[":status"], headers["x-pd-kv"], body) == ("200", "recomputed", b"data: x")
    decode.receiver.done()
    client.close()
    second.close()
    rig.clock.advance(1)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]
    rig.assert_nothing_is_left()
    (record,) = rig.records
    assert (record.status, record.code, record.kv) == (200, "", "recomputed")
    assert "decode-only" in record.note


def test_decode_only_is_not_for_what_the_decode_would_refuse_just_so():
    rig = Rig(*mooncake(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.out[0].answer(400)
    assert rejection(client)[0] == 400
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("policy", OnPrefillFailure)
def test_no_policy_lets_sglangs_decode_do_without(policy):
    rig = Rig(retry=RetryPolicy(on_prefill_failure=policy, attempts=1))
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.out[0].answer(500)
    assert rejection(client)[0] == 502
    client.close()
    rig.assert_nothing_is_left()


def test_a_prefill_that_fails_after_the_head_cuts_the_answer(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head()
    client.call.take()
    rig.egress.out[0].answer(500)
    assert rejection(client)[0] == 502
    client.close()
    rig.assert_nothing_is_left()
