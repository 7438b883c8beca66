"""Requests that wait to be let in, or for workers, through whole exchanges; and every way in which one gives back."""

from __future__ import annotations

import pytest
from fakes import Rig, mutated, nixl, rejection, released, worker
from test_in_turn import ANSWER

from extproc.admission.gate import GateSettings
from extproc.admission.legs import LegSettings
from extproc.admission.priority import CLASSES, Priority, Tenants
from extproc.errors import GatewayError
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.trial import Trial
from extproc.transport.interface import Lost
from extproc.workers.worker import Role, Status

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
ONE = GateSettings(limit=1)


def answered(client):
    """The decode answers, and the answer ends."""
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    client.close()


def prefills(rig):
    return rig.egress.out_at("prefill")


def settle(rig):
    """What is put off to the next tick happens."""
    rig.clock.advance(0)


# -- the gate -----------------------------------------------------------------------------------------------------


def waits(client):
    return client.call.take() == [] and client.call.aborted is None


def test_a_second_request_waits_until_the_first_is_over():
    rig = Rig(gate=ONE)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    assert waits(second)
    assert len(prefills(rig)) == 1
    rig.clock.advance(2)
    prefills(rig)[0].answer()
    answered(first)
    assert len(prefills(rig)) == 1
    released(second)
    prefills(rig)[0].answer()
    answered(second)
    rig.assert_nothing_is_left()
    assert [record.queued for record in rig.records] == [0, 2]


def finish_answered(rig, client):
    prefills(rig)[0].answer()
    answered(client)


def finish_left(rig, client):  # noqa: ARG001 - one of several
    client.close()


def finish_prefill_failed(rig, client):
    prefills(rig)[0].answer(400)
    client.close()


def finish_prefill_lost(rig, client):
    prefills(rig)[0].receiver.lost(Lost.RESET, "x")
    client.close()


def finish_decode_failed(rig, client):
    prefills(rig)[0].answer()
    client.decode_head(500, [("x-pd-upstream", "127.0.0.1:11")])
    client.close()


def finish_timeout(rig, client):
    rig.gateway._end(client.session, GatewayError("request_timeout", "x"))
    client.close()


def finish_abandoned(rig, client):
    rig.gateway._end(client.session, GatewayError("request_timeout", "x"))
    rig.clock.advance(10)
    rig.gateway.expire()
    client.close()


FINISHES = [
    finish_answered,
    finish_left,
    finish_prefill_failed,
    finish_prefill_lost,
    finish_decode_failed,
    finish_timeout,
    finish_abandoned,
]


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("released_retries", [True, False])
def test_however_a_request_ends_the_next_one_gets_its_slot(finish, released_retries):
    rig = Rig(gate=ONE, retry=RetryPolicy(attempts=1), retry_released=released_retries)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    finish(rig, first)
    released(second)
    second.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "other", "messages": []}'])
def test_a_request_that_is_refused_gives_its_slot_back(body):
    rig = Rig(gate=ONE)
    first = rig.post(CHAT, body)
    second = rig.post(CHAT, BODY)
    assert waits(second)  # Envoy has not ended the first
    first.close()
    released(second)
    second.close()
    rig.assert_nothing_is_left()


def test_what_never_comes_to_the_gate_takes_no_slot():
    rig = Rig(gate=ONE, api_key="k")
    authorized = [("authorization", "Bearer k")]
    for client in (rig.post(CHAT, BODY), rig.post("/nowhere", BODY, headers=authorized)):
        client.call.take()
    rig.post("/v1/responses/resp_1", b"", headers=authorized).call.take()  # may be a cancellation, which makes room
    assert rig.gateway.gate.in_flight == 0
    released(rig.post(CHAT, BODY, headers=authorized))


def test_health_is_looked_at_however_busy_the_gateway_is():
    rig = Rig(gate=ONE)
    rig.post(CHAT, BODY)
    Trial(rig.gateway, "tiny", lambda _: None)
    assert len(rig.egress.out_at("decode")) == 1


def test_a_client_that_leaves_while_it_waits_leaves_nothing():
    rig = Rig(gate=ONE)
    first, second, third = [rig.post(CHAT, BODY) for _ in range(3)]
    second.close()
    assert rig.gateway.gate.queued == 1
    first.close()
    released(third)
    third.close()
    rig.assert_nothing_is_left()
    assert [record.status for record in rig.records] == [0, 0, 0]


