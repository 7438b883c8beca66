"""Handoffs in turn: the prefill leg alone, then the release of what its answer makes of the request."""

import json

import pytest
from fakes import Rig, mooncake, mutated, nixl, rejection, released, worker

from extproc.errors import GatewayError
from extproc.exchange.attempts import KvMissing, OnPrefillFailure, RetryPolicy
from extproc.exchange.clock import REST_SECONDS
from extproc.transport.interface import Lost
from extproc.workers.worker import Role

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
PATH = "/v1/chat/completions"
PARAMS = (
    b'{ "do_remote_prefill":true, "do_remote_decode":false,"remote_block_ids":[[1, 9007199254740993]],'
    b'"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.1","remote_port":5600,"tp_size": 1e0}'
)
ANSWER = b'{"choices":[{"index":0,"finish_reason":"length"}], "kv_transfer_params" : %b }' % PARAMS
ONCE = RetryPolicy(attempts=1)
STEADY = RetryPolicy(jitter=0)


@pytest.fixture
def rig():
    return Rig(*nixl(), retry=ONCE)


def leg(rig):
    """The only leg that is out."""
    (one,) = rig.egress.out
    return one


def forgotten(rig):
    """(workers, parameters) of the orders to free a KV cache."""
    orders = [order for order in rig.egress.orders if order.json["max_tokens"] < 0]
    for order in orders:
        assert (order.cluster, order.path) == ("decode", "/v1/completions")
    return [(order.destination, order.body.partition(b'"kv_transfer_params":')[2][:-1]) for order in orders]


def end(client, rig):
    client.close()
    rig.clock.advance(100)
    rig.assert_nothing_is_left()
    (record,) = rig.records
    return record


# -- first one, then the other ---------------------------------------------------------------------------------------


def test_first_the_prefill_alone(rig):
    client = rig.post(PATH, CHAT)
    prefill = leg(rig)
    assert (prefill.cluster, prefill.destination, prefill.path) == ("prefill", "127.0.0.1:1", PATH)
    assert prefill.json["max_tokens"] == 1
    assert client.call.take() == []
    prefill.receiver.head(200, [])
    prefill.receiver.data(ANSWER)
    assert client.call.take() == []  # it is not done
    prefill.receiver.done()
    assert len(client.call.take()) == 2
    assert rig.egress.out == []  # the decode leg is Envoy's


@pytest.mark.parametrize("cut", [1, 50, 10_000])
def test_the_parameters_reach_the_decode_byte_for_byte(rig, cut):
    client = rig.post(PATH, CHAT)
    receiver = leg(rig).receiver
    receiver.head(200, [])
    for at in range(0, len(ANSWER), cut):
        receiver.data(ANSWER[at : at + cut])
    receiver.done()
    body, headers, destinations = released(client)
    assert body == json.dumps(CHAT).encode()[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    assert headers["content-length"] == str(len(body))
    assert "x-pd-cluster" not in headers  # the path's own
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]


def test_a_prefills_long_answer_is_read_to_its_end(rig):
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=b'{"choices":[{"x":"' + b"y" * 3_000_000 + b'"}],' + ANSWER[1:])
    assert PARAMS in released(client)[0]


def test_the_workers_load_is_that_of_the_legs_that_are_out(rig):
    prefill, _, first, second = rig.workers
    client = rig.post(PATH, CHAT)
    assert (prefill.load, first.load) == (1, 0)
    leg(rig).answer(body=ANSWER)
    assert (prefill.load, first.load) == (0, 1)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    assert (first.load, second.load) == (0, 1)
    client.close()
    assert second.load == 0
    rig.assert_nothing_is_left()


def test_what_happened_is_named(rig):
    client = rig.post(PATH, CHAT)
    rig.clock.time += 0.25
    leg(rig).answer(body=ANSWER)
    rig.clock.time += 0.5
    client.call.take()
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    named = mutated(client.call.take()[0])
    assert (named["x-pd-handoff"], named["x-pd-kv"]) == ("nixl", "handed")
    assert (named["x-pd-prefill"], named["x-pd-decode"]) == ("http://127.0.0.1:1", "http://127.0.0.1:11")
    assert named["server-timing"] == "route;dur=0.00, prefill;dur=250.00, decode;dur=750.00"
    assert "x-pd-attempts" not in named
    record = end(client, rig)
    assert (record.kv, record.note, record.attempts, record.status, record.code) == ("handed", "", 1, 200, "")


