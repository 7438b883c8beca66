"""A client that leaves at any moment: both legs end, nothing is kept."""

import pytest
from fakes import Rig

from extproc.transport.interface import Lost

CHAT = {"model": "tiny", "messages": []}
PATH = "/v1/chat/completions"


@pytest.fixture
def rig():
    return Rig()


def test_during_the_upload(rig):
    client = rig.open()
    client.head(PATH)
    client.body(b'{"mod')
    client.close()
    rig.assert_nothing_is_left()
    assert rig.egress.legs == []
    assert rig.records[0].status == 0


def test_before_anything_was_sent(rig):
    client = rig.open()
    client.close()
    rig.assert_nothing_is_left()
    assert rig.records == []  # there is nothing to say of it


def test_while_both_legs_are_silent(rig):
    client = rig.post(PATH, CHAT)
    leg = rig.egress.legs[0]
    client.close()
    assert leg.cancelled
    assert rig.egress.aborts == [("prefill", leg.json["rid"]), ("decode", leg.json["rid"])]
    rig.assert_nothing_is_left()


def test_an_abort_that_is_answered_or_lost_has_no_time_limit_any_more(rig):
    client = rig.post(PATH, CHAT)
    client.close()
    answered, lost, *silent = rig.egress.open("/abort_request")
    answered.answer()
    lost.receiver.lost(Lost.RESET, "")
    assert len([limit for limit in rig.clock.scheduled if not limit.cancelled]) == len(silent)
    rig.clock.advance(10)
    assert [leg.cancelled for leg in silent] == [True] * len(silent)
    assert not answered.cancelled


def test_after_the_prefill_while_the_decode_is_silent(rig):
    client = rig.post(PATH, CHAT)
    leg = rig.egress.legs[0]
    leg.answer()
    client.close()
    assert rig.egress.aborts == [("decode", leg.json["rid"])]
    rig.assert_nothing_is_left()


def test_while_an_early_head_is_held(rig):
    client = rig.post("/generate", {"text": "a", "stream": True})
    client.decode_head()
    client.close()
    assert rig.egress.legs[0].cancelled
    rig.clock.advance(10)  # the timer of the held head must not wake the dead
    rig.assert_nothing_is_left()


def test_mid_stream(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    rig.egress.legs[0].answer()
    client.decode_head()
    client.close()
    assert rig.egress.aborts == []  # the engine notices a broken stream at once
    rig.assert_nothing_is_left()


def test_mid_stream_with_the_prefill_still_out(rig):
    client = rig.post(PATH, CHAT | {"stream": True})
    leg = rig.egress.legs[0]
    client.decode_head()
    client.close()
    assert not leg.cancelled  # perhaps the answer is simply over, and the prefill just about to say so
    assert rig.gateway.alive == 1
    rig.clock.advance(0.05)
    assert leg.cancelled
    rig.assert_nothing_is_left()


def test_a_short_answer_lets_its_prefill_end_in_peace(rig):
    client = rig.post(PATH, CHAT)
    leg = rig.egress.legs[0]
    client.decode_head()
    client.close()
    leg.answer()
    assert not leg.cancelled
    assert rig.egress.aborts == []
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


def test_after_a_rejection(rig):
    client = rig.post(PATH, b"{")
    client.close()
    rig.assert_nothing_is_left()
    assert rig.records[0].code == "invalid_json"


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
def test_relayed_at_any_moment(rig, answered):
    client = rig.post(PATH, CHAT | {"n": 2})
    legs = list(rig.egress.legs)
    assert len(legs) == 4
    for leg in legs[:answered]:
        leg.answer(body=b'{"id":"x","choices":[{"index":0}],"usage":{}}')
    client.close()
    assert all(leg.cancelled for leg in legs[answered:])
    assert len(rig.egress.aborts) == 4 - answered
    rig.assert_nothing_is_left()