def test_one_that_waits_is_told_when_its_time_is_over():
    rig = Rig(gate=GateSettings(limit=1, queue_timeout=5.0))
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    rig.clock.advance(5)
    status, headers, _ = rejection(second)
    assert (status, headers["x-pd-error-code"], headers["retry-after"]) == (503, "admission_queue_timeout", "2")
    second.close()
    first.close()
    rig.assert_nothing_is_left()
    assert rig.records[0].queued == 5


def test_one_too_many_is_refused_before_its_body_has_come():
    rig = Rig(gate=GateSettings(limit=1, queue_size=1))
    rig.post(CHAT, BODY)
    rig.post(CHAT, BODY)
    client = rig.open()
    client.head(CHAT)
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"], headers["retry-after"]) == (429, "admission_queue_full", "2")
    assert b"rate_limit_error" in body
    client.body(b"{}", end=True)
    assert client.call.take() == []


def test_the_body_of_one_that_waits_is_left_with_envoy():
    rig = Rig(gate=ONE)
    first = rig.post(CHAT, BODY)
    second = rig.open()
    second.head(CHAT)
    second.body(b'{"model": "tiny", "messages": [')
    assert not second.call.paused  # a small one is taken in: Envoy then has nothing that its word would wait behind
    second.body(b" " * (1 << 20))
    assert second.call.paused
    first.close()
    assert not second.call.paused
    second.body(b"]}", end=True)
    released(second)
    second.close()
    rig.assert_nothing_is_left()


def test_one_that_is_told_no_is_not_kept_from_ending():
    rig = Rig(gate=ONE)
    rig.post(CHAT, BODY)
    second = rig.open()
    second.head(CHAT)
    second.body(b" " * 2_000_000)
    assert second.call.paused
    rig.gateway.drain()
    assert not second.call.paused
    assert rejection(second)[1]["x-pd-error-code"] == "draining"


def test_a_gateway_that_stops_turns_away_those_that_wait():
    rig = Rig(gate=ONE)
    first, *others = [rig.post(CHAT, BODY) for _ in range(4)]
    rig.gateway.drain()
    for client in others:
        status, headers, _ = rejection(client)
        assert (status, headers["x-pd-error-code"], headers["retry-after"]) == (503, "draining", "1")
        client.close()
    released(first)
    first.close()
    rig.assert_nothing_is_left()


def test_a_class_is_asked_for_in_a_header_and_goes_no_further():
    tenants = Tenants({"ops": Priority.SYSTEM})
    rig = Rig(gate=GateSettings(limit=1, classes=CLASSES), tenants=tenants)
    first = rig.post(CHAT, BODY)
    bulk = rig.post(CHAT, BODY, headers=[("x-smg-priority", "bulk")])
    usual = rig.post(CHAT, BODY)
    urgent = rig.post(CHAT, BODY, headers=[("x-smg-priority", "system"), ("x-smg-tenant-id", "ops")])
    first.close()
    for client in (urgent, usual, bulk):
        released(client)
        client.close()
    rig.assert_nothing_is_left()


# -- legs of prefill workers --------------------------------------------------------------------------------------


def limited(*workers, limit=1, decode=None, **config):
    rig = Rig(*workers, **config)
    for each in rig.workers:
        each.limit = limit if each.role is Role.PREFILL else decode
    return rig


PAIR = lambda: (worker(Role.PREFILL, 1, bootstrap_port=8998), worker(Role.DECODE, 11))  # noqa: E731


def test_a_worker_at_its_limit_is_no_candidate():
    rig = limited()
    clients = [rig.post(CHAT, BODY) for _ in range(2)]
    assert {leg.destination for leg in prefills(rig)} == {"127.0.0.1:1", "127.0.0.1:2"}
    third = rig.post(CHAT, BODY)
    assert waits(third)
    one = next(leg for leg in prefills(rig) if leg.destination == "127.0.0.1:2")
    one.answer()  # its slot is that of the leg, not of the request
    settle(rig)
    assert [leg.destination for leg in prefills(rig)] == ["127.0.0.1:1", "127.0.0.1:2"]
    released(third)
    for client in (*clients, third):
        client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("engines", ["sglang", "nixl"])