@pytest.mark.parametrize("stream", [True, False])
def test_a_decodes_head_is_never_kept_back(rig, stream):
    client = rig.post(PATH, CHAT | {"stream": stream})
    leg(rig).answer(body=ANSWER)
    client.call.take()
    client.decode_head()
    assert len(client.call.take()) == 1
    end(client, rig)


# -- no parameters ---------------------------------------------------------------------------------------------------

WITHOUT = [
    b"{}",
    b'{"kv_transfer_params":null}',
    ANSWER.replace(b'"remote_port":5600', b'"remote_port":null'),
    ANSWER.replace(b"remote_engine_id", b"engine_id"),
    b"not JSON",
]


@pytest.mark.parametrize("answer", WITHOUT)
def test_without_usable_parameters_the_decode_recomputes_and_that_is_said(rig, answer):
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=answer)
    assert released(client)[0] == json.dumps(CHAT).encode()
    client.decode_head()
    assert mutated(client.call.take()[0])["x-pd-kv"] == "recomputed"
    record = end(client, rig)
    assert record.kv == "recomputed"
    assert "kv_transfer_params" in record.note
    assert record.code == ""
    assert rig.egress.orders == []


@pytest.mark.parametrize("answer", WITHOUT)
def test_or_the_request_fails_where_the_operator_wants_that(answer):
    rig = Rig(*nixl(), kv_missing=KvMissing.FAIL)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=answer)
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (502, "kv_missing")
    assert "x-pd-kv" not in headers  # nothing was handed over, nor computed
    assert "http://127.0.0.1:1" in json.loads(body)["error"]["message"]
    record = end(client, rig)
    assert (record.status, record.code, record.kv) == (502, "kv_missing", "")
    assert len(rig.egress.legs) == 1  # another prefill of the same kind would answer alike


# -- the prefill fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_prefills_refusal_is_the_clients_answer(status):
    rig = Rig(*nixl())
    client = rig.post(PATH, CHAT)
    leg(rig).answer(status, b'{"error":"no"}', [(b"retry-after", b"3")])
    told, headers, body = rejection(client)
    assert (told, body) == (status, b'{"error":"no"}')
    assert headers["x-pd-error-code"] == "prefill_rejected"
    end(client, rig)
    assert len(rig.egress.legs) == 1


@pytest.mark.parametrize(
    "failure",
    [
        lambda leg: leg.answer(500),
        lambda leg: leg.answer(429),
        lambda leg: leg.answer(200, b'{"choices":[{"finish_reason":"abort"}]}'),
        lambda leg: leg.answer(503, b"", [(b"x-pd-local-reply", b"UC")]),
        lambda leg: leg.receiver.lost(Lost.RESET, "RST_STREAM"),
    ],
)
def test_a_failure_without_another_attempt_is_told(rig, failure):
    client = rig.post(PATH, CHAT)
    failure(leg(rig))
    status, headers, _ = rejection(client)
    assert status in (429, 502)
    assert headers["x-pd-prefill"] == "http://127.0.0.1:1"
    assert "x-pd-decode" not in headers
    end(client, rig)
    assert rig.egress.orders == []  # nothing was computed


@pytest.mark.parametrize("workers", [nixl, mooncake])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_decode_only_does_without(workers, status):
    policy = RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY)
    rig = Rig(*workers(), retry=policy, mooncake_in_turn=True)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(status)
    assert released(client)[0] == json.dumps(CHAT).encode()
    client.decode_head()
    assert mutated(client.call.take()[0])["x-pd-kv"] == "recomputed"
    record = end(client, rig)
    assert "decode-only" in record.note
    assert (record.status, record.code) == (200, "")


@pytest.mark.parametrize("status", [400, 422])
def test_what_the_decode_would_refuse_just_so_is_not_tried_on_it(status):
    rig = Rig(*nixl(), retry=RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY))
    client = rig.post(PATH, CHAT)
    leg(rig).answer(status)
    assert rejection(client)[0] == status
    end(client, rig)


# -- the client leaves -----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_during_the_prefill(rig):
    client = rig.post(PATH, CHAT)
    prefill = leg(rig)
    client.close()
    assert prefill.cancelled
    assert rig.egress.orders == []  # vLLM ends a request whose connection closes, and frees what it holds
    rig.assert_nothing_is_left()
    assert rig.records[0].status == 0


LIST = {"model": "tiny", "prompt": ["a", "b"]}
BEGUN = ANSWER.index(b'"length"')


