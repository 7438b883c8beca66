"""Stored responses: who keeps which, and requests about them."""

import json
from urllib.parse import quote

import pytest
from fakes import Rig, mutated, nixl, rejection, released, worker

from extproc.exchange import stored
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.stored import StoredResponses
from extproc.workers.worker import Role

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "Say hi"}
PARAMS = (
    b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":1}}'
)
WORKERS = [worker(Role.DECODE, port) for port in range(11, 15)]


@pytest.fixture
def rig():
    return Rig(*nixl())


def prefilled(rig):
    """The first prefill leg answers with parameters."""
    rig.egress.out[0].answer(body=PARAMS)


def asked(rig, path, method="GET", body=None):
    client = rig.open()
    client.head(path, method=method, end=body is None)
    if body is not None:
        client.body(body, end=True)
    return client


def destination(client):
    return client.call.take()[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_name_tells_its_keeper_to_every_gateway():
    for one in WORKERS:
        name = StoredResponses().name(one)
        assert name.startswith("resp_")
        assert StoredResponses().keeper(name, WORKERS) is one  # another gateway


def test_names_are_all_different():
    kept = StoredResponses()
    assert len({kept.name(WORKERS[0]) for _ in range(100)}) == 100


def test_a_keeper_that_is_gone_is_nobody():
    assert StoredResponses().keeper(StoredResponses().name(WORKERS[0]), WORKERS[1:]) is None


@pytest.mark.parametrize("name", ["", "resp_", "resp_0", "resp_" + "0" * 32, "theirs"])
def test_a_name_that_says_nothing(name):
    assert StoredResponses().keeper(name, WORKERS) is None


def test_after_a_failover_the_other_worker_is_remembered():
    kept = StoredResponses()
    name = kept.name(WORKERS[0])
    kept.made(name, WORKERS[1])
    assert kept.keeper(name, WORKERS) is WORKERS[1]
    assert kept.keeper(name, WORKERS[:1]) is None  # the first one has never had it


def test_a_clients_own_name_is_remembered_for_its_last_maker():
    kept = StoredResponses()
    kept.made("theirs", WORKERS[0])
    kept.made("theirs", WORKERS[1])
    assert kept.keeper("theirs", WORKERS) is WORKERS[1]


def test_a_name_that_the_worker_tells_again_forgets_the_other_one():
    kept = StoredResponses()
    name = kept.name(WORKERS[0])
    kept.made(name, WORKERS[1])
    kept.made(name, WORKERS[0])
    assert kept.keeper(name, WORKERS) is WORKERS[0]


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "with a worker's tag"])
def test_a_name_that_is_too_long_is_nobodys(own):
    kept = StoredResponses()
    name = (kept.name(WORKERS[0]) if own else "").ljust(256, "x")
    for one, keeper in ((name, WORKERS[0]), (name + "x", None)):
        kept.made(one, WORKERS[0])
        assert kept.keeper(one, WORKERS) is keeper
    assert kept._kept.keys() <= {name}


def test_a_names_length_is_that_of_its_bytes():
    kept = StoredResponses()
    for name, keeper in (("é" * 128, WORKERS[0]), ("é" * 129, None)):
        kept.made(name, WORKERS[0])
        assert kept.keeper(name, WORKERS) is keeper


def test_memory_is_bounded_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(stored, "_REMEMBERED", 3)
    kept = StoredResponses()
    for name in ("a", "b", "a", "c", "d"):
        kept.made(name, WORKERS[0])
    assert [kept.keeper(name, WORKERS) is not None for name in "abcd"] == [True, False, True, True]


def test_what_a_name_tells_needs_no_memory(monkeypatch):
    monkeypatch.setattr(stored, "_REMEMBERED", 0)
    kept = StoredResponses()
    name = kept.name(WORKERS[2])
    kept.made(name, WORKERS[2])
    assert kept.keeper(name, WORKERS) is WORKERS[2]


# -- made by requests -------------------------------------------------------------------------------------------------


