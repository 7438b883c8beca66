"""Mooncake's legs, both at once: neither may be left waiting for the other."""

import json

import pytest
from fakes import Rig, mooncake, mutated, rejection, released

from extproc.exchange.attempts import KvMissing, OnPrefillFailure, RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS, LEFTOVER_SECONDS
from extproc.handoff.mooncake import MooncakeHandoff
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
    return json.loads(body)["kv_transfer_params"]["transfer_id"]


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


def test_of_several_engine_cores_none_is_chosen_and_the_decode_is_alone(rig):
    rig.workers[0].kv_engines = (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1"))
    client = rig.post(PATH, CHAT, headers=[("x-data-parallel-rank", "7")])
    body, headers, _ = released(client)
    assert json.loads(body) == CHAT
    assert "x-data-parallel-rank" not in headers
    assert rig.egress.legs == []
    client.close()
    (record,) = rig.records
    assert "--dp-aware" in record.note


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
    rig.clock.advance(1)
    assert len(rig.egress.orders) == 1
    rig.assert_nothing_is_left()


def test_as_is_one_whose_client_leaves_just_then():
    """Whether the decode's head comes is awaited for a moment before another pair is tried."""
    rig = Rig(*mooncake())
    client = rig.post(PATH, CHAT)
    (leg,) = prefills(rig)
    leg.answer(503)
    client.close()
    rig.clock.advance(1)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("status", [429, 503])
def test_a_prefill_that_has_no_time_for_that_is_asked_again(rig, status):
    client = rig.post(PATH, CHAT)
    prefills(rig)[0].answer(503)
    client.close()
    for _ in range(3):
        rig.clock.advance(0.2)
        rig.egress.orders[-1].answer(status, headers=[(b"x-pd-upstream", b"127.0.0.1:1")])
        rig.clock.advance(5)
    rig.egress.orders[-1].answer(200)
    rig.clock.advance(100)
    assert len(unpinned(rig)) == 4
    assert len(set(unpinned(rig))) == 1


def test_nor_is_it_asked_for_ever(rig):
    client = rig.post(PATH, CHAT)
    prefills(rig)[0].answer(503)
    client.close()
    for _ in range(100):
        rig.clock.advance(10)
        if (last := rig.egress.orders[-1]).out:
            last.answer(503)
    assert 3 < len(unpinned(rig)) < 10


@pytest.mark.parametrize(("status", "headers"), [(500, []), (502, []), (503, [(b"x-pd-local-reply", b"UC")])])
def test_nor_where_it_may_have_done_it(rig, status, headers):
    """A second one would take the first one's place, and its block be nobody's."""
    client = rig.post(PATH, CHAT)
    prefills(rig)[0].answer(503)
    client.close()
    rig.clock.advance(0.2)
    rig.egress.orders[-1].answer(status, b"", headers)
    rig.clock.advance(100)
    assert len(unpinned(rig)) == 1


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


# -- what no decode may have freed twice -------------------------------------------------------------------------------
#
# A prefill that is asked for what it no longer has keeps the question for 480 s, and attends to 20 at a time.


UNREACHABLE = [("x-pd-error-code", "decode_unreachable")]
LOST = [("x-pd-error-code", "decode_connection_lost")]
REFUSED = [("x-pd-upstream", "127.0.0.1:11")]


def forgotten(rig):
    """(workers, transfer id) of the orders to a decode to have a prefill free a KV cache."""
    orders = [order for order in rig.egress.orders if order.cluster == "decode" and order.json["kv_transfer_params"]]
    return [(order.destination, transfer(order.body)) for order in orders]


def prefilled(rig, body=CHAT):
    """A request whose prefill is done."""
    client = rig.post("/v1/completions" if "prompt" in body else PATH, body)
    for leg in prefills(rig):
        leg.answer(body=b"{}")
    return client


IN_TURN = pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "at once"])
ENDS = pytest.mark.parametrize("end", ["leaves", "expires"])


def ended(rig, client, end):
    """The client has left, or its time is over."""
    if end == "expires":
        rig.clock.time += 10_000
        rig.gateway.expire()
    client.close()


def settled(rig, status=400):
    """A while later; orders to a decode have been answered with ``status``."""
    rig.clock.advance(1.5)
    assert unpinned(rig) == []  # a prefill would lose what it keeps
    for order in list(rig.egress.orders):
        order.answer(status, headers=[(b"x-pd-upstream", b"127.0.0.1:11")])
    rig.clock.advance(10)


STREAMED_LIST = LIST | {"stream": True}


