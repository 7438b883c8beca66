"""The gate: how many requests there are at once, who waits, and who comes next."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import FakeClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.admission.bucket import TokenBucket
from extproc.admission.gate import Gate, GateSettings
from extproc.admission.pace import LONGEST, UNKNOWN, Pace
from extproc.admission.priority import CLASSES, PRIORITY, TENANT, ClassRules, Priority, Tenants, kept
from extproc.errors import GatewayError

SYSTEM, INTERACTIVE, DEFAULT, BULK = Priority


class Entrant:
    """Who waits, and what became of it."""

    def __init__(self, gate, priority=DEFAULT, log=None):
        self.gate = gate
        self.priority = priority
        self.log = [] if log is None else log
        self.error = None
        self.answered = False  # its client has heard something
        self.seconds = None
        self.inside = gate.enter(priority, self)
        self.waiter = None
        if not self.inside:
            self.waiter = gate.wait(priority, self)

    def admitted(self):
        assert self.seconds is not None, "it is told first that it waits no more"
        assert not self.inside
        assert self.error is None
        self.inside = True
        self.log.append(self)

    def waited(self, seconds):
        assert self.seconds is None
        self.seconds = seconds

    def refused(self, error):
        assert not self.inside
        self.error = error

    @property
    def unanswered(self):
        return self.inside and not self.answered

    def preempted(self, error):
        assert self.unanswered
        self.error = error

    def leave(self):
        assert self.inside
        self.inside = False
        self.gate.leave(self.priority, self)

    @property
    def waits(self):
        return self.waiter is not None and self.seconds is None


def gate(limit, clock=None, **settings):
    return Gate(GateSettings(limit=limit, **settings), clock or FakeClock())


def test_those_beyond_the_limit_wait_and_come_in_as_they_came():
    one = gate(2)
    log = []
    first, second, *others = [Entrant(one, log=log) for _ in range(5)]
    assert [each.inside for each in (first, second, *others)] == [True, True, False, False, False]
    second.leave()
    first.leave()
    assert log == others[:2]
    assert (one.in_flight, one.queued) == (2, 1)


def test_without_a_limit_nobody_waits():
    one = gate(0)
    assert all(Entrant(one).inside for _ in range(10_000))


def test_who_gives_up_leaves_nothing_and_is_passed_over():
    clock = FakeClock()
    one = gate(1, clock)
    inside, gone, last = [Entrant(one) for _ in range(3)]
    gone.waiter.cancel()
    gone.waiter.cancel()
    inside.leave()
    assert (gone.inside, gone.error, last.inside, one.queued) == (False, None, True, 0)
    assert all(handle.cancelled for handle in clock.scheduled)


def test_a_full_queue_refuses_and_says_how_soon_to_come_again():
    clock = FakeClock()
    one = gate(1, clock, queue_size=2)
    made = [Entrant(one) for _ in range(3)]
    with pytest.raises(GatewayError) as caught:
        Entrant(one)
    assert (caught.value.fault.code, caught.value.status) == ("admission_queue_full", 429)
    assert caught.value.retry_after == UNKNOWN
    for number in range(4):  # one every 4 s
        clock.advance(4)
        made[number].leave()
        made.append(Entrant(one))
    with pytest.raises(GatewayError) as caught:
        Entrant(one)
    assert caught.value.retry_after == 12  # the third from now


def test_nobody_may_wait_with_a_queue_of_none():
    one = gate(1, queue_size=0)
    Entrant(one)
    with pytest.raises(GatewayError):
        Entrant(one)


def test_who_waits_too_long_is_told_so():
    clock = FakeClock()
    one = gate(1, clock, queue_timeout=3.0)
    Entrant(one)
    late = Entrant(one)
    clock.advance(2.9)
    assert late.waits
    clock.advance(0.2)
    assert (late.error.fault.code, late.error.status, late.seconds) == ("admission_queue_timeout", 503, 3.0)
    assert late.error.retry_after >= 1
    assert one.queued == 0


def test_those_that_fail_at_once_do_not_dig_into_the_stack():
    one = gate(1, queue_size=5000)
    first = Entrant(one)

    class Brief(Entrant):
        def admitted(self):
            super().admitted()
            self.leave()

    everybody = [Brief(one) for _ in range(5000)]
    first.leave()
    assert not any(each.waits for each in everybody)
    assert (one.in_flight, one.queued) == (0, 0)


def test_one_that_breaks_does_not_keep_the_others():
    one = gate(1)
    first, broken, last = [Entrant(one) for _ in range(3)]

    def break_(*_):
        raise ZeroDivisionError

    broken.admitted = break_
    first.leave()
    assert one.in_flight == 1  # it has its slot, which its end gives back
    one.leave(DEFAULT, broken)
    assert last.inside


def test_all_are_turned_away_when_the_gateway_stops():
    one = gate(1)
    first, *others = [Entrant(one) for _ in range(4)]
    one.refuse_all(GatewayError("draining", "x"))
    assert [each.error.fault.code for each in others] == ["draining"] * 3
    first.leave()
    assert (one.in_flight, one.queued) == (0, 0)


# -- requests per second ------------------------------------------------------------------------------------------


def test_a_bucket_holds_so_many_and_fills_up_again():
    bucket = TokenBucket(2.0, 3, 10.0)
    for _ in range(3):
        assert bucket.wait(10.0) == 0
        bucket.take()
    assert bucket.wait(10.0) == 0.5
    assert bucket.wait(10.5) == 0
    assert bucket.wait(100.0, 3) == 0
    assert bucket.wait(100.0, 4) > 0


def test_so_many_a_second_are_let_in_and_the_rest_wait():
    clock = FakeClock()
    one = gate(0, clock, rate=2.0, burst=3)
    log = []
    made = [Entrant(one, log=log) for _ in range(6)]
    assert [each.inside for each in made] == [True] * 3 + [False] * 3
    clock.advance(0.49)
    assert log == []
    clock.advance(0.02)
    assert log == made[3:4]
    clock.advance(1.0)
    assert log == made[3:]


def test_beyond_the_rate_and_the_queue_it_is_said_when_there_will_be_a_token():
    clock = FakeClock()
    one = gate(0, clock, rate=0.25, burst=1, queue_size=1)
    Entrant(one)
    Entrant(one)
    with pytest.raises(GatewayError) as caught:
        Entrant(one)
    assert (caught.value.fault.code, caught.value.status, caught.value.retry_after) == ("rate_limit_exceeded", 429, 9)


def test_the_timer_of_the_rate_ends_with_the_queue():
    clock = FakeClock()
    one = gate(0, clock, rate=1.0, burst=1)
    Entrant(one)
    Entrant(one).waiter.cancel()
    assert all(handle.cancelled for handle in clock.scheduled)


# -- classes ------------------------------------------------------------------------------------------------------


def test_the_classes_are_the_peers():
    assert {
        SYSTEM: ClassRules(32, 0.0, 64, 30, 5, preempts=True),
        INTERACTIVE: ClassRules(128, 0.25, 256, 30, 5, preempts=True),
        DEFAULT: ClassRules(0, 0.10, 512, 60, 30),
        BULK: ClassRules(0, 0.0, 1024, 300, 120),
    } == CLASSES
    assert kept(4096, CLASSES) == [32, 1024, 409, 0]
    small = kept(10, CLASSES)
    assert sum(small) <= 5
    assert small[1] == 3


@pytest.mark.parametrize(
    ("asked", "tenant", "given"),
    [
        (b"bulk", b"", BULK),
        (b"", b"", DEFAULT),
        (b" Interactive ", b"", INTERACTIVE),
        (b"urgent", b"", DEFAULT),
        (b"system", b"", INTERACTIVE),
        (b"system", b"ops", SYSTEM),
        (b"interactive", b"crawler", BULK),
        (b"", b"crawler", BULK),
        (b"system", b"\xff", INTERACTIVE),
    ],
)
def test_a_class_is_no_higher_than_the_tenants(asked, tenant, given):
    tenants = Tenants({"ops": SYSTEM, "crawler": BULK})
    assert tenants.priority({PRIORITY: asked, TENANT: tenant}) is given


def test_the_more_urgent_class_comes_first_and_each_class_in_its_order():
    one = gate(1, classes=CLASSES)
    log = []
    first = Entrant(one, BULK)
    made = [Entrant(one, priority, log) for priority in (BULK, DEFAULT, SYSTEM, BULK, SYSTEM, INTERACTIVE)]
    first.leave()
    while log[-1].inside and len(log) < 6:
        log[-1].leave()
    assert log == [made[2], made[4], made[5], made[1], made[0], made[3]]


def test_what_is_kept_for_a_class_is_not_given_to_others():
    one = gate(100, classes=CLASSES)  # half is kept: 9 for system, 37 for interactive, 2 for default
    reserve = kept(100, CLASSES)
    bulk = [Entrant(one, BULK) for _ in range(100)]
    assert sum(each.inside for each in bulk) == 100 - sum(reserve)
    assert all(Entrant(one, SYSTEM).inside for _ in range(reserve[0]))
    assert not Entrant(one, SYSTEM).inside
    assert all(Entrant(one, INTERACTIVE).inside for _ in range(reserve[1]))


def test_who_starves_may_have_what_is_kept_for_others():
    clock = FakeClock()
    one = gate(100, clock, classes=CLASSES)
    bulk = [Entrant(one, BULK) for _ in range(100)]
    waiting = [each for each in bulk if each.waits]
    clock.advance(CLASSES[BULK].starvation - 1)
    assert all(each.waits for each in waiting)
    clock.advance(2)
    assert not any(each.waits for each in waiting)
    assert one.in_flight == 100


def test_each_class_has_its_own_queue_and_time():
    clock = FakeClock()
    one = gate(1, clock, classes=CLASSES)
    Entrant(one, BULK)
    made = [Entrant(one, SYSTEM) for _ in range(64)]
    with pytest.raises(GatewayError) as caught:
        Entrant(one, SYSTEM)
    assert (caught.value.fault.code, caught.value.status) == ("scheduler_queue_full", 429)
    other = Entrant(one, DEFAULT)
    clock.advance(31)
    assert {each.error.fault.code for each in made} == {"scheduler_queue_timeout"}
    assert other.waits


# -- preemption ---------------------------------------------------------------------------------------------------

NONE_KEPT = {priority: replace(rules, floor=0, share=0.0) for priority, rules in CLASSES.items()}


def test_an_urgent_request_has_the_newest_of_the_least_urgent_ended():
    one, log = gate(4, classes=NONE_KEPT), []
    default, old, new = Entrant(one, DEFAULT), Entrant(one, BULK), Entrant(one, BULK)
    Entrant(one, SYSTEM)
    urgent = Entrant(one, INTERACTIVE, log)
    assert (new.error.fault.code, new.error.status, new.error.retry_after) == ("scheduler_preempted", 503, 1)
    assert (b"x-smg-preempted", b"true") in new.error.headers
    assert (default.error, old.error) == (None, None)
    assert urgent.waits  # until that one has gone
    new.leave()
    assert log == [urgent]


def test_one_that_was_answered_is_left_alone():
    one = gate(2, classes=NONE_KEPT)
    old, new = Entrant(one, BULK), Entrant(one, BULK)
    new.answered = True
    Entrant(one, SYSTEM)
    assert new.error is None
    assert old.error is not None
    assert Entrant(one, SYSTEM).waits  # there is nobody any more


@pytest.mark.parametrize(("has", "comes"), [(BULK, DEFAULT), (INTERACTIVE, INTERACTIVE), (SYSTEM, INTERACTIVE)])
def test_who_is_not_urgent_or_not_more_urgent_preempts_nobody(has, comes):
    one = gate(1, classes=NONE_KEPT)
    inside = Entrant(one, has)
    assert Entrant(one, comes).waits
    assert inside.error is None


def test_one_for_one_and_nobody_for_one_that_is_refused():
    one = gate(3, classes=NONE_KEPT | {SYSTEM: ClassRules(0, 0.0, 2, 30.0, 5.0, preempts=True)})
    bulk = [Entrant(one, BULK) for _ in range(3)]
    for _ in range(2):
        Entrant(one, SYSTEM)
    with pytest.raises(GatewayError):
        Entrant(one, SYSTEM)
    assert sum(each.error is not None for each in bulk) == 2


def test_nobody_is_preempted_where_a_token_is_what_lacks():
    clock = FakeClock()
    one = gate(2, clock, classes=NONE_KEPT, rate=1.0, burst=2)
    bulk = [Entrant(one, BULK) for _ in range(2)]
    assert Entrant(one, SYSTEM).waits
    assert [each.error for each in bulk] == [None, None]


def test_who_has_starved_is_not_preempted():
    clock = FakeClock()
    one = gate(2, clock, classes=NONE_KEPT)
    first, second = Entrant(one, SYSTEM), Entrant(one, SYSTEM)
    starving = Entrant(one, BULK)
    clock.advance(CLASSES[BULK].starvation)
    first.leave()
    assert starving.inside
    assert Entrant(one, SYSTEM).waits
    assert starving.error is None
    second.leave()


def test_one_that_ends_at_once_makes_room_at_once():
    one, log = gate(1, classes=NONE_KEPT), []
    bulk = Entrant(one, BULK)
    bulk.preempted = lambda _: bulk.leave()
    urgent = Entrant(one, SYSTEM, log)
    assert log == [urgent]


# -- whatever happens ---------------------------------------------------------------------------------------------

SMALL = {
    SYSTEM: ClassRules(1, 0.0, 3, 20.0, 5.0, preempts=True),
    INTERACTIVE: ClassRules(1, 0.3, 3, 20.0, 5.0, preempts=True),
    DEFAULT: ClassRules(0, 0.1, 4, 30.0, 10.0),
    BULK: ClassRules(0, 0.0, 5, 60.0, 20.0),
}


class Storm(RuleBasedStateMachine):
    """Requests come, end, give up and grow old in any order."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.made = []
        self.log = []

    @initialize(
        limit=st.integers(0, 6), classes=st.booleans(), rate=st.sampled_from((0.0, 0.5, 3.0)), size=st.integers(0, 4)
    )
    def begin(self, limit, classes, rate, size):
        self.classed = classes
        self.limit = limit
        self.rate = rate
        self.gate = gate(
            limit, self.clock, queue_size=size, queue_timeout=15.0, rate=rate, classes=SMALL if classes else None
        )

    @rule(priority=st.sampled_from(Priority))
    def come(self, priority):
        with suppress(GatewayError):
            self.made.append(Entrant(self.gate, priority if self.classed else DEFAULT, self.log))

    @precondition(lambda self: any(each.inside for each in self.made))
    @rule(which=st.integers(0, 99))
    def end(self, which):
        inside = [each for each in self.made if each.inside]
        inside[which % len(inside)].leave()

    @precondition(lambda self: any(each.inside for each in self.made))
    @rule(which=st.integers(0, 99))
    def answer(self, which):
        inside = [each for each in self.made if each.inside]
        inside[which % len(inside)].answered = True

    @precondition(lambda self: any(each.waits for each in self.made))
    @rule(which=st.integers(0, 99))
    def give_up(self, which):
        waiting = [each for each in self.made if each.waits]
        waiting[which % len(waiting)].waiter.cancel()

    @rule(seconds=st.sampled_from((0.1, 1.0, 4.0, 11.0)))
    def pass_time(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def stop(self):
        self.gate.refuse_all(GatewayError("draining", "x"))
        assert self.gate.queued == 0

    @invariant()
    def slots_are_counted(self):
        if not hasattr(self, "gate"):
            return
        inside = [each for each in self.made if each.inside]
        assert self.gate.in_flight == len(inside)
        assert not self.limit or len(inside) <= self.limit
        waiting = [each for each in self.made if each.waits]
        assert self.gate.queued == len(waiting)
        assert all(self.gate.queued_of(p) == sum(e.priority is p for e in waiting) for p in self.gate.priorities)

    @invariant()
    def nobody_is_kept_who_could_be_preempted_no_more(self):
        if hasattr(self, "gate"):
            for priority, held in self.gate._preemptible.items():
                assert all(each.inside and each.priority is priority and each.error is None for each in held)

    @invariant()
    def nobody_waits_for_a_slot_that_is_free(self):
        if not hasattr(self, "gate") or (self.rate and self.gate._bucket.wait(self.clock.now())):
            return
        inside = [each for each in self.made if each.inside]
        free = self.limit - len(inside) if self.limit else 10**9
        reserve = kept(self.limit, SMALL) if self.classed and self.limit else [0] * 4
        unfilled = [max(0, reserve[p] - sum(each.priority is p for each in inside)) for p in Priority]
        for each in self.made:
            if each.waits:
                starves = self.classed and self.clock.now() >= each.waiter.since + SMALL[each.priority].starvation
                assert free <= 0 or not starves
                assert free <= 0 or (unfilled[each.priority] == 0 and free <= sum(unfilled)), each.priority

    @invariant()
    def each_class_is_let_in_as_it_came(self):
        for priority in Priority:
            order = [self.made.index(each) for each in self.log if each.priority is priority and each in self.made]
            assert all(before < after for before, after in pairwise(order))

    def teardown(self):
        if not hasattr(self, "gate"):
            return
        while inside := [each for each in self.made if each.inside]:
            inside[0].leave()
            self.clock.advance(3)
        self.clock.advance(100)
        while inside := [each for each in self.made if each.inside]:
            inside[0].leave()
        assert not any(each.waits for each in self.made)
        assert (self.gate.in_flight, self.gate.queued) == (0, 0)
        assert not any(self.gate.held.values())
        assert all(handle.cancelled for handle in self.clock.scheduled)


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_pace_is_learnt_from_those_let_in_one_after_another():
    pace = Pace()
    assert pace.retry_after(5) == UNKNOWN
    for at in (10.0, 12.0, 14.0):
        pace.step(at)
    assert pace.retry_after(5) == 10
    pace.rest()
    pace.step(1000.0)  # after a time in which nobody waited
    assert pace.retry_after(5) == 10
    assert pace.retry_after(5000) == LONGEST
