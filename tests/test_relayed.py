"""Relayed exchanges: several pairs of legs, one answer."""

import json

import pytest
from fakes import Rig, mutated, nixl

from extproc.exchange import wire
from extproc.exchange.attempts import RetryPolicy
from extproc.handoff.sglang import HOLD_SECONDS
from extproc.transport.interface import Lost

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 2}
PATH = "/v1/chat/completions"


@pytest.fixture
def rig():
    return Rig(retry=RetryPolicy(attempts=1))  # tests/test_retries.py has the others


def chat_answer(text):
    return json.dumps(
        {
            "id": f"id-{text}",
            "object": "chat.completion",
            "created": 1,
            "model": "tiny",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
        }
    ).encode()


def event(**fields):
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(text):
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def legs(rig):
    return [leg for leg in rig.egress.legs if leg.cluster == "prefill" and leg.path == PATH], [
        leg for leg in rig.egress.legs if leg.cluster == "decode" and leg.path == PATH
    ]


def relayed(client):
    """(status and headers, body, ended) of what was streamed to the client so far."""
    head, body, ended = {}, b"", False
    for message in client.call.take():
        assert message[0] == 0x5A, "not a streamed local reply"
        content = _value(message)
        part = _value(content)
        if content[0] == 0x0A:
            for entry in _fields(_value(part)):
                pair = dict(_numbered(entry))
                head[pair[1].decode()] = pair.get(3, b"").decode()
        else:
            fields = dict(_numbered(part))
            body += fields.get(1, b"")
            ended = ended or fields.get(2) == 1
    return head, body, ended


def _varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


def _numbered(data):
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + value]
            at += value
        else:
            yield tag >> 3, value


def _fields(data):
    return [value for _, value in _numbered(data)]


def _value(data):
    return _fields(data)[0]


def test_two_samples_are_two_pairs_with_their_own_rooms_on_the_same_workers(rig):
    rig.post(PATH, CHAT)
    prefills, decodes = legs(rig)
    assert len(prefills) == len(decodes) == 2
    assert {leg.json["n"] for leg in rig.egress.legs} == {1}
    rooms = [leg.json["bootstrap_room"] for leg in decodes]
    assert rooms == [leg.json["bootstrap_room"] for leg in prefills]
    assert len(set(rooms)) == 2
    assert len({leg.json["rid"] for leg in decodes}) == 2
    destinations = {dict(leg.headers)[b"x-gateway-destination-endpoint"] for leg in decodes}
    assert destinations == {b"127.0.0.1:11,127.0.0.1:12"}


def test_two_samples_come_back_as_one_answer(rig):
    client = rig.post(PATH, CHAT)
    prefills, decodes = legs(rig)
    decodes[1].answer(body=chat_answer("b"), headers=[(b"server", b"uvicorn"), (b"content-length", b"9")])
    prefills[0].answer()
    prefills[1].answer()
    assert client.call.take() == []
    decodes[0].answer(body=chat_answer("a"))
    head, body, ended = relayed(client)
    assert ended
    assert head[":status"] == "200"
    assert head["server"] == "uvicorn"
    assert head["x-pd-handoff"] == "sglang"
    assert head["content-length"] == str(len(body))
    answer = json.loads(body)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "a"), (1, "b")]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
    client.close()
    rig.assert_nothing_is_left()


