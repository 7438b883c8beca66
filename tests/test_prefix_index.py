"""What is known of workers' caches: never more than they were sent, never in more memory than allowed."""

import math
import random
import tracemalloc

import pytest
from fakes import worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.policies.prefix_index import RECORD_BYTES, PrefixIndex
from extproc.policies.prompt_chain import FIRST, GROWTH, Cuts, PromptChain
from extproc.workers.worker import Role

CUTS = Cuts(first=16)
WORKERS = [worker(Role.PREFILL, port) for port in range(1, 7)]
A, B, *_ = WORKERS


def chain(prompt, kind=None, cuts=CUTS):
    return PromptChain(prompt, cuts, kind)


def text(size, seed=0):
    return random.Random(seed).randbytes(size)


def common(one, other):
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


# Few letters, so that prompts have much in common.
PROMPTS = st.lists(st.sampled_from([b"a" * 20, b"b" * 20, b"c" * 33]), max_size=30).map(b"".join)
VISITS = st.lists(st.tuples(PROMPTS, st.sampled_from(WORKERS)), max_size=25)


@given(visits=VISITS, asked=PROMPTS)
def test_about_as_much_is_found_as_is_common(visits, asked):
    index = PrefixIndex(1 << 20, CUTS)
    for prompt, sent_to in visits:
        index.add(chain(prompt), sent_to, 0)
    found = index.overlaps(chain(asked), 0)
    assert set(found) <= {sent_to for _, sent_to in visits}
    for each in WORKERS:
        held = max((common(prompt, asked) for prompt, sent_to in visits if sent_to is each), default=0)
        assert found.get(each, 0) <= held + max(16, held // GROWTH)
        assert found.get(each, 0) <= len(asked)
        # Of what follows the last cut that is common nothing is known.
        assert found.get(each, 0) >= held - max(16, held // GROWTH) - 1


@given(visits=VISITS, memory=st.integers(0, 3000), forgotten=st.sets(st.integers(0, 25)))
def test_memory_is_bounded_whatever_comes(visits, memory, forgotten):
    index = PrefixIndex(memory, CUTS, most_holders=3)
    for number, (prompt, sent_to) in enumerate(visits):
        index.add(chain(prompt), sent_to, number)
        assert 0 <= index.size <= memory
        if number in forgotten:
            index.forget(sent_to)
    for sent_to in WORKERS:
        index.forget(sent_to)
    assert index.overlaps(chain(visits[-1][0]) if visits else chain(b""), 30) == {}


@pytest.mark.parametrize("ages", [False, True])
@pytest.mark.parametrize("holders", [1, 2, 6])
@pytest.mark.parametrize("memory", [400_000, 500_000, 600_000, 700_000])  # a dict doubles somewhere in between
def test_the_bound_holds_for_what_it_really_takes(holders, ages, memory):
    """While old beginnings go and new ones come, which is when dicts are emptier than they are large."""
    cuts = Cuts()
    index = PrefixIndex(memory, cuts, ttl=1000 if ages else math.inf)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        taken = []
        for seed in range(900 // holders):
            prompt = chain(text(2500, seed), cuts=cuts)
            for each in WORKERS[:holders]:
                index.add(prompt, each, 0)
            del prompt
            taken.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert index.size > 0.85 * memory
    assert max(taken) < 1.05 * memory
    assert taken[-1] > 0.3 * memory  # nor is much less known than there is room for


def test_what_was_visited_longest_ago_goes_first_and_the_longer_beginning_before_the_shorter():
    index = PrefixIndex(12 * RECORD_BYTES, CUTS)
    index._clear = index._drop_oldest  # one by one
    old, new = text(16 * 6 + 1, 1), text(16 * 6 + 1, 2)
    index.add(chain(old), A, 0)
    index.add(chain(new), A, 1)
    index.add(chain(old), A, 2)
    index.add(chain(text(16 * 3 + 1, 3)), A, 3)
    assert index.overlaps(chain(old), 4) == {A: 97}
    assert index.overlaps(chain(new), 4) == {A: 48}


def test_a_cache_loses_what_came_before_as_much_as_fits_in():
    index = PrefixIndex(1 << 20, CUTS)
    index.cache(A).room = 1000
    first = text(400, 1)
    index.add(chain(first), A, 0)
    index.add(chain(text(900, 2)), A, 0)
    assert index.overlaps(chain(first), 0)
    index.add(chain(text(200, 3)), A, 0)
    assert index.overlaps(chain(first), 0) == {}


def test_a_chain_that_another_policy_has_cut_takes_as_much_room_as_it_gives_back():
    index, others = PrefixIndex(1 << 20, Cuts(first=16)), Cuts(first=16)
    cache = index.cache(A)
    cache.room = 2000
    for seed in range(100):
        index.add(chain(text(1500, seed), cuts=others), A, 0)
        assert 0 < cache.size <= 2000
    cache.room = 0
    index.add(chain(text(1500), cuts=others), A, 0)
    assert (cache.size, len(cache.kept), len(index)) == (0, 0, 0)


def test_what_is_sent_again_takes_no_room():
    index = PrefixIndex(1 << 20, CUTS)
    index.cache(A).room = 1000
    first, second = text(400, 1), text(401, 2)
    assert index.add(chain(first), A, 0) == 400
    assert index.add(chain(second), A, 0) == 401
    for _ in range(100):
        assert index.add(chain(second), A, 0) == 0
    assert index.overlaps(chain(first), 0)


def test_a_worker_that_is_forgotten_holds_nothing_and_can_begin_anew():
    index = PrefixIndex(1 << 20, CUTS)
    prompt = text(500)
    index.add(chain(prompt), A, 0)
    index.add(chain(prompt), B, 0)
    index.book(chain(text(500, 1)), 0, A, 0)
    index.forget(A)
    assert set(index.overlaps(chain(prompt), 0)) == {B}
    assert index.overlaps(chain(text(500, 1)), 0) == {}
    index.add(chain(prompt[:100]), A, 0)
    assert index.overlaps(chain(prompt), 0)[A] == 100


def test_a_beginning_that_workers_come_and_go_for_does_not_grow():
    index = PrefixIndex(1 << 20, CUTS)
    index.add(chain(b"a" * 40), A, 0)
    index.add(chain(b"a" * 40), B, 0)
    size = index.size
    for port in range(100, 200):
        gone = worker(Role.PREFILL, port)
        index.add(chain(b"a" * 40), gone, 0)
        index.forget(gone)
    assert index.size <= 3 * size
    assert set(index.overlaps(chain(b"a" * 40), 0)) == {A, B}


def test_models_are_apart():
    index = PrefixIndex(1 << 20, CUTS)
    index.add(chain(b"a" * 100, "small"), A, 0)
    assert index.overlaps(chain(b"a" * 100, "small"), 0)
    assert index.overlaps(chain(b"a" * 100, "large"), 0) == {}


def test_by_age():
    index = PrefixIndex(1 << 20, CUTS, ttl=10, sweep=5)
    index.add(chain(b"a" * 100), A, 0)
    index.add(chain(b"b" * 100), A, 8)
    assert index.overlaps(chain(b"a" * 100), 10)
    assert not index.overlaps(chain(b"a" * 100), 11)
    index.add(chain(b"c" * 20), A, 14)
    assert len(index) == 6 + 1  # the first six are gone


def test_of_many_holders_one_goes():
    index = PrefixIndex(1 << 20, CUTS, most_holders=2)
    for each in WORKERS[:3]:
        index.add(chain(b"a" * 20), each, 0)
    found = set(index.overlaps(chain(b"a" * 20), 0))
    assert len(found) == 2
    assert WORKERS[2] in found


def test_of_very_many_holders_only_few_are_looked_at():
    index = PrefixIndex(1 << 20, CUTS)
    for each in WORKERS:
        index.add(chain(b"a" * 100), each, 0)
    assert set(index.overlaps(chain(b"a" * 100), 0, [A, B])) == {A, B}
    assert set(index.overlaps(chain(b"a" * 100), 0)) == set(WORKERS)


# -- bookings ---------------------------------------------------------------------------------------------------------


def test_what_is_booked_is_found_until_it_is_taken_back_or_too_old():
    index = PrefixIndex(1 << 20, CUTS, booked_for=10)
    prompt = text(200)
    booking = index.book(chain(prompt), 0, A, 0)
    assert index.overlaps(chain(prompt), 1) == {A: 192}
    assert index.cache(A).pending == 200
    index.take_back(booking)
    index.take_back(booking)
    assert index.overlaps(chain(prompt), 1) == {}
    assert index.cache(A).pending == 0
    index.book(chain(prompt), 0, A, 0)
    assert index.overlaps(chain(prompt), 10) == {}
    index.book(chain(text(200, 1)), 0, B, 11)
    assert index.cache(A).pending == 0


def test_a_booking_is_of_what_is_not_held_yet():
    index = PrefixIndex(1 << 20, CUTS)
    known, prompt = text(100), text(100) + text(5000, 1)
    index.add(chain(known), A, 0)
    index.book(chain(prompt), 96, A, 0)
    assert index.cache(A).pending == len(prompt) - 96
    (found,) = index.overlaps(chain(prompt), 0).items()
    assert found == (A, CUTS.ends[CUTS.within(len(prompt)) - 1])


def test_of_two_bookings_the_later_one_counts():
    index = PrefixIndex(1 << 20, CUTS)
    first = index.book(chain(b"a" * 100), 0, A, 0)
    index.book(chain(b"a" * 100), 0, B, 0)
    assert index.overlaps(chain(b"a" * 100), 0) == {B: 96}
    index.take_back(first)
    assert index.overlaps(chain(b"a" * 100), 0) == {B: 96}


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(WORKERS), st.booleans()), max_size=40))
def test_nothing_is_left_of_bookings(bookings):
    index = PrefixIndex(1 << 20, CUTS, booked_for=10)
    for number, (prompt, sent_to, taken_back) in enumerate(bookings):
        booking = index.book(chain(prompt), 0, sent_to, number)
        if taken_back:
            index.take_back(booking)
    index.book(chain(b""), 0, A, 1000)
    index.overlaps(chain(b"a" * 900), 1000)
    assert sum(index.cache(each).pending for each in WORKERS) == 0
    assert not index._booked


# -- cuts -------------------------------------------------------------------------------------------------------------


@given(size=st.integers(0, 1_000_000))
def test_cuts_are_as_near_as_is_said(size):
    cuts = Cuts()
    count = cuts.within(size)
    ends = cuts.ends[:count]
    assert all(end < size for end in ends)
    assert size - (ends[-1] if ends else 0) <= max(FIRST, size // GROWTH) + 1
    assert count <= FIRST // GROWTH + math.log(max(size, FIRST) / FIRST, 1 + 1 / GROWTH)


def test_cuts_that_are_given():
    cuts = Cuts((100, 1000))
    assert [cuts.within(size) for size in (0, 100, 101, 1000, 5000)] == [0, 0, 1, 1, 2]


def test_a_conversation_goes_on_from_its_turn_before():
    before = b'[{"role": "user", "content": "' + text(3000).hex().encode() + b'"}]'
    after = before[:-1] + b', {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]'
    cuts = Cuts()
    index = PrefixIndex(1 << 20, cuts)
    index.add(chain(before, cuts=cuts), A, 0)
    assert index.overlaps(chain(after, cuts=cuts), 0)[A] == len(before)
    assert index.add(chain(after, cuts=cuts), A, 0) == len(after) - len(before)
