"""A request that ends for the sake of a more urgent one, wherever it is: what it is told, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import Rig, mooncake, nixl, rejection, released
from test_admission import BODY, CHAT, answered, prefills, waits
from test_in_turn import ANSWER

from extproc.admission.gate import GateSettings
from extproc.admission.legs import LegSettings
from extproc.admission.priority import CLASSES
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS
from extproc.workers.worker import Role

URGENT = [("x-smg-priority", "interactive")]
BULK = [("x-smg-priority", "bulk")]
RULES = {priority: replace(rules, floor=0, share=0.0) for priority, rules in CLASSES.items()}
SLOT = GateSettings(limit=1, classes=RULES)


def told(client):
    """It has been told that it was preempted."""
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"]) == (503, "scheduler_preempted")
    assert (headers["retry-after"], headers["x-smg-preempted"]) == ("1", "true")
    assert b"class interactive" in body


def prefilling(rig, client):  # noqa: ARG001 - one of several
    assert prefills(rig)


def decoding(rig, client):
    prefills(rig)[0].answer(body=ANSWER)
    released(client)


def between_attempts(rig, client):  # noqa: ARG001
    prefills(rig)[0].answer(500)
    assert not prefills(rig)


@pytest.mark.parametrize("engines", [lambda: (), nixl, mooncake])
@pytest.mark.parametrize("where", [prefilling, decoding, between_attempts])
def test_it_ends_with_all_its_legs_and_the_urgent_one_has_its_slot(engines, where):
    rig = Rig(*engines(), gate=SLOT, retry=RetryPolicy(jitter=0, initial=5.0))
    bulk = rig.post(CHAT, BODY, headers=BULK)
    where(rig, bulk)
    bulk.call.take()
    urgent = rig.post(CHAT, BODY, headers=URGENT)
    told(bulk)
    assert waits(urgent)
    bulk.close()
    prefills(rig)[-1].answer(body=ANSWER)
    released(urgent)
    answered(urgent)
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()
    assert (rig.records[0].status, rig.records[0].code) == (503, "scheduler_preempted")


def test_one_whose_body_has_not_come_yet_ends_too():
    rig = Rig(gate=SLOT)
    bulk = rig.open()
    bulk.head(CHAT, headers=BULK)
    urgent = rig.post(CHAT, BODY, headers=URGENT)
    told(bulk)
    bulk.body(b"{}", end=True)
    bulk.close()
    released(urgent)
    urgent.close()
    rig.assert_nothing_is_left()


def test_one_that_waits_for_a_worker_ends_too():
    rig = Rig(gate=GateSettings(limit=3, classes=RULES), legs=LegSettings(prefill_limit=1))
    for each in rig.workers:
        each.limit = 1 if each.role is Role.PREFILL else None
    inside = [rig.post(CHAT, BODY, headers=URGENT) for _ in range(2)]
    bulk = rig.post(CHAT, BODY, headers=BULK)
    assert waits(bulk)
    urgent = rig.post(CHAT, BODY, headers=URGENT)
    told(bulk)
    for client in (bulk, *inside, urgent):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("body", [BODY, BODY | {"n": 2}])
def test_one_that_has_its_answer_goes_on(body):
    rig = Rig(gate=SLOT)
    bulk = rig.post(CHAT, body, headers=BULK)
    if body is BODY:
        bulk.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    else:
        for leg in rig.egress.out:
            leg.answer(body=b'{"choices": [{"index": 0}], "usage": {}}')
    bulk.call.take()
    urgent = rig.post(CHAT, BODY, headers=URGENT)
    assert bulk.call.take() == []
    assert waits(urgent)
    bulk.close()
    urgent.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


def test_one_whose_second_attempt_is_under_way_ends_where_its_answer_would_come():
    rig = Rig(gate=SLOT, retry=RetryPolicy(jitter=0))
    bulk = rig.post(CHAT, BODY, headers=BULK)
    prefills(rig)[0].answer(500)
    released(bulk)
    bulk.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    second = bulk.late()
    rig.clock.advance(max(HEAD_SECONDS, 1.0))
    urgent = rig.post(CHAT, BODY, headers=URGENT)
    headers, body, ended = second.answer()
    assert (headers[":status"], headers["x-smg-preempted"], ended) == ("503", "true", True)
    assert b"scheduler_preempted" in body
    second.close()
    bulk.close()
    urgent.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()
