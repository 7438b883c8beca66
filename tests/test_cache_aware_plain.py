"""cache_aware chooses as its rule says, written down plainly: what is kept ready only makes it cheaper."""

import math
import random

import pytest
from fakes import Asked, worker
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.policies.cache_aware import MOST_LOOKED_AT, RECENT_SECONDS, SAMPLE, CacheAwarePolicy
from extproc.policies.cache_costs import LEAST_TOLL, MOST_TOLL, TOLL
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.prompt_chain import BYTES_PER_TOKEN, PromptChain
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role


class Known:
    """An exact index that knows what a test says: tokens by worker."""

    def __init__(self, tokens):
        self.tokens = tokens

    def overlaps(self, request, candidates):  # noqa: ARG002
        return {each: self.tokens[each] for each in candidates if each in self.tokens}

    def learn(self, request, worker):
        pass

    def forget(self, worker):
        self.tokens.pop(worker, None)


class Plain:
    """The rule without anything that is kept from one request to the next but what happened.

    What is held is asked of the policy's own index, whose answers :func:`plain_overlaps` checks.
    """

    def __init__(self, policy, options, role, now):
        self.policy, self.options, self.role, self.now = policy, options, role, now
        self.seen = set()  # workers that were sent or answered something
        self.booked = {}  # by the request: worker, bytes, bytes ahead, when
        self.put_in = []  # worker, bytes, when
        self.paces = {}  # by the worker: seconds, bytes
        self.all = (0.0, 0.0)
        self.rooms = {}
        self.usual = 1_600_000.0
        self.per_token = 4.0  # bytes that count as one
        self.calls = 0

    def pending(self, worker):
        return sum(size for other, size, *_ in self.booked.values() if other is worker)

    def recent(self, worker):
        ages = [(size, self.now() - when) for other, size, when in self.put_in if other is worker]
        return sum(size * math.exp(-age / RECENT_SECONDS) for size, age in ages)

    def cost(self, chain, worker, held):
        options = self.options
        held = 0 if held < options.cache_threshold * chain.size else held
        held /= 1 + options.overlap_decay * worker.load
        if self.role is Role.DECODE:
            return self.per_token * (worker.tokens + 256 * worker.load) - 0.1 * held
        lacks, load = chain.size - held, self.per_token * worker.tokens
        if worker not in self.seen:
            return load + lacks + min(lacks * LEAST_TOLL, MOST_TOLL)
        load = min(load, self.pending(worker))
        took, done = self.paces.get(worker, (0.0, 0.0))
        if done:
            pace = self.all[1] / self.all[0] if self.all[0] else 1
            load *= min(32, max(0.25, took / done * pace))
        toll = LEAST_TOLL + TOLL * self.recent(worker) / self.rooms.get(worker, self.usual)
        return load + lacks + min(lacks * toll, MOST_TOLL)

    def lopsided(self, among):
        usages = [each.engine_load.kv_usage for each in among if each.engine_load and each.engine_load.kv_usage]
        options = self.options
        return bool(usages) and (
            max(usages) > options.overload_token_usage_threshold
            or max(usages) - min(usages) > options.balance_token_usage_threshold
        )

    def choose(self, chain, among, overlaps):
        """Who may be first, by what it costs, and the costs."""
        options = self.options
        counted = {} if self.lopsided(among) else overlaps
        costs = {each: self.cost(chain, each, counted.get(each, 0)) for each in among}
        best = min(among, key=costs.get)
        self.calls += 1
        if not self.calls % 16 and self.role is Role.PREFILL:
            recent = {each: self.recent(each) if each in self.seen else 0 for each in among}
            coldest = min(among, key=recent.get)
            lacks = overlaps.get(best, 0) - overlaps.get(coldest, 0)
            cold = recent[coldest] < 0.25 * sum(recent.values()) / len(among)
            if cold and coldest.load <= best.load and lacks <= 4096:
                best = coldest
        mean = sum(each.load for each in among) / len(among)
        most = max(options.balance_rel_threshold * mean, options.balance_abs_threshold + mean)
        if best.load > options.balance_abs_threshold and best.load > most:
            best = min((each for each in among if each.load <= most), key=costs.get)
        return best, costs

    def sent(self, asked, chain, worker, overlaps):
        size = max(0, chain.size - overlaps.get(worker, 0))
        self.seen.add(worker)
        self.booked[id(asked)] = (worker, size, self.pending(worker) + size, self.now())

    def answered(self, asked, worker, new):
        found = self.booked.pop(id(asked), None)
        if found is not None and found[0] is worker:
            took, done = self.now() - found[3], found[2] + 1024
            before = self.paces.get(worker, (0.0, 0.0))
            self.paces[worker] = (before[0] * 0.9 + took, before[1] * 0.9 + done)
            share = 1 - 0.1 / len(self.seen)
            self.all = (self.all[0] * share + took, self.all[1] * share + done)
        self.seen.add(worker)
        measured = max(1, len(asked.prompt)) / max(1, asked.tokens)
        self.per_token += (max(BYTES_PER_TOKEN, measured) - self.per_token) / 16
        if worker.engine_load is not None and worker.engine_load.max_tokens:
            room = self.rooms[worker] = self.per_token * worker.engine_load.max_tokens
            if abs(room - self.usual) > self.usual / 16:
                self.usual = room
        self.put_in.append((worker, new, self.now()))

    def forget(self, worker):
        self.seen.discard(worker)
        self.paces.pop(worker, None)
        self.rooms.pop(worker, None)
        self.put_in = [entry for entry in self.put_in if entry[0] is not worker]
        self.booked = {key: entry for key, entry in self.booked.items() if entry[0] is not worker}


