"""Requests for gRPC workers whose legs are all ours: several sequences, and engines that must not be interrupted."""

import gc
import json

import pytest
from collector import no_collector
from fakes import Fetched, mutated, rejection
from rpc_rig import RpcRig
from test_relayed import relayed as said
from test_rpc_direct import PARAMS

from extproc.exchange.attempts import OnPrefillFailure, RetryPolicy
from extproc.exchange.clock import PREFILL_WORD_SECONDS
from extproc.exchange.fetched_reply import FetchedReply
from extproc.exchange.rpc_relayed import RpcRelayedCourse
from extproc.handoff.sglang import HOLD_SECONDS
from extproc.transport.interface import Lost

PATH = "/v1/completions"
TWO = {"model": "tiny", "prompt": "Say hi", "n": 2, "max_tokens": 9}
LIST = {"model": "tiny", "prompt": ["one", "three"], "n": 2, "max_tokens": 9}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ONE = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 9}
STEADY = RetryPolicy(jitter=0)


@pytest.fixture
def rig():
    return RpcRig(retry=STEADY)


def done(rig, client):
    client.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()
    (record,) = rig.records
    return record


def relayed(client):
    """(status, headers, body, ended) of what was said since the last look; no status where the head came before."""
    headers, body, ended = said(client)
    return int(headers.get(":status", 0)), headers, body, ended


def events(body):
    return [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]


@pytest.mark.parametrize("body", [TWO, LIST])
def test_each_sequence_is_a_pair_of_legs(rig, body):
    client = rig.post(PATH, body)
    count = 2 if body is TWO else 4
    prefills, decodes = rig.prefills, rig.decodes
    assert (len(prefills), len(decodes)) == (count, count)
    rooms = {rig.request(leg.body).disaggregated_params.bootstrap_room for leg in prefills}
    assert len(rooms) == count
    assert {rig.request(leg.body).request_id for leg in prefills} == {rig.request(d.body).request_id for d in decodes}
    for leg in prefills:
        rig.answered(leg, rig.complete("h", cached=1))
    for at, leg in enumerate(decodes):
        rig.answered(leg, rig.complete("hi" + "!" * at))
    status, headers, answer, ended = relayed(client)
    assert (status, headers["content-type"], ended) == (200, "application/json", True)
    found = json.loads(answer)
    assert [choice["text"] for choice in found["choices"]] == ["hi" + "!" * at for at in range(count)]
    assert found["usage"]["prompt_tokens"] == (4 if body is TWO else 8)
    assert headers["content-length"] == str(len(answer))
    assert done(rig, client).status == 200


def test_a_stream_of_several(rig):
    client = rig.post(PATH, TWO | STREAM)
    (first, second), decodes = rig.prefills, rig.decodes
    rig.answered(first, rig.complete("h"))
    decodes[0].receiver.head(200, [(b"content-type", b"application/grpc")])
    decodes[0].receiver.data(rig.chunk("h"))
    status, headers, answer, ended = relayed(client)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert json.loads(events(answer)[0])["choices"][0]["text"] == "h"
    rig.answered(decodes[1], rig.chunk("yo"), rig.complete("o"))
    rig.answered(second, rig.complete("h"))
    decodes[0].receiver.data(rig.complete("h"))
    decodes[0].receiver.trailers([(b"grpc-status", b"0")])
    decodes[0].receiver.done()
    _, _, answer, ended = relayed(client)
    assert ended
    assert events(answer)[-1] == "[DONE]"
    assert done(rig, client).status == 200


def test_one_that_fails_before_anything_was_said_is_tried_elsewhere(rig):
    client = rig.post(PATH, TWO)
    old = [*rig.prefills, *rig.decodes]
    rig.refused(rig.decodes[1], 8)
    assert all(leg.cancelled for leg in old if not leg.over)
    assert len(rig.aborted("decode_grpc")) >= 1
    rig.clock.advance(0.1)
    assert {leg.destination for leg in rig.decodes} == {"127.0.0.1:12"}
    for leg in rig.decodes:
        rig.answered(leg, rig.complete("hi"))
    for leg in rig.prefills:
        rig.answered(leg, rig.complete("h"))
    assert relayed(client)[0] == 200
    assert done(rig, client).attempts == 2


