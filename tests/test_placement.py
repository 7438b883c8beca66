"""Policies and placement."""

import random
from collections import Counter

import pytest
from fakes import Asked, FakeFleet, mooncake, nixl, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import GatewayError
from extproc.policies.cache_aware import CacheAwarePolicy
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.partners import CANDIDATES, NEAR_FACTOR
from extproc.policies.placement import Placer
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers.pairing import PairingMode
from extproc.workers.worker import Role

TINY = Asked("tiny")
WORKERS = tuple(worker(Role.DECODE, port) for port in range(1, 9))


@pytest.mark.parametrize("policy", [RandomPolicy, RoundRobinPolicy])
@given(count=st.integers(1, 8), limit=st.integers(1, 10), rounds=st.integers(1, 20))
def test_a_ranking_is_of_candidates_without_repetition(policy, count, limit, rounds):
    candidates = WORKERS[:count]
    one = policy()
    for _ in range(rounds):
        ranked = one.rank(candidates, limit, TINY)
        assert len(ranked) == len(set(ranked)) == min(limit, count)
        assert set(ranked) <= set(candidates)


@given(count=st.integers(1, 8), rounds=st.integers(1, 50))
def test_round_robin_is_fair(count, rounds):
    policy = RoundRobinPolicy()
    chosen = Counter(policy.rank(WORKERS[:count], 3, TINY)[0].id for _ in range(rounds))
    counts = [chosen[w.id] for w in WORKERS[:count]]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=30))
def test_round_robin_goes_on_where_it_was_when_the_set_changes(sets):
    """A worker that stays in the set is not chosen again before the others that stay have been."""
    policy = RoundRobinPolicy()
    always = [w for w in WORKERS if all(w in chosen for chosen in sets)]
    waited = dict.fromkeys(always, 0)
    for members in sets:
        candidates = tuple(w for w in WORKERS if w in members)
        for _ in range(3):
            chosen = policy.rank(candidates, 1, TINY)[0]
            for one in always:
                waited[one] = 0 if one is chosen else waited[one] + 1
            assert all(count <= 2 * len(WORKERS) for count in waited.values())


@given(st.permutations([0, 1, 2] * 6))
def test_every_set_has_its_turn(order):
    """Requests for several models come in any order: each model's workers are chosen in turn all the same."""
    policy = RoundRobinPolicy()
    sets = [WORKERS[:3], WORKERS[3:5], WORKERS[5:]]
    chosen = Counter(policy.rank(sets[which], 2, TINY)[0] for which in order)
    for members in sets:
        assert max(chosen[w] for w in members) - min(chosen[w] for w in members) <= 1


def test_many_sets_do_not_make_it_forget():
    policy = RoundRobinPolicy()
    members = tuple(WORKERS[:4])
    chosen = []
    for _ in range(8):
        chosen.append(policy.rank(members, 1, TINY)[0])
        for _ in range(200):  # sets that come and go, as with other attempts
            policy.rank(tuple(WORKERS[4:7]), 1, TINY)
    assert chosen == [*WORKERS[:4]] * 2


def test_random_reaches_everyone():
    random.seed(1)
    policy = RandomPolicy()
    chosen = Counter(policy.rank(WORKERS, 1, TINY)[0].id for _ in range(800))
    assert min(chosen.values()) > 50
    assert len(chosen) == len(WORKERS)


def placer(*workers, mode=PairingMode.LENIENT):
    return Placer(FakeFleet(*workers, mode=mode), RoundRobinPolicy(), RoundRobinPolicy())


def test_who_is_missing_is_named():
    with pytest.raises(GatewayError, match="No decode worker") as missing:
        placer(worker(Role.PREFILL, 1)).pair(TINY)
    assert missing.value.fault.code == "no_available_workers"
    with pytest.raises(GatewayError, match="No prefill worker"):
        placer(worker(Role.DECODE, 1)).pair(TINY)
    for model in (None, "tiny"):  # nobody is there to say which models exist
        with pytest.raises(GatewayError, match="No prefill worker"):
            placer().pair(Asked(model))


def test_a_model_that_is_down_is_not_unknown():
    prefill = worker(Role.PREFILL, 1)
    prefill.endpoint = None
    with pytest.raises(GatewayError) as down:
        placer(prefill).pair(TINY)
    assert down.value.status == 503
    with pytest.raises(GatewayError) as unknown:
        placer(prefill).pair(Asked("other"))
    assert unknown.value.status == 404