@IN_TURN
@pytest.mark.parametrize(
    ("body", "status", "headers", "by"),
    [
        (CHAT, 503, UNREACHABLE, "127.0.0.1:15"),
        (CHAT, 503, REFUSED, "127.0.0.1:12,127.0.0.1:13,127.0.0.1:14,127.0.0.1:11"),
        (CHAT, 429, REFUSED, "127.0.0.1:12,127.0.0.1:13,127.0.0.1:14,127.0.0.1:11"),
        (STREAM, 503, LOST, "127.0.0.1:12,127.0.0.1:13,127.0.0.1:14,127.0.0.1:11"),
    ],
)
def test_a_cache_that_no_decode_has_asked_for_is_freed(body, status, headers, by, in_turn):
    rig = Rig(*mooncake(decodes=(11, 12, 13, 14, 15)), retry=ONCE, mooncake_in_turn=in_turn)
    client = prefilled(rig, body)
    client.decode_head(status, headers)
    client.close()
    settled(rig)
    (leg,) = prefills(rig)
    assert forgotten(rig) == [(by, transfer(leg.body))]
    assert unpinned(rig) == []
    rig.assert_nothing_is_left()


@IN_TURN
@pytest.mark.parametrize(("status", "headers"), [(503, LOST), (400, REFUSED), (401, REFUSED), (500, REFUSED)])
def test_one_that_may_have_been_asked_for_is_freed_and_the_question_answered(status, headers, in_turn):
    """The engine's handlers have it freed when they refuse a request; what comes before them does not."""
    rig = Rig(*mooncake(), retry=ONCE, mooncake_in_turn=in_turn)
    client = prefilled(rig)
    rig.clock.advance(5)
    client.decode_head(status, headers)
    client.close()
    settled(rig)
    (leg,) = prefills(rig)
    assert forgotten(rig) == [("127.0.0.1:11,127.0.0.1:12", transfer(leg.body))]
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]
    rig.assert_nothing_is_left()


def test_also_when_the_prefill_is_done_long_after_the_decode_has_refused(rig):
    client = rig.post(PATH, CHAT)
    client.decode_head(400, REFUSED)
    client.close()
    rig.clock.advance(50)
    (leg,) = prefills(rig)
    leg.answer(body=b"{}")
    settled(rig)
    assert forgotten(rig) == [("127.0.0.1:11,127.0.0.1:12", transfer(leg.body))]
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]
    rig.assert_nothing_is_left()


@IN_TURN
@pytest.mark.parametrize(
    ("status", "flags", "by", "settles"),
    [
        (503, b"UF", "127.0.0.1:15", False),
        (503, None, "127.0.0.1:12,127.0.0.1:13,127.0.0.1:14,127.0.0.1:11", False),
        (503, b"UC", "127.0.0.1:11,127.0.0.1:12,127.0.0.1:13,127.0.0.1:14", True),
        (500, None, "127.0.0.1:11,127.0.0.1:12,127.0.0.1:13,127.0.0.1:14", True),
    ],
)
def test_one_of_a_list_as_well(status, flags, by, settles, in_turn):
    rig = Rig(*mooncake(decodes=(11, 12, 13, 14, 15)), retry=ONCE, mooncake_in_turn=in_turn)
    client = prefilled(rig, LIST)
    headers = [(b"x-pd-local-reply", flags)] if flags else [(b"x-pd-upstream", b"127.0.0.1:11")]
    rig.egress.out_at("decode")[0].answer(status, b"", headers)
    client.close()
    settled(rig)
    first, second = (transfer(leg.body) for leg in prefills(rig))
    freed = {which: workers for workers, which in forgotten(rig)}
    assert freed.keys() == {first, second}  # the other one's decode leg was ended
    assert freed[first] == by
    assert {which for _, which in unpinned(rig)} == ({first, second} if settles else {second})
    rig.assert_nothing_is_left()


@IN_TURN
@ENDS
@pytest.mark.parametrize("body", [CHAT, LIST], ids=["one", "list"])
def test_a_decode_that_asks_once_more_when_its_leg_is_ended_is_answered(body, end, in_turn):
    """vLLM takes that for a refusal, as long as a whole answer is not there."""
    rig = Rig(*mooncake(), mooncake_in_turn=in_turn)
    client = prefilled(rig, body)
    legs = prefills(rig)
    rig.clock.advance(1)
    ended(rig, client, end)
    settled(rig)
    probes = [order for order in rig.egress.orders if order.cluster == "decode"]
    assert [probe.json["kv_transfer_params"] for probe in probes] == [None] * len(legs)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body)) for leg in legs]
    rig.assert_nothing_is_left()