def made(rig, body=BODY, upstream="127.0.0.1:11"):
    """The name that a response was given, which ``upstream`` has answered."""
    client = rig.post(PATH, body)
    prefilled(rig)
    name = json.loads(released(client)[0])["request_id"]
    client.decode_head(headers=[("x-pd-upstream", upstream)])
    client.close()
    return name


@pytest.mark.parametrize("upstream", ["127.0.0.1:11", "127.0.0.1:12"])
def test_a_response_is_asked_for_where_it_was_made(rig, upstream):
    name = made(rig, upstream=upstream)
    assert destination(asked(rig, f"{PATH}/{name}")) == upstream


def test_a_clients_own_name_reaches_the_worker_and_is_found_again(rig):
    assert made(rig, BODY | {"request_id": "resp_theirs"}, "127.0.0.1:12") == "resp_theirs"
    assert destination(asked(rig, f"{PATH}/resp_theirs")) == "127.0.0.1:12"


def test_a_request_and_its_response_are_known_by_the_same_digits(rig):
    name = made(rig)
    (record,) = rig.records
    assert record.request_id.decode().removeprefix("resp-") == name[len("resp_") + 8 :]


def test_another_attempt_has_another_name():
    """The worker that decodes again may still have the first one, and takes no name twice."""
    rig = Rig(*nixl(decodes=(11,)), retry=RetryPolicy(jitter=0))
    client = rig.post(PATH, BODY)
    names = []
    for _ in range(2):
        (leg,) = rig.egress.out
        names.append(leg.json["request_id"])
        leg.answer(503)
        rig.clock.advance(1)
    assert len(set(names)) == 2
    client.close()


def test_requests_that_clients_gave_one_id_have_different_responses(rig):
    names = set()
    for _ in range(2):
        client = rig.post(PATH, BODY, headers=[("x-request-id", "resp-000000000000000000000001")])
        rig.egress.out[-1].answer(body=PARAMS)
        names.add(json.loads(released(client)[0])["request_id"])
    assert len(names) == 2


@pytest.mark.parametrize("name", ["two words", "50%", 'a"b', "é", "a+b"])
def test_a_name_is_asked_for_in_percent_encoding(rig, name):
    assert made(rig, BODY | {"request_id": name}) == name
    path = f"{PATH}/{quote(name)}"
    client = asked(rig, path)
    assert destination(client) == "127.0.0.1:11"


def test_a_name_too_long_is_served_and_not_found_again(rig):
    name = "resp_" + "x" * 252
    assert made(rig, BODY | {"request_id": name}) == name
    status, headers, _ = rejection(asked(rig, f"{PATH}/{name}"))
    assert (status, headers["x-pd-error-code"]) == (404, "response_not_found")


def test_a_response_that_no_worker_made_is_not_kept(rig):
    client = rig.post(PATH, BODY | {"request_id": "resp_theirs"})
    prefilled(rig)
    released(client)
    client.decode_head(400)
    client.close()
    assert rejection(asked(rig, f"{PATH}/resp_theirs"))[0] == 404


def test_a_second_attempt_is_named_after_the_worker_that_it_goes_to():
    rig = Rig(*nixl(), retry=RetryPolicy(jitter=0))
    client = rig.post(PATH, BODY)
    rig.egress.out[0].answer(500)
    rig.clock.advance(1)
    prefilled(rig)
    body, _, destinations = released(client)
    name = json.loads(body)["request_id"]
    assert destinations[0] == "127.0.0.1:12" or destinations[0] == "127.0.0.1:11"
    assert destination(asked(rig, f"{PATH}/{name}")) == destinations[0]


def test_a_response_made_after_the_release_of_the_first_attempt_is_found():
    """A decode that refuses is followed by another one, whose answer is relayed."""
    rig = Rig(*nixl(), retry=RetryPolicy(jitter=0))
    client = rig.post(PATH, BODY)
    prefilled(rig)
    released(client)
    client.decode_head(503, [("x-pd-upstream", "127.0.0.1:11")])
    second = client.late()
    rig.clock.advance(1)
    prefilled(rig)
    (decode,) = rig.egress.out_at("decode")
    name = decode.json["request_id"]
    decode.answer(headers=[(b"x-pd-upstream", b"127.0.0.1:12")])
    second.close()
    client.close()
    assert destination(asked(rig, f"{PATH}/{name}")) == "127.0.0.1:12"