def test_the_list_for_failover_is_bounded():
    pair = placer(worker(Role.PREFILL, 1), *(worker(Role.DECODE, port) for port in range(10, 30))).pair(TINY)
    assert len(pair.decodes) == CANDIDATES


def test_without_a_model_both_legs_are_of_the_same():
    fleet = [
        worker(Role.PREFILL, 1, model_ids=("a",)),
        worker(Role.PREFILL, 2, model_ids=("b",)),
        worker(Role.DECODE, 11, model_ids=("b",)),
        worker(Role.DECODE, 12, model_ids=("b", "c")),
    ]
    for _ in range(4):
        pair = placer(*fleet).pair(Asked(None))
        assert pair.prefill is fleet[1]
        assert set(pair.decodes) == set(fleet[2:])
    with pytest.raises(GatewayError, match="serve the same model"):
        placer(fleet[0], *fleet[2:]).pair(Asked(None))
    unknown = worker(Role.PREFILL, 3, model_ids=())
    assert placer(unknown, *fleet[2:]).pair(Asked(None)).prefill is unknown


# -- who may hand over to whom -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [(*nixl(), *mooncake((3, 4), (13, 14))), (*mooncake((3, 4), (13, 14)), *nixl())])
def test_pairs_are_of_one_kind(fleet):
    place = placer(*fleet)
    pairs = [place.pair(TINY) for _ in range(8)]
    assert {pair.prefill.kv_connector for pair in pairs} == {"NixlConnector", "MooncakeConnector"}
    for prefill, decodes in pairs:
        assert {decode.pairing for decode in decodes} == {prefill.pairing}


def test_who_has_not_said_how_it_hands_over_may_be_anyones_partner():
    silent = worker(Role.DECODE, 11, runtime="vllm")
    other = worker(Role.DECODE, 12)  # another engine
    assert list(placer(*nixl((1,), ()), silent, other).pair(TINY).decodes) == [silent]


def test_workers_without_a_partner_are_passed_over():
    lonely, one, two = *nixl((1,), ()), *mooncake((2,), (12,))
    for _ in range(3):
        assert placer(lonely, one, two).pair(TINY) == (one, (two,))


def test_a_fleet_in_which_nobody_may_be_paired_says_why():
    with pytest.raises(GatewayError, match=r"mismatch on \[\"transport\"\]") as refused:
        placer(*nixl((1,), ()), *mooncake((), (11,))).pair(TINY)
    assert (refused.value.fault.code, refused.value.status) == ("no_compatible_pd_pair", 503)
    assert not refused.value.fault.retryable


@pytest.mark.parametrize(("mode", "expected"), [("off", 2), ("lenient", 1), ("strict", 0)])
def test_the_operator_says_how_strictly_workers_are_compared(mode, expected):
    silent = worker(Role.DECODE, 11, runtime="vllm")
    fleet = [*nixl((1,), ()), silent, *mooncake((), (12,))]
    place = placer(*fleet, mode=PairingMode(mode))
    if not expected:
        with pytest.raises(GatewayError, match="mismatch on") as refused:
            place.pair(TINY)
        assert refused.value.fault.code == "no_compatible_pd_pair"
    else:
        assert set(place.pair(TINY).decodes) == set(fleet[1 : 1 + expected])


def test_nobody_but_partners_is_where_envoy_may_go():
    """Envoy's list, for whatever attempt, and what one worker answers alone."""
    fleet = [*nixl((1, 2), (11, 12, 13)), *mooncake((3,), (14, 15)), worker(Role.PREFILL, 4), worker(Role.DECODE, 16)]
    place = placer(*fleet)
    for _ in range(12):
        prefill, decodes = place.pair(TINY)
        kind = {(prefill.runtime, prefill.kv_connector)}
        assert {(w.runtime, w.kv_connector) for w in decodes} == kind
        if place.has_pair(TINY, (prefill, decodes[0]), prefill):
            again = place.pair(TINY, (prefill, decodes[0]), prefill)
            assert {(w.runtime, w.kv_connector) for w in (again.prefill, *again.decodes)} == kind
        for alone in (place.decodes(TINY), place.prefills(TINY), place.prefills(TINY, prefill)):
            assert len({(w.runtime, w.kv_connector) for w in alone}) == 1


def labelled(fleet, name, values):
    """The workers with one more label each."""
    for one, value in zip(fleet, values, strict=True):
        one.labels = one.labels | {name: value}
        one.update_pairing()
    return fleet


