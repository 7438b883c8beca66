"""Direct exchanges: releases, heads, failures, give-backs."""

import gc
import json

import pytest
from collector import no_collector
from fakes import Rig, mutated, worker

from extproc.errors import GatewayError
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.session import Session
from extproc.handoff.sglang import HOLD_SECONDS
from extproc.workers.worker import Role

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture
def rig():
    return Rig(retry=RetryPolicy(attempts=1))  # tests/test_retries.py has the others


def released(client):
    """The decode body that Envoy was given, with the headers and destinations."""
    head, body = client.call.take()
    assert head.WhichOneof("response") == "request_headers"
    streamed = body.request_body.response.body_mutation.streamed_response
    assert streamed.end_of_stream
    destinations = head.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"].split(",")
    return streamed.body, mutated(head), destinations


def rejection(client):
    (message,) = client.call.take()
    reply = message.immediate_response
    return reply.status.code, mutated(message), reply.body


def test_both_legs_leave_in_one_step_and_meet_in_one_room(rig):
    client = rig.post(PATH, CHAT)
    body, headers, destinations = released(client)
    (leg,) = rig.egress.legs
    assert leg.body == body
    assert leg.cluster == "prefill"
    assert dict(leg.headers)[b"x-gateway-destination-endpoint"] == b"127.0.0.1:1"
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]
    assert headers["content-length"] == str(len(body))
    room = json.loads(body)["bootstrap_room"]
    assert 0 <= room < 2**63
    assert headers["x-request-id"] == dict(leg.headers)[b"x-request-id"].decode()


def test_the_next_request_gets_the_next_pair(rig):
    rig.post(PATH, CHAT)
    second = rig.post(PATH, CHAT)
    _, _, destinations = released(second)
    assert destinations == ["127.0.0.1:12", "127.0.0.1:11"]
    assert dict(rig.egress.legs[1].headers)[b"x-gateway-destination-endpoint"] == b"127.0.0.1:2"


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_body_in_pieces_is_one_body(rig, chunk):
    client = rig.post(PATH, CHAT, chunk=chunk)
    body, _, _ = released(client)
    assert json.loads(body).items() >= CHAT.items()


def test_a_request_with_trailers_is_released_without_them(rig):
    client = rig.open()
    client.head(PATH)
    client.body(json.dumps(CHAT).encode())
    client.tell(request_trailers={})
    _, body = client.call.take()
    assert body.request_body.response.body_mutation.streamed_response.end_of_stream


def test_what_happened_is_named_in_the_answers_headers(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.clock.time += 0.25
    rig.egress.legs[0].answer()
    rig.clock.time += 0.5
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    (head,) = client.call.take()
    named = mutated(head)
    assert named["x-pd-prefill"] == "http://127.0.0.1:1"
    assert named["x-pd-decode"] == "http://127.0.0.1:11"
    assert named["x-pd-handoff"] == "sglang"
    assert named["server-timing"] == "route;dur=0.00, prefill;dur=250.00, decode;dur=750.00"
    assert list(head.response_headers.response.header_mutation.remove_headers) == ["x-pd-upstream"]
    client.close()
    rig.assert_nothing_is_left()
    (record,) = rig.records
    assert (record.status, record.code) == (200, "")


def test_names_can_be_switched_off():
    rig = Rig(response_headers=False)
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head()
    (head,) = client.call.take()
    assert set(mutated(head)) == {"x-request-id"}


def test_loads_are_counted_from_leg_to_end(rig):
    prefill, _, decode, _ = rig.workers
    client = rig.post(PATH, CHAT)
    assert (prefill.load, decode.load) == (1, 1)
    rig.egress.legs[0].answer()
    assert (prefill.load, decode.load) == (0, 1)  # the prefill's work is over long before the request is
    client.decode_head()
    assert decode.load == 1
    client.close()
    rig.assert_nothing_is_left()


def test_prompt_tokens_are_counted_as_long_as_the_legs(rig):
    prefill, _, decode, other = rig.workers
    size = len(json.dumps(CHAT)) // 4
    client = rig.post(PATH, CHAT)
    assert (prefill.tokens, decode.tokens) == (size, size)
    rig.egress.legs[0].answer()
    assert (prefill.tokens, decode.tokens) == (0, size)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    assert (decode.tokens, other.tokens) == (0, size)
    client.close()
    rig.assert_nothing_is_left()


def test_a_failover_moves_the_load_and_is_reported(rig):
    _, _, first, second = rig.workers
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    assert (first.load, second.load) == (0, 1)
    assert rig.unreachable == [first]
    (head,) = client.call.take()
    assert mutated(head)["x-pd-decode"] == "http://127.0.0.1:12"
    rig.egress.legs[0].answer()
    client.close()
    rig.assert_nothing_is_left()


# -- the prefill fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [(status, told, "prefill_failed") for status, told in ((500, 502), (502, 502), (503, 503), (504, 504))],
)
def test_a_prefills_5xx_ends_the_request_at_once(rig, status, told, code):
    client = rig.post(PATH, CHAT)
    released(client)
    rid = rig.egress.legs[0].json["rid"]
    rig.egress.legs[0].answer(status, b"kaputt", [(b"retry-after", b"7")])
    answered, headers, body = rejection(client)
    assert answered == told
    assert headers["x-pd-error-code"] == code
    assert headers["retry-after"] == "7"
    assert "kaputt" in json.loads(body)["error"]["message"]
    assert rig.egress.aborts == [("decode", rid)]
    client.close()
    rig.assert_nothing_is_left()


