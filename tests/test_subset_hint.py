"""A gateway may name the endpoints among which a request's workers must be, in metadata that no client can set.

Source: Gateway API Inference Extension, docs/proposals/004-endpoint-picker-protocol.
"""

import json

import pytest
from envoy.config.core.v3.base_pb2 import Metadata
from fakes import Rig, hint, mutated, nixl, rejection, released, worker

from extproc.admission.legs import LegSettings
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.headers import subset
from extproc.names import PREFILLER
from extproc.workers.worker import Role

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
PARAMS = (
    b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":1}}'
)
STEADY = RetryPolicy(jitter=0)


@pytest.fixture
def rig():
    return Rig(*nixl((1, 2), (11, 12)))


def prefills(rig):
    return [leg.destination.removeprefix("127.0.0.1:") for leg in rig.egress.out_at("prefill")]


def refused(client, code="no_available_workers"):
    """The message of a 503."""
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (503, code)
    client.close()
    return json.loads(body)["error"]["message"]


# -- what Envoy says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.1:1", "10.0.0.2:1"}),
        ("10.0.0.1:1,10.0.0.2:1", {"10.0.0.1:1", "10.0.0.2:1"}),  # as header_to_metadata makes it
        (["10.0.0.1:1, 10.0.0.2:1", " 10.0.0.3:1 ", ""], {"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"}),
        (["[fd00::1]:8000"], {"[fd00::1]:8000"}),
        ([], set()),
        ("", set()),
        ([None, 7, ["10.0.0.1:1"]], set()),
        (None, set()),
        (7, set()),
        (True, set()),
        ({"10.0.0.1:1": "10.0.0.1:1"}, set()),
    ],
)
def test_what_is_said(said, named):
    context = Metadata()
    context.filter_metadata["envoy.lb.subset_hint"].update({"x-gateway-destination-endpoint-subset": said})
    assert subset(context) == named


def test_nothing_is_said():
    other = Metadata()
    other.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-subset": ["10.0.0.1:1"]})
    another = Metadata()
    another.filter_metadata["envoy.lb.subset_hint"].update({"x-gateway-destination-endpoint": ["10.0.0.1:1"]})
    assert subset(Metadata()) is subset(other) is subset(another) is None


# -- who serves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, "127.0.0.1:2, 127.0.0.1:12"], ids=["list", "text"])
def test_both_workers_are_of_the_list(rig, said):
    for _ in range(3):
        client = rig.post(PATH, CHAT, context=hint(2, 12, said=said))
        assert prefills(rig) == ["2"]
        rig.egress.out[0].answer(body=PARAMS)
        assert released(client)[2] == ["127.0.0.1:12"]
        client.close()
    rig.assert_nothing_is_left()


def test_without_a_list_anybody_serves(rig):
    for context in (None, Metadata(), None, Metadata()):
        client = rig.post(PATH, CHAT, context=context)
        rig.egress.out[0].answer(body=PARAMS)
        assert len(released(client)[2]) == 2
        client.close()
    assert {record.prefill for record in rig.records} == {"http://127.0.0.1:1", "http://127.0.0.1:2"}


@pytest.mark.parametrize("named", [(), (99,), (1, 2), (11, 12)])
def test_a_list_with_no_pair_is_503(rig, named):
    message = refused(rig.post(PATH, CHAT, context=hint(*named)))
    assert message.endswith("among the endpoints that the gateway names (x-gateway-destination-endpoint-subset)")
    assert rig.egress.legs == []
    rig.assert_nothing_is_left()


def test_a_model_that_nobody_has_is_404(rig):
    status, headers, _ = rejection(rig.post(PATH, {**CHAT, "model": "other"}, context=hint(99)))
    assert (status, headers["x-pd-error-code"]) == (404, "model_not_found")


def test_samples_are_made_by_the_pair_of_the_list():
    rig = Rig()
    client = rig.post(PATH, {**CHAT, "n": 3}, context=hint(2, 12))
    assert {leg.destination for leg in rig.egress.out} == {"127.0.0.1:2", "127.0.0.1:12"}
    client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_what_a_prefill_worker_answers_alone(rig):
    for _ in range(2):
        client = rig.post("/tokenize", {"model": "tiny", "prompt": "x"}, context=hint(2))
        assert released(client)[2] == ["127.0.0.1:2"]
        client.close()
    assert "prefill" in refused(rig.post("/tokenize", {"model": "tiny", "prompt": "x"}, context=hint(11)))


def test_a_short_prompt_that_a_decode_worker_answers_alone():
    rig = Rig(*nixl(), min_prompt_tokens=1000)
    for _ in range(2):
        client = rig.post(PATH, CHAT, context=hint(12))
        assert released(client)[2] == ["127.0.0.1:12"]
        client.close()
    refused(rig.post(PATH, CHAT, context=hint(1, 2)))