def test_however_a_prefill_leg_ends_the_next_one_gets_its_slot(finish, engines):
    if engines == "nixl" and finish is finish_decode_failed:
        pytest.skip("its prefill leg has ended before")
    workers = PAIR() if engines == "sglang" else nixl((1,), (11,))
    rig = limited(*workers, retry=RetryPolicy(attempts=1))
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    assert len(prefills(rig)) == 1
    if engines == "nixl" and finish is finish_answered:
        prefills(rig)[0].answer(body=ANSWER)
    else:
        finish(rig, first)
    settle(rig)
    assert len(prefills(rig)) == 1
    assert rig.gateway.legs.queued == {Role.PREFILL: 0, Role.DECODE: 0}
    second.close()
    first.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


def test_who_waits_for_a_prefill_may_leave_and_be_late_and_be_too_many():
    rig = limited(*PAIR(), legs=LegSettings(prefill_limit=1, prefill_queue_size=2, prefill_queue_timeout=7.0))
    first, gone, late = [rig.post(CHAT, BODY) for _ in range(3)]
    over = rig.post(CHAT, BODY)
    status, headers, _ = rejection(over)
    assert (status, headers["x-pd-error-code"], headers["retry-after"]) == (429, "pd_prefill_queue_full", "2")
    gone.close()
    rig.clock.advance(7)
    status, headers, _ = rejection(late)
    assert (status, headers["x-pd-error-code"]) == (503, "pd_prefill_queue_timeout")
    for client in (over, late, first):
        client.close()
    rig.assert_nothing_is_left()
    assert [record.queued for record in rig.records] == [0, 0, 7, 0]


def test_those_that_wait_are_served_in_order():
    rig = limited(*PAIR())
    first, *others = [rig.post(CHAT, BODY, headers=[("x-request-id", f"r{n}")]) for n in range(5)]
    order = []
    for _ in others:
        prefills(rig)[0].answer()
        settle(rig)
        order.append(dict(prefills(rig)[0].headers)[b"x-request-id"])
    assert order == [b"r1", b"r2", b"r3", b"r4"]
    for client in (first, *others):
        client.close()
    rig.assert_nothing_is_left()


def test_classes_hold_for_workers_as_well():
    rig = limited(*PAIR(), gate=GateSettings(classes=CLASSES))
    first = rig.post(CHAT, BODY)
    bulk = rig.post(CHAT, BODY, headers=[("x-smg-priority", "bulk")])
    urgent = rig.post(CHAT, BODY, headers=[("x-smg-priority", "interactive")])
    prefills(rig)[0].answer()
    settle(rig)
    released(urgent)
    assert waits(bulk)
    for client in (first, bulk, urgent):
        client.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_no_class_is_told_no_while_more_urgent_ones_keep_coming(role):
    """A worker that serves one every 5 s, and a more urgent one always there: a bulk one would wait for ever."""
    limits = {"limit": 1} if role is Role.PREFILL else {"limit": None, "decode": 1}
    rig = limited(*PAIR(), gate=GateSettings(classes=CLASSES), **limits)
    urgent = [("x-smg-priority", "interactive")]
    inside = rig.post(CHAT, BODY, headers=urgent)
    bulk = rig.post(CHAT, BODY, headers=[("x-smg-priority", "bulk")])
    for _ in range(9):
        waiting = rig.post(CHAT, BODY, headers=urgent)
        rig.clock.advance(5)
        inside.close()
        settle(rig)
        inside = waiting if waiting.call.take() else bulk
        if inside is bulk:
            break
    assert rig.clock.now() - 100.0 <= (30 if role is Role.PREFILL else 15)
    assert bulk.call.take()
    for client in (bulk, waiting):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("early", [0.0, 0.0013])
