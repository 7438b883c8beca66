"""Another attempt after the decode leg was released: its answer comes as a second call's."""

import json

import pytest
from fakes import LateCall, Rig, mooncake, nixl, released

from extproc.errors import GatewayError
from extproc.exchange import wire
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import CLOSING_SECONDS, ENDED_HEAD_SECONDS, HEAD_SECONDS, SECOND_CALL_SECONDS
from extproc.transport.interface import Lost

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
STREAM = CHAT | {"stream": True}
PATH = "/v1/chat/completions"
STEADY = RetryPolicy(jitter=0)
PARAMS = (
    b'{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e","remote_request_id":"r",'
    b'"remote_host":"h","remote_port":1}'
)
ANSWER = b'{"kv_transfer_params":%b}' % PARAMS
WORKER = [("x-pd-upstream", "127.0.0.1:11"), ("server", "uvicorn"), ("content-length", "5"), ("retry-after", "0")]


@pytest.fixture(params=["sglang", "mooncake"])
def rig(request):
    """Handoffs that send both legs at once."""
    return Rig(*(mooncake() if request.param == "mooncake" else ()), retry=STEADY)


def prefill(rig):
    (leg,) = rig.egress.out_at("prefill")
    return leg


def decode(rig):
    (leg,) = rig.egress.out_at("decode")
    return leg


def end(rig, *calls):
    for call in calls:
        call.close()
    rig.clock.advance(0.05)  # legs that are just about to end
    for leg in list(rig.egress.out):
        leg.answer()  # those that are let finish
    rig.assert_nothing_is_left()
    (record,) = rig.records
    return record


def lost(rig, body=CHAT, *, asked=False, path=PATH):
    """A request whose decode leg was released, and whose prefill leg then failed."""
    client = rig.post(path, body)
    released(client)
    if asked:
        client.decode_head(headers=WORKER)
        assert client.call.take() == []
    prefill(rig).answer(500, b"kaputt")
    if not asked:
        assert client.call.take() == []  # a head may still come, which would cross what we say
        rig.clock.advance(ENDED_HEAD_SECONDS)
    return client


def opened(client, *, asked=False):
    """The second call; unless Envoy waits for our word, the first one ends with the error that it was told."""
    if asked:
        return client.late(WORKER)
    second = client.late()
    client.close()
    return second


def again(rig):
    """The second attempt's legs."""
    rig.clock.advance(0.1)
    return prefill(rig), decode(rig)


# -- what is said on the first call ----------------------------------------------------------------------------------


def test_before_a_head_envoy_is_given_the_error_to_wake_the_second_call(rig):
    client = lost(rig)
    (message,) = client.call.take()
    reply = message.immediate_response
    assert reply.status.code == 502
    assert b"kaputt" in reply.body  # should the second call not come, this is the client's
    second = LateCall(rig, message)
    assert second.found["x-pd-error-code"] == "prefill_failed"
    end(rig, client, second)


def test_a_decode_that_was_told_to_end_has_longer_for_its_head():
    """It will answer, and late on a busy machine: our word must not cross it."""
    rig = Rig(retry=STEADY)
    client = rig.post(PATH, CHAT)
    released(client)
    leg = prefill(rig)
    leg.answer(500, b"kaputt")
    assert ("decode", leg.json["rid"]) in rig.egress.aborts
    rig.clock.advance(max(10 * HEAD_SECONDS, STEADY.initial))
    assert client.call.take() == []
    client.decode_head(400, WORKER)
    second = client.late(WORKER)
    _, leg = again(rig)
    leg.answer(body=b"all of it")
    headers, body, ended = second.answer()
    assert (headers[":status"], body, ended) == ("200", b"all of it", True)
    end(rig, client, second)