def test_where_the_legs_are_the_sidecars():
    rig = Rig(*nixl(), select_only=True, retry_released=False)
    for _ in range(2):
        client = rig.post(PATH, CHAT, context=hint(2, 12))
        _, headers, destinations = released(client)
        assert {headers[name.decode()] for name in PREFILLER} == {"127.0.0.1:2"}
        assert destinations == ["127.0.0.1:12"]
        client.close()
    refused(rig.post(PATH, CHAT, context=hint(2)))
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("known", [True, False], ids=["to metadata as well", "alone"])
def test_a_client_cannot_name_workers(rig, known):
    header = ("x-gateway-destination-endpoint-subset", "127.0.0.1:1,127.0.0.1:11")
    client = rig.post(PATH, CHAT, headers=[header], context=hint(2, 12) if known else None)
    for leg in rig.egress.out:
        assert b"x-gateway-destination-endpoint-subset" not in dict(leg.headers)
        assert not known or leg.destination == "127.0.0.1:2"
        leg.answer(body=PARAMS)
    head, _ = client.call.take()
    assert header[0] in head.request_headers.response.header_mutation.remove_headers
    named = head.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert named == "127.0.0.1:12" if known else set(named.split(",")) == {"127.0.0.1:11", "127.0.0.1:12"}


# -- other attempts ---------------------------------------------------------------------------------------------------


def test_after_a_failed_prefill_the_next_one_is_of_the_list():
    rig = Rig(*nixl((1, 2, 3), (11,)), retry=STEADY)
    client = rig.post(PATH, CHAT, context=hint(1, 3, 11))
    assert prefills(rig) == ["1"]
    rig.egress.out[0].answer(500)
    rig.clock.advance(1)
    assert prefills(rig) == ["3"]
    rig.egress.out[0].answer(500)
    rig.clock.advance(5)
    assert prefills(rig) == [], "the other one is not on it"
    assert rejection(client)[0] == 502
    client.close()
    rig.assert_nothing_is_left()


def test_where_the_list_has_nobody_else_a_failure_is_the_answer():
    rig = Rig(retry=STEADY)
    client = rig.post(PATH, CHAT, context=hint(1, 11))
    rig.egress.out[0].answer(500)
    rig.clock.advance(5)
    assert rig.egress.out == []
    client.close()
    rig.assert_nothing_is_left()


def test_after_a_failed_decode_the_next_one_is_of_the_list():
    rig = Rig(*nixl((1,), (11, 12, 13)), retry=STEADY)
    client = rig.post(PATH, CHAT, context=hint(1, 11, 13))
    rig.egress.out[0].answer(body=PARAMS)
    assert released(client)[2] == ["127.0.0.1:11", "127.0.0.1:13"]
    client.decode_head(503, [("x-pd-upstream", "127.0.0.1:11")])
    second = client.late()
    rig.clock.advance(1)
    rig.egress.out[0].answer(body=PARAMS)
    (decode,) = rig.egress.out_at("decode")
    assert decode.destination.split(",") == ["127.0.0.1:13"]
    second.close()
    client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


# -- stored responses -------------------------------------------------------------------------------------------------


def stored(rig, at, context):
    client = rig.open()
    client.head(f"/v1/responses/{rig.gateway.stored.name(at)}", method="GET", end=True, context=context)
    return client


def test_a_stored_response_is_fetched_from_its_keeper_if_that_is_on_the_list(rig):
    (head,) = stored(rig, rig.workers[3], hint(1, 12)).call.take()
    assert head.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "127.0.0.1:12"
    status, headers, _ = rejection(stored(rig, rig.workers[3], hint(1, 11)))
    assert (status, headers["x-pd-error-code"]) == (404, "response_not_found")
    for named in ((), (1, 2)):
        assert "decode" in refused(stored(rig, rig.workers[3], hint(*named)))


def test_what_goes_on_from_a_response_that_is_kept_elsewhere_is_a_pairs(rig):
    body = {"model": "tiny", "input": "x", "previous_response_id": rig.gateway.stored.name(rig.workers[3])}
    client = rig.post("/v1/responses", body, context=hint(1, 12))
    assert released(client)[2] == ["127.0.0.1:12"]
    assert rig.egress.legs == []
    client = rig.post("/v1/responses", body, context=hint(1, 11))
    assert released(client)[2] == ["127.0.0.1:11"]


# -- waiting ----------------------------------------------------------------------------------------------------------


def limited(*workers, **config):
    rig = Rig(*workers, **config)
    for each in rig.workers:
        if each.role is Role.PREFILL:
            each.limit = 1
    return rig


def waits(client):
    return client.call.take() == [] and client.call.aborted is None and client.session._waiter is not None