def test_one_that_fails_in_the_stream_ends_it_with_an_event(rig):
    client = rig.post(PATH, TWO | STREAM)
    for leg in rig.prefills:
        rig.answered(leg, rig.complete("h"))
    first, second = rig.decodes
    first.receiver.head(200, [(b"content-type", b"application/grpc")])
    first.receiver.data(rig.chunk("h"))
    rig.refused(second, 13, b"died")
    _, _, answer, ended = relayed(client)
    assert ended
    assert json.loads(events(answer)[-1])["error"]["code"] == "decode_failed"
    assert first.cancelled
    assert done(rig, client).code == "decode_failed"


@pytest.mark.parametrize("code", [8, 13])
def test_breakers_hear_of_each_leg(code):
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    rig.listen()
    client = rig.post(PATH, TWO)
    rig.answered(rig.prefills[0], rig.complete("h"))
    rig.answered(rig.decodes[0], rig.complete("hi"))
    rig.refused(rig.decodes[0], code)
    rig.clock.advance(HOLD_SECONDS)
    decode = rig.workers[2].breaker
    assert (decode.outcomes, decode.pushbacks) == (("s", 1) if code == 8 else ("sf", 0))
    assert rig.workers[0].breaker.outcomes == "s"
    done(rig, client)


def test_a_call_that_ends_without_a_status_is_a_lost_connection():
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, TWO)
    leg = rig.decodes[0]
    leg.receiver.head(200, [(b"content-type", b"application/grpc")])
    leg.receiver.data(rig.complete("hi"))
    leg.receiver.done()
    assert done(rig, client).code == "decode_connection_lost"
    assert rig.failing == [rig.workers[2]]


def test_envoys_own_answer_is_known_by_its_flags():
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, TWO)
    head = [(b"grpc-status", b"14"), (b"x-pd-local-reply", b"UF"), (b"content-type", b"application/grpc")]
    leg = rig.prefills[0]
    leg.receiver.head(200, head)
    leg.receiver.done()
    assert done(rig, client).code == "prefill_unreachable"
    assert rig.unreachable == [rig.workers[0]]


def test_a_stop_string_ends_that_sequences_work(rig):
    client = rig.post(PATH, TWO | STREAM | {"stop": ["lo"]})
    for leg in rig.prefills:
        rig.answered(leg, rig.complete("h"))
    first, second = rig.decodes
    first.receiver.head(200, [(b"content-type", b"application/grpc")])
    first.receiver.data(rig.chunk("hello", 5))
    assert first.cancelled
    assert rig.aborted("decode_grpc") == [rig.request(first.body).request_id]
    rig.answered(second, rig.chunk("yo"), rig.complete("o"))
    _, _, answer, ended = relayed(client)
    assert ended
    assert events(answer)[-1] == "[DONE]"
    done(rig, client)


def test_an_answer_waits_for_the_prefills_counts_and_not_for_ever(rig):
    client = rig.post(PATH, TWO)
    for leg in rig.decodes:
        rig.answered(leg, rig.complete("hi"))
    assert client.call.take() == []
    rig.answered(rig.prefills[0], rig.complete("h"))
    rig.clock.advance(PREFILL_WORD_SECONDS)
    assert relayed(client)[0] == 200
    done(rig, client)


def test_a_list_of_one_for_generate_is_a_list(rig):
    client = rig.post("/generate", {"text": ["Say hi"], "sampling_params": {"max_new_tokens": 9}})
    rig.answered(rig.prefills[0], rig.complete("h"))
    rig.answered(rig.decodes[0], rig.complete("hi"))
    _, _, answer, _ = relayed(client)
    (item,) = json.loads(answer)
    assert item["text"] == "hi"
    done(rig, client)


