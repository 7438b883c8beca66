"""Sticky sessions over any policy, and manual: what stays, what moves, and what is forgotten."""

from collections import Counter

import pytest
from fakes import Asked, FakeFleet, Rig, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.policies.least import LeastRequests
from extproc.policies.names import AssignmentMode, PolicyName
from extproc.policies.partners import CANDIDATES
from extproc.policies.placement import Placer
from extproc.policies.routing_key import RoutingKeys
from extproc.policies.sticky import MOST_UNDER_WAY, StickyPolicy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Role

WORKERS = tuple(worker(Role.DECODE, port) for port in range(1, 9))
KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def asked(key=b"k", **fields):
    return Asked(fields={} if key is None else {"x-smg-routing-key": key}, **fields)


def sticky(name=PolicyName.ROUND_ROBIN, **tuning):
    clock = Clock()
    policy = policy_of(name, Tuning(routing_key_override=True, **tuning), clock)
    policy.clock = clock
    return policy


def serve(policy, request, candidates=WORKERS):
    """A request that is answered at once, by whom it was meant for."""
    first = policy.rank(candidates, CANDIDATES, request)[0]
    policy.learn(request, first)
    policy.over(request.notes)
    return first


@pytest.mark.parametrize("name", [name for name in PolicyName if name is not PolicyName.CONSISTENT_HASHING])
@given(sets=st.lists(st.tuples(KEYS, st.sets(st.sampled_from(WORKERS))), max_size=20))
def test_a_key_stays_while_others_come_and_go(name, sets):
    """Other workers fail and come back, other keys come, load changes."""
    policy = sticky(name)
    homes = {}
    for key, members in sets:
        candidates = tuple(w for w in WORKERS if w in members or w in homes.values() or not (members or homes))
        chosen = serve(policy, asked(key), candidates)
        assert homes.setdefault(key, chosen) is chosen
        chosen.load += 1
    for each in WORKERS:
        each.load = 0


def test_requests_without_a_key_go_as_the_policy_says():
    policy = sticky()
    serve(policy, asked(b"k"))
    assert [serve(policy, asked(None)) for _ in range(8)] == [*WORKERS[1:], WORKERS[0]]


def test_turns_of_a_conversation_are_told_by_their_id():
    policy = sticky()
    homes = {serve(policy, asked(None, rid=rid)) for rid in ("conv", "conv_t1", "conv_t2", "conv_t2_r1", "conv_t12")}
    assert len(homes) == 1
    assert serve(policy, asked(None, rid="conv_x1")) not in homes
    assert serve(policy, asked(b"key", rid="conv")) not in homes  # a header counts before it
    alone = {serve(policy, asked(None, rid=rid)) for rid in ("_t1", "", "_r2")}
    assert len(alone) == 3  # of these nothing is left


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"x-two": b"2", "x-one": b"1"}, b"1"),
        ({"x-two": b"2", "x-one": b""}, b"2"),
        ({"x-smg-routing-key": b"3"}, None),
        ({"x-one": b"x" * 128}, b"x" * 128),
    ],
)
def test_the_first_header_that_is_there_counts(fields, expected):
    assert RoutingKeys(("x-one", "x-two")).of(Asked(fields=fields, rid="r")) == expected


def test_of_long_keys_little_is_kept():
    keys = RoutingKeys(("x-one",))
    one, other = (keys.of(Asked(fields={"x-one": b"x" * 4000 + end})) for end in (b"1", b"2"))
    assert len(one) == len(other) == 64
    assert one != other


def test_models_and_roles_are_apart():
    policy = sticky()
    assert serve(policy, asked(model="a")) is not serve(policy, asked(model="b"))
    policies = [sticky(PolicyName.PASSTHROUGH) for _ in range(2)]
    prefill, decode = worker(Role.PREFILL, 11), WORKERS[0]
    place = Placer(FakeFleet(prefill, decode), *policies)
    assert place.pair(asked()) == (prefill, [decode])


def test_one_that_cannot_serve_is_passed_over_and_who_did_serve_is_kept():
    policy = sticky()
    home = serve(policy, asked())
    left = tuple(w for w in WORKERS if w is not home)
    second = serve(policy, asked(), left)
    assert [serve(policy, asked(), left) for _ in range(3)] == [second] * 3
    assert serve(policy, asked()) is second  # the first one came back, with nothing
    without_second = tuple(w for w in WORKERS if w is not second)
    assert serve(policy, asked(), without_second) is home  # better than a third one