def test_a_rolling_upgrade_pairs_like_with_like():
    """A decode of vLLM with NIXL takes no cache of another version."""
    fleet = labelled(nixl(), "version", ("0.31.0", "0.32.0", "0.31.0", "0.32.0"))
    place = placer(*fleet)
    for _ in range(4):
        prefill, decodes = place.pair(TINY)
        assert [w.labels for w in decodes] == [prefill.labels]
    # An attempt after that may well be on workers of the other version.
    assert place.pair(TINY, (fleet[0], fleet[2]), fleet[0]) == (fleet[1], (fleet[3],))
    assert set(place.alike(TINY, fleet[2])) == set(fleet[2:])
    assert set(place.others(TINY, fleet[2], (fleet[2],))) == {fleet[3]}
    assert place.others(TINY, fleet[2], (fleet[2],), partner=True) == ()


def test_a_prefill_without_a_partner_left_is_not_chosen_again():
    fleet = labelled(nixl(), "block_size", ("16", "32", "16", "32"))
    place = placer(*fleet)
    for _ in range(3):
        assert place.pair(TINY, (fleet[2],), fleet[0]) == (fleet[1], (fleet[3],))
    assert place.has_pair(TINY, (fleet[2],), fleet[0])
    assert not place.has_pair(TINY, (fleet[2], fleet[1]), fleet[0])
    with pytest.raises(GatewayError, match="page_size"):
        place.pair(TINY, (fleet[2], fleet[1]), fleet[0])


def test_who_else_there_is_takes_nobodys_turn():
    fleet = nixl((1,), (11, 12, 13, 14, 15, 16))
    place = placer(*fleet)
    turns = [place.decodes(TINY)[0] for _ in range(3)]
    seen = {worker for _ in range(64) for worker in place.others(TINY, fleet[1], (fleet[2],))}
    assert len(place.others(TINY, fleet[1])) == CANDIDATES
    assert seen == {fleet[1], *fleet[3:]}
    turns += [place.decodes(TINY)[0] for _ in range(3)]
    assert turns == fleet[1:]


def test_fail_over_is_among_those_of_one_api_key():
    decodes = [worker(Role.DECODE, port, api_key=key) for port, key in ((11, "a"), (12, "b"), (13, "a"))]
    place = placer(worker(Role.PREFILL, 1), *decodes)
    for _ in range(6):
        keys = {decode.api_key for decode in place.pair(TINY).decodes}
        assert len(keys) == 1


# -- other attempts --------------------------------------------------------------------------------------------------


def test_who_failed_is_left_out():
    first, second, one, other = nixl()
    place = placer(first, second, one, other)
    for _ in range(4):
        assert place.pair(TINY, without=(first, one)) == (second, (other,))
    with pytest.raises(GatewayError, match="No prefill worker"):
        place.pair(TINY, without=(first, second))
    with pytest.raises(GatewayError, match="No decode worker"):
        place.pair(TINY, without=(one, other))


def test_leaving_somebody_out_is_for_one_request_only():
    first, second, one, other = nixl()
    place = placer(first, second, one, other)
    place.pair(TINY, without=(first, one))
    assert {place.pair(TINY).prefill for _ in range(4)} == {first, second}


def test_another_attempt_hands_over_as_the_first_one_did():
    fleet = [*nixl((1, 2), (11,)), *mooncake((3, 4), (13,))]
    place = placer(*fleet)
    for _ in range(6):
        assert place.pair(TINY, (fleet[0],), fleet[0]).prefill is fleet[1]
    with pytest.raises(GatewayError, match="No prefill worker"):
        place.pair(TINY, fleet[:2], fleet[0])


@given(st.lists(st.sets(st.integers(0, 5)), max_size=20))
def test_what_is_remembered_of_a_set_is_not_said_of_another(sets):
    """Sets of workers are told apart by identity, and tuples of them come and go with every attempt."""
    fleet = [*nixl((1,), (11, 12)), *mooncake((2,), (13,)), worker(Role.DECODE, 14)]
    place = placer(*fleet)
    for left_out in sets:
        try:
            prefill, decodes = place.pair(TINY, [fleet[at] for at in left_out if at < len(fleet)])
        except GatewayError:
            continue
        assert {decode.pairing for decode in decodes} == {prefill.pairing}


def test_decodes_for_what_was_meant_for_another():
    one, two, three = nixl((), (11, 12, 13))
    stranger = worker(Role.DECODE, 14, runtime="vllm", kv_connector="NixlConnector", api_key="other")
    place = placer(one, two, three, stranger, *mooncake((), (15,)))
    assert set(place.alike(TINY, one, (one,))) == {two, three}
    assert place.alike(TINY, one, (one, two, three)) == ()
    assert place.alike(Asked("another model"), one) == ()