@IN_TURN
@pytest.mark.parametrize(
    ("body", "seconds", "end"),
    [
        (CHAT, 0.5, "leaves"),
        (LIST, 0.5, "leaves"),
        (STREAM, 5, "leaves"),
        (STREAM, 5, "expires"),
        (STREAMED_LIST, 5, "leaves"),
    ],
)
def test_what_may_not_have_been_seen_by_its_decode_is_freed_first(body, seconds, end, in_turn):
    rig = Rig(*mooncake(), mooncake_in_turn=in_turn)
    client = prefilled(rig, body)
    legs = prefills(rig)
    rig.clock.advance(seconds)
    ended(rig, client, end)
    settled(rig)
    assert forgotten(rig) == [("127.0.0.1:11,127.0.0.1:12", transfer(leg.body)) for leg in legs]
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body)) for leg in legs]
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("body", [STREAM, STREAMED_LIST], ids=["one", "list"])
def test_a_stream_is_no_exception_where_its_head_comes_late(body, monkeypatch):
    """Over gRPC: what is cancelled before its first token is refused, and what has no head may have been looked for."""
    monkeypatch.setattr(MooncakeHandoff, "early_heads", False)
    rig = Rig(*mooncake())
    client = prefilled(rig, body)
    legs = prefills(rig)
    rig.clock.advance(1)
    ended(rig, client, "leaves")
    settled(rig)
    assert [order.json["kv_transfer_params"] for order in rig.egress.orders if order.cluster == "decode"] == [
        None
    ] * len(legs)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body)) for leg in legs]
    rig.assert_nothing_is_left()


def test_another_decode_that_lives_is_no_proof(rig):
    """The one that had the leg may be gone, and have asked for nothing."""
    client = prefilled(rig)
    rig.clock.advance(5)
    ended(rig, client, "leaves")
    for _ in range(2):
        rig.clock.advance(1.5)
        assert unpinned(rig) == []
        rig.egress.orders[-1].answer(400, headers=[(b"x-pd-upstream", b"127.0.0.1:12")])
    (leg,) = prefills(rig)
    assert forgotten(rig) == [("127.0.0.1:11,127.0.0.1:12", transfer(leg.body))]
    rig.clock.advance(2)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body))]
    rig.assert_nothing_is_left()


def test_the_oldest_legs_question_is_answered_first():
    """A prefill attends to some at a time: one that it can answer itself may wait behind those that it cannot."""
    rig = Rig(*mooncake(prefills=(1,)))
    clients = []
    for _ in range(3):
        clients.append(rig.post(PATH, CHAT))
        prefills(rig)[-1].answer(body=b"{}")
        rig.clock.advance(1)
    legs = prefills(rig)
    for client in reversed(clients):
        client.close()
    rig.clock.advance(1.5)
    for order in list(rig.egress.orders):
        order.answer(400, headers=[(b"x-pd-upstream", order.destination.split(",")[0].encode())])
    seen = []
    for _ in range(4):
        rig.clock.advance(1 if not seen else 0.05)
        seen.append([which for _, which in unpinned(rig)])
    expected = [transfer(leg.body) for leg in legs]
    assert seen == [expected[:1], expected[:2], expected, expected]
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("status", [503, 404, 401])
@pytest.mark.parametrize("seconds", [0, 5])
def test_nothing_is_done_to_a_prefill_that_may_keep_something(rig, status, seconds):
    client = prefilled(rig)
    rig.clock.advance(seconds)
    ended(rig, client, "leaves")
    settled(rig, status)
    assert unpinned(rig) == []


@ENDS
@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("body", [CHAT, LIST], ids=["one", "list"])
def test_what_a_decode_asked_for_before_the_prefill_was_done_needs_no_settling(rig, body, end, later):
    """It is sent when the prefill, which is let finish, is done; only just before that there is doubt."""
    client = rig.post("/v1/completions" if body is LIST else PATH, body)
    legs = prefills(rig)
    ended(rig, client, end)
    rig.clock.advance(later)
    for leg in legs:
        leg.answer(body=b"{}")
    settled(rig)
    assert unpinned(rig) == [("127.0.0.1:1", transfer(leg.body)) for leg in legs if not later]
    rig.assert_nothing_is_left()


@ENDS
@pytest.mark.parametrize("body", [CHAT, LIST], ids=["one", "list"])
def test_in_turn_a_prefill_that_is_ended_keeps_nothing(body, end):
    rig = Rig(*mooncake(), mooncake_in_turn=True)
    client = rig.post("/v1/completions" if body is LIST else PATH, body)
    ended(rig, client, end)
    rig.clock.advance(10)
    assert rig.egress.orders == []
    rig.assert_nothing_is_left()


@IN_TURN
def test_nor_one_that_has_answered(in_turn):
    rig = Rig(*mooncake(), mooncake_in_turn=in_turn)
    client = prefilled(rig)
    client.decode_head(200, REFUSED)
    ended(rig, client, "leaves")
    rig.clock.advance(10)
    assert rig.egress.orders == []
    rig.assert_nothing_is_left()
