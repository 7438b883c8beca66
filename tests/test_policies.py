"""What holds for every policy, and what load does to those that look at it."""

import math
import random
from collections import Counter

import pytest
from fakes import Asked, FakeFleet, ranks, worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.errors import GatewayError
from extproc.policies.names import LoadMetric, PolicyName
from extproc.policies.partners import CANDIDATES
from extproc.policies.placement import Placer
from extproc.policies.table import OF_KEYS, policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role, Status

TINY = Asked()
LAID_OVER = [Tuning(), Tuning(routing_key_override=True), Tuning(dp_minimum_tokens_scheduler=True)]


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def fleet(count, role=Role.PREFILL):
    return tuple(worker(role, port) for port in range(1, count + 1))


def busy(one, load=0, tokens=0, **said):
    """``one`` with so much of ours under way, whose engine said ``said`` when it was as busy with ours."""
    one.load, one.tokens = load, tokens
    one.load_then, one.tokens_then = load, tokens
    one.engine_load = EngineLoad(0.0, [RankLoad(**said)]) if said else None
    return one


requests = st.builds(
    Asked,
    fields=st.dictionaries(
        st.sampled_from(["x-smg-routing-key", "x-smg-target-worker", "authorization", "cookie", "x-forwarded-for"]),
        st.sampled_from([b"", b"a", b"0", b"17", b"http://127.0.0.1:2", b"b, c", b"\xff" * 200]),
    ),
    prompt=st.sampled_from([b"", b'"a prompt"', b"[1,2,3]", b'[{"role":"user"}]']),
    tokens=st.integers(0, 100_000),
    rid=st.sampled_from(["", "r", "r_t1", "_t2"]),
)
said = st.one_of(
    st.none(),
    st.builds(
        lambda **figures: EngineLoad(0.0, [RankLoad(**figures)]),
        running=st.one_of(st.none(), st.integers(0, 9)),
        waiting=st.one_of(st.none(), st.integers(0, 9)),
        waiting_tokens=st.one_of(st.none(), st.integers(0, 9000)),
        used_tokens=st.one_of(st.none(), st.integers(0, 9000)),
        kv_usage=st.one_of(st.none(), st.floats(0, 2)),
        throughput=st.one_of(st.none(), st.floats(0, 9000)),
    ),
)


@pytest.mark.parametrize("tuning", LAID_OVER, ids=["alone", "sticky", "rank"])
@pytest.mark.parametrize("name", PolicyName)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_ranking_is_of_candidates_without_repetition(name, tuning, data):
    """Whatever the load, the request, the candidates of the call before, and who answered or is gone."""
    clock = Clock()
    policy = policy_of(name, tuning, clock)
    workers = [*fleet(7), *ranks(Role.PREFILL, 50, 3)]
    for _ in range(data.draw(st.integers(1, 8))):
        for one in workers:
            one.load, one.tokens = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 9000))
            one.engine_load = data.draw(said)
        chosen = data.draw(st.sets(st.sampled_from(workers), min_size=1))
        candidates = tuple(one for one in workers if one in chosen)
        limit, request = data.draw(st.integers(1, 12)), data.draw(requests)
        ranked = policy.rank(candidates, limit, request)
        assert len(ranked) == len(set(ranked)) == min(limit, len(candidates))
        assert set(ranked) <= set(candidates)
        clock.time += data.draw(st.sampled_from([0, 1, 10, 20_000]))
        match data.draw(st.integers(0, 3)):
            case 0:
                policy.learn(request, data.draw(st.sampled_from(workers)))
            case 1:
                policy.forget(data.draw(st.sampled_from(workers)))
            case 2:
                policy.over(request.notes)