def test_who_starves_is_served_when_it_does_and_not_with_the_next_leg_that_ends(early):
    """What is free meanwhile gathers for a batch of a more urgent class. An event loop's timers may come early."""
    rig = limited(limit=2, gate=GateSettings(classes=CLASSES))
    after = rig.clock.after
    rig.clock.after = lambda seconds, callback: after(max(0.0, seconds - early), callback)
    first = [rig.post(CHAT, BODY) for _ in range(4)]
    bulk = rig.post(CHAT, BODY, headers=[("x-smg-priority", "bulk")])
    batch = rig.post(CHAT, BODY | {"n": 2})
    for leg in (prefills(rig)[0], prefills(rig)[1]):  # one of each worker
        leg.answer()
    settle(rig)
    assert waits(bulk)
    rig.clock.advance(30 - early)  # half of what it may wait
    released(bulk)
    assert rig.gateway.legs.queued[Role.PREFILL] == 1
    for client in (*first, bulk, batch):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_a_new_worker_serves_those_that_wait():
    rig = limited(*PAIR())
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    rig.fleet.workers.append(worker(Role.PREFILL, 2, bootstrap_port=8999))
    rig.gateway.legs.look_soon()  # as the registry's every change has it do
    settle(rig)
    released(second)
    assert [leg.destination for leg in prefills(rig)] == ["127.0.0.1:1", "127.0.0.1:2"]
    first.close()
    second.close()


def test_when_the_last_one_dies_those_that_wait_hear_of_it():
    rig = limited(*PAIR())
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    rig.workers[0].status = Status.NOT_READY
    rig.gateway.legs.look_soon()
    settle(rig)
    assert rejection(second)[1]["x-pd-error-code"] == "no_available_workers"
    first.close()
    second.close()
    rig.assert_nothing_is_left()


def test_another_attempt_waits_for_room_too():
    rig = limited(*nixl((1, 2), (11,)), retry=RetryPolicy(jitter=0))
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    one, two = prefills(rig)
    one.answer(500)
    rig.clock.advance(1)
    assert len(prefills(rig)) == 1  # the other worker has its leg
    assert rig.gateway.legs.queued[Role.PREFILL] == 1
    two.answer(body=ANSWER)
    settle(rig)
    (again,) = prefills(rig)
    assert again.destination == two.destination
    again.answer(body=ANSWER)
    released(first)
    for client in (first, second):
        client.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()
    assert rig.records[0].queued > 0.9


@pytest.mark.parametrize("how", ["timeout", "left", "drain", "expired"])
def test_another_attempt_that_waits_in_vain_ends_with_the_failure_before(how):
    rig = limited(*nixl((1, 2), (11,)), retry=RetryPolicy(jitter=0))
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    prefills(rig)[0].answer(500)
    rig.clock.advance(1)
    match how:
        case "timeout":
            rig.clock.advance(60)
        case "drain":
            rig.gateway.drain()
        case "expired":
            rig.gateway._end(first.session, GatewayError("request_timeout", "x"))
    if how != "left":
        code = "request_timeout" if how == "expired" else "prefill_failed"
        assert rejection(first)[1]["x-pd-error-code"] == code
    first.close()
    second.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


# -- legs of decode workers ---------------------------------------------------------------------------------------


def test_a_decode_worker_is_given_no_more_than_its_engine_runs():
    rig = limited(limit=None, decode=1)
    clients = [rig.post(CHAT, BODY) for _ in range(3)]
    assert {released(client)[2][0] for client in clients[:2]} == {"127.0.0.1:11", "127.0.0.1:12"}
    assert waits(clients[2])
    prefills(rig)[0].answer()
    settle(rig)
    assert waits(clients[2])  # the decode's leg is what counts
    answered(clients[0])
    settle(rig)
    assert released(clients[2])[2][0] == "127.0.0.1:11"
    for client in clients[1:]:
        client.close()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


def test_room_is_kept_for_a_decode_leg_that_is_sent_later():
    rig = limited(*nixl((1, 2), (11,)), limit=None, decode=1)
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    assert len(prefills(rig)) == 1
    assert rig.workers[2].promised == 1
    prefills(rig)[0].answer(body=ANSWER)
    assert (rig.workers[2].promised, rig.workers[2].load) == (0, 1)
    settle(rig)
    assert prefills(rig) == []
    answered(first)
    settle(rig)
    assert len(prefills(rig)) == 1
    second.close()
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("finish", [finish_left, finish_prefill_failed, finish_prefill_lost, finish_timeout])
def test_room_that_was_kept_is_given_back(finish):
    rig = limited(*nixl((1, 2), (11,)), limit=None, decode=1, retry=RetryPolicy(attempts=1))
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    finish(rig, first)
    settle(rig)
    assert len(prefills(rig)) == 1
    second.close()
    rig.clock.advance(1000)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_without_room_on_a_decode_worker_a_request_is_shed(seconds):
    rig = limited(limit=None, decode=1, legs=LegSettings(decode_wait=seconds))
    clients = [rig.post(CHAT, BODY) for _ in range(3)]
    if seconds:
        assert waits(clients[2])
        rig.clock.advance(seconds)
    status, headers, _ = rejection(clients[2])
    assert (status, headers["x-pd-error-code"]) == (503, "worker_overload_protection_shed")
    assert headers["retry-after"] == "2"


