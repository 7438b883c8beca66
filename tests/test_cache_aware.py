"""cache_aware: prompts go where their beginnings are, as long as that hurts nobody."""

import json
import random
from collections import Counter

import pytest
from fakes import Asked, FakeFleet, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis.request import InferenceRequest
from extproc.apis.table import COMPLETIONS
from extproc.policies.cache_aware import MOST_LOOKED_AT, CacheAwarePolicy
from extproc.policies.cache_options import CacheAwareSettings, CacheIndex
from extproc.policies.names import PolicyName
from extproc.policies.placement import Placer
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Rig:
    """A policy and workers that are asked in turn, each done before the next one comes, unless a test says else."""

    def __init__(self, count=4, role=Role.PREFILL, exact=None, **settings):
        self.clock = Clock()
        self.workers = tuple(worker(role, port) for port in range(1, count + 1))
        self.policy = CacheAwarePolicy(CacheAwareSettings(**settings), self.clock, role, exact)

    def rank(self, prompt, limit=1, **fields):
        asked = Asked(prompt=prompt, tokens=len(prompt) // 4, **fields)
        return asked, self.policy.rank(self.workers, limit, asked)

    def sent(self, prompt, **fields):
        """Chosen, and not answered yet."""
        asked, (chosen, *_) = self.rank(prompt, **fields)
        chosen.begin(asked.tokens)
        return asked, chosen

    def served(self, prompt, **fields):
        asked, chosen = self.sent(prompt, **fields)
        self.answered(asked, chosen)
        return chosen

    def answered(self, asked, chosen):
        chosen.end(0, asked.tokens)
        self.policy.learn(asked, chosen)
        self.clock.now += 1


def text(size, seed=0):
    return random.Random(seed).randbytes(size)


# -- where a prompt goes ----------------------------------------------------------------------------------------------


@given(seeds=st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_equal_prompts_go_to_the_same_worker_while_loads_are_equal(seeds):
    rig = Rig()
    went = {}
    for seed in seeds:
        chosen = rig.served(text(3000, seed))
        assert went.setdefault(seed, chosen) is chosen


def test_a_conversation_stays_where_it_is():
    rig = Rig()
    for seed in range(20):
        rig.served(text(2000, seed))
    prompt = text(4000, 100)
    first = rig.served(prompt)
    for turn in range(20):
        prompt += text(500, 200 + turn)
        assert rig.served(prompt) is first
        rig.served(text(5000, 300 + turn))


def test_different_prompts_are_spread():
    rig = Rig()
    served = Counter(rig.served(text(3000, seed)) for seed in range(80))
    assert max(served.values()) <= 2 * min(served.values())
    assert len(served) == 4


def test_prompts_too_short_to_tell_apart_are_spread():
    rig = Rig()
    served = Counter(rig.served(b'[{"role":"user","content":"hi"}]') for _ in range(80))
    assert max(served.values()) - min(served.values()) <= 2


def held(policy, worker, prompt, **fields):
    """How many tokens of ``prompt`` the policy takes a worker to hold."""
    fields.setdefault("tokens", len(prompt) // 4)
    asked = Asked(prompt=prompt, **fields)
    return policy.held(asked, (worker,)).get(worker, 0)


def test_models_and_what_stands_before_the_prompt_are_apart():
    rig = Rig()
    prompt = text(3000)
    rig.served(prompt, model="small", context=b"tools")
    same = {"model": "small", "context": b"tools"}
    assert max(held(rig.policy, each, prompt, **same) for each in rig.workers) == 750
    for other in ({"model": "large", "context": b"tools"}, {"model": "small"}):
        assert not any(held(rig.policy, each, prompt, **other) for each in rig.workers)


@pytest.mark.parametrize("digits", [1, 5])
def test_token_ids_are_counted_and_not_their_bytes(digits):
    """Ids in JSON have 2 to 7 bytes, of which a guess by bytes would make another number of tokens."""
    rig = Rig(count=1)
    (only,) = rig.workers
    ids = [10**digits - 1 - place % 9 for place in range(4000)]
    begun = json.dumps(ids).encode()
    request = InferenceRequest.read(COMPLETIONS, b'{"model": "tiny", "prompt": %b}' % begun)
    rig.policy.rank(rig.workers, 1, request)
    rig.policy.learn(request, only)
    longer = json.dumps([*ids, *ids[:2000]]).encode()
    for prompt, tokens in ((begun, 4000), (longer, 4000)):
        asked = InferenceRequest.read(COMPLETIONS, b'{"model": "tiny", "prompt": %b}' % prompt)
        assert rig.policy.held(asked, (only,))[only] == pytest.approx(tokens, rel=0.07)


def test_affinity_is_learned_from_what_was_answered_only():
    rig = Rig()
    prompt = text(3000)
    asked, first = rig.sent(prompt)
    first.end(0, asked.tokens)
    rig.policy.over(asked.notes)  # it failed, for good
    assert not any(held(rig.policy, each, prompt) for each in rig.workers)
    asked, chosen = rig.sent(prompt)
    assert not any(held(rig.policy, each, prompt + b"!") for each in rig.workers if each is not chosen)
    rig.answered(asked, chosen)
    assert held(rig.policy, chosen, prompt) == 750


def test_requests_of_one_new_beginning_that_come_together_follow_the_first():
    rig = Rig()
    shared = text(20_000)
    chosen = [rig.sent(shared + text(300, seed))[1] for seed in range(10)]
    assert len(set(chosen[:3])) == 1
    assert len(set(chosen)) <= 3


def test_but_not_for_ever_when_it_fails_there():
    rig = Rig()
    shared = text(20_000)
    asked, first = rig.sent(shared + text(300, 1))
    first.end(0, asked.tokens)
    left = tuple(each for each in rig.workers if each is not first)
    (second,) = rig.policy.rank(left, 1, asked)  # the same request, tried again
    assert second is not first
    assert rig.sent(shared + text(300, 2))[1] is second


def test_they_do_not_herd():
    rig = Rig(count=4)
    shared = text(4000)
    chosen = Counter(rig.sent(shared + text(4000, seed))[1] for seed in range(100))
    assert max(chosen.values()) < 40


# -- load -------------------------------------------------------------------------------------------------------------


def test_a_cold_worker_gets_work_though_all_prompts_begin_alike():
    rig = Rig()
    shared = text(4000)
    for seed in range(40):
        rig.served(shared + text(1000, seed))
    cold = worker(Role.PREFILL, 99)
    rig.workers = (*rig.workers, cold)
    served = Counter(rig.served(shared + text(1000, 100 + seed)) for seed in range(200))
    assert served[cold] >= 20


def test_a_busy_worker_is_left_though_it_holds_the_prompt():
    rig = Rig(count=2)
    prompt = text(8000)
    holder = rig.served(prompt)
    for seed in range(20):
        asked = Asked(prompt=text(40_000, seed), tokens=10_000)
        rig.policy.rank((holder,), 1, asked)
        holder.begin(10_000)
    assert rig.sent(prompt)[1] is not holder


@given(loads=st.lists(st.integers(0, 300), min_size=2, max_size=8), seed=st.integers(0, 5))
def test_the_gate_bounds_imbalance(loads, seed):
    rig = Rig(count=len(loads))
    prompt = text(100_000, seed)
    rig.served(prompt)
    for each, load in zip(rig.workers, loads, strict=True):
        each.load = load
    (chosen,) = rig.rank(prompt)[1]
    mean = sum(loads) / len(loads)
    assert chosen.load <= max(64 + mean, 1.5 * mean)


def test_what_failed_weighs_nothing_in_the_end():
    rig = Rig()
    for seed in range(50):
        asked, chosen = rig.sent(text(50_000, seed))
        chosen.end(0, asked.tokens)  # nobody says what became of it
    rig.clock.now += 1000
    rig.served(b"")
    assert {rig.policy._index.cache(each).pending for each in rig.workers} == {0}


# -- what is ranked ---------------------------------------------------------------------------------------------------


@given(
    count=st.sampled_from([1, 2, 5, MOST_LOOKED_AT, MOST_LOOKED_AT + 1, 100]),
    limit=st.integers(1, 6),
    role=st.sampled_from([Role.PREFILL, Role.DECODE]),
    temperature=st.sampled_from([0.0, 0.5]),
    seeds=st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_a_ranking_is_of_candidates_without_repetition(count, limit, role, temperature, seeds):
    rig = Rig(count=count, role=role, selection_temperature=temperature)
    everybody = rig.workers
    for seed in seeds:
        rig.workers = everybody
        rig.served(text(3000, seed))
        rig.workers = tuple(each for each in everybody if random.random() < 0.7) or everybody[:1]
        ranked = rig.rank(text(3000, seed), limit)[1]
        assert len(ranked) == len(set(ranked)) == min(limit, len(rig.workers))
        assert set(ranked) <= set(rig.workers)


def test_in_a_large_fleet_the_holder_is_found():
    rig = Rig(count=500)
    for seed in range(30):
        prompt = text(5000, seed)
        first = rig.served(prompt)
        assert rig.served(prompt + text(500, 1000 + seed)) is first


def test_in_a_large_fleet_all_get_work():
    rig = Rig(count=100)
    served = Counter(rig.served(text(3000, seed)) for seed in range(2000))
    assert len(served) == 100


def test_the_holder_of_less_comes_after_the_one_of_more():
    rig = Rig(count=5, balance_abs_threshold=0)
    prompt = text(40_000)
    rig.policy.learn(Asked(prompt=prompt[:20_000]), rig.workers[3])
    rig.policy.learn(Asked(prompt=prompt), rig.workers[1])
    assert rig.rank(prompt, 3)[1][:2] == [rig.workers[1], rig.workers[3]]


def test_a_worker_that_is_another_process_holds_nothing():
    rig = Rig()
    prompt = text(3000)
    holder = rig.served(prompt)
    rig.policy.forget(holder)
    assert not held(rig.policy, holder, prompt)


def test_an_answer_of_a_process_that_was_forgotten_meanwhile_is_taken():
    rig = Rig(count=1)
    asked, chosen = rig.sent(text(3000))
    rig.policy.forget(chosen)
    rig.answered(asked, chosen)
    assert rig.served(text(3000, 1)) is chosen


def test_behind_placement_both_roles_look_at_one_chain():
    rig, decodes = Rig(), Rig(role=Role.DECODE)
    placer = Placer(FakeFleet(*rig.workers, *decodes.workers), rig.policy, decodes.policy)
    for each in rig.workers:
        each.bootstrap_port = 1
    asked = Asked(prompt=text(3000))
    pair = placer.pair(asked)
    placer.answered(asked, pair.prefill)
    placer.answered(asked, pair.decodes[0])
    again = Asked(prompt=asked.prompt)
    assert placer.pair(again).prefill is pair.prefill
    assert len([note for note in again.notes if note == "prompt chain"]) == 1


# -- decode -----------------------------------------------------------------------------------------------------------


def test_decodes_are_chosen_by_what_is_in_their_care():
    rig = Rig(role=Role.DECODE)
    prompt = text(3000)
    rig.served(prompt)
    chosen = Counter(rig.sent(prompt)[1] for _ in range(8))
    assert set(chosen.values()) == {2}


def test_of_equally_loaded_decodes_the_holder_is_chosen():
    rig = Rig(role=Role.DECODE)
    prompt = text(3000)
    rig.policy.learn(Asked(prompt=prompt), rig.workers[2])
    assert rig.rank(prompt, 4)[1][0] is rig.workers[2]


# -- options ----------------------------------------------------------------------------------------------------------


def usage(each, share, tokens=None):
    each.engine_load = EngineLoad(0, [RankLoad(kv_usage=share, max_tokens=tokens)])


@pytest.mark.parametrize("option", ["balance_token_usage_threshold", "overload_token_usage_threshold"])
@pytest.mark.parametrize(("share", "stays"), [(0.95, False), (0.5, True)])
def test_with_kv_caches_too_full_load_decides_alone(option, share, stays):
    rig = Rig(count=2, **{option: 0.8})
    prompt = text(3000)
    holder = rig.served(prompt)
    usage(holder, share)
    usage(next(each for each in rig.workers if each is not holder), 0.1)
    assert (rig.rank(prompt)[1][0] is holder) == stays


def test_what_is_less_than_the_threshold_counts_for_nothing():
    shared = text(2000)
    for threshold, follows in [(0.1, True), (0.9, False)]:
        rig = Rig(count=2, cache_threshold=threshold)
        holder = rig.served(shared)
        assert (rig.rank(shared + text(2000, 1))[1][0] is holder) == follows


def test_what_a_busy_worker_holds_decays():
    prompt = text(8000)
    for decay, stays in [(0.0, True), (5.0, False)]:
        rig = Rig(count=2, overlap_decay=decay)
        rig.policy.learn(Asked(prompt=prompt), rig.workers[0])
        rig.workers[0].begin(1500)
        rig.policy._index.cache(rig.workers[0]).pending += 6000
        assert (rig.rank(prompt)[1][0] is rig.workers[0]) == stays


def test_with_a_temperature_others_are_chosen_too():
    prompt = text(8000)
    rig = Rig(count=4, selection_temperature=10.0)
    rig.policy.learn(Asked(prompt=prompt), rig.workers[0])
    assert len({rig.rank(prompt)[1][0] for _ in range(100)}) == 4


def test_what_an_engine_has_no_room_for_is_lost():
    rig = Rig(count=1)
    (only,) = rig.workers
    usage(only, 0.5, tokens=1500)
    rig.served(text(6000, 1))
    rig.served(text(6000, 2))
    assert not held(rig.policy, only, text(6000, 1))
    assert held(rig.policy, only, text(6000, 2))


def test_not_every_answer_has_all_caches_looked_at():
    """In a large fleet that would cost more than the placement; how long tokens are is a little different each time."""
    rig = Rig(count=20)
    for each in rig.workers:
        usage(each, 0.5, tokens=400_000)
        rig.policy.learn(Asked(prompt=text(2000, 0), tokens=500), each)
    fill, filled = rig.policy._fill, []
    rig.policy._fill = lambda cache: (filled.append(cache), fill(cache))
    for number in range(1, 101):
        rig.policy.learn(Asked(prompt=text(2000 + number, number), tokens=500), rig.workers[number % 20])
    assert len(filled) < 200


def test_token_ids_are_measured_by_how_long_they_are():
    """As JSON they have 7 bytes for a token here, not 4: as many tokens fit into a cache all the same."""
    rig = Rig(count=1)
    (only,) = rig.workers
    usage(only, 0.5, tokens=3000)

    def ids(seed, count=1000):
        return b"[" + b",".join(b"%d" % (100_000 + seed * 1000 + number) for number in range(count)) + b"]"

    for seed in range(200):
        rig.policy.learn(Asked(prompt=ids(seed), tokens=1000), only)
    held = [rig.policy.held(Asked(prompt=ids(seed), tokens=1000), [only])[only] for seed in (199, 198, 197)]
    assert all(900 < each <= 1000 for each in held[:2])
    assert not rig.policy.held(Asked(prompt=ids(195), tokens=1000), [only]).get(only)
    again = ids(199)[: 7 * 500] + ids(7, 500)[1:]
    assert 440 < rig.policy.held(Asked(prompt=again, tokens=1000), [only])[only] <= 500


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=30), seed=st.integers(0, 3))
def test_what_was_used_last_is_what_is_held(lengths, seed):
    """The last prompts that fit into the cache are known, and none of those before."""
    rig = Rig(count=1)
    (only,) = rig.workers
    usage(only, 0.5, tokens=3000)
    prompts = [text(300 * length, 100 * seed + number) for number, length in enumerate(lengths)]
    for prompt in prompts:
        rig.served(prompt)
    since = 0
    for prompt in reversed(prompts):
        known = held(rig.policy, only, prompt)
        if since + len(prompt) <= 4 * 3000:
            assert known >= (len(prompt) - max(256, len(prompt) // 16) - 1) // 4
        elif since - 300 * 16 > 4 * 3000:  # of each its last bytes are not counted
            assert not known
        since += len(prompt)


def test_by_the_hash_index_what_is_known_is_so_for_a_time():
    rig = Rig(count=1, cache_index=CacheIndex.HASH, cache_ttl_secs=10, cache_boundaries=(100, 400))
    rig.served(text(3000))
    assert held(rig.policy, rig.workers[0], text(3000)[:1000] + text(2000, 1)) == 100
    rig.clock.now += 20
    assert not held(rig.policy, rig.workers[0], text(3000))


class Exact:
    """An exact index that knows one worker."""

    def __init__(self):
        self.held = {}
        self.told = []

    def overlaps(self, _request, _candidates):
        return self.held

    def learn(self, _request, worker):
        self.told.append(worker)

    def forget(self, _worker):
        self.told.append(None)


def test_what_is_known_counts_before_what_is_guessed():
    exact = Exact()
    rig = Rig(count=2, exact=exact)
    prompt = text(8000)
    holder = rig.served(prompt)
    other = next(each for each in rig.workers if each is not holder)
    exact.held = {holder: 0, other: 1900}
    assert rig.rank(prompt)[1][0] is other
    exact.held = None
    assert rig.rank(prompt)[1][0] is holder
    rig.policy.forget(holder)
    assert exact.told == [holder, None]


def test_what_is_booked_counts_beside_what_is_known():
    exact = Exact()
    rig = Rig(exact=exact)
    exact.held = dict.fromkeys(rig.workers, 0)
    shared = text(20_000)
    chosen = [rig.sent(shared + text(300, seed))[1] for seed in range(3)]
    assert len(set(chosen)) == 1


def test_what_is_known_by_events_alone_counts():
    exact = Exact()
    rig = Rig(count=4, exact=exact)
    for holder in rig.workers:
        exact.held = dict.fromkeys(rig.workers, 0) | {holder: 1900}
        assert rig.rank(text(8000, holder.url.port))[1][0] is holder


def test_a_request_that_was_only_placed_is_not_held():
    rig = Rig(role=Role.DECODE)
    asked, (chosen,) = rig.rank(text(8000))
    assert not rig.policy.held(asked, (chosen,))


# -- laid over, and let go ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [{}, {"routing_key_override": True}, {"dp_minimum_tokens_scheduler": True}])
def test_what_is_laid_over_it_asks_it_and_tells_it(over):
    clock, workers = Clock(), tuple(worker(Role.DECODE, port) for port in (1, 2))
    policy = policy_of(PolicyName.CACHE_AWARE, Tuning(**over), clock, Role.DECODE)
    asked = Asked(prompt=text(3000), tokens=750, fields={"x-smg-routing-key": b"a"})
    chosen = policy.rank(workers, 1, asked)[0]
    policy.learn(asked, chosen)
    assert held(policy, chosen, text(3000)) == 750
    policy.forget(chosen)
    assert held(policy, chosen, text(3000)) == 0


def test_a_request_that_is_over_is_not_on_its_way_any_more():
    rig = Rig(count=2)
    placer = Placer(FakeFleet(*rig.workers), rig.policy, rig.policy)
    asked, _ = rig.sent(text(40_000))
    assert rig.policy in asked.notes
    placer.over(asked.notes)
    assert rig.policy not in asked.notes
    assert not any(cache.pending for cache in rig.policy._index.caches.values())
