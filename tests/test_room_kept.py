"""Every leg that is sent has room, whatever path leads to it, and gives it back once."""

from __future__ import annotations

import json

import pytest
from fakes import Rig, mooncake, nixl, rejection, released, worker
from test_admission import BODY, CHAT, answered, prefills, settle, waits
from test_in_turn import ANSWER

from extproc.exchange.attempts import OnPrefillFailure, RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS
from extproc.workers.worker import Role, Status

STEADY = RetryPolicy(jitter=0)
WAIVING = RetryPolicy(jitter=0, on_prefill_failure=OnPrefillFailure.DECODE_ONLY)
RESPONSES = "/v1/responses"
AT_11 = [("x-pd-upstream", "127.0.0.1:11")]


def limited(*workers, prefill=None, decode=None, **config):
    rig = Rig(*workers, **config)
    for each in rig.workers:
        each.limit = prefill if each.role is Role.PREFILL else decode
    return rig


def over(rig, *clients):
    for client in clients:
        client.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


# -- who must serve it --------------------------------------------------------------------------------------------


def kept(rig):
    """A response that the decode worker at port 11 keeps."""
    client = rig.post(RESPONSES, {"model": "tiny", "input": "hi", "request_id": "theirs"})
    while leg := next(iter(prefills(rig)), None):
        leg.answer(body=ANSWER)
    released(client)
    client.decode_head(headers=AT_11)
    client.call.take()
    client.close()
    rig.clock.advance(1)


NEXT = {"model": "tiny", "input": "so?", "previous_response_id": "theirs"}


def test_what_only_one_worker_can_serve_waits_for_that_one_and_keeps_nobody_else_waiting():
    rig = limited(*nixl((1,), (11, 12)), decode=1)
    kept(rig)
    first, second = rig.post(RESPONSES, NEXT), rig.post(RESPONSES, NEXT)
    assert released(first)[2] == ["127.0.0.1:11"]
    assert waits(second)
    other = rig.post(CHAT, BODY)
    prefills(rig)[0].answer(body=ANSWER)
    assert released(other)[2][0] == "127.0.0.1:12"
    assert rig.gateway.legs.queued == {Role.PREFILL: 0, Role.DECODE: 1}
    answered(first)
    settle(rig)
    assert released(second)[2] == ["127.0.0.1:11"]
    assert (rig.workers[1].load, rig.workers[2].load) == (1, 1)
    over(rig, second, other)


def test_nor_does_it_wait_for_a_prefill_that_it_does_not_need():
    rig = limited(*nixl((1,), (11,)))
    kept(rig)
    rig.workers[0].limit = 1
    first, behind = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    goes_on = rig.post(RESPONSES, NEXT)
    assert released(goes_on)[2] == ["127.0.0.1:11"]
    rig.workers[0].status = Status.NOT_READY
    another = rig.post(RESPONSES, NEXT)
    assert released(another)[2] == ["127.0.0.1:11"]
    over(rig, first, behind, goes_on, another)


@pytest.mark.parametrize(
    ("more", "role"),
    [({"max_tokens": 1}, Role.PREFILL), ({"n": 2}, Role.DECODE)],
)
def test_who_needs_one_worker_waits_for_no_other(more, role):
    """What one token asks for a prefill answers alone, and several samples a decode: the other may be full."""
    full, free = ("prefill", "decode") if role is Role.DECODE else ("decode", "prefill")
    rig = limited(*nixl((1,), (11,)), **{full: 0, free: 1})
    first, second = rig.post(CHAT, BODY | more), rig.post(CHAT, BODY | more)
    assert json.loads(released(first)[0]) == BODY | more
    assert waits(second)
    pair = rig.post(CHAT, BODY)
    assert waits(pair)
    first.close()
    settle(rig)
    released(second)
    over(rig, second, pair)


# -- other attempts -----------------------------------------------------------------------------------------------


def test_a_lone_request_is_tried_again_where_there_is_room():
    rig = limited(*nixl((1,), (11, 12, 13)), decode=1, min_prompt_tokens=1000, retry=STEADY)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    assert [released(client)[2][0] for client in (first, second)] == ["127.0.0.1:11", "127.0.0.1:12"]
    first.decode_head(500, AT_11)
    late = first.late()
    rig.clock.advance(1)
    (leg,) = rig.egress.out
    assert leg.destination.split(",")[0] == "127.0.0.1:13"
    assert [each.load for each in rig.workers[1:]] == [0, 1, 1]
    late.close()
    over(rig, first, second)