def test_too_many_sequences(rig):
    client = rig.post(PATH, TWO | {"prompt": ["x"] * 600})
    assert rejection(client)[0] == 400
    assert rig.egress.legs == []
    done(rig, client)


def test_legs_that_are_too_large_together():
    rig = RpcRig(max_payload_bytes=1000)
    client = rig.post(PATH, TWO | {"prompt": "x" * 100, "n": 2})
    assert rejection(client)[0] == 413
    done(rig, client)


# Streams that say nothing for long

LONG = ONE | {"messages": [{"role": "user", "content": "x" * 4096}], "stream": True}


def test_a_long_prompts_client_hears_of_its_stream_meanwhile(rig):
    client = rig.post("/v1/chat/completions", LONG)
    (prefill,), (decode,) = rig.prefills, rig.decodes
    rig.clock.advance(14.9)
    assert client.call.take() == []
    rig.clock.advance(0.2)
    status, headers, answer, ended = relayed(client)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert (answer, ended) == (b": keep-alive\n\n", False)
    rig.answered(prefill, rig.complete("h"))
    rig.clock.advance(15)
    assert relayed(client)[2] == b": keep-alive\n\n"
    decode.receiver.head(200, [(b"content-type", b"application/grpc")])
    decode.receiver.data(rig.chunk("h"))
    rig.clock.advance(15)
    assert b"keep-alive" not in relayed(client)[2]  # it was not silent
    rig.clock.advance(15)
    assert relayed(client)[2] == b": keep-alive\n\n"
    decode.receiver.data(rig.complete("h"))
    decode.receiver.trailers([(b"grpc-status", b"0")])
    decode.receiver.done()
    _, _, answer, ended = relayed(client)
    assert ended
    assert events(answer)[-1] == "[DONE]"
    assert done(rig, client).status == 200


def test_all_streams_may_be_relayed_and_a_connection_that_breaks_is_an_event():
    rig = RpcRig(retry=STEADY, relay_streams=True)
    client = rig.post("/v1/chat/completions", ONE | {"stream": True})
    (prefill,), (decode,) = rig.prefills, rig.decodes
    rig.answered(prefill, rig.complete("h"))
    decode.receiver.head(200, [(b"content-type", b"application/grpc")])
    decode.receiver.data(rig.chunk("h"))
    decode.receiver.lost(Lost.RESET, "gone")
    _, _, answer, ended = relayed(client)
    assert ended
    assert json.loads(events(answer)[-1])["error"]["code"] == "decode_connection_lost"
    assert done(rig, client).code == "decode_connection_lost"
    whole = rig.post("/v1/chat/completions", ONE)
    assert len(rig.decodes) == 0  # Envoy runs it
    whole.close()


def test_after_a_comment_there_may_still_be_another_attempt(rig):
    client = rig.post("/v1/chat/completions", LONG)
    rig.clock.advance(15)
    assert relayed(client)[0] == 200
    rig.refused(rig.prefills[0], 13)
    rig.clock.advance(0.1)
    rig.answered(rig.prefills[0], rig.complete("h"))
    rig.answered(rig.decodes[0], rig.chunk("hi"), rig.complete("i"))
    status, _, answer, ended = relayed(client)
    assert (status, ended) == (0, True)  # the head was out
    assert events(answer)[-1] == "[DONE]"
    assert done(rig, client).attempts == 2


def test_after_a_comment_an_error_is_an_event():
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post("/v1/chat/completions", LONG)
    rig.clock.advance(15)
    relayed(client)
    rig.refused(rig.prefills[0], 13, b"lost")
    _, _, answer, ended = relayed(client)
    assert json.loads(events(answer)[-1])["error"]["code"] == "prefill_failed"
    assert ended
    assert done(rig, client).code == "prefill_failed"


@pytest.mark.parametrize("whole", [True, False])
def test_no_comments(whole):
    """Not in an answer that is no stream, and not if nobody wants them."""
    rig = RpcRig(retry=STEADY, **({} if whole else {"keep_alive": 0.0}))
    client = rig.post(PATH, TWO if whole else TWO | STREAM)
    rig.clock.advance(60)
    assert client.call.take() == []
    for leg in (*rig.prefills, *rig.decodes):
        rig.answered(leg, rig.complete("h"))
    relayed(client)
    done(rig, client)