def test_another_attempt_names_the_response_anew():
    """The decode may still have the first one, and takes no name twice."""
    rig = Rig(retry=STEADY)
    client = lost(rig, {"model": "tiny", "input": "Say hi"}, path="/v1/responses")
    second = opened(client)
    first = rig.egress.legs[0].json["request_id"]
    rig.clock.advance(0.1)
    assert prefill(rig).json["request_id"] == decode(rig).json["request_id"] != first
    second.close()
    client.close()


def test_an_error_without_a_body_still_has_one_to_be_replaced():
    """A second call for an answer without a body could put none in its place."""
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    prefill(rig).answer(body=ANSWER)
    released(client)
    client.decode_head(503, [("x-pd-upstream", "127.0.0.1:11")])
    (message,) = client.call.take()
    assert message.WhichOneof("response") == "response_headers"
    client.close()

    rig = Rig(retry=STEADY)
    client = rig.post(PATH, CHAT)
    released(client)
    prefill(rig).answer(429, b"")
    rig.clock.advance(ENDED_HEAD_SECONDS)
    (message,) = client.call.take()
    assert message.immediate_response.body == b" "


def test_a_head_that_waits_is_given_the_name_of_the_second_call():
    rig = Rig(*mooncake(), retry=STEADY)
    client = lost(rig, STREAM, asked=True)
    (message,) = client.call.take()
    mutation = message.response_headers.response.header_mutation
    assert [option.header.key for option in mutation.set_headers] == ["x-pd-late"]
    second = LateCall(rig, message, WORKER)
    end(rig, client, second)


def test_no_two_requests_have_the_same_second_call(rig):
    """Whatever ids their clients gave them."""
    names = set()
    for _ in range(2):
        client = rig.post(PATH, CHAT, headers=[("x-request-id", "same")])
        client.call.take()
        rig.egress.out_at("prefill")[-1].answer(500)
        rig.clock.advance(ENDED_HEAD_SECONDS)
        names.add(client.late().found["x-pd-late"])
    assert len(names) == 2


@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_where_late_answers_are_switched_off_the_first_failure_is_the_answer(body):
    rig = Rig(retry=STEADY, retry_released=False)
    client = rig.post(PATH, body)
    released(client)
    prefill(rig).answer(500, b"kaputt")
    (message,) = client.call.take()
    assert (message.immediate_response.status.code, b"kaputt" in message.immediate_response.body) == (502, True)
    assert "x-pd-late" not in str(message)
    rig.clock.advance(1)
    assert [leg.path for leg in rig.egress.out if leg.path == PATH] == []
    client.close()
    rig.assert_nothing_is_left()

    client = rig.post(PATH, body)
    released(client)
    client.decode_head(503, WORKER)
    (message,) = client.call.take()
    assert message.WhichOneof("response") == "response_headers"  # the worker's own answer
    assert "x-pd-late" not in str(message)
    client.close()
    rig.assert_nothing_is_left()


def test_a_held_request_is_tried_again_all_the_same():
    rig = Rig(*nixl(), retry=STEADY, retry_released=False)
    client = rig.post(PATH, CHAT)
    prefill(rig).answer(500)
    rig.clock.advance(STEADY.initial)
    prefill(rig).answer(body=ANSWER)
    released(client)
    client.decode_head(headers=WORKER)
    client.close()
    rig.assert_nothing_is_left()


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_the_second_attempts_answer_replaces_what_was_there(asked):
    rig = Rig(*mooncake(), retry=STEADY)
    client = lost(rig, STREAM, asked=asked)
    second = opened(client, asked=asked)
    second_prefill, second_decode = again(rig)
    assert second_prefill.destination == "127.0.0.1:2"
    assert len(second_decode.destination.split(",")) == 2  # no decode is to blame
    second_prefill.answer()
    second_decode.receiver.head(200, [(b"content-type", b"text/event-stream"), (b"x-pd-upstream", b"127.0.0.1:12")])
    assert second.answer() == ({}, b"", False)  # Envoy sends a head with the first piece
    second_decode.receiver.data(b"data: one\n\n")
    headers, body, ended = second.answer()
    assert headers[":status"] == "200"
    assert headers["content-type"] == "text/event-stream"
    assert headers["x-request-id"] == rig_request_id(rig)
    assert (headers["x-pd-prefill"], headers["x-pd-decode"]) == ("http://127.0.0.1:2", "http://127.0.0.1:12")
    assert (headers["x-pd-attempts"], headers["x-pd-kv"]) == ("2", "handed")
    assert "x-pd-late" not in headers
    assert "content-length" not in headers
    assert "x-pd-upstream" not in headers
    assert (body, ended) == (b"data: one\n\n", False)
    second_decode.receiver.data(b"odd bytes \x00\xff")
    assert second.answer() == ({}, b"odd bytes \x00\xff", False)
    second_decode.receiver.done()
    assert second.answer() == ({}, b"", True)
    record = end(rig, *((client, second) if asked else (second,)))
    assert (record.status, record.code, record.attempts) == (200, "", 2)