def begun(rig, body):
    """A request of which the prefills have begun to answer, and the rests of these answers."""
    client = rig.post("/v1/completions" if body is LIST else PATH, body)
    for prefill in rig.egress.out:
        prefill.receiver.head(200, [])
        prefill.receiver.data(ANSWER[:BEGUN])
    return client, list(rig.egress.out)


@pytest.mark.parametrize("body", [CHAT, LIST], ids=["one", "list"])
def test_a_client_that_leaves_during_the_prefills_answer_has_the_cache_freed(rig, body):
    """The work is done, and the rest of the answer is all that tells what it keeps."""
    client, prefills = begun(rig, body)
    client.close()
    assert len(rig.records) == 1
    assert rig.egress.out == prefills
    assert rig.workers[0].load == len(prefills)
    for prefill in prefills:
        prefill.receiver.data(ANSWER[BEGUN:])
        prefill.receiver.done()
    assert forgotten(rig) == [("127.0.0.1:11,127.0.0.1:12", PARAMS)] * len(prefills)
    rig.clock.advance(100)
    assert not any(prefill.cancelled for prefill in prefills)
    rig.assert_nothing_is_left()


def test_the_deadline_in_the_prefills_answer_does_the_same():
    rig = Rig(*nixl(), retry=ONCE, request_timeout=5)
    client, (prefill,) = begun(rig, CHAT)
    rig.clock.time += 10
    rig.gateway.expire()
    assert rejection(client)[0] == 504
    prefill.receiver.data(ANSWER[BEGUN:])
    prefill.receiver.done()
    assert [params for _, params in forgotten(rig)] == [PARAMS]
    end(client, rig)


@pytest.mark.parametrize("end", ["no more of it", "its loss", "no parameters", "no JSON", "a failure"])
def test_the_rest_of_such_an_answer_is_not_waited_for_long_and_may_be_of_no_use(rig, end):
    client, (prefill,) = begun(rig, CHAT)
    client.close()
    if end == "no more of it":
        rig.clock.advance(REST_SECONDS)
        assert prefill.cancelled
    elif end == "its loss":
        prefill.receiver.lost(Lost.RESET, "")
    elif end == "no JSON":
        prefill.receiver.done()
    else:
        rest = b'"length"}]}' if end == "no parameters" else b'"abort"}]}'
        prefill.receiver.data(rest)
        prefill.receiver.done()
    rig.clock.advance(100)
    assert rig.egress.orders == []
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("sent", ["nothing", "a head", "an error"])
def test_a_prefill_that_has_said_nothing_of_use_is_ended_at_once(rig, sent):
    client = rig.post(PATH, CHAT)
    prefill = leg(rig)
    if sent != "nothing":
        prefill.receiver.head(200 if sent == "a head" else 500, [])
    if sent == "an error":
        prefill.receiver.data(b"{")
    client.close()
    assert prefill.cancelled
    rig.assert_nothing_is_left()


def test_of_mooncake_in_turn_what_is_done_is_freed_by_its_transfer_id():
    rig = Rig(*mooncake(), retry=ONCE, mooncake_in_turn=True)
    client, (prefill,) = begun(rig, CHAT)
    client.close()
    prefill.receiver.data(ANSWER[BEGUN:])
    prefill.receiver.done()
    ((_, params),) = forgotten(rig)
    assert json.loads(params)["transfer_id"] == prefill.json["kv_transfer_params"]["transfer_id"]
    rig.egress.orders[0].answer(400)
    rig.clock.advance(100)
    assert len(rig.egress.orders) == 1  # no decode has asked for it: none must be answered
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("end", ["its loss", "a failure"])
def test_of_mooncake_in_turn_there_is_no_decode_to_be_freed_of_a_prefill_that_fails(end):
    """What is done for one that waits would cost the prefill a block for the lease."""
    rig = Rig(*mooncake(), retry=ONCE, mooncake_in_turn=True)
    client, (prefill,) = begun(rig, CHAT)
    client.close()
    if end == "its loss":
        prefill.receiver.lost(Lost.RESET, "")
    else:
        prefill.receiver.data(b'"abort"}]}')
        prefill.receiver.done()
    rig.clock.advance(100)
    assert rig.egress.orders == []
    rig.assert_nothing_is_left()


def test_a_client_that_leaves_between_two_attempts():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(500)
    record = end(client, rig)  # the timer of the next attempt wakes nobody
    assert len(rig.egress.legs) == 1
    assert record.status == 0