def test_who_answered_after_fail_over_is_kept():
    policy = sticky()
    request = asked()
    ranked = policy.rank(WORKERS, CANDIDATES, request)
    policy.learn(request, ranked[2])
    policy.over(request.notes)
    assert serve(policy, asked()) is ranked[2]


def test_an_attempt_that_failed_holds_nothing():
    policy = sticky()
    for _ in range(5):
        request = asked()
        policy.rank(WORKERS, 1, request)
        policy.rank(WORKERS, 1, request)  # the same request, anew
        policy.over(request.notes)
        policy.over(request.notes)
    request = asked()
    home = policy.rank(WORKERS, 1, request)[0]
    others = [policy.rank(WORKERS, 1, asked())[0] for _ in range(MOST_UNDER_WAY - 1)]
    assert {home, *others} == {WORKERS[0]}


def test_more_than_two_at_once_go_elsewhere_and_come_back():
    policy = sticky()
    under_way = [(request, policy.rank(WORKERS, 1, request)[0]) for request in [asked() for _ in range(6)]]
    counts = Counter(chosen for _, chosen in under_way)
    assert len(counts) == 3
    assert set(counts.values()) == {MOST_UNDER_WAY}
    home = under_way[0][1]
    for request, chosen in under_way:
        policy.learn(request, chosen)
        policy.over(request.notes)
    assert serve(policy, asked()) is home


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=60), st.integers(1, 8))
def test_no_worker_has_more_of_a_key_than_two_while_another_has_room(steps, count):
    policy = StickyPolicy(LeastRequests(), RoutingKeys(("x-smg-routing-key",)), Clock(), 100)
    candidates = WORKERS[:count]
    under_way = []
    for key, ends in steps:
        if ends and under_way:
            request, chosen, _ = under_way.pop(0)
            chosen.load -= 1
            policy.over(request.notes)
        request = asked(key)
        chosen = policy.rank(candidates, 1, request)[0]
        before = Counter(w for _, w, other in under_way if other == key)
        free = [w for w in candidates if before[w] < MOST_UNDER_WAY]
        # The policy below is asked for three: those of a few more may all be full.
        assert before[chosen] < MOST_UNDER_WAY or len(free) <= max(0, count - 3)
        chosen.load += 1
        under_way.append((request, chosen, key))
    for request, chosen, _ in under_way:
        chosen.load -= 1
        policy.over(request.notes)


def test_a_prefill_leg_is_under_way_until_it_was_answered():
    prefills = tuple(worker(Role.PREFILL, port) for port in (1, 2, 3))
    policy = sticky()
    for _ in range(5):
        request = asked()
        policy.learn(request, policy.rank(prefills, 1, request)[0])  # and its decode goes on
    assert policy.rank(prefills, 1, asked())[0] is prefills[0]


def test_unused_keys_are_forgotten():
    policy = sticky(max_idle_secs=10)
    home = serve(policy, asked())
    policy.clock.time = 9
    assert serve(policy, asked()) is home
    policy.clock.time = 18
    assert serve(policy, asked()) is home
    serve(policy, asked(b"other"))
    assert len(policy) == 2
    policy.clock.time = 28
    serve(policy, asked(b"third"))
    assert len(policy) == 1


def test_only_so_many_keys_are_remembered():
    policy = StickyPolicy(LeastRequests(), RoutingKeys(("x-smg-routing-key",)), Clock(), 100, most_keys=3)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        serve(policy, asked(key))
    assert len(policy) == 3
    homes = [serve(policy, asked(key)) for key in (b"a", b"a", b"a")]
    assert len(set(homes)) == 1


def test_a_request_that_outlives_its_key_changes_no_count():
    """Its worker has it under way for longer than keys are kept: the other keys' numbers stay right."""
    groups = {}
    policy = StickyPolicy(
        LeastRequests(), RoutingKeys(("x-smg-routing-key",)), Clock(), 100, groups=groups, most_keys=1
    )
    old = asked(b"old")
    policy.rank(WORKERS[:1], 1, old)
    home = serve(policy, asked(b"new"), WORKERS[1:2])
    policy.learn(old, WORKERS[2])
    policy.over(old.notes)
    assert groups == {home: 1}