def rig_request_id(rig):
    (session,) = rig.gateway._alive
    return session.record.request_id.decode()


@pytest.mark.parametrize("size", [0, 5, 3 * wire.BODY_CHUNK + 1])
def test_a_whole_answer_comes_at_once_and_with_its_length(rig, size):
    second = opened(lost(rig))
    _, leg = again(rig)
    body = b"x" * size
    leg.answer(body=body)
    headers, told, ended = second.answer()
    assert headers["content-length"] == str(size)
    assert (told, ended) == (body, True)
    end(rig, second)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_there_before_the_second_call_waits_for_it(rig, stream):
    client = lost(rig, CHAT | {"stream": stream})
    (message,) = client.call.take()
    client.close()
    _, leg = again(rig)
    leg.answer(body=b"all of it")
    second = LateCall(rig, message)
    headers, body, ended = second.answer()
    assert (headers[":status"], body, ended) == ("200", b"all of it", True)
    end(rig, second)


def test_the_first_attempt_holds_nothing_while_the_second_is_paused():
    rig = Rig(*mooncake(), retry=RetryPolicy(initial=5, jitter=0))
    client = lost(rig)
    assert [w.load for w in rig.workers] == [0, 0, 0, 0]
    second = opened(client)
    rig.clock.advance(3.5)
    assert rig.egress.out == []
    rig.clock.advance(1)
    loads = [w.load for w in rig.workers]
    assert (loads[:2], sum(loads[2:])) == ([0, 1], 1)
    end(rig, second)


def test_a_client_that_does_not_read_makes_the_decode_wait(rig):
    second = opened(lost(rig, STREAM))
    _, leg = again(rig)
    leg.receiver.head(200, [])
    second.call.queued = 2 << 20
    leg.receiver.data(b"x")
    assert leg.paused
    second.session.drained()
    assert not leg.paused
    end(rig, second)


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_when_all_attempts_have_failed_the_last_error_is_told(rig, there):
    client = lost(rig)
    (message,) = client.call.take()
    client.close()
    second = LateCall(rig, message) if there else None
    again(rig)[0].answer(503, b"worse", [(b"retry-after", b"9")])
    second = second or LateCall(rig, message)
    headers, body, ended = second.answer()
    assert (headers[":status"], headers["x-pd-error-code"], headers["retry-after"]) == ("503", "prefill_failed", "9")
    assert headers["x-pd-attempts"] == "2"
    assert b"worse" in body
    assert ended
    record = end(rig, second)
    assert (record.status, record.code, record.attempts) == (503, "prefill_failed", 2)


@pytest.mark.parametrize("body", [b"too long", b""])
def test_a_workers_own_error_is_passed_on(rig, body):
    second = opened(lost(rig))
    again(rig)[1].answer(400, body)
    headers, told, ended = second.answer()
    assert (headers[":status"], headers["x-pd-error-code"]) == ("400", "decode_rejected")
    assert (told.strip(), ended) == (body, True)
    end(rig, second)


