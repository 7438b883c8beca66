"""When a circuit breaker opens, what it lets through then, and when it closes again."""

import itertools

import pytest

from extproc.workers.breaker import Breaker, BreakerSettings, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SETTINGS = BreakerSettings(failure_threshold=4, success_threshold=2, timeout=60, window=120)


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


class Rig:
    """A breaker, its clock, and what it has told: (state before, state, whether it shuts out)."""

    def __init__(self, settings=SETTINGS):
        self.clock = Clock()
        self.told = []
        self.breaker = Breaker(
            settings, self.clock, lambda before: self.told.append((before, self.breaker.state, self.breaker.shuts_out))
        )

    def run(self, outcomes, apart=0.0):
        """Legs one after the other: ``f`` fails, ``s`` succeeds."""
        for outcome in outcomes:
            turn = self.breaker.begin()
            (self.breaker.failed if outcome == "f" else self.breaker.succeeded)(turn)
            self.breaker.end(turn)
            self.clock.time += apart
        return self.breaker.state

    def opened(self):
        assert self.run("ffff") is OPEN
        return self

    def half_open(self):
        self.opened().breaker.rested()
        assert self.breaker.state is HALF_OPEN
        self.told.clear()
        return self


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ("fff", CLOSED),
        ("ffff", OPEN),
        ("s" * 1000 + "ffff", OPEN),  # it was well for long, and now fails all
        ("fsfsfs", CLOSED),
        ("fsfsfsf", OPEN),  # half of them
        ("sfsfsfsf", OPEN),
        ("fffsssss" * 3, CLOSED),  # most succeed
        ("fffs" + "f", OPEN),
    ],
)
def test_failures_within_the_window(outcomes, state):
    assert Rig().run(outcomes) is state


def test_a_busy_worker_of_which_one_request_in_a_thousand_fails_stays():
    rig = Rig()
    for _ in range(200):  # 200 failures in 100 s
        assert rig.run("f" + "s" * 999, apart=0.0005) is CLOSED


def test_failures_in_a_row_that_are_far_apart_do_not_count():
    assert Rig().run("f" * 50, apart=41) is CLOSED  # never four in 120 s
    assert Rig().run("f" * 50, apart=39) is OPEN


def test_old_failures_are_forgotten():
    rig = Rig()
    rig.run("fff")
    rig.clock.time += 131  # the window is counted in twelfths
    assert rig.run("s") is CLOSED
    assert not rig.breaker.wary
    assert rig.run("fff") is CLOSED


def test_old_successes_are_forgotten():
    rig = Rig()
    rig.run("f" + "s" * 100)
    rig.clock.time += 60
    rig.run("f")
    rig.clock.time += 71  # the successes are too old, the second failure is not
    assert rig.run("sfsff") is OPEN


def test_successes_need_not_be_told_while_nothing_is_wrong():
    breaker = Rig().breaker
    assert not breaker.wary
    breaker.failed(0)
    assert breaker.wary


def test_while_open_nothing_should_come():
    rig = Rig().opened()
    assert rig.told == [(CLOSED, OPEN, True)]
    assert rig.breaker.explain() == "circuit breaker open: too many of its requests failed; tried again in 60 s"
    rig.clock.time += 59
    assert "in 1 s" in rig.breaker.explain()


@pytest.mark.parametrize("outcome", ["failed", "succeeded"])
def test_what_was_sent_before_it_opened_decides_nothing(outcome):
    rig = Rig()
    turns = [rig.breaker.begin() for _ in range(5)]
    rig.opened()
    for _ in range(2):
        for turn in turns:
            getattr(rig.breaker, outcome)(turn)
            rig.breaker.end(turn)
        if rig.breaker.state is OPEN:
            rig.breaker.rested()
    assert rig.breaker.state is HALF_OPEN
    assert rig.breaker.trials == 0


