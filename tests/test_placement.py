"""Policies and placement."""

import random
from collections import Counter

import pytest
from fakes import FakeFleet, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import GatewayError
from extproc.policies.placement import CANDIDATES, Placer
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers.worker import Role

WORKERS = tuple(worker(Role.DECODE, port) for port in range(1, 9))


@pytest.mark.parametrize("policy", [RandomPolicy, RoundRobinPolicy])
@given(count=st.integers(1, 8), limit=st.integers(1, 10), rounds=st.integers(1, 20))
def test_a_ranking_is_of_candidates_without_repetition(policy, count, limit, rounds):
    candidates = WORKERS[:count]
    one = policy()
    for _ in range(rounds):
        ranked = one.rank(candidates, limit)
        assert len(ranked) == len(set(ranked)) == min(limit, count)
        assert set(ranked) <= set(candidates)


@given(count=st.integers(1, 8), rounds=st.integers(1, 50))
def test_round_robin_is_fair(count, rounds):
    policy = RoundRobinPolicy()
    chosen = Counter(policy.rank(WORKERS[:count], 3)[0].id for _ in range(rounds))
    counts = [chosen[w.id] for w in WORKERS[:count]]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=6))
def test_round_robin_goes_on_where_it_was_when_the_set_changes(sets):
    """A worker that stays in the set is not chosen again before the others that stay have been."""
    policy = RoundRobinPolicy()
    always = [w for w in WORKERS if all(w in chosen for chosen in sets)]
    waited = dict.fromkeys(always, 0)
    for members in sets:
        candidates = tuple(w for w in WORKERS if w in members)
        for _ in range(3):
            chosen = policy.rank(candidates, 1)[0]
            for one in always:
                waited[one] = 0 if one is chosen else waited[one] + 1
            assert all(count <= 2 * len(WORKERS) for count in waited.values())


def test_random_reaches_everyone():
    random.seed(1)
    policy = RandomPolicy()
    chosen = Counter(policy.rank(WORKERS, 1)[0].id for _ in range(800))
    assert min(chosen.values()) > 50
    assert len(chosen) == len(WORKERS)


def placer(*workers):
    return Placer(FakeFleet(*workers), RoundRobinPolicy(), RoundRobinPolicy())


def test_who_is_missing_is_named():
    with pytest.raises(GatewayError, match="No decode worker") as missing:
        placer(worker(Role.PREFILL, 1)).pair("tiny")
    assert missing.value.fault.code == "no_available_workers"
    with pytest.raises(GatewayError, match="No prefill worker"):
        placer(worker(Role.DECODE, 1)).pair("tiny")
    for model in (None, "tiny"):  # nobody is there to say which models exist
        with pytest.raises(GatewayError, match="No prefill worker"):
            placer().pair(model)


def test_a_model_that_is_down_is_not_unknown():
    prefill = worker(Role.PREFILL, 1)
    prefill.endpoint = None
    with pytest.raises(GatewayError) as down:
        placer(prefill).pair("tiny")
    assert down.value.status == 503
    with pytest.raises(GatewayError) as unknown:
        placer(prefill).pair("other")
    assert unknown.value.status == 404


def test_the_list_for_failover_is_bounded():
    pair = placer(worker(Role.PREFILL, 1), *(worker(Role.DECODE, port) for port in range(10, 30))).pair("tiny")
    assert len(pair.decodes) == CANDIDATES


def test_without_a_model_both_legs_are_of_the_same():
    fleet = [
        worker(Role.PREFILL, 1, model_ids=("a",)),
        worker(Role.PREFILL, 2, model_ids=("b",)),
        worker(Role.DECODE, 11, model_ids=("b",)),
        worker(Role.DECODE, 12, model_ids=("b", "c")),
    ]
    for _ in range(4):
        pair = placer(*fleet).pair(None)
        assert pair.prefill is fleet[1]
        assert set(pair.decodes) == set(fleet[2:])
    with pytest.raises(GatewayError, match="serve the same model"):
        placer(fleet[0], *fleet[2:]).pair(None)
    unknown = worker(Role.PREFILL, 3, model_ids=())
    assert placer(unknown, *fleet[2:]).pair(None).prefill is unknown