@pytest.mark.parametrize("name", [name for name in PolicyName if name not in (PolicyName.PASSTHROUGH, *OF_KEYS)])
def test_nobody_starves(name):
    """Of equal workers each gets requests, which are under way for a while."""
    random.seed(1)
    workers = fleet(8)
    policy = policy_of(name, Tuning(), Clock())
    chosen, live = Counter(), []
    for number in range(1600):
        request = Asked(prompt=b'"%d"' % number, tokens=number * 37 % 5000)
        first = policy.rank(workers, 1, request)[0]
        chosen[first] += 1
        first.load += 1
        first.tokens += request.tokens
        live.append((first, request.tokens))
        if len(live) > 40:
            done, tokens = live.pop(0)
            done.load -= 1
            done.tokens -= tokens
    assert len(chosen) == len(workers)
    assert min(chosen.values()) > 1600 / 8 / 4


@pytest.mark.parametrize("name", PolicyName)
def test_through_placement(name):
    """A pair of each policy; one that failed is not chosen again."""
    if name is PolicyName.BUCKET:
        policies = policy_of(name, Tuning(), Clock()), policy_of(PolicyName.RANDOM, Tuning(), Clock())
    else:
        policies = [policy_of(name, Tuning(), Clock()) for _ in range(2)]
    prefills, decodes = fleet(5), tuple(worker(Role.DECODE, port) for port in range(11, 20))
    place = Placer(FakeFleet(*prefills, *decodes), *policies)
    request = Asked(fields={"x-smg-routing-key": b"k"})
    failed = []
    for _ in range(4):
        pair = place.pair(request, failed)
        assert pair.prefill in prefills
        assert len(pair.decodes) == CANDIDATES
        assert not {pair.prefill, *pair.decodes} & set(failed)
        failed += [pair.prefill, pair.decodes[0]]


STATES = (Status.READY, Status.READY, Status.NOT_READY, Status.DRAINING, Status.FAILED)


@pytest.mark.parametrize("tuning", LAID_OVER, ids=["alone", "sticky", "rank"])
@pytest.mark.parametrize("name", PolicyName)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), asked=st.lists(requests, min_size=2, max_size=8))
def test_nobody_who_cannot_serve_is_ever_chosen(name, tuning, seed, asked):
    """Whatever a policy has learned of him: first, for fail-over, for a request alone or tried again."""
    clock, chance = Clock(), random.Random(seed)
    decode = PolicyName.RANDOM if name is PolicyName.BUCKET else name
    workers = [*fleet(4), *(worker(Role.DECODE, port) for port in range(11, 15))]
    place = Placer(FakeFleet(*workers), policy_of(name, tuning, clock), policy_of(decode, tuning, clock, Role.DECODE))
    for request in asked:
        for one in workers:
            one.status = chance.choice(STATES)
        usable = {one.role for one in workers if one.usable}
        if len(usable) < 2:
            with pytest.raises(GatewayError, match="is available"):
                place.pair(request)
            continue
        pair = place.pair(request)
        chosen = {pair.prefill, *pair.decodes, *place.decodes(request), *place.prefills(request)}
        chosen |= {*place.alike(request, pair.decodes[0], pair.decodes[:1]), *place.others(request, pair.prefill)}
        assert all(one.usable for one in chosen)
        place.answered(request, pair.prefill)
        place.answered(request, pair.decodes[0])
        clock.time += chance.choice((0, 10))
        place.over(request.notes)


def test_passthrough_is_the_first_as_long_as_it_can():
    workers = fleet(3)
    policy = policy_of(PolicyName.PASSTHROUGH, Tuning(), Clock())
    assert tuple(policy.rank(workers, 2, TINY)) == workers[:2]
    assert tuple(policy.rank(workers[1:], 1, TINY)) == workers[1:2]


# -- least_load --------------------------------------------------------------------------------------------------------


def least_load(**tuning):
    clock = Clock()
    return policy_of(PolicyName.LEAST_LOAD, Tuning(**tuning), clock), clock


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60))
def test_where_no_engine_says_anything_the_fewest_requests_decide(loads):
    policy, _ = least_load()
    workers = fleet(len(loads))
    for one, load in zip(workers, loads, strict=True):
        busy(one, load, tokens=1000 - load)
    assert policy.rank(workers, 1, TINY)[0].load == min(loads)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)), min_size=2, max_size=60))