class Told(LeastRequests):
    learns = holds = True

    def __init__(self):
        self.told = []

    def learn(self, *_):
        self.told.append("learn")

    def over(self, *_):
        self.told.append("over")

    def forget(self, *_):
        self.told.append("forget")


def test_the_policy_below_is_told_everything():
    policy = StickyPolicy(Told(), RoutingKeys(("x-smg-routing-key",)), Clock(), 100)
    serve(policy, asked())
    serve(policy, asked(None))
    policy.forget(WORKERS[0])
    assert policy._inner.told == ["learn", "over", "learn", "over", "forget"]


# -- who gets a new key ------------------------------------------------------------------------------------------------


def test_manual_gives_a_new_key_to_anyone_and_keeps_it():
    policy = policy_of(PolicyName.MANUAL, Tuning(), Clock())
    homes = {key: serve(policy, asked(b"%d" % key)) for key in range(200)}
    assert set(homes.values()) == set(WORKERS)
    assert all(serve(policy, asked(b"%d" % key)) is home for key, home in homes.items())
    assert len({policy.rank(WORKERS, 1, asked(b"1"))[0] for _ in range(9)}) == 1  # however many are under way
    assert len({serve(policy, asked(None, rid="r")) for _ in range(100)}) > 4


@pytest.mark.parametrize("mode", [AssignmentMode.MIN_LOAD, AssignmentMode.DELEGATE])
def test_the_fewest_requests(mode):
    policy = policy_of(PolicyName.MANUAL, Tuning(assignment_mode=mode), Clock())
    workers = tuple(worker(Role.DECODE, port) for port in (1, 2, 3))
    workers[0].load = workers[2].load = 1
    assert serve(policy, asked(), workers) is workers[1]
    workers[1].load = 9
    assert serve(policy, asked(), workers) is workers[1]
    assert serve(policy, asked(b"other"), workers) is not workers[1]


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 8))
def test_the_fewest_keys(keys, count):
    for policy in (
        policy_of(PolicyName.MANUAL, Tuning(assignment_mode=AssignmentMode.MIN_GROUP), Clock()),
        sticky(assignment_mode=AssignmentMode.MIN_GROUP),
    ):
        homes = {key: serve(policy, asked(b"%d" % key), WORKERS[:count]) for key in keys}
        counts = Counter(homes.values())
        sizes = [counts[w] for w in WORKERS[:count]]
        assert max(sizes) - min(sizes) <= 1


def test_keys_that_are_forgotten_make_room():
    clock = Clock()
    policy = policy_of(PolicyName.MANUAL, Tuning(assignment_mode=AssignmentMode.MIN_GROUP, max_idle_secs=10), clock)
    workers = WORKERS[:2]
    for key in (b"a", b"b"):
        serve(policy, asked(key), workers[:1])
    clock.time = 20
    assert {serve(policy, asked(key), workers) for key in (b"c", b"d")} == set(workers)


# -- in a gateway ------------------------------------------------------------------------------------------------------

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}


def rig_with(policy, workers):
    rig = Rig(*workers)
    rig.gateway.placer = Placer(rig.fleet, policy_of(PolicyName.ROUND_ROBIN, Tuning(), Clock()), policy)
    return rig


@pytest.mark.parametrize("ending", ["answered", "left", "refused"])
def test_whatever_becomes_of_a_request_its_place_is_free_again(ending):
    policy = sticky(PolicyName.PASSTHROUGH)
    decodes = [worker(Role.DECODE, port) for port in (11, 12, 13)]
    rig = rig_with(policy, [worker(Role.PREFILL, 1, bootstrap_port=8998), *decodes])
    for _ in range(MOST_UNDER_WAY + 2):
        client = rig.post("/v1/chat/completions", CHAT, headers=[("x-smg-routing-key", "k")])
        if ending == "answered":
            rig.egress.legs[-1].answer()
            client.decode_head(200, [("x-pd-upstream", "127.0.0.1:11")])
        elif ending == "refused":
            rig.egress.legs[-1].answer(400)
        client.close()
    under_way = [asked() for _ in range(MOST_UNDER_WAY)]
    assert [policy.rank(decodes, 1, request)[0] for request in under_way] == decodes[:1] * MOST_UNDER_WAY