def test_who_waits_for_one_worker_is_in_nobodys_way():
    rig = limited(*nixl((1, 2), (11, 12)))
    clients = [rig.post(PATH, CHAT, context=hint(1, 11))]
    behind = rig.post(PATH, CHAT, context=hint(1, 11))
    assert waits(behind)
    clients.append(rig.post(PATH, CHAT))
    assert prefills(rig) == ["1", "2"]
    for leg in rig.egress.out[:1]:
        leg.answer(body=PARAMS)
    rig.clock.advance(0)
    assert prefills(rig) == ["2", "1"], "what it waited for"
    for client in (*clients, behind):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("first", ["limited", "anybody"])
def test_who_came_first_is_given_what_both_could_have(first):
    """Neither those that a list limits are starved by the others, nor the others by those."""
    rig = limited(*nixl((1, 2), (11, 12)))
    clients = [rig.post(PATH, CHAT) for _ in range(2)]
    contexts = [hint(1, 11), None] if first == "limited" else [None, hint(1, 11)]
    waiting = [rig.post(PATH, CHAT, context=context) for context in contexts]
    assert all(waits(client) for client in waiting)
    next(leg for leg in rig.egress.out if leg.destination == "127.0.0.1:1").answer(body=PARAMS)
    clients.append(rig.post(PATH, CHAT))  # at the moment at which there is room
    assert [client.session._waiter is None for client in (*waiting, clients[-1])] == [True, False, False]
    assert prefills(rig) == ["2", "1"]
    for client in (*clients, *waiting):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_a_batch_gathers_room_on_its_own_list_only():
    rig = limited()
    first = rig.post(PATH, CHAT, context=hint(1, 11))
    batch = rig.post(PATH, {**CHAT, "n": 2}, context=hint(1, 11))
    assert waits(batch)
    other = rig.post(PATH, CHAT)
    assert prefills(rig) == ["1", "2"]
    assert released(other)[2][0] == "127.0.0.1:12"
    for client in (first, batch, other):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_one_that_waits_in_vain_is_told_so():
    rig = limited(*nixl((1, 2), (11,)), legs=LegSettings(prefill_limit=1, prefill_queue_timeout=7.0))
    first, second = (rig.post(PATH, CHAT, context=hint(1, 11)) for _ in range(2))
    assert waits(second)
    rig.clock.advance(7)
    refused(second, "pd_prefill_queue_timeout")
    first.close()


def test_another_attempt_waits_for_room_on_the_list():
    rig = limited(*nixl((1, 2, 3), (11,)), retry=STEADY)
    first, second = rig.post(PATH, CHAT, context=hint(1, 2, 11)), rig.post(PATH, CHAT, context=hint(1, 2, 11))
    one, two = rig.egress.out
    one.answer(500)
    rig.clock.advance(1)
    assert prefills(rig) == ["2"], "the third one has room, and is not on the list"
    two.answer(body=PARAMS)
    rig.clock.advance(0)
    assert prefills(rig) == ["2"]
    for client in (first, second):
        client.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("is_relayed", [False, True])
def test_attempts_of_different_lists_wait_in_lines_of_their_own(is_relayed):
    """Though the same worker has failed both."""
    workers, path, body = nixl((1, 2, 3), (11,)), PATH, CHAT
    if is_relayed:  # the prefill's log probabilities are put into the answer
        workers = [*[worker(Role.PREFILL, n, bootstrap_port=8990 + n) for n in (1, 2, 3)], worker(Role.DECODE, 11)]
        path, body = "/generate", {"model": "tiny", "text": "a", "return_logprob": True, "logprob_start_len": 0}
    rig = limited(*workers, retry=STEADY)
    rig.workers[1].limit = rig.workers[2].limit = 0
    clients = []
    for named in ((1, 2, 11), (1, 3, 11)):
        clients.append(rig.post(path, body, context=hint(*named)))
        assert prefills(rig) == ["1"]
        assert bool(rig.egress.out_at("decode")) is is_relayed
        rig.egress.out_at("prefill")[0].answer(500)
        rig.clock.advance(1)
        assert prefills(rig) == []
    rig.workers[2].limit = 1
    rig.workers[2].freed(rig.workers[2])
    rig.clock.advance(0)
    assert prefills(rig) == ["3"]
    for client in clients:
        client.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


def test_who_served_is_told_as_ever(rig):
    client = rig.post(PATH, CHAT, context=hint(2, 12))
    rig.egress.out[0].answer(body=PARAMS)
    released(client)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    named = mutated(client.call.take()[0])
    assert (named["x-pd-prefill"], named["x-pd-decode"]) == ("http://127.0.0.1:2", "http://127.0.0.1:12")
    client.close()
    rig.assert_nothing_is_left()