def test_the_shortest_wait_is_ours_and_what_others_have_queued(queues):
    policy, _ = least_load()
    workers = fleet(len(queues))
    for one, (ours, waiting) in zip(workers, queues, strict=True):
        busy(one, tokens=ours, waiting_tokens=waiting, throughput=3000.0)
    chosen = policy.rank(workers, 1, TINY)[0]
    assert max(chosen.tokens, chosen.engine_load.waiting_tokens) == min(max(queue) for queue in queues)


def test_what_is_sent_counts_at_once_and_what_is_done_no_more():
    policy, _ = least_load()
    one, other = workers = fleet(2)
    for each in workers:
        busy(each, tokens=4000, waiting_tokens=4000)
    one.tokens += 10
    assert policy.rank(workers, 1, TINY)[0] is other
    one.tokens -= 3000
    assert policy.rank(workers, 1, TINY)[0] is one


def test_a_full_kv_cache_is_worth_seconds():
    policy, _ = least_load()
    full, other = workers = fleet(2)
    busy(full, tokens=0, kv_usage=0.9, waiting=0)
    busy(other, tokens=2600, kv_usage=0.0, waiting=0)  # 1.3 s
    assert policy.rank(workers, 1, TINY)[0] is other  # 0.15 * 9 = 1.35 s
    assert least_load(least_load_kv_pressure_weight=0)[0].rank(workers, 1, TINY)[0] is full


def test_a_queue_of_which_only_the_number_is_known():
    workers = fleet(2)
    busy(workers[0], waiting=2)
    busy(workers[1], waiting_tokens=3000)
    assert least_load(least_load_mean_prefill_tokens=1000)[0].rank(workers, 1, TINY)[0] is workers[0]
    assert least_load(least_load_mean_prefill_tokens=2000)[0].rank(workers, 1, TINY)[0] is workers[1]


def test_an_idle_engine_does_not_seem_slow():
    """What it generates says how much it was asked for, unless somebody waits."""
    policy, _ = least_load()
    idle, other = workers = fleet(2)
    busy(idle, tokens=100, waiting=0, throughput=3.0)
    busy(other, tokens=200, waiting=0, throughput=1500.0)
    assert policy.rank(workers, 1, TINY)[0] is idle
    policy, _ = least_load()
    slow, other = workers = fleet(2)
    busy(slow, tokens=100, waiting=1, waiting_tokens=100, throughput=3.0)
    busy(other, tokens=200, waiting=1, waiting_tokens=100, throughput=1500.0)
    assert policy.rank(workers, 1, TINY)[0] is other


@pytest.mark.parametrize("slowest", [5e-324, 1e-300])
def test_an_engine_that_hardly_moves_is_not_chosen_and_no_riddle(slowest):
    """One over such a number is infinite, and nothing compares with what comes of that."""
    for turned in (1, -1):
        policy, _ = least_load()
        stuck, other = workers = fleet(2)
        busy(stuck, tokens=0, waiting=1, waiting_tokens=0, throughput=slowest)
        busy(other, tokens=200, waiting=1, waiting_tokens=100, throughput=1500.0)
        _, scores = policy._scored(workers[::turned])
        assert all(math.isfinite(score) for score in scores)
        busy(stuck, tokens=1, waiting=1, waiting_tokens=100, throughput=slowest)
        assert least_load()[0].rank(workers[::turned], 1, TINY)[0] is other


def test_who_says_nothing_counts_as_a_mean_worker():
    policy, _ = least_load()
    silent, *others = workers = fleet(3)
    busy(silent, tokens=1000)
    for each in others:
        busy(each, tokens=500, waiting=1, waiting_tokens=2000, throughput=1000.0)
    assert policy.rank(workers, 1, TINY)[0] is silent


def test_news_of_engines_are_seen():
    policy, clock = least_load()
    one, other = workers = fleet(2)
    for each in workers:
        busy(each, waiting_tokens=100)
    policy.rank(workers, 1, TINY)
    busy(one, waiting_tokens=9000)
    clock.time = 1
    assert policy.rank(workers, 1, TINY)[0] is other