# Engines whose decode must not be interrupted while it receives the cache


@pytest.fixture
def delicate():
    return RpcRig("tokenspeed", retry=STEADY)


def test_a_decode_that_may_be_receiving_is_left_until_it_shows_a_token(delicate):
    rig = delicate
    client = rig.post("/v1/chat/completions", ONE)
    (decode,), (prefill,) = rig.decodes, rig.prefills
    client.close()
    assert prefill.cancelled
    assert not decode.cancelled
    assert rig.aborted("decode_grpc") == []
    assert rig.workers[2].load == 1
    assert rig.gateway.alive == 0
    decode.receiver.head(200, [(b"content-type", b"application/grpc")])
    assert not decode.cancelled
    decode.receiver.data(rig.chunk("h"))
    assert decode.cancelled
    assert rig.aborted("decode_grpc") == [rig.request(decode.body).request_id]
    rig.assert_nothing_is_left()


def test_or_for_half_a_minute(delicate):
    rig = delicate
    client = rig.post("/v1/chat/completions", ONE)
    (decode,) = rig.decodes
    client.close()
    rig.clock.advance(29.9)
    assert not decode.cancelled
    rig.clock.advance(0.2)
    assert decode.cancelled
    assert rig.aborted("decode_grpc") == [rig.request(decode.body).request_id]
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["done", "lost"])
def test_or_until_it_ends_by_itself(delicate, how):
    rig = delicate
    client = rig.post("/v1/chat/completions", ONE)
    (decode,) = rig.decodes
    client.close()
    if how == "done":
        rig.answered(decode, trailers=[(b"grpc-status", b"13")])
    else:
        decode.receiver.lost(Lost.RESET, "gone")
    rig.clock.advance(60)
    assert rig.aborted("decode_grpc") == []
    rig.assert_nothing_is_left()


def test_one_that_has_shown_a_token_is_ended_at_once(delicate):
    rig = delicate
    client = rig.post("/v1/chat/completions", ONE | {"stream": True})
    (decode,) = rig.decodes
    decode.receiver.head(200, [(b"content-type", b"application/grpc")])
    decode.receiver.data(rig.chunk("h"))
    client.close()
    assert decode.cancelled
    assert rig.aborted("decode_grpc") == [rig.request(decode.body).request_id]
    rig.assert_nothing_is_left()


# What nobody needs any more


def test_several_that_one_worker_answers_are_ended_by_their_names():
    rig = RpcRig("vllm", retry=STEADY)
    client = rig.post(PATH, TWO | {"max_tokens": 1, "temperature": 1})
    legs = rig.prefills
    assert (len(legs), rig.decodes) == (2, [])
    client.close()
    assert all(leg.cancelled for leg in legs)
    # Who of the candidates has a leg, only its head would say.
    assert list(dict.fromkeys(rig.aborted("prefill_grpc"))) == [rig.request(leg.body).request_id for leg in legs]
    rig.assert_nothing_is_left()


def test_decodes_that_do_without_a_prefill_are_ended_by_their_names():
    policy = RetryPolicy(on_prefill_failure=OnPrefillFailure.DECODE_ONLY, jitter=0)
    rig = RpcRig("vllm", retry=policy)
    client = rig.post(PATH, TWO | {"temperature": 1})
    rig.refused(rig.prefills[0], 14)
    legs = rig.decodes
    assert len(legs) == 2
    client.close()
    assert all(leg.cancelled for leg in legs)
    assert list(dict.fromkeys(rig.aborted("decode_grpc"))) == [rig.request(leg.body).request_id for leg in legs]
    rig.assert_nothing_is_left()