def plain_overlaps(index, chain):
    """By whom how much is held, looked up worker by worker."""
    numbers = chain.numbers
    found = {}
    for each, cache in index.caches.items():
        held = [number for number in numbers if number in cache.kept]
        if held:
            found[each] = min(chain.size, cache.kept[held[-1]])
    return found


def said(max_tokens, usage):
    return EngineLoad(0.0, [RankLoad(max_tokens=max_tokens, kv_usage=usage)])


_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "cache_threshold": st.sampled_from([0.3]),
        "overlap_decay": st.sampled_from([0.5]),
        "balance_abs_threshold": st.sampled_from([1]),
        "balance_token_usage_threshold": st.sampled_from([0.5]),
        "block_size": st.sampled_from([4]),
    },
)
_WHAT = ("send", "answer", "fail", "forget")
_SECONDS = (0.0, 0.01, 1.0, 10.0)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@settings(max_examples=100, deadline=None)
@given(
    count=st.sampled_from([1, 2, 5, MOST_LOOKED_AT, 3 * MOST_LOOKED_AT]),
    options=_OPTIONS,
    steps=st.integers(1, 150),
    limit=st.sampled_from([1, 4]),
    seed=st.integers(0, 1 << 16),
    events=st.booleans(),
)
def test_whoever_is_chosen_costs_least(role, count, options, steps, limit, seed, events):
    rng = random.Random(seed)  # what happens is drawn of it: hypothesis itself makes short stories only
    clock, options = [1000.0], CacheAwareSettings(**options)
    workers = tuple(worker(role, port) for port in range(1, count + 1))
    for each in workers:
        each.load, each.tokens = rng.choice([(0, 0), (1, 0), (3, rng.randrange(9000))])
        if rng.random() < 0.5:
            each.engine_load = said(rng.choice([None, 5000, 400_000]), rng.choice([None, 0.1, 0.9]))
    known = {each: rng.randrange(500) for each in workers if rng.random() < 0.3}
    exact = Known(known) if events else None
    policy = CacheAwarePolicy(options, lambda: clock[0], role, exact)
    plain = Plain(policy, options, role, lambda: clock[0])
    index, cuts = policy._index, policy._cuts
    beginnings = [rng.randbytes(60_000) for _ in range(6)]
    out = []
    for _ in range(steps):
        (what,) = rng.choices(_WHAT, (60, 35, 4, 1))
        seconds = rng.choice(_SECONDS)
        # Bookings that end by themselves are another matter.
        if what == "send" and all(clock[0] + seconds < entry[3] + 60 for entry in plain.booked.values()):
            clock[0] += seconds
            shared = rng.choice(beginnings)[: rng.choice([0, 100, 600, 5000, 60_000])]
            prompt = shared + rng.randbytes(rng.choice([0, 50, 300, 3000]))
            asked = Asked(prompt=prompt, tokens=len(prompt) // 4)
            chain = PromptChain(prompt, cuts, asked.model)
            assert index.overlaps(chain, clock[0], booked=False) == plain_overlaps(index, chain)
            among = workers
            number = rng.getrandbits(32)
            random.seed(number)
            if count > MOST_LOOKED_AT:
                start = int(random.random() * count)
                among = (workers * 2)[start : start + SAMPLE]
                random.seed(number)
            overlaps = index.overlaps(chain, clock[0], among if among is not workers else ())
            if exact is not None:
                per_token = len(prompt) / max(1, asked.tokens)
                overlaps |= {each: min(len(prompt), round(per_token * n)) for each, n in known.items() if each in among}
                for each, promised in index.promised(chain, clock[0]).items():
                    overlaps[each] = max(overlaps.get(each, 0), promised)
            if among is not workers:
                among = tuple(dict.fromkeys((*among, *(each for each in overlaps if each in workers))))
            best, costs = plain.choose(chain, among, overlaps)
            ranked = policy.rank(workers, limit, asked)
            assert set(ranked) <= set(among)
            assert len(set(ranked)) == len(ranked) == min(limit, len(among))
            assert costs[ranked[0]] == pytest.approx(costs[best])
            others = sorted(cost for each, cost in costs.items() if each is not ranked[0])
            assert [costs[each] for each in ranked[1:]] == pytest.approx(others[: limit - 1])
            ranked[0].begin(asked.tokens)
            plain.sent(asked, chain, ranked[0], overlaps)
            out.append((asked, chain, ranked[0]))
        elif what in ("answer", "fail") and out:
            asked, chain, chosen = out.pop(rng.randrange(len(out)))
            chosen.end(0, asked.tokens)
            if what == "answer":
                new = len(asked.prompt) - plain_overlaps(index, chain).get(chosen, 0)
                plain.answered(asked, chosen, new)
                policy.learn(asked, chosen)
            plain.booked.pop(id(asked), None)
            policy.over(asked.notes)
        elif what == "forget":
            gone = rng.choice(workers)
            policy.forget(gone)
            plain.forget(gone)