def test_a_client_that_leaves_between_release_and_head_has_the_cache_freed(rig):
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=ANSWER)
    end(client, rig)
    assert forgotten(rig) == [("127.0.0.1:11,127.0.0.1:12", PARAMS)]


def test_a_client_that_leaves_after_the_head_has_nothing_freed(rig):
    """The decode has the request, and frees what it did not fetch when it is aborted."""
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=ANSWER)
    client.decode_head()
    end(client, rig)
    assert forgotten(rig) == []


def test_nothing_is_freed_where_nothing_was_handed_over(rig):
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=b"{}")
    end(client, rig)
    assert rig.egress.orders == []


@pytest.mark.parametrize("status", [400, 503])
def test_a_decode_that_refuses_may_have_told_nobody(rig, status):
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=ANSWER)
    client.call.take()
    client.decode_head(status, [("x-pd-upstream", "127.0.0.1:12")])
    assert client.call.take()[0].WhichOneof("response") == "response_headers"  # the worker's own answer
    end(client, rig)
    assert [params for _, params in forgotten(rig)] == [PARAMS]


@pytest.mark.parametrize("code", ["decode_connection_lost", "decode_timeout"])
def test_the_others_of_the_list_can_free_what_a_decode_that_died_was_to_fetch(rig, code):
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=ANSWER)
    client.decode_head(502, [("x-pd-error-code", code)])
    end(client, rig)
    assert [params for _, params in forgotten(rig)] == [PARAMS]


def test_decode_workers_that_cannot_be_reached_are_told_nothing():
    rig = Rig(*nixl(decodes=(11, 12, 13, 14, 15)), retry=ONCE)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(body=ANSWER)
    assert len(released(client)[2]) == 4
    client.decode_head(503, [("x-pd-error-code", "decode_unreachable")])
    end(client, rig)
    assert forgotten(rig) == [("127.0.0.1:15", PARAMS)]


# -- time ------------------------------------------------------------------------------------------------------------


def prefilling(rig, client):
    """Nothing has happened."""


def paused(rig, client):
    assert client.call.take() == []
    leg(rig).answer(500)


def decoding(rig, client):
    leg(rig).answer(body=ANSWER)
    client.call.take()


def answering(rig, client):
    decoding(rig, client)
    client.decode_head()
    client.call.take()


def rejected(rig, client):
    leg(rig).answer(400)
    client.call.take()


ANY_MOMENT = pytest.mark.parametrize("until", [prefilling, paused, decoding, answering, rejected])


@ANY_MOMENT
def test_the_deadline_at_any_moment(until):
    rig = Rig(*nixl(), request_timeout=10, retry=RetryPolicy(initial=8, jitter=0))
    client = rig.post(PATH, CHAT)
    until(rig, client)
    rig.clock.time += 10
    rig.gateway.expire()
    told = client.call.take()
    assert len(told) == (0 if until is rejected else 1)
    for message in told:
        assert message.immediate_response.status.code == 504
    assert rig.egress.out == []
    rig.clock.advance(1)  # no timer wakes what is over
    assert client.call.take() == []
    record = end(client, rig)
    assert record.code == ("prefill_rejected" if until is rejected else "request_timeout")
    assert [params for _, params in forgotten(rig)] == ([PARAMS] if until is decoding else [])


@ANY_MOMENT
def test_the_gateway_stops_at_any_moment(until):
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    until(rig, client)
    rig.gateway.end_all(GatewayError("draining", "the gateway is stopping"))
    assert len(client.call.take()) == (0 if until is rejected else 1)
    assert rig.egress.out == []
    end(client, rig)


def test_requests_under_way_go_on_while_the_gateway_drains():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    rig.gateway.draining = True
    leg(rig).answer(500)
    rig.clock.advance(1)
    leg(rig).answer(body=ANSWER)
    assert PARAMS in released(client)[0]
    client.decode_head()
    end(client, rig)


# -- other attempts --------------------------------------------------------------------------------------------------


def test_after_a_pause_another_pair_is_tried_from_the_start():
    rig = Rig(*nixl(), retry=RetryPolicy(initial=2, jitter=0))
    client = rig.post(PATH, CHAT)
    first = leg(rig)
    first.answer(503, b"", [(b"x-pd-local-reply", b"UF")])
    assert rig.unreachable == [rig.workers[0]]
    assert client.call.take() == []
    rig.clock.advance(1.9)
    assert rig.egress.out == []
    rig.clock.advance(0.2)
    second = leg(rig)
    assert second.destination == "127.0.0.1:2"
    assert second.body == first.body
    assert [w.load for w in rig.workers] == [0, 1, 0, 0]
    second.answer(body=ANSWER)
    assert PARAMS in released(client)[0]
    client.decode_head()
    named = mutated(client.call.take()[0])
    assert (named["x-pd-attempts"], named["x-pd-prefill"]) == ("2", "http://127.0.0.1:2")
    record = end(client, rig)
    assert (record.attempts, record.prefill, record.kv, record.code) == (2, "http://127.0.0.1:2", "handed", "")