def test_a_batch_takes_a_slot_for_each_of_its_legs():
    rig = limited(*PAIR(), limit=4)
    batch = rig.post(CHAT, BODY | {"n": 3})
    single, second_batch, behind = rig.post(CHAT, BODY), rig.post(CHAT, BODY | {"n": 2}), rig.post(CHAT, BODY)
    assert len(prefills(rig)) == 4
    assert rig.gateway.legs.queued[Role.PREFILL] == 2
    prefills(rig)[3].answer()
    settle(rig)
    assert len(prefills(rig)) == 3  # what becomes free gathers for the batch; those behind it wait
    batch.close()
    settle(rig)
    assert len(prefills(rig)) == 3
    assert rig.gateway.legs.queued[Role.PREFILL] == 0
    for client in (single, second_batch, behind):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_a_batch_larger_than_any_limit_has_a_worker_for_itself():
    rig = limited(*PAIR(), limit=2)
    single, batch, behind = rig.post(CHAT, BODY), rig.post(CHAT, BODY | {"n": 5}), rig.post(CHAT, BODY)
    assert len(prefills(rig)) == 1
    prefills(rig)[0].answer()
    settle(rig)
    assert len(prefills(rig)) == 5
    for leg in prefills(rig)[:4]:
        leg.answer()
    settle(rig)
    assert len(prefills(rig)) == 2  # one of the batch, and who came behind
    for client in (single, batch, behind):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_nobody_is_given_what_a_batch_of_another_model_waits_for():
    shared = worker(Role.PREFILL, 1, bootstrap_port=8998, model_ids=("a", "b"))
    rig = limited(shared, worker(Role.DECODE, 11, model_ids=("a", "b")), limit=2)
    first = rig.post(CHAT, BODY | {"model": "a"})
    batch = rig.post(CHAT, BODY | {"model": "a", "n": 2})
    other = rig.post(CHAT, BODY | {"model": "b"})
    assert len(prefills(rig)) == 1
    prefills(rig)[0].answer()
    settle(rig)
    assert len(prefills(rig)) == 2
    assert waits(other)
    batch.close()
    settle(rig)
    released(other)
    first.close()
    other.close()


def test_a_batch_is_not_waited_for_by_those_that_came_before_it():
    both = ("a", "b")
    workers = [worker(Role.PREFILL, 1, bootstrap_port=8998, model_ids=both), worker(Role.DECODE, 11, model_ids=both)]
    rig = limited(*workers, limit=2)
    clients = [rig.post(CHAT, BODY | fields) for fields in ({"model": "a"}, {"model": "a"})]  # it is full
    waiting = [rig.post(CHAT, BODY | {"model": model, "n": n}) for model, n in (("a", 1), ("b", 1), ("a", 2))]
    for leg in prefills(rig):
        leg.answer()
    settle(rig)
    assert [len(client.call.take()) for client in waiting] == [2, 2, 0]
    for client in (*clients, *waiting):
        client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_a_request_that_a_prefill_answers_alone_takes_a_slot():
    rig = limited(*PAIR())
    first, second = [rig.post("/tokenize", {"model": "tiny", "prompt": "x"}) for _ in range(2)]
    released(first)
    assert waits(second)
    first.close()
    settle(rig)
    released(second)
    second.close()
    rig.assert_nothing_is_left()


def test_what_was_waited_for_is_told():
    rig = limited(*PAIR())
    first, second = rig.post(CHAT, BODY), rig.post(CHAT, BODY)
    rig.clock.advance(3)
    prefills(rig)[0].answer()
    settle(rig)
    second.call.take()
    prefills(rig)[0].answer()
    second.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    (head,) = second.call.take()
    assert mutated(head)["server-timing"].startswith("route;dur=3000")
    first.close()