def test_a_long_queue_is_passed_over_while_there_is_another():
    policy, _ = least_load(least_load_max_waiting_requests=3)
    short, long = workers = fleet(2)
    busy(short, load=1, tokens=9000, waiting=2, waiting_tokens=9000)
    busy(long, load=1, tokens=10, waiting=3, waiting_tokens=10)
    assert policy.rank(workers, 1, TINY)[0] is short
    short.load += 1  # sent since
    assert policy.rank(workers, 1, TINY)[0] is long  # all are that long: there is no other than the least


def test_of_many_equal_workers_not_always_the_same():
    policy, _ = least_load()
    workers = fleet(600)
    assert len({policy.rank(workers, 1, TINY)[0] for _ in range(100)}) > 50
    for each in workers:
        busy(each, load=5)
    for each in workers[::100]:
        busy(each, load=1)
    assert all(policy.rank(workers, 1, TINY)[0].load == 1 for _ in range(50))  # one of 256 is among the six


# -- power_of_two ------------------------------------------------------------------------------------------------------


def power_of_two(metric=LoadMetric.EXPECTED_WAIT):
    return policy_of(PolicyName.POWER_OF_TWO, Tuning(power_of_two_load_metric=metric), Clock())


@pytest.mark.parametrize("metric", LoadMetric)
def test_the_busiest_of_all_is_never_chosen(metric):
    policy = power_of_two(metric)
    busiest, *_ = workers = fleet(5)
    busy(busiest, load=9)
    chosen = Counter(policy.rank(workers, 1, TINY)[0] for _ in range(400))
    assert set(chosen) == set(workers[1:])
    assert policy.rank(workers[:2], 2, TINY)[0] is workers[1]


def test_each_pair_is_as_likely_as_any():
    random.seed(1)
    workers = fleet(4)
    for load, each in enumerate(workers):
        busy(each, load=load)
    policy = power_of_two(LoadMetric.LEAST_REQUESTS)
    pairs = Counter(tuple(policy.rank(workers, 2, TINY)) for _ in range(6000))
    assert len(pairs) == 6
    assert min(pairs.values()) > 850


def test_what_its_metrics_count():
    one, other = workers = fleet(2)
    busy(one, load=3, tokens=10, running=2, waiting=1)  # all of them ours
    busy(other, load=1, tokens=5000, running=6, waiting=2, waiting_tokens=5000)
    first = {metric: power_of_two(metric).rank(workers, 1, TINY)[0] for metric in LoadMetric}
    assert first == {
        LoadMetric.EXPECTED_WAIT: one,
        LoadMetric.REQUESTS: one,  # the other has seven of others besides
        LoadMetric.LEAST_REQUESTS: other,
    }
    busy(other, load=1)
    other.envoy_active = 4  # of which three are another sidecar's
    assert power_of_two(LoadMetric.REQUESTS).rank(workers, 1, TINY)[0] is one


# -- ranks -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9000), min_size=4, max_size=4), st.sets(st.integers(0, 3), min_size=1))
def test_the_rank_with_the_fewest_tokens_of_the_chosen_server(tokens, usable):
    server = ranks(Role.DECODE, 50, 4)
    for rank, held in zip(server, tokens, strict=True):
        busy(rank, tokens=100, used_tokens=held)
    workers = tuple(rank for number, rank in enumerate(server) if number in usable)
    policy = policy_of(PolicyName.PASSTHROUGH, Tuning(dp_minimum_tokens_scheduler=True), Clock())
    chosen = policy.rank((*workers, *fleet(2)), 3, TINY)[0]
    assert chosen in workers
    assert max(tokens[chosen.dp_rank], 100) == min(max(tokens[number], 100) for number in usable)


def test_of_equal_ranks_the_lowest_and_what_was_sent_since_counts():
    server = tuple(ranks(Role.DECODE, 50, 3))
    policy = policy_of(PolicyName.PASSTHROUGH, Tuning(dp_minimum_tokens_scheduler=True), Clock())
    for expected in (0, 1, 2, 0):
        chosen = policy.rank(server, 1, TINY)[0]
        assert chosen.dp_rank == expected
        chosen.tokens += 10