def test_an_answer_that_breaks_after_its_head_is_cut(rig):
    second = opened(lost(rig, STREAM))
    _, leg = again(rig)
    leg.receiver.head(200, [])
    leg.receiver.data(b"data: one\n\n")
    leg.receiver.lost(Lost.RESET, "RST_STREAM")
    _, body, ended = second.answer()
    assert (body, ended) == (b"data: one\n\n", False)
    assert second.call.aborted is not None
    record = end(rig, second)
    assert (record.status, record.code) == (200, "decode_connection_lost")


def test_a_whole_answer_that_breaks_is_followed_by_another_attempt():
    """As long as the client has heard nothing."""
    rig = Rig(*mooncake(prefills=(1, 2, 3)), retry=STEADY)
    second = opened(lost(rig))
    _, leg = again(rig)
    leg.receiver.head(200, [(b"x-pd-upstream", b"127.0.0.1:12")])
    leg.receiver.data(b"half of")
    leg.receiver.lost(Lost.RESET, "RST_STREAM")
    rig.egress.out_at("prefill")[0].answer()  # the one that was let finish
    _, leg = again(rig)
    assert leg.destination == "127.0.0.1:11"
    leg.answer(body=b"the whole", headers=[(b"x-pd-upstream", b"127.0.0.1:11")])
    assert second.answer()[1:] == (b"the whole", True)
    record = end(rig, second)
    assert record.attempts == 3


def test_an_answer_that_breaks_before_the_second_call_is_there_is_an_error(rig):
    client = lost(rig, STREAM)
    (message,) = client.call.take()
    client.close()
    _, leg = again(rig)
    leg.receiver.head(200, [])
    leg.receiver.data(b"data: one\n\n")
    leg.receiver.lost(Lost.RESET, "RST_STREAM")
    second = LateCall(rig, message)
    headers, body, ended = second.answer()
    assert headers[":status"] == "502"
    assert json.loads(body)["error"]["code"] == "decode_connection_lost"
    assert ended
    record = end(rig, second)
    assert (record.status, record.code) == (502, "decode_connection_lost")


# -- the calls' ends -------------------------------------------------------------------------------------------------


def test_a_race_lost_ends_everything(rig):
    """A head of the worker's was on its way when Envoy was told: it takes our answer for the client's."""
    client = lost(rig)
    client.call.take()
    rig.clock.advance(0.1)
    legs = rig.egress.out
    assert len(legs) == 2
    client.decode_head(headers=WORKER)
    assert client.call.take() == []
    assert not any(leg.out for leg in legs if leg.cluster == "decode")
    record = end(rig, client)
    assert (record.status, record.code) == (502, "prefill_failed")


def test_a_race_lost_after_the_next_attempts_answer(rig):
    """It was there before the second call, which will not come: what Envoy has taken is what the client was told."""
    client = lost(rig)
    client.call.take()
    prefill_leg, decode_leg = again(rig)
    prefill_leg.answer()
    decode_leg.answer()
    client.decode_head(headers=WORKER)
    record = end(rig, client)
    assert (record.status, record.code) == (502, "prefill_failed")


def test_a_race_lost_before_the_next_attempt(rig):
    client = lost(rig)
    client.call.take()
    client.decode_head(headers=WORKER)
    rig.clock.advance(5)
    assert rig.egress.out_at("decode") == []
    end(rig, client)


def test_a_second_call_that_does_not_come_ends_everything(rig):
    client = lost(rig)
    client.call.take()
    client.close()
    again(rig)
    rig.clock.advance(SECOND_CALL_SECONDS)
    assert rig.egress.out_at("decode") == []
    record = end(rig)
    assert record.status == 502


def test_a_second_call_that_comes_too_late_is_refused(rig):
    client = lost(rig)
    (message,) = client.call.take()
    client.close()
    rig.clock.advance(SECOND_CALL_SECONDS)
    second = LateCall(rig, message)
    assert second.call.aborted is not None
    end(rig, second)


