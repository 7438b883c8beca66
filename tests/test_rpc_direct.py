"""Requests for gRPC workers whose decode leg is a call that Envoy runs: from the client's body to its answer."""

import gc
import json

import pytest
from collector import no_collector
from fakes import hint, mutated, rejection, released, worker
from rpc_rig import Answer, Letters, RpcRig, ids, rpc_worker

from extproc.errors import GatewayError
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import ENDED_HEAD_SECONDS, FIRST_TOKEN_SECONDS, PREFILL_WORD_SECONDS, SECOND_CALL_SECONDS
from extproc.exchange.rpc_direct import RpcDirectCourse
from extproc.exchange.rpc_reply import RpcReply
from extproc.handoff.sglang import HOLD_SECONDS
from extproc.workers.worker import MOONCAKE, Role, Status

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 9}
STREAM = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
STEADY = RetryPolicy(jitter=0)
HEAD = [("content-type", "application/grpc"), ("x-pd-upstream", "127.0.0.1:11")]
PARAMS = (
    '{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e","remote_request_id":"r",'
    '"remote_host":"h","remote_port":1}'
)


@pytest.fixture
def rig():
    return RpcRig(retry=STEADY)


def refused_head(code, message="no"):
    return [*HEAD, ("grpc-status", str(code)), ("grpc-message", message)]


def events(body):
    return [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]


