"""A stream whose head is out when the prefill that was to send its cache is found gone."""

import pytest
from fakes import Rig, mooncake, nixl, rejection, released
from google.protobuf.json_format import MessageToDict

from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import FIRST_TOKEN_SECONDS, PUSH_SECONDS, SECOND_CALL_SECONDS

CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]})
RESPONSES = ("/v1/responses", {"model": "tiny", "input": "Say hi"})
STREAM = {"stream": True}
LISTED = ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], **STREAM})
STEADY = RetryPolicy(jitter=0)
SERVED = [("x-pd-upstream", "127.0.0.1:11")]
EVENT = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
CREATED, DELTA = b"event: response.created\ndata: {}\n\n", b"event: response.output_text.delta\ndata: {}\n\n"


def end(rig, *calls):
    for call in calls:
        call.close()
    for leg in list(rig.egress.out):
        leg.answer()  # those that are let finish
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()


def watched_name(client):
    """The name under which Envoy is asked to report; empty if it is not."""
    (message,) = client.call.take()
    assert message.WhichOneof("response") == "response_headers"
    return MessageToDict(message.dynamic_metadata).get("pd_extproc", {}).get("watched", "")


def streamed(rig, question=CHAT):
    """A stream whose prefill is done and whose head is out; Envoy's name for it, and who prefilled."""
    path, body = question
    client = rig.post(path, body | STREAM)
    released(client)
    client.decode_head(headers=SERVED)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    return client, watched_name(client), next(w for w in rig.workers if w.endpoint == leg.destination)


@pytest.fixture
def rig():
    return Rig(*mooncake(), retry=STEADY)


def test_a_stream_of_which_nothing_comes_is_cut(rig):
    client, name, prefill = streamed(rig)
    rig.report(name, 0)  # before anybody knows
    rig.gateway.prefill_lost(prefill)
    rig.report(name, 0)  # the decode may be at its first token
    rig.clock.advance(FIRST_TOKEN_SECONDS / 2)
    rig.gateway.prefill_lost(prefill)  # still so
    rig.clock.advance(FIRST_TOKEN_SECONDS / 2)
    assert client.call.take() == []
    rig.report(name, 0)
    assert rejection(client)[0] == 502
    rig.report(name, 0)
    assert client.call.take() == []
    end(rig, client)
    (record,) = rig.records
    assert (record.status, record.code) == (200, "prefill_connection_lost")
    assert str(prefill.url) in record.message


@pytest.mark.parametrize("sent", [(1,), (0, 1), (0, 1, 1)])
def test_a_stream_that_flows_is_left_alone(rig, sent):
    client, name, prefill = streamed(rig)
    rig.gateway.prefill_lost(prefill)
    for each in sent:
        rig.clock.advance(FIRST_TOKEN_SECONDS / 2)
        rig.report(name, each)
    rig.clock.advance(10 * FIRST_TOKEN_SECONDS)
    rig.report(name, sent[-1])  # its client reads slowly
    assert client.call.take() == []
    end(rig, client)


def test_a_response_flows_when_more_comes_than_its_first_events(rig):
    client, name, prefill = streamed(rig, RESPONSES)
    rig.gateway.prefill_lost(prefill)
    for sent in (900, 900, 901):
        rig.report(name, sent)
        rig.clock.advance(FIRST_TOKEN_SECONDS / 2)
    rig.report(name, 901)
    assert client.call.take() == []
    end(rig, client)


def test_a_response_of_which_only_its_first_events_come_is_cut(rig):
    client, name, prefill = streamed(rig, RESPONSES)
    rig.gateway.prefill_lost(prefill)
    rig.report(name, 900)
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    rig.report(name, 900)
    assert rejection(client)[0] == 502
    end(rig, client)


def test_nothing_is_doubted_without_a_reason(rig):
    client, name, prefill = streamed(rig)
    other = next(w for w in rig.workers if w.role is prefill.role and w is not prefill)
    rig.gateway.prefill_lost(other)
    rig.clock.advance(PUSH_SECONDS)
    rig.gateway.prefill_lost(prefill)  # which has long sent it
    rig.report(name, 0)
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    rig.report(name, 0)
    assert client.call.take() == []
    end(rig, client)


def test_reports_of_others_and_after_the_end_are_no_matter(rig):
    client, name, prefill = streamed(rig)
    rig.gateway.prefill_lost(prefill)
    rig.report("another", 0)
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    rig.report("another", 0)
    assert client.call.take() == []
    end(rig, client)
    rig.report(name, 0)
    rig.gateway.progress.received(b"")
    assert client.call.take() == []


