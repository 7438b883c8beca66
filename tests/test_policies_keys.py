"""Policies by which the same goes to the same worker: the ring, its bounded load, and whom a client names."""

from collections import Counter
from itertools import pairwise

import pytest
from fakes import Asked, ranks, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.policies.names import PolicyName
from extproc.policies.ring import Ring, Rings
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.worker import Role

KEYS = [b"key-%d" % number for number in range(300)]
WORKERS = tuple(worker(Role.DECODE, port) for port in range(1, 13))


def keyed(key, **fields):
    return Asked(fields={"x-smg-routing-key": key}, **fields)


def policy(name=PolicyName.CONSISTENT_HASHING, **tuning):
    return policy_of(name, Tuning(**tuning), lambda: 0.0)


# -- the ring ----------------------------------------------------------------------------------------------------------


@given(st.sets(st.sampled_from(WORKERS), min_size=1), st.sampled_from(WORKERS))
def test_who_comes_takes_only_its_own_keys_and_who_goes_gives_only_those(members, changing):
    without = Ring(tuple(w for w in WORKERS if w in members - {changing}) or WORKERS[:1])
    if changing in without.workers:
        return
    with_it = Ring((*without.workers, changing))
    for key in KEYS:
        before, after = without.first(key), with_it.first(key)
        assert after is before or after is changing


@given(st.sets(st.sampled_from(WORKERS), min_size=2), st.integers(0, 10**6), st.integers(1, 6))
def test_the_next_in_order_is_who_gets_the_key_without_the_first(members, seed, limit):
    key = b"%d" % seed
    workers = tuple(w for w in WORKERS if w in members)
    ordered = Ring(workers).order(key, limit)
    assert len(ordered) == min(limit, len(workers))
    assert ordered[0] is Ring(workers).first(key)
    left = workers
    for expected in ordered:
        assert Ring(left).first(key) is expected
        left = tuple(w for w in left if w is not expected)


@pytest.mark.parametrize("count", [2, 10, 100])
def test_shares_are_even(count):
    ring = Ring(tuple(worker(Role.DECODE, port) for port in range(1000, 1000 + count)))
    shares = Counter(ring.first(b"%d" % number) for number in range(400 * count))
    assert len(shares) == count
    assert max(shares.values()) < 400 * 1.35
    assert min(shares.values()) > 400 * 0.65


def test_the_ring_is_the_same_in_every_gateway():
    """It depends on names alone: not on the order of registration, the process or its hash seed."""
    assert [Ring(WORKERS).first(key).url.port for key in KEYS[:8]] == PORTS
    assert [Ring(WORKERS[::-1]).first(key).url.port for key in KEYS[:8]] == PORTS


PORTS = [5, 7, 1, 11, 9, 1, 1, 4]


@given(st.sets(st.sampled_from(WORKERS), min_size=1), st.sampled_from(KEYS), st.integers(1, 6))
def test_without_some_it_is_the_circle_of_the_others(members, key, limit):
    rings, left = Rings(), tuple(w for w in WORKERS if w in members)
    rings.of(WORKERS)
    for _ in range(9):
        found = rings.of(left)
        assert list(found.order(key, limit)) == list(Ring(left).order(key, limit))
        assert found.first_of(key, lambda w: w is left[-1]) is left[-1]
        assert found.first_of(key, lambda _: False) is None


def test_no_circle_is_made_for_another_attempt(monkeypatch):
    """It takes milliseconds in a large fleet, and when a worker dies all its requests are tried again at once."""
    made = []
    before = Ring.__init__
    monkeypatch.setattr(Ring, "__init__", lambda ring, workers: (made.append(workers), before(ring, workers))[1])
    chooser = policy()
    for number in range(50):
        home = chooser.rank(WORKERS, 1, keyed(b"%d" % number))[0]
        chooser.rank(tuple(w for w in WORKERS if w is not home), 4, keyed(b"%d" % number))
    assert made == [WORKERS]
    left = WORKERS[1:]  # what the fleet is from now on
    for number in range(50):
        chooser.rank(left, 4, keyed(b"%d" % number))
    assert made == [WORKERS, left]


# -- consistent_hashing ------------------------------------------------------------------------------------------------


@given(st.sampled_from(KEYS), st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=8))
def test_a_key_stays_while_others_come_and_go(key, sets):
    one = policy()
    home = one.rank(WORKERS, 1, keyed(key))[0]
    for members in sets:
        candidates = tuple(w for w in WORKERS if w in members or w is home)
        assert one.rank(candidates, 3, keyed(key))[0] is home


def test_the_keys_of_a_request_in_order_of_what_counts():
    one = policy(routing_key_headers=("x-session", "x-smg-routing-key"))
    headers = [
        ("x-session", b"s"),
        ("x-smg-routing-key", b"k"),
        ("authorization", b"Bearer c"),
        ("x-forwarded-for", b"10.0.0.1"),
        ("cookie", b"c=1"),
    ]
    for at in range(len(headers)):
        name, value = headers[at]
        fields = dict(headers[at:])
        alone = one.rank(WORKERS, 4, Asked(fields={name: value}))
        assert one.rank(WORKERS, 4, Asked(fields=fields)) == alone
        assert one.rank(WORKERS, 4, Asked(fields={**fields, "x-session": b""} if at else fields)) == alone


def test_the_first_address_is_the_clients():
    one = policy()
    seen = {one.rank(WORKERS, 1, Asked(fields={"x-forwarded-for": b"10.0.0.1, " + proxy}))[0] for proxy in KEYS}
    assert len(seen) == 1