def test_a_prefill_that_was_aborted_has_failed_although_it_says_200(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.legs[0].answer(200, b'{"choices":[{"index":0,"finish_reason":"abort"}]}')
    answered, headers, _ = rejection(client)
    assert (answered, headers["x-pd-error-code"]) == (502, "prefill_failed")


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
def test_a_prefills_4xx_is_passed_on_as_it_is(rig, status):
    client = rig.post(PATH, CHAT)
    released(client)
    body = b'{"object":"error","message":"too long"}'
    rig.egress.legs[0].answer(status, body, [(b"retry-after", b"3")])
    answered, headers, told = rejection(client)
    assert (answered, told) == (status, body)
    assert headers["content-type"] == "application/json"
    assert headers["retry-after"] == "3"
    assert headers["x-pd-error-code"] == "prefill_rejected"


@pytest.mark.parametrize(
    ("flags", "status", "code"),
    [
        (b"UF", 503, "prefill_unreachable"),
        (b"UF,URX", 503, "prefill_unreachable"),
        (b"UH", 503, "prefill_unreachable"),
        (b"UC", 502, "prefill_connection_lost"),
        (b"UPE", 502, "prefill_connection_lost"),
        (b"UT", 504, "prefill_timeout"),
    ],
)
def test_envoys_word_on_a_prefill_leg_is_not_the_workers(rig, flags, status, code):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.legs[0].answer(503, b"upstream connect error", [(b"x-pd-local-reply", flags)])
    answered, headers, _ = rejection(client)
    assert (answered, headers["x-pd-error-code"]) == (status, code)
    assert headers.get("retry-after") == ("1" if status == 503 else None)
    assert rig.unreachable == ([rig.workers[0]] if code == "prefill_unreachable" else [])


def test_a_prefill_that_fails_after_the_head_cuts_the_answer(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    released(client)
    client.decode_head()
    client.call.take()
    rig.egress.legs[0].answer(500)
    answered, _, _ = rejection(client)  # after the head Envoy makes a reset of it
    assert answered == 502
    client.close()
    rig.assert_nothing_is_left()
    assert rig.records[0].code == "prefill_failed"


# -- the decode fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_decodes_error_goes_through_and_ends_the_prefill(rig, status):
    client = rig.post(PATH, CHAT)
    released(client)
    leg = rig.egress.legs[0]
    client.decode_head(status, [("retry-after", "5")])
    rig.clock.advance(HOLD_SECONDS)  # in which the prefill might have failed
    (head,) = client.call.take()
    assert "retry-after" not in mutated(head)  # it is the worker's own and stays
    assert leg.cancelled
    assert rig.egress.aborts == [("prefill", leg.json["rid"])]
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_where_both_fail_at_once_it_is_the_prefills_failure_whoever_says_so_first(rig, first):
    """A transfer that fails fails both legs; who of them is heard first is chance."""
    client = rig.post(PATH, CHAT)
    released(client)
    (prefill,) = rig.egress.out_at("prefill")
    if first == "decode":
        client.decode_head(500, [("x-pd-upstream", "127.0.0.1:11")])
        assert client.call.take() == []
        rig.clock.advance(HOLD_SECONDS / 2)
    prefill.answer(500)
    status, headers, _ = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (502, "prefill_failed")
    if first == "prefill":
        client.decode_head(500, [("x-pd-upstream", "127.0.0.1:11")])
        assert client.call.take() == []
    client.close()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["left", "expired", "prefill done"])
def test_a_decodes_error_that_is_kept_back(rig, how):
    client = rig.post(PATH, CHAT)
    released(client)
    (prefill,) = rig.egress.out_at("prefill")
    client.decode_head(500, [("x-pd-upstream", "127.0.0.1:11")])
    match how:
        case "expired":
            rig.gateway._end(client.session, GatewayError("request_timeout", "x"))
            assert rejection(client)[0] == 504
        case "prefill done":
            prefill.answer()
            rig.clock.advance(HOLD_SECONDS)
            (head,) = client.call.take()
            assert head.WhichOneof("response") == "response_headers"
    client.close()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


def test_workers_that_envoy_could_not_reach_are_reported(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head(503, [("x-pd-error-code", "decode_unreachable")])
    assert rig.unreachable == list(rig.workers[2:])
    client.close()
    assert rig.records[0].code == "decode_unreachable"
    rig.assert_nothing_is_left()


# -- early heads ----------------------------------------------------------------------------------------------------

GENERATE = {"text": "Once", "stream": True}


def test_an_early_head_waits_for_the_prefill(rig):
    client = rig.post("/generate", GENERATE)
    released(client)
    client.decode_head()
    assert client.call.take() == []
    rig.egress.legs[0].answer(400, b"no")
    answered, _, body = rejection(client)
    assert (answered, body) == (400, b"no")
    client.close()
    assert (rig.records[0].status, rig.records[0].code) == (400, "prefill_rejected")


def test_a_client_that_leaves_while_the_head_is_kept_back_was_told_nothing(rig):
    client = rig.post("/generate", GENERATE)
    released(client)
    client.decode_head()
    client.close()
    assert rig.records[0].status == 0


def test_an_early_head_goes_out_when_the_prefill_is_done(rig):
    client = rig.post("/generate", GENERATE)
    released(client)
    client.decode_head()
    rig.egress.legs[0].answer()
    assert len(client.call.take()) == 1


def test_an_early_head_is_not_kept_for_long(rig):
    client = rig.post("/generate", GENERATE)
    released(client)
    client.decode_head()
    rig.clock.advance(0.03)
    assert len(client.call.take()) == 1
    rig.egress.legs[0].answer()
    client.close()
    rig.assert_nothing_is_left()


def test_a_head_that_comes_with_the_first_token_never_waits(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    released(client)
    client.decode_head()
    assert len(client.call.take()) == 1


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_ended_on_both_workers():
    rig = Rig(request_timeout=10)
    client = rig.post(PATH, CHAT)
    released(client)
    leg = rig.egress.legs[0]
    rig.clock.time += 9
    rig.gateway.expire()
    assert client.call.take() == []
    rig.clock.time += 1
    rig.gateway.expire()
    answered, headers, _ = rejection(client)
    assert (answered, headers["x-pd-error-code"]) == (504, "request_timeout")
    assert leg.cancelled
    assert rig.egress.aborts == [("prefill", leg.json["rid"]), ("decode", leg.json["rid"])]
    client.close()
    rig.assert_nothing_is_left()


def test_an_upload_that_never_ends_is_ended():
    rig = Rig(request_timeout=10)
    client = rig.open()
    client.head(PATH)
    client.body(b"{")
    rig.clock.time += 10
    rig.gateway.expire()
    answered, _, _ = rejection(client)
    assert answered == 504
    client.close()
    rig.assert_nothing_is_left()


# -- what is not even sent -------------------------------------------------------------------------------------------


def test_an_unknown_model_is_404_and_no_worker_503(rig):
    client = rig.post(PATH, CHAT | {"model": "nope"})
    answered, headers, body = rejection(client)
    assert (answered, headers["x-pd-error-code"]) == (404, "model_not_found")
    assert json.loads(body)["error"]["param"] == "model"
    rig.workers[0].endpoint = rig.workers[1].endpoint = None
    answered, headers, _ = rejection(rig.post(PATH, CHAT))
    assert (answered, headers["x-pd-error-code"], headers["retry-after"]) == (503, "no_available_workers", "1")
    assert rig.egress.legs == []


@pytest.mark.parametrize("body", [CHAT | {"model": "nope"}, CHAT | {"n": 0}, b"{", CHAT])
def test_what_is_refused_goes_from_memory_without_the_collectors_help(rig, body):
    for each in rig.workers:
        each.endpoint = None if body is CHAT else each.endpoint
    with no_collector():
        client = rig.post(PATH, body)
        assert rejection(client)[0] >= 400
        client.close()
        del client
        assert [each for each in gc.get_objects() if isinstance(each, Session)] == []


def test_too_large_a_body_is_refused_when_announced_and_when_it_comes():
    rig = Rig(max_payload_bytes=100)
    client = rig.open()
    client.head(PATH, headers=[("content-length", "101")])
    assert rejection(client)[0] == 413
    client = rig.open()
    client.head(PATH)
    client.body(b"x" * 60)
    client.body(b"x" * 60)
    assert rejection(client)[0] == 413
    client.body(b"x" * 60, end=True)  # was under way when Envoy heard
    assert client.call.take() == []
    client.close()
    assert rig.gateway.alive == 1  # the first one, not closed yet


def test_the_gateways_key_is_asked_for():
    rig = Rig(api_key="secret")
    assert rejection(rig.post(PATH, CHAT))[0] == 401
    assert rejection(rig.post(PATH, CHAT, headers=[("authorization", "Bearer other")]))[0] == 401
    assert rejection(rig.post(PATH, CHAT, headers=[("authorization", "Basic secret")]))[0] == 401
    released(rig.post(PATH, CHAT, headers=[("authorization", "Bearer secret")]))
    released(rig.post(PATH, CHAT, headers=[("authorization", "bearer  secret")]))  # as the control API reads it


def test_while_draining_new_requests_are_refused_and_old_ones_end(rig):
    old = rig.post(PATH, CHAT)
    released(old)
    rig.gateway.draining = True
    answered, headers, _ = rejection(rig.post(PATH, CHAT))
    assert (answered, headers["x-pd-error-code"]) == (503, "draining")
    rig.egress.legs[0].answer()
    old.decode_head()
    assert len(old.call.take()) == 1


def test_an_empty_body_is_400(rig):
    client = rig.open()
    client.head(PATH, end=True)
    assert rejection(client)[0] == 400


# -- headers ---------------------------------------------------------------------------------------------------------

SENT = [
    ("authorization", "Bearer client"),
    ("traceparent", "00-1-2-03"),
    ("x-custom", "kept"),
    ("connection", "x"),
    ("te", "trailers"),
    ("proxy-authorization", "Basic eDp5"),
    ("x-pd-cluster", "decode"),
    ("x-gateway-destination-endpoint", "10.0.0.1:80"),
    ("x-override-bootstrap-host", "evil"),
    ("x-data-parallel-rank", "3"),
    ("x-envoy-retry-on", "5xx"),
    ("x-smg-target-worker", "0"),
    ("x-smg-tenant-id", "a"),
    ("x-smg-routing-key", "kept"),
]


def test_end_to_end_headers_reach_both_legs_and_no_others_do(rig):
    client = rig.post(PATH, CHAT, headers=SENT)
    head, _ = client.call.take()
    removed = set(head.request_headers.response.header_mutation.remove_headers)
    assert removed == {name for name, _ in SENT} - {"authorization", "traceparent", "x-custom", "x-smg-routing-key"}
    leg = dict(rig.egress.legs[0].headers)
    assert leg[b"authorization"] == b"Bearer client"
    assert leg[b"traceparent"] == b"00-1-2-03"
    assert leg[b"x-custom"] == leg[b"x-smg-routing-key"] == b"kept"
    assert leg[b"x-gateway-destination-endpoint"] == b"127.0.0.1:1"  # ours
    assert leg[b"x-pd-cluster"] == b"prefill"
    ours = removed & {"x-gateway-destination-endpoint", "x-pd-cluster"}
    assert leg.keys().isdisjoint({name.encode() for name in removed - ours})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("x-request-id", "mine")], "mine"),
        ([("x-correlation-id", "second")], "second"),
        ([("x-trace-id", "t"), ("x-correlation-id", "c")], "c"),  # the list's order decides, not the request's
        ([("x-request-id", "bad id"), ("request-id", "good")], "good"),
        ([("x-request-id", "x" * 129)], None),
        ([], None),
    ],
)
def test_request_ids(rig, headers, expected):
    client = rig.post(PATH, CHAT, headers=headers)
    _, sent, _ = released(client)
    made = sent.get("x-request-id") or dict(headers)["x-request-id"]  # the client's own is not set again
    assert made == expected if expected else made.startswith("chatcmpl-") and len(made) == 33
    assert dict(rig.egress.legs[0].headers)[b"x-request-id"].decode() == made