@pytest.mark.parametrize("workers", [(), nixl()], ids=["sglang", "nixl"])
def test_only_what_a_prefill_pushes_is_watched(workers):
    rig = Rig(*workers, retry=STEADY)
    path, body = CHAT
    client = rig.post(path, body | STREAM)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    client.call.take()
    client.decode_head(headers=SERVED)
    assert watched_name(client) == ""
    end(rig, client)


@pytest.mark.parametrize(("status", "stream"), [(200, False), (400, True)])
def test_only_streams_are_watched(rig, status, stream):
    path, body = CHAT
    client = rig.post(path, body | {"stream": stream})
    released(client)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    client.decode_head(status, headers=SERVED)
    assert watched_name(client) == ""
    rig.clock.advance(10)  # in which what a refusal may leave is settled
    end(rig, client)


# -- answers that pass through the service ----------------------------------------------------------------------------


def half_listed(rig):
    """A streamed list of which one answer has begun; the other's decode leg, and who prefilled."""
    client = rig.post(*LISTED)
    legs = rig.egress.out_at("prefill")
    for leg in legs:
        leg.answer()
    prefill = next(w for w in rig.workers if w.endpoint == legs[0].destination)
    first, second = rig.egress.out_at("decode")
    for decode in (first, second):
        decode.receiver.head(200, [(b"content-type", b"text/event-stream")])
    first.receiver.data(EVENT)
    return client, second, prefill


def test_a_list_whose_answers_come_in_time_goes_on(rig):
    client, second, prefill = half_listed(rig)
    rig.gateway.prefill_lost(prefill)
    second.receiver.data(EVENT)
    client.call.take()
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    assert client.call.take() == []
    end(rig, client)


def test_a_list_of_which_one_answer_does_not_come_ends_with_an_error(rig):
    client, _, prefill = half_listed(rig)
    client.call.take()
    for _ in range(2):
        rig.gateway.prefill_lost(prefill)
        assert client.call.take() == []  # it may have what the other has, and be at its first token
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    last = b"".join(client.call.take())
    assert b"prefill_connection_lost" in last
    end(rig, client)


def late(rig, question, *pieces):
    """A stream's second attempt, which has said so much; whose decode leg it is, and who prefilled."""
    path, body = question
    client = rig.post(path, body | STREAM)
    released(client)
    client.decode_head(503, SERVED)
    second = client.late()
    rig.clock.advance(STEADY.initial)
    prefill_leg, (decode,) = rig.egress.out_at("prefill")[-1], rig.egress.out_at("decode")
    prefill_leg.answer()
    decode.receiver.head(200, [(b"content-type", b"text/event-stream")])
    for piece in pieces:
        decode.receiver.data(piece)
    second.call.take()
    return client, second, decode, next(w for w in rig.workers if w.endpoint == prefill_leg.destination)


@pytest.mark.parametrize(("question", "pieces"), [(CHAT, (EVENT,)), (RESPONSES, (CREATED, DELTA))])
def test_a_late_answer_that_flows_is_left_alone(rig, question, pieces):
    client, second, decode, prefill = late(rig, question, *pieces)
    rig.gateway.prefill_lost(prefill)
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    assert second.call.take() == []
    assert second.call.aborted is None
    decode.receiver.data(EVENT)
    decode.receiver.done()
    end(rig, client, second)


def test_a_late_response_of_which_only_its_first_events_come_is_ended(rig):
    client, second, _, prefill = late(rig, RESPONSES, CREATED)
    rig.gateway.prefill_lost(prefill)
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    assert second.call.take() or second.call.aborted
    end(rig, client, second)


def test_one_that_waited_for_a_worker_is_ended_too(rig):
    for each in rig.workers[:2]:
        each.limit = 1
    path, body = RESPONSES
    client, other = rig.post(path, body | STREAM), rig.post(*CHAT)
    released(client)
    client.decode_head(503, SERVED)
    second = client.late()
    rig.clock.advance(STEADY.initial)
    assert rig.gateway.legs.waiting  # the first leg is let finish, and the other one is out
    rig.egress.out_at("prefill")[1].answer()
    rig.clock.advance(0)
    (decode,) = rig.egress.out_at("decode")
    prefill_leg = rig.egress.out_at("prefill")[1]
    prefill_leg.answer()
    decode.receiver.head(200, [(b"content-type", b"text/event-stream")])
    decode.receiver.data(CREATED)
    second.call.take()
    rig.gateway.prefill_lost(next(w for w in rig.workers if w.endpoint == prefill_leg.destination))
    rig.clock.advance(FIRST_TOKEN_SECONDS)
    assert second.call.take() or second.call.aborted
    rig.clock.advance(SECOND_CALL_SECONDS)  # the other one's does not come
    end(rig, client, second, other)