def test_a_call_about_an_answer_that_nobody_gives_is_refused():
    rig = Rig()
    client = rig.open()
    client.decode_head(headers=[("x-pd-late", "0" * 32)])
    assert client.call.aborted is not None
    client.close()
    rig.assert_nothing_is_left()
    assert rig.records == []


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("first", ["first call", "second call"])
@pytest.mark.parametrize("until", ["pause", "legs", "head", "piece"])
def test_a_client_that_leaves_ends_everything_once(asked, first, until):
    """Envoy closes both calls, in any order."""
    rig = Rig(*mooncake(), retry=STEADY)
    client = lost(rig, STREAM, asked=asked)
    second = client.late(WORKER if asked else ())
    if until != "pause":
        _, leg = again(rig)
    if until in ("head", "piece"):
        leg.receiver.head(200, [])
    if until == "piece":
        leg.receiver.data(b"x")
    second.call.take()
    record = end(rig, *((client, second) if first == "first call" else (second, client)))
    assert second.call.take() == []
    assert record.status == (200 if until == "piece" else 0 if asked else 502)


def test_a_decode_that_was_told_nothing_has_its_cache_freed():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    prefill(rig).answer(body=ANSWER)
    released(client)
    client.decode_head(503, [("x-pd-upstream", "127.0.0.1:11")])
    assert [order.json["kv_transfer_params"] for order in rig.egress.orders] == [json.loads(PARAMS)]
    second = client.late()
    rig.clock.advance(0.1)
    prefill(rig).answer(body=ANSWER)
    client.close()
    second.close()  # the second attempt's decode has not answered either
    assert len(rig.egress.orders) == 2
    end(rig)


@pytest.mark.parametrize("asked", [False, True])
def test_the_deadline_of_a_late_answer(asked):
    rig = Rig(*mooncake(), retry=STEADY, request_timeout=10)
    client = lost(rig, STREAM, asked=asked)
    second = opened(client, asked=asked)
    again(rig)
    rig.clock.time += 10
    rig.gateway.expire()
    assert rig.egress.out_at("decode") == []
    headers, _, ended = second.answer()
    assert (headers[":status"], headers["x-pd-error-code"], ended) == ("504", "request_timeout", True)
    record = end(rig, *((client, second) if asked else (second,)))
    assert (record.status, record.code) == (504, "request_timeout")


def test_the_deadline_of_a_late_answer_that_has_begun_cuts_it(rig):
    second = opened(lost(rig, STREAM))
    _, leg = again(rig)
    leg.receiver.head(200, [])
    leg.receiver.data(b"x")
    rig.clock.time += rig.gateway.config.request_timeout
    rig.gateway.expire()
    assert second.call.aborted is not None
    record = end(rig, second)
    assert (record.status, record.code) == (200, "request_timeout")


def test_the_gateway_stops_between_two_attempts(rig):
    second = opened(lost(rig))
    rig.gateway.end_all(GatewayError("draining", "the gateway is stopping"))
    rig.clock.advance(10)
    assert second.answer()[0][":status"] == "503"
    end(rig, second)


def test_a_second_call_that_envoy_does_not_close_is_given_up(rig):
    second = opened(lost(rig))
    rig.gateway.end_all(GatewayError("draining", "the gateway is stopping"))
    second.call.take()
    rig.clock.time += CLOSING_SECONDS
    rig.gateway.expire()
    assert second.call.aborted is not None
    end(rig, second)


# -- a decode that fails ---------------------------------------------------------------------------------------------

REFUSALS = [
    (503, [("x-pd-upstream", "127.0.0.1:11")]),
    (429, [("x-pd-upstream", "127.0.0.1:11"), ("retry-after", "1")]),
    (502, [("x-pd-error-code", "decode_connection_lost")]),
    (504, [("x-pd-error-code", "decode_timeout")]),
]