def test_a_workers_own_key_replaces_the_clients():
    rig = Rig(worker(Role.PREFILL, 1, api_key="pk"), worker(Role.DECODE, 11, api_key="dk"), worker(Role.DECODE, 12))
    client = rig.post(PATH, CHAT, headers=[("authorization", "Bearer client")])
    _, headers, destinations = released(client)
    assert headers["authorization"] == "Bearer dk"
    assert destinations == ["127.0.0.1:11"]  # the other one must not be shown this key
    assert [v for k, v in rig.egress.legs[0].headers if k == b"authorization"] == [b"Bearer pk"]


def test_a_clients_rid_stays_and_is_not_ours_to_abort(rig):
    client = rig.post(PATH, CHAT | {"rid": "theirs"})
    released(client)
    assert rig.egress.legs[0].json["rid"] == "theirs"
    client.close()
    assert rig.egress.aborts == []
    rig.assert_nothing_is_left()


def test_one_worker_apis_go_to_a_prefill_worker_unchanged(rig):
    raw = b'{"query":"q","documents":["d"], "top_n":1}'
    client = rig.post("/rerank?x=1", raw)
    body, headers, destinations = released(client)
    assert body == raw
    assert headers[":path"] == "/v1/rerank?x=1"
    assert destinations == ["127.0.0.1:1", "127.0.0.1:2"]
    assert rig.egress.legs == []
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:2")])
    (head,) = client.call.take()
    assert mutated(head)["x-pd-prefill"] == "http://127.0.0.1:2"
    assert "x-pd-handoff" not in mutated(head)
    client.close()
    rig.assert_nothing_is_left()