def test_a_cache_is_freed_whose_prefill_does_not_tell_what_was_asked_for():
    rig = RpcRig("vllm", retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, TWO | {"echo": True, "logprobs": 1, "temperature": 1})
    rig.answered(rig.prefills[0], rig.complete("h", params=PARAMS))  # without log probabilities of the prompt
    assert rejection(client)[0] == 502
    client.close()
    (order,) = [leg for leg in rig.egress.orders if leg.path.endswith("/Generate")]
    assert (rig.request(order.body).kv_transfer_params_json, order.cluster) == (PARAMS, "decode_grpc")
    rig.clock.advance(5)
    rig.assert_nothing_is_left()


# Servers that speak no gRPC

STRANGE = [(b"content-type", b"text/html")]


@pytest.mark.parametrize("role", ["prefills", "decodes"])
def test_a_server_of_another_kind_is_not_waited_for(role):
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, TWO)
    leg = getattr(rig, role)[0]
    leg.receiver.head(200, STRANGE)
    assert leg.cancelled
    assert rejection(client)[0] == 502
    record = done(rig, client)
    assert record.code == "decode_bad_reply"
    assert "not as a gRPC server does" in record.message


# Streams that Envoy fetches


@pytest.mark.parametrize(("fetches", "keep_alive", "stream"), [(True, 15, True), (True, 0, True), (True, 15, False)])
def test_a_short_prompts_stream_is_relayed_where_envoy_can_fetch_it(fetches, keep_alive, stream):
    rig = RpcRig(retry=STEADY, keep_alive=keep_alive)
    rig.gateway.fetches = fetches
    client = rig.post("/v1/chat/completions", ONE | {"stream": stream})
    ours = bool(keep_alive and stream)
    assert len(rig.decodes) == ours
    head, body = client.call.take()
    assert mutated(head)["x-pd-cluster"] == ("answers" if ours else "decode_grpc")
    assert bool(body.request_body.response.body_mutation.streamed_response.body) is not ours
    client.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()


def test_a_fetched_stream_that_is_silent_gets_comments(rig):
    rig.gateway.fetches = True
    client = rig.post("/v1/chat/completions", ONE | {"stream": True})
    head, _ = client.call.take()
    answer = Fetched()
    rig.gateway.fetch(mutated(head)[":path"].encode(), answer)
    rig.clock.advance(14.9)
    assert answer.headers is None
    rig.clock.advance(0.2)
    assert (answer.headers[":status"], answer.said) == ("200", b": keep-alive\n\n")
    answer.queued = 1  # Envoy has not taken it: the client reads nothing
    rig.clock.advance(30)
    assert answer.said == b": keep-alive\n\n"
    rig.answered(rig.prefills[0], rig.complete("h"))
    rig.answered(rig.decodes[0], rig.chunk("hi"), rig.complete("i"))
    assert events(answer.said)[-1] == "[DONE]"
    assert done(rig, client).status == 200


@pytest.mark.parametrize("ends", ["well", "left", "unfetched", "failed"])
def test_a_fetched_stream_goes_from_memory_without_the_collectors_help(ends):
    with no_collector():
        rig = RpcRig(retry=RetryPolicy(attempts=1))
        rig.gateway.fetches = True
        client = rig.post("/v1/chat/completions", ONE | {"stream": True})
        path = mutated(client.call.take()[0])[":path"].encode()
        reply = None if ends == "unfetched" else rig.gateway.fetch(path, Fetched())
        if ends == "failed":
            rig.refused(rig.prefills[0], 13)
        elif ends == "well":
            rig.answered(rig.prefills[0], rig.complete("h"))
            rig.answered(rig.decodes[0], rig.chunk("hi"), rig.complete("i"))
        if reply is not None:
            reply.closed()  # as the transport, which then lets go of it
        del reply
        client.close()
        rig.clock.advance(60)
        rig.assert_nothing_is_left()
        for leg in rig.egress.legs:
            leg.receiver = None  # as the transport, of a leg that is over
        kinds = RpcRelayedCourse | FetchedReply
        assert [each for each in gc.get_objects() if isinstance(each, kinds)] == []
