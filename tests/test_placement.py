"""Policies and placement."""

import random
from collections import Counter

import pytest
from fakes import FakeFleet, mooncake, nixl, worker
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


# -- who may hand over to whom -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [(*nixl(), *mooncake((3, 4), (13, 14))), (*mooncake((3, 4), (13, 14)), *nixl())])
def test_pairs_are_of_one_kind(fleet):
    place = placer(*fleet)
    pairs = [place.pair("tiny") for _ in range(8)]
    assert {pair.prefill.kv_connector for pair in pairs} == {"NixlConnector", "MooncakeConnector"}
    for prefill, decodes in pairs:
        assert {decode.pairing for decode in decodes} == {prefill.pairing}


def test_who_has_not_said_how_it_hands_over_may_be_anyones_partner():
    silent = worker(Role.DECODE, 11, runtime="vllm")
    other = worker(Role.DECODE, 12)  # another engine
    assert list(placer(*nixl((1,), ()), silent, other).pair("tiny").decodes) == [silent]


def test_workers_without_a_partner_are_passed_over():
    lonely, one, two = *nixl((1,), ()), *mooncake((2,), (12,))
    for _ in range(3):
        assert placer(lonely, one, two).pair("tiny") == (one, (two,))


def test_a_fleet_in_which_nobody_may_be_paired_says_why():
    with pytest.raises(GatewayError, match="mismatch on transport") as refused:
        placer(*nixl((1,), ()), *mooncake((), (11,))).pair("tiny")
    assert (refused.value.fault.code, refused.value.status) == ("no_compatible_pd_pair", 503)
    assert not refused.value.fault.retryable


def test_fail_over_is_among_those_of_one_api_key():
    decodes = [worker(Role.DECODE, port, api_key=key) for port, key in ((11, "a"), (12, "b"), (13, "a"))]
    place = placer(worker(Role.PREFILL, 1), *decodes)
    for _ in range(6):
        keys = {decode.api_key for decode in place.pair("tiny").decodes}
        assert len(keys) == 1


# -- other attempts --------------------------------------------------------------------------------------------------


def test_who_failed_is_left_out():
    first, second, one, other = nixl()
    place = placer(first, second, one, other)
    for _ in range(4):
        assert place.pair("tiny", without=(first, one)) == (second, (other,))
    with pytest.raises(GatewayError, match="No prefill worker"):
        place.pair("tiny", without=(first, second))
    with pytest.raises(GatewayError, match="No decode worker"):
        place.pair("tiny", without=(one, other))


def test_leaving_somebody_out_is_for_one_request_only():
    first, second, one, other = nixl()
    place = placer(first, second, one, other)
    place.pair("tiny", without=(first, one))
    assert {place.pair("tiny").prefill for _ in range(4)} == {first, second}


def test_another_attempt_hands_over_as_the_first_one_did():
    fleet = [*nixl((1, 2), (11,)), *mooncake((3, 4), (13,))]
    place = placer(*fleet)
    for _ in range(6):
        assert place.pair("tiny", (fleet[0],), fleet[0]).prefill is fleet[1]
    with pytest.raises(GatewayError, match="No prefill worker"):
        place.pair("tiny", fleet[:2], fleet[0])


@given(st.lists(st.sets(st.integers(0, 5)), max_size=20))
def test_what_is_remembered_of_a_set_is_not_said_of_another(sets):
    """Sets of workers are told apart by identity, and tuples of them come and go with every attempt."""
    fleet = [*nixl((1,), (11, 12)), *mooncake((2,), (13,)), worker(Role.DECODE, 14)]
    place = placer(*fleet)
    for left_out in sets:
        try:
            prefill, decodes = place.pair("tiny", [fleet[at] for at in left_out if at < len(fleet)])
        except GatewayError:
            continue
        assert {decode.pairing for decode in decodes} == {prefill.pairing}


def test_decodes_for_what_was_meant_for_another():
    one, two, three = nixl((), (11, 12, 13))
    stranger = worker(Role.DECODE, 14, runtime="vllm", kv_connector="NixlConnector", api_key="other")
    place = placer(one, two, three, stranger, *mooncake((), (15,)))
    assert set(place.alike("tiny", one, (one,))) == {two, three}
    assert place.alike("tiny", one, (one, two, three)) == ()
    assert place.alike("another model", one) == ()


def test_all_decodes_are_more_than_candidates():
    decodes = [worker(Role.DECODE, port, model_ids=(f"model-{port}",)) for port in range(10, 20)]
    assert list(placer(worker(Role.PREFILL, 1), *decodes).all_decodes()) == decodes


def test_one_prefill_alone_may_be_a_certain_one():
    fleet = [*nixl((1, 2, 3), (11,)), *mooncake((4,), ())]
    place = placer(*fleet)
    assert place.prefills("tiny", fleet[1])[0] is fleet[1]
    assert set(place.prefills("tiny", fleet[1])) == set(fleet[:3])  # for fail-over: those of its kind
