"""Placement where workers are limited: who has room is chosen, and a choice that comes to nothing leaves no trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
from fakes import Asked, FakeFleet, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from test_workers_overload import ON, Rig

from extproc.policies.cache_aware import CacheAwarePolicy
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.names import PolicyName
from extproc.policies.placement import Placer
from extproc.policies.room import ONE_LEG, NoRoomError, Room
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Role

EACH = (PolicyName.ROUND_ROBIN, PolicyName.BUCKET, PolicyName.PASSTHROUGH, PolicyName.PREFIX_HASH)
KEY = {"x-smg-routing-key": b"a"}


def fleet(prefills=3, decodes=3, limit=1):
    workers = [worker(Role.PREFILL, 1 + n) for n in range(prefills)] + [
        worker(Role.DECODE, 11 + n) for n in range(decodes)
    ]
    for each in workers:
        each.limit = limit
    return workers[:prefills], workers[prefills:]


def turns(*workers):
    return Placer(FakeFleet(*workers), RoundRobinPolicy(), RoundRobinPolicy())


def full(*workers):
    for each in workers:
        each.load = each.limit


# -- who is chosen ------------------------------------------------------------------------------------------------


def test_whoever_has_room_is_chosen_in_turn():
    prefills, decodes = fleet()
    full(prefills[0], decodes[1])
    placer = turns(*prefills, *decodes)
    pairs = [placer.pair(Asked(), room=ONE_LEG) for _ in range(8)]
    assert Counter(pair.prefill for pair in pairs) == dict.fromkeys(prefills[1:], 4)
    assert Counter(pair.decodes[0] for pair in pairs) == {decodes[0]: 4, decodes[2]: 4}


@pytest.mark.parametrize(("role", "index"), [(Role.PREFILL, 0), (Role.DECODE, 1)])
def test_where_nobody_has_it_is_said_of_which_role(role, index):
    sides = fleet()
    full(*sides[index])
    with pytest.raises(NoRoomError) as caught:
        turns(*sides[0], *sides[1]).pair(Asked(), room=ONE_LEG)
    assert caught.value.role is role


def test_a_prefill_whose_partners_have_no_room_is_passed_over():
    prefills, decodes = fleet(2, 2)
    for number, model in enumerate("ab"):
        prefills[number].model_ids = decodes[number].model_ids = (model,)
    full(decodes[0])
    placer = turns(*prefills, *decodes)
    for _ in range(4):
        pair = placer.pair(Asked(model=None), room=ONE_LEG)
        assert (pair.prefill, pair.decodes[0]) == (prefills[1], decodes[1])
    full(prefills[1])
    with pytest.raises(NoRoomError) as caught:
        placer.pair(Asked(model=None), room=ONE_LEG)
    assert caught.value.role is Role.DECODE


def test_what_others_wait_for_is_not_taken():
    prefills, decodes = fleet()
    placer = turns(*prefills, *decodes)
    pair = placer.pair(Asked(), room=Room({prefills[0], decodes[0]}))
    assert (pair.prefill, pair.decodes[0]) == (prefills[1], decodes[1])
    with pytest.raises(NoRoomError):
        placer.decodes(Asked(), room=Room(set(decodes)))


def test_several_legs_need_room_for_all_of_them():
    prefills, decodes = fleet(limit=3)
    prefills[0].load = decodes[2].load = 1
    placer = turns(*prefills, *decodes)
    seen = [placer.pair(Asked(), room=Room((), lambda _: 3)) for _ in range(6)]
    assert {pair.prefill for pair in seen} == set(prefills[1:])
    assert {pair.decodes[0] for pair in seen} == set(decodes[:2])


@pytest.mark.parametrize("ask", ["prefills", "decodes", "alike"])
def test_one_that_answers_alone_has_room(ask):
    prefills, decodes = fleet()
    workers = prefills if ask == "prefills" else decodes
    placer = turns(*prefills, *decodes)
    more = (workers[0],) if ask == "alike" else ()
    full(workers[0])
    asked = [getattr(placer, ask)(Asked(), *more, room=ONE_LEG)[0] for _ in range(6)]
    assert Counter(asked) == dict.fromkeys(workers[1:], 3)
    full(*workers)
    with pytest.raises(NoRoomError) as caught:
        getattr(placer, ask)(Asked(), *more, room=ONE_LEG)
    assert caught.value.role is workers[0].role


# -- by each policy ----------------------------------------------------------------------------------------------------

ALL = [(name, over) for name in PolicyName for over in ({}, {"routing_key_override": True})]


@pytest.mark.parametrize(("name", "over"), ALL)
@given(
    count=st.sampled_from([1, 2, 3, 5, 20, 40]),
    limit=st.sampled_from([1, 4]),
    free=st.sets(st.integers(0, 39)),
    keys=st.lists(st.sampled_from([{}, KEY, {"x-smg-routing-key": b"b"}, {"x-smg-target-worker": b"1"}]), max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_in_place_of_a_choice_that_does_not_fit_comes_one_that_does(name, over, count, limit, free, keys):
    workers = tuple(worker(Role.PREFILL, port) for port in range(1, 1 + count))
    policy = policy_of(name, Tuning(**over), lambda: 0.0)
    fitting = {each for number, each in enumerate(workers) if number in free}
    for number, fields in enumerate(keys):
        asked = Asked(fields=fields, prompt=b'"%d %0500d"' % (number % 3, 0), tokens=130 * number)
        first, *_ = policy.rank(workers, limit, asked)
        if first not in fitting:
            ranked = policy.pass_over(workers, limit, asked, fitting.__contains__)
            assert len(ranked) == len(set(ranked))
            assert len(ranked) <= limit
            assert set(ranked) <= set(workers)
            assert ranked[0] in fitting if fitting else not ranked
            if not fitting:
                continue
            first = ranked[0]
        first.begin(asked.tokens)
        policy.learn(asked, first)


@given(key=st.binary(min_size=1, max_size=8), count=st.integers(1, 40), free=st.sets(st.integers(0, 39)))
def test_a_key_goes_where_it_would_if_there_were_only_those_with_room(key, count, free):
    workers = tuple(worker(Role.PREFILL, port) for port in range(1, 1 + count))
    left = tuple(each for number, each in enumerate(workers) if number in free)
    asked = Asked(fields={"x-smg-routing-key": key})
    for name in (PolicyName.CONSISTENT_HASHING, PolicyName.PREFIX_HASH):
        policy, other = (policy_of(name, Tuning(), lambda: 0.0) for _ in range(2))
        policy.rank(workers, 4, asked)
        ranked = policy.pass_over(workers, 4, asked, left.__contains__)
        assert list(ranked[:1]) == (list(other.rank(left, 4, asked)[:1]) if left else [])


@pytest.mark.parametrize("name", [PolicyName.CONSISTENT_HASHING, PolicyName.PREFIX_HASH])
def test_no_circle_is_made_for_one_request(name):
    """It takes milliseconds in a large fleet."""
    prefills, decodes = fleet(8, 8)
    policies = [policy_of(name, Tuning(), lambda: 0.0) for _ in range(2)]
    placer = Placer(FakeFleet(*prefills, *decodes), *policies)
    full(*prefills[:6], *decodes[2:])
    for number in range(50):
        placer.pair(Asked(fields={"x-smg-routing-key": b"%d" % number}), room=ONE_LEG)
    assert [len(policy._rings._rings) for policy in policies] == [1, 1]


# -- what is not chosen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("over", [{}, {"routing_key_override": True}])
def test_a_choice_that_came_to_nothing_has_not_been(name, over):
    """The same requests go to the same workers, whether or not there are others in between that nobody has room for."""
    prefills, decodes = fleet()
    chosen = []
    for others in (0, 3):
        policies = [policy_of(name, Tuning(balance_abs_threshold=10, **over), lambda: 0.0) for _ in range(2)]
        placer = Placer(FakeFleet(*prefills, *decodes), *policies)
        served = []
        for number in range(40):
            for other in range(others):
                limited = prefills if number % 2 else decodes
                full(*limited)
                asked = Asked(tokens=100 * other, fields=KEY if other else {}, prompt=b"x" * other)
                with pytest.raises(NoRoomError):
                    placer.pair(asked, room=ONE_LEG)
                placer.over(asked.notes)
                for each in limited:
                    each.load = 0
            asked = Asked(tokens=number * 37 % 500, fields={"x-smg-routing-key": b"%d" % (number % 5)})
            served.append((pair := placer.pair(asked, room=ONE_LEG)).prefill)
            served.append(pair.decodes[0])
            placer.over(asked.notes)
        chosen.append(served)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("over", [{}, {"routing_key_override": True}])
@pytest.mark.parametrize("busy", range(3))
def test_nor_has_one_that_was_passed_over_for_another(name, over, busy):
    """One prefill is at its limit, and all decodes are: what is taken back is the choice among the others."""
    prefills, decodes = fleet(3, 2)
    chosen = []
    for others in (0, 3):
        policies = [policy_of(name, Tuning(balance_abs_threshold=10, **over), lambda: 0.0) for _ in range(2)]
        placer = Placer(FakeFleet(*prefills, *decodes), *policies)
        served = []
        for number in range(30):
            full(prefills[busy], *decodes)
            for other in range(others):
                with pytest.raises(NoRoomError):
                    placer.pair(Asked(tokens=100 + other, fields=KEY, prompt=b"x" * other), room=ONE_LEG)
            for each in (*prefills, *decodes):
                each.load = 0
            asked = Asked(tokens=number * 37 % 500, fields={"x-smg-routing-key": b"%d" % number})
            served.append(placer.pair(asked, room=ONE_LEG).prefill)
            placer.over(asked.notes)
        chosen.append(served)
    assert chosen[0] == chosen[1]


def test_who_is_full_for_a_while_has_its_turn_when_it_is_not():
    prefills, decodes = fleet(3, 1, limit=None)
    prefills[0].limit = 1
    placer = turns(*prefills, *decodes)
    full(prefills[0])
    between = [placer.pair(Asked(), room=ONE_LEG).prefill for _ in range(6)]
    assert Counter(between) == dict.fromkeys(prefills[1:], 3)
    prefills[0].load = 0
    assert placer.pair(Asked(), room=ONE_LEG).prefill is prefills[0]


def test_a_prompt_that_waits_is_not_on_its_way_to_anybody():
    prefills, decodes = fleet()
    policy = CacheAwarePolicy(CacheAwareSettings(), lambda: 0.0)
    placer = Placer(FakeFleet(*prefills, *decodes), policy, RoundRobinPolicy())
    full(*prefills)
    asked = Asked(prompt=b"x" * 5000, tokens=1250)
    with pytest.raises(NoRoomError):
        placer.pair(asked, room=ONE_LEG)
    assert policy not in asked.notes
    assert not any(cache.pending for cache in policy._index.caches.values())


def test_a_key_is_not_given_a_worker_that_has_no_room():
    prefills, decodes = fleet(2, 1)
    policy = policy_of(PolicyName.MANUAL, Tuning(), lambda: 0.0)
    placer = Placer(FakeFleet(*prefills, *decodes), policy, RoundRobinPolicy())
    full(prefills[0])
    for _ in range(8):
        asked = Asked(fields=KEY)
        assert placer.pair(asked, room=ONE_LEG).prefill is prefills[1]
        placer.over(asked.notes)
    assert policy._groups == {prefills[1]: 1}


# -- overloaded workers -------------------------------------------------------------------------------------------


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(ON)
    yield rig
    await rig.registry.close()


async def test_others_that_are_full_are_waited_for_before_an_overloaded_one_is_used(rig: Rig) -> None:
    prefill, other = [await rig.add(Role.PREFILL) for _ in range(2)]
    decode, second = [await rig.add(Role.DECODE) for _ in range(2)]
    rig.burden(other, second)
    for role, at_limit in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        at_limit.limit = at_limit.load = 1
        with pytest.raises(NoRoomError) as caught:
            rig.placer.pair(Asked(), room=ONE_LEG)
        assert caught.value.role is role
        at_limit.limit = None
    decode.limit = decode.load = 1
    with pytest.raises(NoRoomError):
        rig.placer.decodes(Asked(), room=ONE_LEG)
    with pytest.raises(NoRoomError):
        rig.placer.alike(Asked(), decode, room=ONE_LEG)


async def test_where_all_are_overloaded_any_that_has_room_serves(rig: Rig) -> None:
    prefills = [await rig.add(Role.PREFILL) for _ in range(2)]
    decodes = [await rig.add(Role.DECODE) for _ in range(2)]
    rig.burden(*prefills, *decodes)
    for full_one in (prefills[0], decodes[0]):
        full_one.limit = full_one.load = 1
    pair = rig.placer.pair(Asked(), room=ONE_LEG)
    assert (pair.prefill, pair.decodes[0]) == (prefills[1], decodes[1])
    assert rig.placer.decodes(Asked(), room=ONE_LEG)[0] is decodes[1]


async def test_an_overloaded_one_is_used_when_the_others_have_failed(rig: Rig) -> None:
    prefill, other = [await rig.add(Role.PREFILL) for _ in range(2)]
    await rig.add(Role.DECODE)
    rig.burden(other)
    assert rig.placer.pair(Asked(), (prefill,), room=ONE_LEG).prefill is other


def test_a_full_worker_is_met_with_once_in_a_round():
    """Else every request would pay for the look at all of them."""
    prefills, decodes = fleet(4, 1, limit=None)
    prefills[0].limit = 1
    full(prefills[0])
    placer = turns(*prefills, *decodes)
    looks = []
    on = Room.on

    class Counting(Room):
        def on(self, worker, legs=1):
            looks.append(worker)
            return on(self, worker, legs)

    for _ in range(6):
        placer.pair(Asked(), room=Counting())
    assert looks.count(prefills[0]) == 2