def test_what_is_sent_all_the_same_may_close_it_but_not_keep_it_open():
    rig = Rig().opened()
    assert rig.run("fsf") is OPEN
    assert rig.breaker.since == rig.clock.time
    assert rig.run("s") is CLOSED
    assert rig.told[-1] == (OPEN, CLOSED, False)


def test_half_open_lets_as_many_trials_through_at_once_as_must_succeed():
    rig = Rig().half_open()
    breaker = rig.breaker
    assert not breaker.shuts_out
    first, second = breaker.begin(), breaker.begin()
    assert breaker.shuts_out
    breaker.end(first)  # without an outcome: the client left
    assert not breaker.shuts_out
    third = breaker.begin()
    assert breaker.shuts_out
    breaker.end(second)
    breaker.end(third)
    assert (breaker.trials, breaker.shuts_out, breaker.state) == (0, False, HALF_OPEN)
    assert [shut for _, _, shut in rig.told] == [True, False, True, False]


def test_trials_that_succeed_close_it():
    rig = Rig().half_open()
    assert rig.run("s") is HALF_OPEN
    assert rig.breaker.explain() == "circuit breaker half open: 1 of 2 trials have succeeded"
    assert rig.run("s") is CLOSED
    assert not rig.breaker.wary
    assert not rig.breaker.shuts_out
    assert rig.breaker.explain() == ""
    assert rig.run("fff") is CLOSED  # it begins anew


def test_a_trial_that_fails_opens_it_again():
    rig = Rig().half_open()
    rig.run("s")
    late = rig.breaker.begin()
    assert rig.run("f") is OPEN
    assert rig.told[-1] == (HALF_OPEN, OPEN, True)
    rig.breaker.rested()
    rig.breaker.succeeded(late)  # of the trials before
    rig.breaker.end(late)
    assert (rig.breaker.state, rig.breaker.trials) == (HALF_OPEN, 0)
    assert rig.run("s") is HALF_OPEN  # the success before does not count any more


def test_a_trial_that_is_over_late_takes_no_slot_of_others():
    rig = Rig().half_open()
    late = rig.breaker.begin()
    assert rig.run("f") is OPEN
    rig.breaker.rested()
    turn = rig.breaker.begin()
    rig.breaker.end(late)
    assert rig.breaker.trials == 1
    rig.breaker.end(turn)
    assert rig.breaker.trials == 0


def test_one_that_is_switched_off_never_opens():
    assert Rig(BreakerSettings(failure_threshold=1, enabled=False)).run("f" * 100) is CLOSED


def test_other_settings_begin_anew():
    rig = Rig()
    rig.run("fff")
    rig.breaker.settings = SETTINGS
    assert rig.run("f") is OPEN
    rig.breaker.settings = BreakerSettings(failure_threshold=2)
    assert rig.told[-1] == (OPEN, CLOSED, False)
    assert rig.run("f") is CLOSED
    assert rig.run("f") is OPEN


def test_time_and_health_change_nothing_but_an_open_one():
    rig = Rig()
    rig.breaker.rested()
    assert rig.breaker.state is CLOSED
    rig.half_open().breaker.rested()
    assert rig.breaker.state is HALF_OPEN
    assert rig.told == []


def test_any_order_of_legs_leaves_nothing_taken():
    """Every interleaving of three legs with the two things that may happen besides."""
    steps = ["begin", "begin", "begin", "end", "end", "end", "rested", "fail"]
    for order in set(itertools.permutations(steps)):
        rig = Rig(BreakerSettings(failure_threshold=1, success_threshold=2))
        rig.breaker.failed(0)
        out = []
        for step in order:
            if step == "begin":
                out.append(rig.breaker.begin())
            elif step == "end" and out:
                rig.breaker.end(out.pop(0))
            elif step == "fail" and out:
                rig.breaker.failed(out[0])
            elif step == "rested":
                rig.breaker.rested()
        for turn in out:
            rig.breaker.end(turn)
        assert rig.breaker.trials == 0
        assert rig.breaker.shuts_out is (rig.breaker.state is OPEN)