@pytest.mark.parametrize(("status", "headers"), REFUSALS)
@pytest.mark.parametrize("workers", [nixl, mooncake, tuple])
def test_a_decode_that_fails_before_its_head_is_replaced(workers, status, headers):
    rig = Rig(*workers(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    if workers is nixl:
        prefill(rig).answer(body=ANSWER)
    released(client)
    client.decode_head(status, headers)
    second = client.late(headers)
    for leg in list(rig.egress.out):
        leg.answer()  # a prefill that is let finish
    rig.clock.advance(1.1)
    if workers is nixl:
        prefill(rig).answer(body=ANSWER)
    leg = decode(rig)
    assert leg.destination == "127.0.0.1:12"
    leg.answer(body=b"yes")
    told, body, ended = second.answer()
    assert (told[":status"], told["x-pd-decode"]) == ("200", "http://127.0.0.1:12")
    assert (body, ended) == (b"yes", True)
    record = end(rig, client, second)
    assert (record.status, record.code, record.attempts) == (200, "", 2)
    assert rig.failing == ([rig.workers[2]] if headers[0][1] == "decode_connection_lost" else [])


@pytest.mark.parametrize("workers", [nixl, mooncake, tuple])
def test_when_nobody_is_left_the_workers_answer_passes(workers):
    rig = Rig(*(workers(decodes=(11,)) if workers is not tuple else Rig().workers[:3]), retry=STEADY)
    client = rig.post(PATH, CHAT)
    if workers is nixl:
        prefill(rig).answer(body=ANSWER)
    released(client)
    client.decode_head(503, WORKER)
    (message,) = client.call.take()
    assert message.WhichOneof("response") == "response_headers"
    assert "x-pd-late" not in {o.header.key for o in message.response_headers.response.header_mutation.set_headers}
    record = end(rig, client)
    assert (record.status, record.code) == (503, "")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_the_client_named_is_not_tried_again_once_it_is_sent(role):
    """The failed attempt's legs may still have the name on their workers, and SGLang takes none twice."""
    rig = Rig(retry=STEADY)
    client = rig.post(PATH, CHAT | {"rid": "mine"})
    released(client)
    if role == "prefill":
        prefill(rig).answer(500, b"kaputt")
        (message,) = client.call.take()
        assert message.immediate_response.status.code == 502
    else:
        client.decode_head(503, WORKER)
        (message,) = client.call.take()
        assert message.WhichOneof("response") == "response_headers"
    assert "x-pd-late" not in str(message)
    assert end(rig, client).attempts == 1


def test_a_decode_that_refuses_what_any_would_refuse_is_not_replaced():
    rig = Rig(retry=STEADY)
    client = rig.post(PATH, CHAT)
    released(client)
    client.decode_head(400, WORKER)
    assert len(client.call.take()) == 1
    end(rig, client)


def test_decode_workers_that_cannot_be_reached_are_all_left_out():
    rig = Rig(*nixl(decodes=(11, 12, 13, 14, 15)), retry=STEADY)
    client = rig.post(PATH, CHAT)
    prefill(rig).answer(body=ANSWER)
    assert len(released(client)[2]) == 4
    client.decode_head(503, [("x-pd-error-code", "decode_unreachable")])
    assert rig.unreachable == list(rig.workers[2:6])
    (order,) = rig.egress.orders
    assert order.destination == "127.0.0.1:15"  # nobody else can have the cache freed
    second = client.late()
    rig.clock.advance(0.1)
    prefill(rig).answer(body=ANSWER)
    leg = decode(rig)
    assert leg.destination == "127.0.0.1:15"
    leg.answer()
    end(rig, client, second)


def test_the_second_attempts_record_does_not_keep_what_was_said_of_the_first():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(PATH, CHAT)
    prefill(rig).answer(body=b"{}")
    released(client)
    client.decode_head(503, WORKER)
    second = client.late(WORKER)
    rig.clock.advance(0.1)
    prefill(rig).answer(body=ANSWER)
    decode(rig).answer()
    record = end(rig, client, second)
    assert (record.kv, record.note) == ("handed", "")