def test_all_decodes_are_more_than_candidates():
    decodes = [worker(Role.DECODE, port, model_ids=(f"model-{port}",)) for port in range(10, 20)]
    assert list(placer(worker(Role.PREFILL, 1), *decodes).all_decodes(None)) == decodes


def test_one_prefill_alone_may_be_a_certain_one():
    fleet = [*nixl((1, 2, 3), (11,)), *mooncake((4,), ())]
    place = placer(*fleet)
    assert place.prefills(TINY, fleet[1])[0] is fleet[1]
    assert set(place.prefills(TINY, fleet[1])) == set(fleet[:3])  # for fail-over: those of its kind


def test_a_server_in_both_roles_is_not_paired_with_itself():
    """vLLM's ``kv_both`` may be registered so: each of two such servers prefills for the other one."""
    both = [worker(role, port) for port in (1, 2) for role in (Role.PREFILL, Role.DECODE)]
    place = placer(*both)
    for _ in range(8):
        prefill, decodes = place.pair(TINY)
        assert [w.base_url for w in decodes] == [w.base_url for w in both[1::2] if w.base_url != prefill.base_url]
    assert place.has_pair(TINY, both[3:], both[0])
    assert not place.has_pair(TINY, both[2:], both[0])
    with pytest.raises(GatewayError, match="the same server, which is registered as prefill and as") as caught:
        placer(*both[:2]).pair(TINY)
    assert caught.value.fault.code == "no_compatible_pd_pair"


# -- near and far ------------------------------------------------------------------------------------------------------


def zoned(role, port, zone):
    return worker(role, port, labels={"zone": zone})


def test_the_nearest_decodes_come_first_and_the_far_follow():
    near = [zoned(Role.DECODE, port, "a") for port in (11, 12)]
    far = [zoned(Role.DECODE, port, "b") for port in range(13, 20)]
    place = placer(zoned(Role.PREFILL, 1, "a"), *far[:3], *near, *far[3:])
    first = Counter()
    third = Counter()
    for _ in range(60):
        decodes = place.pair(TINY).decodes
        assert len(set(decodes)) == CANDIDATES
        assert set(decodes[:2]) == set(near)
        assert set(decodes[2:]) <= set(far)
        first[decodes[0]] += 1
        third[decodes[2]] += 1
    assert first == Counter(dict.fromkeys(near, 30))
    assert len(third) > 2  # to whom a dead neighbourhood's requests go


def test_each_prefill_has_its_own_neighbours_and_none_is_preferred():
    prefills = [zoned(Role.PREFILL, port, zone) for port, zone in enumerate("abc", 1)]
    place = placer(*prefills, zoned(Role.DECODE, 11, "a"), zoned(Role.DECODE, 12, "b"))
    pairs = [place.pair(TINY) for _ in range(9)]
    assert Counter(pair.prefill for pair in pairs) == Counter(dict.fromkeys(prefills, 3))
    for prefill, decodes in pairs:
        if prefill is not prefills[2]:
            assert decodes[0].labels == prefill.labels


def serve(place, requests, under_way):
    """Send requests of which so many are under way at a time; how often each decode worker was chosen."""
    chosen = Counter()
    live = []
    for _ in range(requests):
        decode = place.pair(TINY).decodes[0]
        chosen[decode] += 1
        decode.load += 1
        live.append(decode)
        if len(live) > under_way:
            live.pop(0).load -= 1
    return chosen


def test_a_decode_that_is_near_nobody_is_not_left_without_work():
    near, far, farther = fleet = [zoned(Role.DECODE, port, zone) for port, zone in enumerate("abc", 11)]
    assert serve(placer(zoned(Role.PREFILL, 1, "a"), *fleet), 100, 2)[near] == 100  # there is nothing to spare
    busy = serve(placer(zoned(Role.PREFILL, 1, "a"), *fleet), 1000, 60)
    assert min(busy[far], busy[farther]) > 150
    assert busy[near] > busy[far]


