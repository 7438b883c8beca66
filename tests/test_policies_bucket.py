"""bucket: ranges of prompt lengths that cover everything and follow what comes."""

import random
from collections import Counter

import pytest
from fakes import Asked, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.policies.bucket import BucketPolicy
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Role

WORKERS = tuple(worker(Role.PREFILL, port) for port in range(1, 9))
NEVER = 10**9  # tokens of imbalance


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def bucket(**tuning):
    clock = Clock()
    policy = BucketPolicy(Tuning(**tuning), clock)
    policy.clock = clock
    return policy


def send(policy, size, candidates=WORKERS[:4]):
    return policy.rank(candidates, 1, Asked(tokens=size))[0]


def test_at_first_they_are_equal_parts_and_the_last_has_no_end():
    policy = bucket(balance_abs_threshold=NEVER)
    sizes = [0, 1023, 1025, 2047, 2049, 3071, 3073, 4096, 10**7]
    assert [WORKERS.index(send(policy, size)) for size in sizes] == [0, 0, 1, 1, 2, 2, 3, 3, 3]


@given(st.lists(st.integers(1, 10**6), min_size=20, max_size=200), st.integers(2, 8), st.integers(0, 10**7))
def test_every_length_has_a_place_and_a_longer_prompt_none_before_it(sizes, count, any_size):
    policy = bucket(balance_abs_threshold=NEVER)
    for size in sizes:
        send(policy, size, WORKERS[:count])
    policy.clock.time = 6
    places = [WORKERS.index(send(policy, size, WORKERS[:count])) for size in sorted({*sizes, any_size})]
    assert all(0 <= place < count for place in places)
    ends = policy._ends[count]
    assert ends == sorted(ends)
    assert len(ends) == count - 1
    if len(set(ends)) == len(ends):
        inside = [size for size in sorted({*sizes, any_size}) if size not in ends]
        strictly = [WORKERS.index(send(policy, size, WORKERS[:count])) for size in inside]
        assert strictly == sorted(strictly)


def test_the_ranges_are_cut_to_equal_volume():
    random.seed(1)
    policy = bucket(balance_abs_threshold=NEVER)
    sizes = [int(random.lognormvariate(7, 1.5)) + 1 for _ in range(3000)]
    for size in sizes:
        send(policy, size)
    policy.clock.time = 6
    volume = Counter()
    for size in sizes:
        volume[send(policy, size)] += size
    assert max(volume.values()) < 1.15 * min(volume[w] for w in WORKERS[:4])


def test_they_follow_what_comes():
    policy = bucket(balance_abs_threshold=NEVER)
    for size in range(1, 4000):
        send(policy, size)
    policy.clock.time = 6
    assert send(policy, 25) is WORKERS[0]
    for _ in range(2):
        for size in range(1, 4097):
            send(policy, size // 100)
        policy.clock.time += 6
    assert send(policy, 25) is WORKERS[1]
    assert send(policy, 4000) is WORKERS[3]


def test_prompts_of_one_length_are_shared():
    policy = bucket(balance_abs_threshold=NEVER)
    chosen = Counter()
    for _ in range(10):
        for _ in range(100):
            chosen[send(policy, 500)] += 1
        policy.clock.time += 6
    assert set(chosen) == set(WORKERS[:4])
    assert min(chosen.values()) > 200


def test_where_one_had_too_much_the_one_with_least_is_taken():
    policy = bucket(balance_abs_threshold=1000, balance_rel_threshold=2.0)
    assert send(policy, 1000) is WORKERS[0]
    assert send(policy, 10) is WORKERS[0]  # not more than 1000 above the least
    assert send(policy, 10) is WORKERS[1]
    assert send(policy, 5000) is WORKERS[2]


def test_a_new_worker_is_not_flooded():
    policy = bucket()
    random.seed(2)
    for _ in range(500):
        send(policy, random.randrange(1, 4000))
    policy.clock.time = 6
    came = Counter(send(policy, random.randrange(1, 4000), WORKERS[:5]) for _ in range(50))
    assert came[WORKERS[4]] < 25


@given(st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=10), st.randoms())
def test_whoever_cannot_serve_is_never_chosen(sets, chance):
    """The peer goes on to choose a worker of the range that is out, and so has none."""
    policy = bucket()
    for members in sets:
        candidates = tuple(w for w in WORKERS if w in members)
        for _ in range(5):
            assert send(policy, chance.randrange(10000), candidates) in members
        policy.clock.time += chance.choice([0, 6])
        policy.forget(chance.choice(WORKERS))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_who_follows_has_lengths_that_are_most_like_it(place):
    policy = bucket(balance_abs_threshold=NEVER)
    ranked = [WORKERS.index(w) for w in policy.rank(WORKERS[:4], 3, Asked(tokens=1024 * place + 5))]
    assert ranked == {0: [0, 1, 2], 1: [1, 0, 2], 3: [3, 2, 1]}[place]