def test_a_workers_retry_after_is_waited_for():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(429, b"busy", [(b"retry-after", b"5")])
    rig.clock.advance(4.9)
    assert rig.egress.out == []
    rig.clock.advance(0.2)
    leg(rig).answer(body=ANSWER)
    released(client)
    end(client, rig)


def test_mooncake_has_a_new_transfer_with_every_attempt():
    rig = Rig(*mooncake(), retry=STEADY, mooncake_in_turn=True)
    client = rig.post(PATH, CHAT)
    transfers = [leg(rig).json["kv_transfer_params"]["transfer_id"]]
    leg(rig).answer(500)
    rig.clock.advance(1)
    transfers.append(leg(rig).json["kv_transfer_params"]["transfer_id"])
    leg(rig).answer(body=b"{}")
    params = json.loads(released(client)[0])["kv_transfer_params"]
    assert len(set(transfers)) == 2
    assert (params["transfer_id"], params["remote_engine_id"]) == (transfers[1], "engine-2")
    client.decode_head()
    end(client, rig)


def test_when_everybody_has_failed_the_last_one_is_the_answer():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(500, b"first")
    rig.clock.advance(1)
    leg(rig).answer(500, b"second")
    status, headers, body = rejection(client)
    assert status == 502
    assert b"second" in body
    assert headers["x-pd-attempts"] == "2"
    record = end(client, rig)
    assert (record.attempts, record.code) == (2, "prefill_failed")


def test_who_is_left_only_before_the_pause_is_no_help():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(500, b"first")
    rig.workers[1].endpoint = None
    rig.clock.advance(1)
    assert b"first" in rejection(client)[2]
    end(client, rig)


def test_a_worker_that_hands_over_otherwise_is_no_second_choice():
    other = worker(Role.PREFILL, 2, runtime="vllm", kv_connector="LMCacheConnectorV1")
    rig = Rig(*nixl(prefills=(1,)), other, retry=STEADY)
    while (client := rig.post(PATH, CHAT)) and leg(rig).destination != "127.0.0.1:1":
        client.close()
    leg(rig).answer(500)
    assert rejection(client)[0] == 502


@pytest.mark.parametrize("status", [200, 400])
def test_with_a_second_choice_that_cannot_hand_over_the_decode_is_alone(status):
    """Mooncake's, of which nobody has told the engine id yet."""
    rig = Rig(*mooncake(), retry=STEADY, mooncake_in_turn=True)
    client = rig.post(PATH, CHAT)
    rig.workers[1].kv_engines = ()
    leg(rig).answer(500, b"first")
    rig.clock.advance(1)
    assert released(client)[0] == json.dumps(CHAT).encode()
    assert rig.egress.out == []
    client.decode_head(status, headers=[("x-pd-upstream", "127.0.0.1:11")])
    named = mutated(client.call.take()[0])
    assert (named["x-pd-kv"], named["x-pd-attempts"]) == ("recomputed", "2")
    assert "x-pd-prefill" not in named
    record = end(client, rig)
    assert "engine id" in record.note
    assert (record.status, record.attempts) == (status, 2)
    assert rig.egress.orders == []


def test_the_egress_listeners_trouble_is_waited_out_on_the_same_pair():
    rig = Rig(*nixl(prefills=(1,)), retry=STEADY)
    client = rig.post(PATH, CHAT)
    leg(rig).receiver.lost(Lost.UNREACHABLE, "no connection")
    rig.clock.advance(1)
    leg(rig).answer(body=ANSWER)
    released(client)
    assert rig.unreachable == rig.failing == []
    client.decode_head()
    end(client, rig)


def test_another_attempt_goes_to_the_next_in_turn():
    rig = Rig(*nixl(prefills=(1, 2, 3)), retry=STEADY)
    client = rig.post(PATH, CHAT)
    leg(rig).answer(500)
    rig.clock.advance(1)
    assert leg(rig).destination == "127.0.0.1:2"
    end(client, rig)