def test_the_gateways_own_key_is_nobodys():
    """All clients bear it: their requests must not all go to the same worker."""
    request = Asked(fields={"authorization": b"Bearer gateway"})
    assert len({policy().rank(WORKERS, 1, request)[0] for _ in range(50)}) == 1
    shared = policy(api_key="gateway")
    assert len({shared.rank(WORKERS, 1, request)[0] for _ in range(200)}) > 6


def test_who_has_no_key_goes_anywhere():
    assert len({policy().rank(WORKERS, 1, Asked())[0] for _ in range(200)}) > 6


def test_long_keys_count_to_their_end():
    one = policy()
    seen = {one.rank(WORKERS, 1, keyed(b"x" * 500 + key))[0] for key in KEYS}
    assert len(seen) == len(WORKERS)


@pytest.mark.parametrize(
    ("value", "port"),
    [
        (b"http://127.0.0.1:3", 3),
        (b"http://127.0.0.1:3/", 3),
        (b"decode-5", 5),
        (b"http://elsewhere:1, http://127.0.0.1:7", 7),
        (b"0", 1),
        (b"11", 12),
    ],
)
def test_the_worker_that_a_client_names_is_first(value, port):
    request = keyed(b"k")
    others = [w for w in policy().rank(WORKERS, 4, request) if w.url.port != port]
    request.fields["x-smg-target-worker"] = value
    ranked = policy().rank(WORKERS, 4, request)
    assert ranked[0].url.port == port
    assert list(ranked[1:]) == others[:3]


@pytest.mark.parametrize("value", [b"12", b"99999999999999999999", b"-1", b"http://elsewhere:1", b"", b"\xff", b","])
def test_who_names_nobody_goes_where_its_key_goes(value):
    request = keyed(b"k")
    expected = policy().rank(WORKERS, 4, request)
    request.fields["x-smg-target-worker"] = value
    assert policy().rank(WORKERS, 4, request) == expected


def test_of_a_server_the_rank_with_the_least_to_do_or_the_one_that_is_named():
    server = ranks(Role.DECODE, 50, 3)
    server[0].load = server[2].load = 1
    candidates = (*WORKERS, *server)
    for value, expected in ((b"http://127.0.0.1:50", server[1]), (b"http://127.0.0.1:50@2", server[2])):
        assert policy().rank(candidates, 1, Asked(fields={"x-smg-target-worker": value}))[0] is expected


# -- prefix_hash -------------------------------------------------------------------------------------------------------


def prefix_hash(**tuning):
    return policy(PolicyName.PREFIX_HASH, **tuning)


def first_of(one, **fields):
    return one.rank(WORKERS, 1, Asked(**fields))[0]


def test_prompts_that_begin_alike_go_together():
    one = prefix_hash(prefix_token_count=4)
    assert len({first_of(one, prompt=b'"Once upon a time ' + end) for end in KEYS}) == 1  # 16 bytes
    assert len({first_of(one, prompt=b'"' + start) for start in KEYS}) == len(WORKERS)
    assert len({first_of(one, prompt=b"[1, 22, 333, 4444, " + end) for end in (b"5]", b"6, 7]", b"8")}) == 1
    assert len({first_of(one, prompt=b"[%d,2,3,4,5]" % start) for start in range(300)}) == len(WORKERS)
    assert first_of(one, prompt=b"[1,22,333,4444,5]") is first_of(one, prompt=b"[1, 22, 333, 4444, 6]")


def test_a_routing_key_counts_before_the_prompt():
    one = prefix_hash()
    key = {"x-smg-routing-key": b"k"}
    assert len({first_of(one, prompt=start, fields=key) for start in KEYS}) == 1


def test_without_a_prompt_the_fewest_requests_decide():
    workers = tuple(worker(Role.PREFILL, port, load=load) for port, load in ((1, 4), (2, 2), (3, 3)))
    assert prefix_hash().rank(workers, 3, Asked(prompt=b""))[0] is workers[1]


@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=12),
    st.sampled_from(KEYS),
    st.sampled_from([1.0, 1.25, 3.0]),
    st.integers(0, 20),
    st.sampled_from([1, 4]),
)
def test_nobody_gets_more_than_its_bounded_share(loads, key, factor, margin, limit):
    one = prefix_hash(prefix_hash_load_factor=factor, prefix_hash_balance_abs_threshold=margin)
    workers = tuple(worker(Role.PREFILL, port) for port in range(1, len(loads) + 1))
    for each, load in zip(workers, loads, strict=True):
        each.load = load
    average = (sum(loads) + 1) / len(loads)
    most = max(average * factor, average + margin)
    order = Ring(workers).order(key, 4)
    chosen = one.rank(workers, limit, keyed(key))[0]
    acceptable = [w for w in order if w.load <= most]
    assert chosen.load <= most
    assert chosen is acceptable[0] if acceptable else chosen.load == min(loads)


def test_a_hot_prefix_spreads_and_no_more_than_it_must():
    one = prefix_hash()
    workers = tuple(worker(Role.PREFILL, port) for port in range(1, 9))
    served = Counter()
    for _ in range(200):
        chosen = one.rank(workers, 1, keyed(b"hot"))[0]
        chosen.load += 1
        served[chosen] += 1
    assert max(served.values()) <= 200 / 8 * 1.25 + 10
    for each in workers:
        each.load = 0
    quiet = [one.rank(workers, 1, keyed(b"hot"))[0] for _ in range(5)]
    assert all(a is b for a, b in pairwise(quiet))