def test_a_busy_neighbourhood_is_helped_out():
    """Eight prefill workers with one decode worker near them, and eight decode workers elsewhere."""
    near = zoned(Role.DECODE, 11, "a")
    far = [zoned(Role.DECODE, port, "b") for port in range(12, 20)]
    place = placer(*(zoned(Role.PREFILL, port, "a") for port in range(1, 9)), near, *far)
    serve(place, 500, 100)
    assert near.load <= NEAR_FACTOR * (max(w.load for w in far) + 1) + 1
    assert max(w.load for w in far) - min(w.load for w in far) <= 3


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=6), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_a_near_decode_is_passed_over_only_when_it_has_much_more_to_do(zones, loads):
    decodes = [zoned(Role.DECODE, port, zone) for port, zone in enumerate(zones, 11)]
    for decode, load in zip(decodes, loads, strict=False):
        decode.load = load
    pair = placer(zoned(Role.PREFILL, 1, "a"), *decodes).pair(TINY)
    assert len(set(pair.decodes)) == min(len(decodes), CANDIDATES)
    near = [w for w in decodes if w.labels == {"zone": "a"}]
    if near and pair.decodes[0] not in near:
        assert any(w.load > NEAR_FACTOR * (pair.decodes[0].load + 1) for w in near)


class Booking(RoundRobinPolicy):
    """Keeps in mind whom it was asked for last, as cache_aware and sticky sessions do."""

    def __init__(self):
        super().__init__()
        self.booked = []

    def rank(self, candidates, limit, request):
        found = super().rank(candidates, limit, request)
        self.booked.append(found[0])
        return found

    def take_back(self, request):
        super().take_back(request)
        self.booked.pop()


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=6), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_only_who_is_chosen_is_booked_near_or_far(zones, loads):
    """A worker that was only compared must not count as having the request."""
    decodes = [zoned(Role.DECODE, port, zone) for port, zone in enumerate(zones, 11)]
    for decode, load in zip(decodes, loads, strict=False):
        decode.load = load
    policy = Booking()
    place = Placer(FakeFleet(zoned(Role.PREFILL, 1, "a"), *decodes), RoundRobinPolicy(), policy)
    for _ in range(3):
        pair = place.pair(TINY)
        assert policy.booked == [pair.decodes[0]]
        policy.booked.clear()


def test_a_prompt_is_on_its_way_to_the_worker_that_gets_it_near_or_far():
    near, far, farther = fleet = [zoned(Role.DECODE, port, zone) for port, zone in enumerate("abc", 11)]
    near.load, far.load, farther.load = 9, 5, 6  # too busy to be taken without a look at others, but not by that much
    policy = CacheAwarePolicy(CacheAwareSettings(), lambda: 0.0, Role.DECODE)
    request = Asked(prompt=b'"%b"' % (b"x" * 4096))
    place = Placer(FakeFleet(zoned(Role.PREFILL, 1, "a"), *fleet), RoundRobinPolicy(), policy)
    assert place.pair(request).decodes[0] is near
    assert request.notes[policy].cache.worker is near


def test_whoever_failed_is_left_out_near_or_far():
    near, near_too, far = [zoned(Role.DECODE, port, zone) for port, zone in enumerate("aab", 11)]
    prefill = zoned(Role.PREFILL, 1, "a")
    place = placer(prefill, near, near_too, far)
    assert place.pair(TINY, (near,)).decodes == (near_too, far)
    assert place.pair(TINY, (near, near_too)).decodes == (far,)
    assert place.has_pair(TINY, (near, near_too), prefill)


class Learning(RoundRobinPolicy):
    learns = True

    def __init__(self):
        super().__init__()
        self.learnt, self.forgotten = [], []

    def learn(self, request, worker):
        self.learnt.append((request, worker))

    def forget(self, worker):
        self.forgotten.append(worker)


def test_each_role_has_a_policy_that_is_told_of_its_own():
    prefill, decode = worker(Role.PREFILL, 1), worker(Role.DECODE, 11)
    policies = Learning(), Learning()
    place = Placer(FakeFleet(prefill, decode), *policies)
    place.answered(TINY, prefill)
    place.answered(TINY, decode)
    place.forget(prefill)
    assert [policy.learnt for policy in policies] == [[(TINY, prefill)], [(TINY, decode)]]
    assert all(policy.forgotten == [prefill] for policy in policies)  # by its id: the other had nothing of it


def test_what_cannot_be_learnt_from_fails_no_request(caplog):
    class Broken(RoundRobinPolicy):
        learns = True

        def learn(self, request, worker):  # noqa: ARG002
            raise StopIteration

    prefill = worker(Role.PREFILL, 1)
    placer = Placer(FakeFleet(prefill, worker(Role.DECODE, 2)), Broken(), Broken())
    placer.answered(TINY, prefill)
    assert prefill.name in caplog.text