def test_a_lone_request_waits_for_room_to_be_tried_again():
    rig = limited(*nixl((1,), (11, 12)), decode=1, min_prompt_tokens=1000, retry=STEADY)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    for client in (first, second):
        released(client)
    first.decode_head(500, AT_11)
    late = first.late()
    rig.clock.advance(1)
    assert rig.egress.out == []
    second.close()
    settle(rig)
    (leg,) = rig.egress.out
    assert leg.destination == "127.0.0.1:12"
    late.close()
    over(rig, first)


def test_another_attempt_may_have_the_room_of_the_first():
    """SGLang's decode of one slot: the leg of the failed attempt is ended there, though Envoy still has it."""
    workers = [worker(Role.PREFILL, 1 + n, bootstrap_port=90 + n) for n in range(2)] + [worker(Role.DECODE, 11)]
    rig = limited(*workers, decode=1, retry=STEADY)
    client = rig.post(CHAT, BODY)
    released(client)
    prefills(rig)[0].answer(500)
    client.decode_head(headers=AT_11)
    late = client.late()
    rig.clock.advance(max(STEADY.initial, HEAD_SECONDS))
    assert [leg.cluster for leg in rig.egress.out] == ["prefill", "decode"]
    assert rig.workers[2].load == 1
    late.close()
    over(rig, client)


@pytest.mark.parametrize("engines", [nixl, mooncake])
def test_a_decode_that_does_without_its_prefill_has_the_room_that_was_kept_for_it(engines):
    rig = limited(*engines((1,), (11,)), decode=1, retry=WAIVING)
    client, behind = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    client.call.take()
    prefills(rig)[0].answer(500)
    if engines is mooncake:  # whose first decode leg was out
        client.decode_head(500, AT_11)
        late = client.late()
        rig.clock.advance(1)
    settle(rig)
    assert (rig.workers[1].load, rig.workers[1].promised) == (1, 0)
    assert waits(behind)
    if engines is mooncake:
        late.close()
    over(rig, client, behind)


def test_one_whose_first_leg_envoy_still_has_waits_for_room_beside_it():
    rig = limited(*mooncake((1,), (11,)), decode=2, retry=WAIVING)
    stream = BODY | {"stream": True}
    client, other = rig.post(CHAT, stream), rig.post(CHAT, BODY)
    client.call.take()
    client.decode_head(headers=AT_11)
    prefills(rig)[0].answer(500)
    late = client.late()
    rig.clock.advance(1)
    assert rig.gateway.legs.queued[Role.DECODE] == 1
    assert rig.workers[1].load == 2
    other.close()
    settle(rig)
    assert rig.workers[1].load == 2
    assert [leg.cluster for leg in rig.egress.out][-1] == "decode"
    late.close()
    over(rig, client)


def test_the_one_whose_room_was_kept_may_be_another_in_the_end():
    """The prefill took long, and the decode worker went: the leg goes where there is room, the room kept is free."""
    rig = limited(*nixl((1,), (11, 12, 13)), decode=1)
    first = rig.post(CHAT, BODY)
    assert [each.promised for each in rig.workers[1:]] == [1, 0, 0]
    rig.workers[2].load = 1  # others came
    rig.workers[1].overloaded = "it has too much"
    prefills(rig)[0].answer(body=ANSWER)
    assert released(first)[2][0] == "127.0.0.1:13"
    assert [(each.load, each.promised) for each in rig.workers[1:]] == [(0, 0), (1, 0), (1, 0)]
    rig.workers[2].load = 0
    rig.workers[1].overloaded = ""
    over(rig, first)


def test_room_that_was_kept_and_not_needed_wakes_those_that_wait():
    rig = limited(*nixl((1, 2), (11, 12)), decode=1)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    waiting = rig.post(CHAT, BODY)
    assert waits(waiting)
    rig.workers[2].overloaded = "it has too much"
    prefills(rig)[0].answer(body=ANSWER)  # its decode leg goes to the other, which has none: it cannot wait any more
    assert rig.workers[3].load == 1
    rig.workers[2].overloaded = ""
    settle(rig)
    assert len(prefills(rig)) == 2
    over(rig, first, second, waiting)


def test_without_room_for_it_nothing_is_refused_that_a_pair_would_not_be():
    rig = limited(*nixl((1,), (11,)), decode=1, min_prompt_tokens=1000)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    rig.clock.advance(30)
    status, headers, _ = rejection(second)
    assert (status, headers["x-pd-error-code"]) == (503, "worker_overload_protection_shed")
    assert headers["retry-after"] == "2"
    over(rig, first, second)