def text_of(body):
    chunks = [json.loads(event) for event in events(body) if event != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


def end(rig, client, answer=None):
    """As Envoy does: the first call ends with the worker's trailers, the second with the answer."""
    client.close()
    if answer is not None:
        answer.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()
    (record,) = rig.records
    return record


def begun(rig, body=STREAM):
    """A request whose decode has its head; the prefill is out."""
    client = rig.post(PATH, body)
    released(client)
    (prefill,) = rig.prefills
    client.decode_head(headers=HEAD)
    return client, prefill, Answer(rig, client)


def test_the_legs(rig):
    client = rig.post(PATH, CHAT, headers=[("accept-encoding", "gzip"), ("cookie", "x"), ("content-length", "90")])
    body, headers, destinations = released(client)
    assert destinations[0] == "127.0.0.1:11"
    (prefill,) = rig.prefills
    for message, role in ((rig.request(body), "decode"), (rig.request(prefill.body), "prefill")):
        assert list(message.tokenized.input_ids) == ids("Say hi"), role
        assert message.disaggregated_params.bootstrap_port == 8998
    assert rig.request(body).request_id == rig.request(prefill.body).request_id
    assert headers[":path"] == prefill.path == "/sglang.grpc.scheduler.SglangScheduler/Generate"
    assert headers["content-type"] == "application/grpc"
    assert (headers["te"], headers["x-pd-cluster"]) == ("trailers", "decode_grpc")
    fields = dict(prefill.headers)
    assert (fields[b"te"], fields[b"content-type"]) == (b"trailers", b"application/grpc")
    assert not {b"cookie", b"content-length", b"accept-encoding"} & fields.keys()
    client.close()
    rig.clock.advance(0.05)
    assert rig.aborted("prefill_grpc") == rig.aborted("decode_grpc")[:1] == [rig.request(body).request_id]
    rig.assert_nothing_is_left()


def test_what_is_taken_from_the_clients_head(rig):
    client = rig.post(PATH, CHAT, headers=[("cookie", "x"), ("content-length", "90"), ("traceparent", "t")])
    head, _ = client.call.take()
    response = head.request_headers.response
    assert response.clear_route_cache
    assert {"cookie", "content-length"} <= set(response.header_mutation.remove_headers)
    assert "traceparent" not in response.header_mutation.remove_headers
    client.close()


@pytest.mark.parametrize("own", [None, "worker's"])
def test_keys(own):
    rig = RpcRig(api_key="ours")
    for each in rig.workers:
        each.api_key = own
    client = rig.post(PATH, CHAT, headers=[("authorization", "Bearer ours")])
    (prefill,) = rig.prefills
    expected = None if own is None else b"Bearer worker's"
    assert dict(prefill.headers).get(b"authorization") == expected
    head, _ = client.call.take()
    mutation = head.request_headers.response.header_mutation
    told = {option.header.key: option.header.raw_value for option in mutation.set_headers}
    assert told.get("authorization") == expected
    assert ("authorization" in mutation.remove_headers) is (own is None)
    client.close()


def test_a_whole_answer(rig):
    client, prefill, answer = begun(rig, CHAT)
    answer.feed(rig.complete("hi"))
    assert answer.body == b""
    rig.answered(prefill, rig.complete("h", cached=3))
    answer.trailers()
    assert answer.ended
    found = json.loads(answer.body)
    assert found["choices"][0]["message"]["content"] == "hi"
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert answer.headers["content-length"] == str(len(answer.body))
    assert (answer.status, answer.headers["x-pd-decode"]) == (200, "grpc://127.0.0.1:11")
    client.close()
    assert rig.gateway.alive == 1  # the client may not have all of it yet
    answer.close()
    record = end(rig, client)
    assert (record.status, record.code, record.handoff) == (200, "", "sglang")


def test_a_list_of_one_prompt_is_one_prompt_for_completions(rig):
    client = rig.post("/v1/completions", {"model": "tiny", "prompt": ["Say hi"], "max_tokens": 9})
    released(client)
    rig.answered(rig.prefills[0], rig.complete("h"))
    client.decode_head(headers=HEAD)
    answer = Answer(rig, client)
    answer.feed(rig.complete("hi"))
    answer.trailers()
    assert [choice["text"] for choice in json.loads(answer.body)["choices"]] == ["hi"]
    end(rig, client, answer)


def test_a_stream_ends_with_the_prefills_counts(rig):
    client, prefill, answer = begun(rig)
    answer.feed(rig.chunk("h"))
    assert text_of(answer.body) == "h"
    answer.feed(rig.chunk("i", 2), rig.complete("i"))
    answer.trailers()
    assert not answer.ended  # the prefill is out
    rig.answered(prefill, rig.complete("h", cached=2))
    answer.look()
    assert answer.ended
    assert events(answer.body)[-1] == "[DONE]"
    assert json.loads(events(answer.body)[-2])["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    end(rig, client, answer)


def test_a_prefill_that_says_nothing_more_is_waited_for_a_moment_only(rig):
    client, prefill, answer = begun(rig)
    answer.feed(rig.chunk("hi"), rig.complete("hi"))
    answer.trailers()
    rig.clock.advance(PREFILL_WORD_SECONDS)
    answer.look()
    assert answer.ended
    assert text_of(answer.body) == "hi"
    client.close()
    answer.close()
    rig.clock.advance(0.05)
    assert prefill.cancelled
    end(rig, client)


def test_a_prefill_that_fails_before_the_decodes_head_is_replaced(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    (first,) = rig.prefills
    rig.refused(first, 13)
    rig.clock.advance(ENDED_HEAD_SECONDS)
    late = client.late()
    client.close()
    rig.clock.advance(0.1)
    (prefill,), (decode,) = rig.prefills, rig.decodes
    assert prefill.destination == "127.0.0.1:2"
    assert rig.request(prefill.body).request_id != rig.request(first.body).request_id
    rig.answered(prefill, rig.complete("h"))
    rig.answered(decode, rig.chunk("hi"), rig.complete("hi"))
    headers, body, ended = late.answer()
    assert (headers[":status"], headers["content-type"]) == ("200", "text/event-stream; charset=utf-8")
    assert (text_of(body), ended) == ("hi", True)
    late.close()
    record = end(rig, client)
    assert (record.attempts, record.status) == (2, 200)


def test_a_prefill_that_refuses_is_the_clients_answer(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    (prefill,) = rig.prefills
    rig.refused(prefill, 3, b"too%20odd")
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (400, "prefill_rejected")
    assert "too odd" in json.loads(body)["error"]["message"]
    assert rig.aborted("decode_grpc")
    end(rig, client)


def test_a_prefill_that_fails_in_the_answer_ends_it_with_an_event(rig):
    client, prefill, answer = begun(rig)
    answer.feed(rig.chunk("h"))
    rig.refused(prefill, 13, b"lost")
    answer.look()
    assert answer.ended
    last = json.loads(events(answer.body)[-1])
    assert last["error"]["code"] == "prefill_failed"
    assert rig.aborted("decode_grpc") == []  # the client might see the end of it
    client.close()
    answer.close()
    assert len(rig.aborted("decode_grpc")) == 1
    assert end(rig, client).code == "prefill_failed"


def test_a_prefill_that_fails_before_the_first_text_gives_a_status(rig):
    client, prefill, answer = begun(rig, CHAT)
    rig.refused(prefill, 13, b"lost")
    answer.look()
    assert (answer.status, answer.headers["x-pd-error-code"]) == (500, "prefill_failed")
    assert answer.ended
    end(rig, client, answer)


@pytest.mark.parametrize(
    ("code", "status", "outcome"),
    [
        (3, 400, ("", 0)),
        (8, 429, ("", 1)),
        (14, 503, ("", 1)),
        (13, 500, ("f", 0)),
        (1, 502, ("f", 0)),
        (12, 501, ("f", 0)),
    ],
)
def test_a_decodes_refusal(code, status, outcome):
    rig = RpcRig(retry=RetryPolicy(attempts=1))
    rig.listen()
    client = rig.post(PATH, STREAM)
    released(client)
    decode = rig.workers[2]
    client.decode_head(headers=refused_head(code, "the%20words"))
    rig.clock.advance(HOLD_SECONDS)  # in which the prefill may turn out to be the cause
    (message,) = client.call.take()
    common = message.response_headers.response
    told = {option.header.key: option.header.raw_value.decode() for option in common.header_mutation.set_headers}
    assert (told[":status"], told["content-type"]) == (str(status), "application/json")
    assert {"grpc-status", "grpc-message", "content-type"} <= set(common.header_mutation.remove_headers)
    assert "the words" in json.loads(common.body_mutation.body)["error"]["message"]
    assert (decode.breaker.outcomes, decode.breaker.pushbacks) == outcome
    end(rig, client)


def test_a_busy_decode_leads_to_another_attempt(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    (first,) = rig.prefills
    client.decode_head(headers=refused_head(8))
    late = client.late(refused_head(8))
    assert first.cancelled
    rig.clock.advance(0.1)
    (prefill,), (decode,) = rig.prefills, rig.decodes
    assert decode.destination == "127.0.0.1:12"
    rig.answered(decode, rig.complete("hi"))
    rig.answered(prefill, rig.complete("h", cached=1))
    _, body, ended = late.answer()
    assert ended
    assert json.loads(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    late.close()
    end(rig, client)


def test_an_error_behind_the_first_text_is_an_event_and_counts(rig):
    rig.listen()
    client, prefill, answer = begun(rig)
    rig.answered(prefill, rig.complete("h"))
    answer.feed(rig.chunk("h"))
    answer.trailers(13, "engine died")
    assert answer.ended
    assert "engine died" in json.loads(events(answer.body)[-1])["error"]["message"]
    assert rig.workers[2].breaker.outcomes == "sf"  # its head was a success
    record = end(rig, client, answer)
    assert (record.status, record.code) == (200, "decode_failed")


def test_an_error_before_the_first_text_is_a_status(rig):
    client, prefill, answer = begun(rig, CHAT)
    rig.answered(prefill, rig.complete("h"))
    answer.trailers(14, "gone")
    assert (answer.status, answer.ended) == (503, True)
    assert end(rig, client, answer).status == 503


def test_what_is_no_answer(rig):
    client, prefill, answer = begun(rig, CHAT)
    rig.answered(prefill, rig.complete("h"))
    answer.feed(b"\x01\0\0\0\0")
    assert (answer.status, answer.headers["x-pd-error-code"]) == (502, "decode_bad_reply")
    end(rig, client, answer)


def test_a_call_that_ends_without_trailers_was_cut(rig):
    client, prefill, answer = begun(rig)
    rig.answered(prefill, rig.complete("h"))
    answer.feed(rig.chunk("hi"), rig.complete("hi"))
    answer.end_of_body()
    assert answer.ended
    assert "error" in json.loads(events(answer.body)[-1])
    assert end(rig, client, answer).code


def test_a_call_that_ends_well_with_its_head_is_no_answer(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    rig.answered(rig.prefills[0], rig.complete("h"))
    client.decode_head(headers=refused_head(0, ""))
    (said,) = client.call.take()
    assert mutated(said)[":status"] == "502"
    assert end(rig, client).code == "decode_bad_reply"


@pytest.mark.parametrize(
    ("headers", "bare"),
    [
        (HEAD, True),  # and no status
        ([("content-type", "text/html"), HEAD[1]], False),
        ([HEAD[1]], False),
    ],
)
@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_a_head_that_is_no_calls_is_an_error_at_once(rig, headers, bare, body):
    client = rig.post(PATH, body)
    released(client)
    (prefill,) = rig.prefills
    client.decode_head(headers=headers, end=bare)
    (said,) = client.call.take()
    assert mutated(said)[":status"] == "502"
    assert prefill.cancelled
    record = end(rig, client)
    assert (record.code, record.status) == ("decode_bad_reply", 502)
    assert "not as a gRPC server does" in record.message


def test_a_request_that_one_worker_answers_is_ended_by_its_name():
    rig = RpcRig("vllm")
    client = rig.post(PATH, CHAT | {"max_tokens": 1})
    body, _, _ = released(client)
    end(rig, client)
    (name,) = set(rig.aborted("prefill_grpc"))
    assert rig.request(body).request_id == name


def test_a_prefill_that_fails_behind_its_decodes_end_changes_nothing(rig):
    client, prefill, answer = begun(rig)
    answer.feed(rig.chunk("hi"), rig.complete("hi"))
    answer.trailers()
    assert not answer.ended
    rig.refused(prefill, 13, b"lost")
    answer.look()
    assert answer.ended
    assert events(answer.body)[-1] == "[DONE]"
    assert end(rig, client, answer).code == ""


def test_a_stop_string_ends_the_answer_and_the_engines_work(rig):
    client, prefill, answer = begun(rig, STREAM | {"stop": ["lo"]})
    rig.answered(prefill, rig.complete("h"))
    answer.feed(rig.chunk("hel"))
    answer.feed(rig.chunk("lo you", 9))
    assert answer.ended
    assert text_of(answer.body) == "hel"
    assert events(answer.body)[-1] == "[DONE]"
    assert len(rig.aborted("decode_grpc")) == 1
    answer.feed(rig.chunk("more"))  # what Envoy had on its way
    client.close()
    answer.close()
    assert end(rig, client).status == 200
    assert len(rig.aborted("decode_grpc")) == 1


@pytest.mark.parametrize("first", ["client", "answer"])
def test_a_client_that_leaves_in_the_answer(rig, first):
    client, prefill, answer = begun(rig)
    rig.answered(prefill, rig.complete("h"))
    answer.feed(rig.chunk("h"))
    for call in (client, answer) if first == "client" else (answer, client):
        call.close()
    assert len(rig.aborted("decode_grpc")) == 1
    assert end(rig, client).status == 200


def test_a_client_that_leaves_before_the_second_call(rig):
    client = rig.post(PATH, STREAM)
    released(client)
    rig.answered(rig.prefills[0], rig.complete("h"))
    client.decode_head(headers=HEAD)
    client.call.take()
    client.close()
    assert len(rig.aborted("decode_grpc")) == 1
    rig.clock.advance(SECOND_CALL_SECONDS)
    end(rig, client)


def test_a_second_call_that_never_comes(rig):
    client = rig.post(PATH, CHAT)
    released(client)
    rig.answered(rig.prefills[0], rig.complete("h"))
    client.decode_head(headers=HEAD)
    client.call.take()
    client.session.trailed = True  # the worker's answer is whole, and Envoy ends the first call
    client.close()
    assert rig.gateway.alive == 1
    rig.clock.advance(SECOND_CALL_SECONDS)
    end(rig, client)


def test_the_requests_time_is_over_in_the_answer(rig):
    client, prefill, answer = begun(rig)
    rig.answered(prefill, rig.complete("h"))
    answer.feed(rig.chunk("h"))
    rig.gateway.end_all(GatewayError("request_timeout", "too long"))
    answer.look()
    assert json.loads(events(answer.body)[-1])["error"]["code"] == "request_timeout"
    assert answer.ended
    end(rig, client, answer)
    assert len(rig.aborted("decode_grpc")) == 1


# In turn


def test_in_turn_the_decode_is_told_what_the_prefill_said():
    rig = RpcRig("vllm", retry=STEADY)
    client = rig.post(PATH, CHAT)
    assert client.call.take() == []
    (prefill,) = rig.prefills
    assert rig.request(prefill.body).sampling_params.max_tokens == 1
    rig.answered(prefill, rig.complete("h", cached=2, params=PARAMS))
    body, _, _ = released(client)
    assert rig.request(body).kv_transfer_params_json == PARAMS
    client.decode_head(headers=HEAD)
    answer = Answer(rig, client)
    answer.feed(rig.complete("hi"))
    answer.trailers()
    assert json.loads(answer.body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    record = end(rig, client, answer)
    assert (record.kv, record.handoff) == ("handed", "nixl")


def test_in_turn_a_cache_that_nobody_fetched_is_freed():
    rig = RpcRig("vllm", retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, CHAT)
    rig.answered(rig.prefills[0], rig.complete("h", params=PARAMS))
    released(client)
    client.decode_head(headers=refused_head(13))
    end(rig, client)
    (order,) = [leg for leg in rig.egress.orders if leg.path.endswith("/Generate")]
    assert rig.request(order.body).kv_transfer_params_json == PARAMS
    assert order.cluster == "decode_grpc"


def test_in_turn_a_cache_that_a_prefill_is_about_to_name_is_freed():
    rig = RpcRig("vllm", retry=RetryPolicy(attempts=1))
    client = rig.post(PATH, CHAT)
    (prefill,) = rig.prefills
    message = rig.complete("h", params=PARAMS)
    prefill.receiver.head(200, [(b"content-type", b"application/grpc")])
    prefill.receiver.data(message[:3])
    client.close()
    assert not prefill.cancelled
    prefill.receiver.data(message[3:])
    prefill.receiver.trailers([(b"grpc-status", b"0")])
    prefill.receiver.done()
    (order,) = [leg for leg in rig.egress.orders if leg.path.endswith("/Generate")]
    assert rig.request(order.body).kv_transfer_params_json == PARAMS
    rig.clock.advance(100)
    rig.assert_nothing_is_left()


def test_one_token_is_answered_by_the_prefill_alone():
    rig = RpcRig("vllm")
    client = rig.post(PATH, CHAT | {"max_tokens": 1})
    body, headers, destinations = released(client)
    assert (headers["x-pd-cluster"], destinations[0]) == ("prefill_grpc", "127.0.0.1:1")
    assert rig.prefills == []
    assert rig.request(body).sampling_params.max_tokens == 1
    client.decode_head(headers=[*HEAD[:1], ("x-pd-upstream", "127.0.0.1:1")])
    answer = Answer(rig, client)
    answer.feed(rig.complete("h", finish="length"))
    answer.trailers()
    assert json.loads(answer.body)["choices"][0]["finish_reason"] == "length"
    record = end(rig, client, answer)
    assert (record.kv, record.prefill) == ("none", "grpc://127.0.0.1:1")


# Prefills that send the cache themselves


def headed(rig):
    """A stream whose decode's server sends its head at once; it is held until the prefill has answered."""
    client = rig.post(PATH, STREAM)
    released(client)
    client.decode_head(headers=HEAD)
    assert client.call.take() == []
    rig.answered(rig.prefills[0], rig.complete("h"))
    return client, Answer(rig, client)


def test_a_prefill_that_is_gone_before_its_decode_has_said_anything():
    rig = RpcRig("vllm", connector=MOONCAKE, retry=STEADY)
    client, answer = headed(rig)
    rig.gateway.prefill_lost(rig.workers[0])
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    answer.look()
    assert (answer.status, answer.headers["x-pd-error-code"]) == (502, "prefill_connection_lost")
    assert answer.ended
    client.close()
    answer.close()
    rig.clock.advance(0.05)
    assert len(rig.aborted("decode_grpc")) == 1
    assert rig.gateway.alive == 0


def test_one_that_has_shown_a_token_is_not_hurt():
    rig = RpcRig("vllm", connector=MOONCAKE, retry=STEADY)
    client, answer = headed(rig)
    rig.gateway.prefill_lost(rig.workers[0])
    answer.feed(rig.chunk("h"))
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    answer.feed(rig.complete("h"))
    answer.trailers()
    assert events(answer.body)[-1] == "[DONE]"
    client.close()
    answer.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()


# Before a worker is chosen


def test_long_prompts_become_tokens_later(rig):
    rig.texts.later = True
    client = rig.post(PATH, CHAT)
    assert client.call.take() == []
    assert rig.egress.legs == []
    (step,) = rig.texts.waiting
    step()
    released(client)
    client.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()


def test_a_client_that_leaves_meanwhile(rig):
    rig.texts.later = True
    client = rig.post(PATH, CHAT)
    client.close()
    assert rig.texts.cancelled == 1
    rig.assert_nothing_is_left()


def test_the_requests_time_is_over_meanwhile(rig):
    rig.texts.later = True
    client = rig.post(PATH, CHAT)
    rig.gateway.end_all(GatewayError("request_timeout", "too long"))
    assert rejection(client)[0] == 504
    assert rig.texts.cancelled == 1
    client.close()
    rig.assert_nothing_is_left()


def test_a_tokenizer_that_is_taken_away_meanwhile(rig):
    rig.texts.later = True
    client = rig.post(PATH, CHAT)
    rig.texts.gone = True
    rig.texts.waiting.pop()()
    status, headers, _ = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (503, "tokenizer_not_found")
    end(rig, client)


class OtherLetters(Letters):
    """The same characters are other tokens."""

    def encode(self, text, *, special):
        return [token + 1 for token in super().encode(text, special=special)]


def exchanged(rig):
    """The model has another tokenizer from now on."""
    rig.texts.tokenizer = OtherLetters()


def test_a_tokenizer_that_is_exchanged_meanwhile(rig):
    rig.texts.later = True
    client = rig.post(PATH, CHAT)
    exchanged(rig)
    rig.texts.waiting.pop(0)()
    assert client.call.take() == []
    rig.texts.waiting.pop(0)()
    body, _, _ = released(client)
    assert list(rig.request(body).tokenized.input_ids) == [token + 1 for token in ids("Say hi")]
    end(rig, client)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_tokenizer_that_is_exchanged_while_the_request_waits_for_room(rig, leaves):
    for each in rig.workers:
        each.limit = 1
    first = [rig.post(PATH, CHAT) for _ in range(2)]
    client = rig.post(PATH, CHAT)
    assert client.call.take() == []
    rig.texts.later = True
    exchanged(rig)
    for each in first:
        each.close()
    rig.clock.advance(0)
    (again,) = rig.texts.waiting
    assert client.call.take() == []
    if leaves:
        client.close()
        assert rig.texts.cancelled == 1
    else:
        again()
        body, _, _ = released(client)
        assert list(rig.request(body).tokenized.input_ids) == [token + 1 for token in ids("Say hi")]
        client.close()
    rig.clock.advance(5)
    rig.assert_nothing_is_left()


def test_a_request_that_names_no_model_goes_where_its_tokens_are_known():
    others = [rpc_worker(role, port, model_ids=("other",)) for role, port in ((Role.PREFILL, 3), (Role.DECODE, 13))]
    rig = RpcRig("sglang", *others)
    for _ in range(4):
        client = rig.post("/generate", {"text": "Say hi"})
        assert rig.texts.asked[-1] == "tiny"
        assert released(client)[2][0] in ("127.0.0.1:11", "127.0.0.1:12")
        client.close()
        rig.clock.advance(1)
    rig.assert_nothing_is_left()


def test_a_prompt_that_is_too_long(rig):
    rig.texts.error = GatewayError("context_length_exceeded", "too long", param="messages")
    client = rig.post(PATH, CHAT)
    assert rejection(client)[0] == 400
    assert rig.egress.legs == []
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/rerank"])
def test_apis_that_are_not_served(rig, path):
    body = CHAT | {"input": "x", "query": "q", "documents": ["d"]}
    client = rig.post(path, body)
    assert rejection(client)[0] == 501
    client.close()
    rig.assert_nothing_is_left()


def http(*ports):
    roles = {1: Role.PREFILL, 2: Role.PREFILL, 3: Role.DECODE, 4: Role.DECODE}
    return [worker(roles[port], 100 + port, bootstrap_port=8998) for port in ports]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/rerank"])
def test_beside_http_workers_those_serve_the_other_apis(path):
    rig = RpcRig("sglang", *http(1, 3))
    for _ in range(6):
        client = rig.post(path, CHAT | {"query": "q", "documents": ["d"]})
        _, headers, destinations = released(client)
        assert destinations[0] in ("127.0.0.1:101", "127.0.0.1:103")
        assert headers.get("content-type") == "application/json"
        client.close()
    assert not {leg.cluster for leg in rig.egress.legs} & {"prefill_grpc", "decode_grpc"}


def test_beside_http_workers_those_serve_what_cannot_be_told_over_grpc():
    rig = RpcRig("sglang", *http(1, 3))
    rig.texts.error = GatewayError("tokenizer_not_found", "none")
    for _ in range(4):
        client = rig.post(PATH, CHAT)
        assert released(client)[2] == ["127.0.0.1:103"]
        client.close()


@pytest.mark.parametrize(
    ("path", "fields", "waits"),
    [
        ("/v1/messages", {}, False),
        ("/v1/messages", {}, True),
        (PATH, {"cache_salt": "x"}, False),
        (PATH, {"cache_salt": "x"}, True),
        ("/v1/rerank", {}, False),
    ],
)
def test_http_workers_that_are_not_usable_now_are_no_reason_to_say_that_nobody_can(path, fields, waits):
    rig = RpcRig("sglang", *http(1, 3))
    own = [each for each in rig.workers if not each.url.is_grpc]
    for each in own:
        each.limit = 1
    body = CHAT | {"query": "q", "documents": ["d"], **fields}
    first = rig.post(path, body) if waits else None
    client = rig.post(path, body) if waits else None
    for each in own:
        each.status = Status.NOT_READY
    if client is None:
        client = rig.post(path, body)
    else:
        assert client.call.take() == []  # it waits for room
        first.close()
        rig.clock.advance(0)
    status, headers, _ = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (503, "no_available_workers")
    client.close()
    rig.clock.advance(5)
    rig.assert_nothing_is_left()


def test_what_is_wrong_of_itself_is_told_all_the_same():
    rig = RpcRig("sglang", *http(1, 3))
    for each in rig.workers:
        if not each.url.is_grpc:
            each.status = Status.NOT_READY
    client = rig.post(PATH, CHAT | {"temperature": "hot"})
    assert rejection(client)[0] == 400
    client.close()


def test_beside_http_workers_each_kind_gets_its_share():
    rig = RpcRig("sglang", *http(1, 3))
    clusters = set()
    for _ in range(6):
        client = rig.post(PATH, CHAT)
        clusters.add(released(client)[1].get("x-pd-cluster", "decode"))
        client.close()
    assert clusters == {"decode_grpc", "decode"}


@pytest.mark.parametrize("model", ["tiny", None])
def test_of_the_pairs_that_a_gateway_names_one_serves(model):
    """Whoever that is; a prompt becomes tokens only where gRPC workers are among them."""
    rig = RpcRig("sglang", *http(1, 3))
    body = CHAT if model else {key: value for key, value in CHAT.items() if key != "model"}
    for named, cluster, tokenised in (((2, 12), "decode_grpc", True), ((101, 103), "decode", False)) * 2:
        rig.texts.asked.clear()
        client = rig.post(PATH, body, context=hint(*named))
        _, headers, destinations = released(client)
        assert headers.get("x-pd-cluster", "decode") == cluster
        assert destinations == [f"127.0.0.1:{named[1]}"]
        assert bool(rig.texts.asked) is tokenised
        client.close()
    rig.clock.advance(5)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("path", "fields"), [(PATH, {"cache_salt": "x"}), ("/v1/messages", {}), ("/v1/rerank", {})]
)
def test_what_those_cannot_serve_goes_to_no_others(path, fields):
    rig = RpcRig("sglang", *http(1, 3))
    client = rig.post(path, CHAT | {"query": "q", "documents": ["d"], **fields}, context=hint(1, 11))
    status, headers, error = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (503, "no_available_workers")
    assert "x-gateway-destination-endpoint-subset" in json.loads(error)["error"]["message"]
    assert rig.egress.legs == []
    client.close()
    rig.clock.advance(5)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("fault", [None, "prompt", "tokenizer", "decode", "prefill"])
def test_what_is_over_goes_from_memory_without_the_collectors_help(rig, fault):
    with no_collector():
        ends(rig, fault)
        rig.clock.advance(SECOND_CALL_SECONDS)  # the rig forgets no sooner what it was to do
        kinds = RpcDirectCourse | RpcReply  # a session stays with its legs, and those with the rig
        assert [each for each in gc.get_objects() if isinstance(each, kinds)] == []


def ends(rig, fault):
    """A request that comes to nothing in one of several ways, or to an answer."""
    if fault in ("prompt", "tokenizer"):
        code = "context_length_exceeded" if fault == "prompt" else "tokenizer_not_found"
        rig.texts.error = GatewayError(code, "no")
        client = rig.post(PATH, CHAT)
        assert rejection(client)[0] >= 400
        end(rig, client)
        return
    client, prefill, answer = begun(rig, CHAT)
    if fault == "prefill":
        rig.refused(prefill, 13, b"lost")
        answer.look()
    else:
        rig.answered(prefill, rig.complete("h"))
        if fault:
            answer.trailers(14, "gone")
        else:
            answer.feed(rig.complete("hi"))
            answer.trailers()
    assert answer.status == (503 if fault == "decode" else 500 if fault else 200)
    end(rig, client, answer)