def test_a_response_of_sglang_has_one_name():
    rig = Rig()
    client = rig.post(PATH, BODY)
    body, _, destinations = released(client)
    assert body.count(b'"request_id"') == 1
    name = json.loads(body)["request_id"]
    client.decode_head(headers=[("x-pd-upstream", destinations[0])])
    assert destination(asked(rig, f"{PATH}/{name}")) == destinations[0]


# -- asked for -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_request_without_a_body_goes_to_the_keeper_as_it_is(rig, method):
    path = f"{PATH}/{rig.gateway.stored.name(rig.workers[3])}?stream=true"
    client = asked(rig, path, method)
    (head,) = client.call.take()
    assert head.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "127.0.0.1:12"
    assert not {":path", ":method", "content-length", "content-type", "x-pd-cluster"} & mutated(head).keys()
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    assert mutated(client.call.take()[0])["x-pd-decode"] == "http://127.0.0.1:12"
    client.close()
    rig.assert_nothing_is_left()
    assert rig.records[0].api == "stored_responses"


@pytest.mark.parametrize("body", [b"", b"not \n JSON"])
def test_a_body_goes_along_as_it_is(rig, body):
    client = asked(rig, f"{PATH}/{rig.gateway.stored.name(rig.workers[2])}/cancel", "POST", body)
    sent, headers, destinations = released(client)
    assert sent == body
    assert destinations == ["127.0.0.1:11"]
    assert headers["content-length"] == str(len(body))


def test_the_keepers_own_key_is_shown():
    rig = Rig(worker(Role.PREFILL, 1), worker(Role.DECODE, 11, api_key="dk"))
    client = asked(rig, f"{PATH}/{rig.gateway.stored.name(rig.workers[1])}")
    assert mutated(client.call.take()[0])["authorization"] == "Bearer dk"


@pytest.mark.parametrize("name", ["", "/", "?x=1", "resp_unknown", "resp_unknown/cancel", "x" * 5000])
def test_a_response_that_nobody_keeps_is_404(rig, name):
    client = asked(rig, f"{PATH}/{name}")
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (404, "response_not_found")
    assert json.loads(body)["error"]["param"] == "response_id"
    assert len(body) < 1000
    client.close()
    rig.assert_nothing_is_left()


def test_a_keeper_that_is_down_is_not_replaced(rig):
    name = rig.gateway.stored.name(rig.workers[2])
    rig.workers[2].endpoint = None
    assert rejection(asked(rig, f"{PATH}/{name}"))[0] == 404


def test_a_keepers_error_is_the_answer(rig):
    client = asked(rig, f"{PATH}/{rig.gateway.stored.name(rig.workers[2])}")
    client.call.take()
    client.decode_head(503)
    assert client.call.take()[0].WhichOneof("response") == "response_headers"
    client.close()
    rig.assert_nothing_is_left()


# -- gone on from ----------------------------------------------------------------------------------------------------


def test_what_goes_on_from_a_response_goes_to_its_keeper_alone(rig):
    before = rig.gateway.stored.name(rig.workers[3])
    for _ in range(2):
        client = rig.post(PATH, BODY | {"previous_response_id": before})
        body, _, destinations = released(client)
        assert destinations == ["127.0.0.1:12"]
        assert json.loads(body)["previous_response_id"] == before
    assert rig.egress.legs == []
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    assert mutated(client.call.take()[0])["x-pd-kv"] == "recomputed"
    name = json.loads(body)["request_id"]
    assert destination(asked(rig, f"{PATH}/{name}")) == "127.0.0.1:12"


def test_what_goes_on_from_an_unknown_response_is_answered_by_any_decode_worker(rig):
    client = rig.post(PATH, BODY | {"previous_response_id": "resp_unknown"})
    assert len(released(client)[2]) == 2
    client.close()
    rig.assert_nothing_is_left()
    assert "goes on from" in rig.records[0].note