def test_a_worker_without_a_key_is_not_shown_the_gateways():
    rig = Rig(api_key="secret")
    client = rig.post(PATH, CHAT, headers=[("authorization", "Bearer secret")])
    head, _ = client.call.take()
    assert "authorization" in head.request_headers.response.header_mutation.remove_headers
    assert b"authorization" not in dict(rig.egress.legs[0].headers)
    client.close()
    assert all(b"secret" not in value for leg in rig.egress.legs for _, value in leg.headers)


def test_a_one_worker_request_loses_control_fields_too(rig):
    body = {"query": "q", "documents": ["d"], "kv_transfer_params": {"x": 1}, "bootstrap_host": "evil"}
    sent, _, _ = released(rig.post("/rerank", body))
    assert json.loads(sent) == {"query": "q", "documents": ["d"]}


def test_an_unauthorized_client_is_told_how(rig):
    rig = Rig(api_key="secret")
    _, headers, body = rejection(rig.post(PATH, CHAT))
    assert headers["www-authenticate"] == "Bearer"
    assert b"send 'Authorization: Bearer <key>'" in body


def test_an_error_names_who_was_to_serve(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.legs[0].answer(500)
    _, headers, _ = rejection(client)
    assert headers["x-pd-prefill"] == "http://127.0.0.1:1"
    assert headers["x-pd-handoff"] == "sglang"


def test_nobody_is_named_for_an_answer_that_envoy_made(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head(503, [("x-pd-error-code", "decode_unreachable")])
    assert "x-pd-decode" not in mutated(client.call.take()[0])


def test_a_long_model_name_is_neither_echoed_nor_kept_whole(rig):
    client = rig.post(PATH, CHAT | {"model": "m" * 100_000})
    _, _, body = rejection(client)
    client.close()
    assert len(body) < 1000
    assert len(rig.records[0].model) <= 256
    assert len(rig.records[0].message) < 1000


def test_every_worker_that_refused_is_reported():
    decodes = [worker(Role.DECODE, port) for port in (11, 12, 13)]
    rig = Rig(worker(Role.PREFILL, 1), *decodes)
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:13")])
    assert rig.unreachable == decodes[:2]
    assert [w.load for w in decodes] == [0, 0, 1]


def test_while_nobody_has_answered_every_candidate_is_told_to_end(rig):
    client = rig.post(PATH, CHAT)
    rid = rig.egress.legs[0].json["rid"]
    client.close()
    assert rig.egress.aborts_at("127.0.0.1:11") == rig.egress.aborts_at("127.0.0.1:12") == [rid]
    rig.assert_nothing_is_left()


# -- defects ---------------------------------------------------------------------------------------------------------


def broken(*_args, **_kwargs):
    raise RuntimeError("a defect")


def test_a_defect_in_an_action_ends_the_call_and_leaves_nothing(rig, caplog):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.send = broken  # the abort of the decode leg
    rig.egress.legs[0].receiver.head(500, [])
    rig.egress.legs[0].receiver.done()
    assert client.call.aborted is not None
    client.close()
    rig.assert_nothing_is_left()
    assert "a defect" in caplog.text


def test_a_defect_while_sending_is_an_internal_error_and_leaves_nothing(rig, caplog):
    rig.egress.send = broken
    client = rig.post(PATH, CHAT)
    assert client.call.aborted is not None or client.call.take()
    client.close()
    rig.assert_nothing_is_left()
    assert "a defect" in caplog.text


def test_a_defect_while_closing_leaves_nothing(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.egress.send = broken
    client.close()
    rig.assert_nothing_is_left()


def test_a_request_that_envoy_does_not_close_is_given_up():
    rig = Rig(request_timeout=10)
    stuck, other = rig.post(PATH, CHAT), rig.post(PATH, CHAT)
    rig.clock.time += 10
    rig.gateway.expire()
    rig.clock.time += 4
    rig.gateway.expire()
    assert stuck.call.aborted is None
    rig.clock.time += 1
    rig.gateway.expire()
    assert stuck.call.aborted is not None
    assert other.call.aborted is not None
    stuck.close()
    other.close()
    rig.assert_nothing_is_left()


def test_one_requests_defect_does_not_keep_the_others_from_ending(caplog):
    rig = Rig(request_timeout=10)
    first, second = rig.post(PATH, CHAT), rig.post(PATH, CHAT)
    released(first)
    released(second)
    first.call.send = broken
    rig.clock.time += 10
    rig.gateway.expire()
    assert rejection(second)[0] == 504
    assert "a defect" in caplog.text


def test_what_is_under_way_when_the_gateway_stops_is_told():
    rig = Rig()
    idle = []
    rig.gateway.on_idle = lambda: idle.append(True)
    client = rig.post(PATH, CHAT)
    released(client)
    rig.gateway.end_all(GatewayError("draining", "the gateway is stopping"))
    assert rejection(client)[0] == 503
    assert len(rig.egress.aborts) == 2
    assert idle == []
    client.close()
    assert idle == [True]
    rig.assert_nothing_is_left()