def test_a_streams_first_token_does_not_wait_for_the_other_sample(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    _, decodes = legs(rig)
    decodes[1].receiver.head(200, [(b"content-type", b"text/event-stream")])
    decodes[1].receiver.data(delta("b"))
    head, body, ended = relayed(client)
    assert head[":status"] == "200"
    assert head["content-type"].startswith("text/event-stream")
    assert json.loads(body.removeprefix(b"data: "))["choices"][0]["index"] == 1
    assert not ended


def test_a_stream_ends_once_when_all_samples_have(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    prefills, decodes = legs(rig)
    for leg in prefills:
        leg.answer()
    for leg in decodes:
        leg.answer(body=delta("t") + b"data: [DONE]\n\n")
    _, body, ended = relayed(client)
    assert ended
    assert body.count(b"[DONE]") == 1
    assert body.endswith(b"data: [DONE]\n\n")
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("which", [0, 1])
def test_a_failed_prefill_ends_all_legs_and_is_told_with_its_status(rig, which):
    client = rig.post(PATH, CHAT)
    prefills, decodes = legs(rig)
    prefills[which].answer(400, b'{"message":"too long"}')
    (message,) = client.call.take()
    assert message.immediate_response.status.code == 400
    assert message.immediate_response.body == b'{"message":"too long"}'
    others = [leg for leg in (*prefills, *decodes) if leg is not prefills[which]]
    assert all(leg.cancelled for leg in others)
    assert len(rig.egress.aborts) == 3
    client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize(("status", "code"), [(429, "decode_rejected"), (500, "decode_failed"), (503, "decode_failed")])
def test_a_decodes_error_is_passed_on(rig, status, code):
    client = rig.post(PATH, CHAT)
    _, decodes = legs(rig)
    decodes[0].answer(status, b"busy", [(b"retry-after", b"9")])
    rig.clock.advance(HOLD_SECONDS)
    (message,) = client.call.take()
    assert (message.immediate_response.status.code, message.immediate_response.body) == (status, b"busy")
    assert (mutated(message)["x-pd-error-code"], mutated(message)["retry-after"]) == (code, "9")
    client.close()
    rig.assert_nothing_is_left()


def test_where_both_legs_fail_at_once_it_is_the_prefills_failure(rig):
    client = rig.post(PATH, CHAT)
    prefill_legs, decodes = legs(rig)
    decodes[0].answer(500, b"no cache")
    assert client.call.take() == []
    prefill_legs[0].answer(500, b"no cache")
    (message,) = client.call.take()
    assert message.immediate_response.status.code == 502
    assert mutated(message)["x-pd-error-code"] == "prefill_failed"
    client.close()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


def test_a_stream_that_breaks_is_told_as_an_event_before_the_end(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    _, decodes = legs(rig)
    decodes[0].receiver.head(200, [])
    decodes[0].receiver.data(delta("a"))
    relayed(client)
    decodes[1].receiver.lost(Lost.RESET, "RST_STREAM")
    _, body, ended = relayed(client)
    assert ended
    first, *_ = body.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["error"]["code"] == "decode_connection_lost"
    client.close()
    rig.assert_nothing_is_left()
    assert rig.records[0].code == "decode_connection_lost"


def test_an_answer_that_is_not_what_the_api_promises_is_an_error_not_a_guess(rig):
    client = rig.post(PATH, CHAT)
    _, decodes = legs(rig)
    decodes[0].answer(body=b"<html>")
    decodes[1].answer(body=chat_answer("b"))
    (message,) = client.call.take()
    assert message.immediate_response.status.code == 502
    assert mutated(message)["x-pd-error-code"] == "decode_bad_reply"
    client.close()
    rig.assert_nothing_is_left()


def test_a_client_that_does_not_read_makes_the_workers_wait(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    _, decodes = legs(rig)
    decodes[0].receiver.head(200, [])
    client.call.queued = 2 << 20
    decodes[0].receiver.data(delta("a"))
    assert [leg.paused for leg in decodes] == [True, True]
    client.session.drained()
    assert [leg.paused for leg in decodes] == [False, False]
    client.close()
    rig.assert_nothing_is_left()


def test_prompt_logprobs_are_taken_from_the_prefill(rig):
    body = {"text": "a b", "return_logprob": True, "logprob_start_len": 0}
    client = rig.post("/generate", body)
    prefill, decode = rig.egress.legs
    decode.answer(body=json.dumps(_generated([])).encode())
    assert client.call.take() == []
    prefill.answer(body=json.dumps(_generated([[None, 1, None], [-0.5, 2, None]])).encode())
    _, answer, ended = relayed(client)
    assert ended
    assert json.loads(answer)["meta_info"]["input_token_logprobs"] == [[None, 1, None], [-0.5, 2, None]]
    client.close()
    rig.assert_nothing_is_left()


def _generated(input_logprobs):
    meta = {"input_token_logprobs": input_logprobs, "output_token_logprobs": [[-0.1, 3, None]]}
    return {"text": "c", "output_ids": [3], "meta_info": {"id": "r", "finish_reason": None, **meta}}


def test_a_request_that_takes_too_long_is_ended():
    rig = Rig(request_timeout=5)
    client = rig.post(PATH, CHAT)
    rig.clock.time += 5
    rig.gateway.expire()
    (message,) = client.call.take()
    assert message.immediate_response.status.code == 504
    assert rig.egress.open(PATH) == []
    assert rig.egress.aborts_at("127.0.0.1:12") != []  # Envoy may have failed over to it
    client.close()
    rig.assert_nothing_is_left()


def test_a_clients_own_name_is_numbered_per_sample_and_can_be_ended(rig):
    client = rig.post(PATH, CHAT | {"rid": "theirs"})
    prefills, decodes = legs(rig)
    assert [leg.json["rid"] for leg in decodes] == [leg.json["rid"] for leg in prefills] == ["theirs_0", "theirs_1"]
    client.close()
    assert set(rig.egress.aborts) == {(role, f"theirs_{i}") for role in ("prefill", "decode") for i in (0, 1)}
    rig.assert_nothing_is_left()


def test_every_prompt_of_a_batch_is_ended(rig):
    client = rig.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    rid = rig.egress.legs[0].json["rid"]
    client.close()
    assert [name for cluster, name in rig.egress.aborts if cluster == "decode"] == [f"{rid}_{i}" for i in range(3)]
    rig.assert_nothing_is_left()


def test_a_merge_that_breaks_is_an_internal_error(rig, monkeypatch, caplog):
    client = rig.post(PATH, CHAT)
    _, decodes = legs(rig)
    monkeypatch.setattr("extproc.merge.answer.JoinedBody.decode_done", lambda *_: 1 / 0)
    decodes[0].answer(body=chat_answer("a"))
    (message,) = client.call.take()
    assert mutated(message)["x-pd-error-code"] == "internal_error"
    client.close()
    rig.assert_nothing_is_left()
    assert "cannot be merged" in caplog.text


def test_workers_that_refused_are_reported(rig):
    client = rig.post(PATH, CHAT)
    _, decodes = legs(rig)
    decodes[0].answer(503, b"", [(b"x-pd-local-reply", b"UF")])
    assert rig.unreachable == list(rig.workers[2:])
    (message,) = client.call.take()
    assert mutated(message)["x-pd-error-code"] == "decode_unreachable"
    client.close()
    rig.assert_nothing_is_left()


def test_a_last_leg_may_end_by_itself_after_the_answer(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    prefills, decodes = legs(rig)
    for leg in decodes:
        leg.receiver.head(200, [])
        leg.receiver.data(b"data: [DONE]\n\n")
    assert relayed(client)[2]
    client.close()
    for leg in decodes:
        leg.receiver.done()
    prefills[0].answer()
    rig.clock.advance(0.05)
    assert [leg.cancelled for leg in (*decodes, *prefills)] == [False, False, False, True]
    assert len(rig.egress.aborts) == 1
    rig.assert_nothing_is_left()


def test_a_failover_of_one_sample_moves_its_load(rig):
    client = rig.post(PATH, CHAT)
    _, decodes = legs(rig)
    decodes[0].receiver.head(200, [(b"x-pd-upstream", b"127.0.0.1:12")])
    assert [w.load for w in rig.workers[2:]] == [1, 1]
    assert [w.tokens for w in rig.workers[2:]] == [len(json.dumps(CHAT)) // 4] * 2
    client.close()
    rig.assert_nothing_is_left()


def test_each_sample_has_the_prompts_tokens(rig):
    size = len(json.dumps(CHAT)) // 4
    client = rig.post(PATH, CHAT)
    assert [w.tokens for w in rig.workers] == [2 * size, 0, 2 * size, 0]
    prefills, _ = legs(rig)
    prefills[1].answer()
    assert [w.tokens for w in rig.workers] == [size, 0, 2 * size, 0]
    client.close()
    rig.assert_nothing_is_left()


def test_the_prompts_of_a_list_share_its_tokens():
    rig = Rig(*nixl(), retry=RetryPolicy(attempts=1))
    body = {"model": "tiny", "prompt": ["a" * 400, "b" * 400]}
    client = rig.post("/v1/completions", body)
    each = len(json.dumps(body)) // 4 // 2
    assert [w.tokens for w in rig.workers] == [2 * each, 0, 0, 0]
    client.close()
    rig.assert_nothing_is_left()


def test_the_wire_form_of_field_11():
    assert wire.relayed_body(b"x", end=True)[0][0] == 0x5A
