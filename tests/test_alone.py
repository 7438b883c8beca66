"""Requests that one worker answers alone, and what happens when it does not; prefill workers that are found gone."""

import pytest
from fakes import LateCall, Rig, mooncake, nixl, rejection, released

from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS, PUSH_SECONDS

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
STEADY = RetryPolicy(jitter=0)
LOST = [("x-pd-error-code", "prefill_connection_lost")]
SCORING = (PATH, CHAT | {"max_tokens": 1})
SAMPLES = (PATH, CHAT | {"n": 2})
COUNT = ("/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]})
TOKENIZE = ("/tokenize", {"model": "tiny", "prompt": "x"})


def end(rig, *calls):
    for call in calls:
        call.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("question", [SCORING, COUNT, TOKENIZE])
def test_another_prefill_worker_answers_when_the_first_dies(question):
    rig = Rig(*nixl(), retry=STEADY)
    path, body = question
    client = rig.post(path, body)
    sent, _, destinations = released(client)
    first, other = [w for w in rig.workers if w.role.value == "prefill"]
    if destinations[0] != first.endpoint:
        first, other = other, first
    client.decode_head(502, LOST)
    second = client.late(LOST)
    rig.clock.advance(STEADY.initial)
    (leg,) = rig.egress.out
    assert (leg.cluster, leg.path, leg.destination, leg.body) == ("prefill", path, other.endpoint, sent)
    assert [w.load for w in rig.workers if w.load] == [1]
    leg.answer(body=b'{"count": 3}', headers=[(b"x-pd-upstream", other.endpoint.encode())])
    head, *_ = second.call.take()
    named = {o.header.key: o.header.raw_value for o in head.response_headers.response.header_mutation.set_headers}
    assert (named[":status"], named["x-pd-prefill"], named["x-pd-attempts"]) == (b"200", other.name.encode(), b"2")
    assert "x-pd-handoff" not in named
    end(rig, client, second)


def test_another_decode_worker_answers_samples_when_the_first_dies():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(*SAMPLES)
    _, _, destinations = released(client)
    client.decode_head(503, [("x-pd-upstream", destinations[0])])
    second = client.late()
    rig.clock.advance(STEADY.initial)
    (leg,) = rig.egress.out
    assert (leg.cluster, leg.destination) == ("decode", destinations[1])
    leg.answer()
    end(rig, client, second)


def test_without_another_the_failure_is_the_answer():
    rig = Rig(*nixl(prefills=(1,)), retry=STEADY)
    client = rig.post(*COUNT)
    released(client)
    client.decode_head(502, LOST)
    (message,) = client.call.take()
    assert message.WhichOneof("response") == "response_headers"
    assert "x-pd-late" not in str(message)
    end(rig, client)


def test_a_refusal_is_the_answer():
    rig = Rig(*nixl(), retry=STEADY)
    client = rig.post(*COUNT)
    _, _, destinations = released(client)
    client.decode_head(400, [("x-pd-upstream", destinations[0])])
    (message,) = client.call.take()
    assert "x-pd-late" not in str(message)
    end(rig, client)


# -- a prefill that is gone before its cache was fetched --------------------------------------------------------------


def pushed(rig, body=CHAT):
    """A request whose prefill leg is done; who prefilled."""
    client = rig.post(PATH, body)
    released(client)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    return client, next(w for w in rig.workers if w.endpoint == leg.destination)


def test_a_decode_that_would_wait_for_ever_is_replaced():
    rig = Rig(*mooncake(), retry=STEADY)
    client, prefill = pushed(rig)
    rig.gateway.prefill_lost(prefill)
    rig.clock.advance(HEAD_SECONDS)
    (message,) = client.call.take()
    second = LateCall(rig, message)
    client.close()
    rig.clock.advance(STEADY.initial)
    (leg,) = rig.egress.out_at("prefill")
    assert leg.destination != prefill.endpoint
    leg.answer()
    (decode,) = rig.egress.out_at("decode")
    decode.answer(body=b"{}")
    end(rig, second)


def test_without_another_pair_the_client_hears_of_it():
    rig = Rig(*mooncake(prefills=(1,)), retry=STEADY)
    client, prefill = pushed(rig)
    rig.gateway.prefill_lost(prefill)
    assert rejection(client)[0] == 502
    end(rig, client)


def test_a_decode_that_has_long_had_its_cache_is_left_alone():
    rig = Rig(*mooncake(), retry=STEADY)
    client, prefill = pushed(rig)
    rig.clock.advance(PUSH_SECONDS)
    rig.gateway.prefill_lost(prefill)
    assert client.call.take() == []
    end(rig, client)


def test_an_answer_that_flows_is_left_alone():
    rig = Rig(*mooncake(), retry=STEADY)
    client, prefill = pushed(rig)
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    client.call.take()
    rig.gateway.prefill_lost(prefill)
    assert client.call.take() == []
    end(rig, client)


def test_other_workers_and_other_handoffs_are_left_alone():
    rig = Rig(*mooncake(), retry=STEADY)
    client, prefill = pushed(rig)
    rig.gateway.prefill_lost(next(w for w in rig.workers if w.role is prefill.role and w is not prefill))
    assert client.call.take() == []
    end(rig, client)

    rig = Rig(retry=STEADY)
    client, prefill = pushed(rig)
    rig.gateway.prefill_lost(prefill)  # SGLang's decode notices by itself
    assert client.call.take() == []
    end(rig, client)


def test_a_list_whose_prefill_is_gone_is_tried_elsewhere():
    rig = Rig(*mooncake(), retry=STEADY)
    client = rig.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"]})
    for leg in rig.egress.out_at("prefill"):
        leg.answer()
        prefill = next(w for w in rig.workers if w.endpoint == leg.destination)
    rig.gateway.prefill_lost(prefill)
    rig.clock.advance(STEADY.initial)
    assert {leg.destination for leg in rig.egress.out_at("prefill")} == {
        w.endpoint for w in rig.workers if w.role is prefill.role and w is not prefill
    }
    client.close()
    for leg in list(rig.egress.out):
        leg.answer()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


# -- bodies that would be too many ------------------------------------------------------------------------------------


def test_legs_that_would_be_too_large_together_are_refused():
    rig = Rig(*nixl(), max_payload_bytes=1_000_000)
    body = {"model": "tiny", "prompt": ["x"] * 500, "user": "u" * 2000}
    client = rig.post("/v1/completions", body)
    assert rejection(client)[0] == 413
    assert rig.egress.legs == []
    end(rig, client)
    client = rig.post("/v1/completions", body | {"prompt": ["x" * 1000] * 50})
    assert len(rig.egress.legs) == 50
    client.close()
    rig.assert_nothing_is_left()
