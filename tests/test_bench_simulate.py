"""The simulation of policies: what it rests on, and that it can be repeated."""

import itertools
import random
from dataclasses import replace

import pytest

from bench.simulate import report
from bench.simulate.decode import RULES as DECODE_RULES
from bench.simulate.decode import Decodes
from bench.simulate.fleet import OVERHEAD, RATE, Engine, Fleet
from bench.simulate.request import Request
from bench.simulate.rules import RULES
from bench.simulate.traffic import BLOCK, SCENARIOS, Conversation, Turn, conversations
from extproc.policies.names import PolicyName

SMALL = replace(SCENARIOS[0], seconds=25.0, workers=4, rate=3.0)


def run(name, seed=1):
    random.seed(seed)
    return report.cell(SMALL.name, name, seed, Fleet(SMALL, RULES[name]).run(conversations(SMALL, seed)))


@pytest.mark.parametrize("name", RULES)
def test_equal_seeds_give_equal_figures(name):
    assert run(name) == run(name)


def test_every_policy_is_compared():
    """Under its own name or with something laid over it."""
    assert {policy.value for policy in PolicyName} <= {name.partition(",")[0] for name in RULES}
    assert {"oracle", "peer", "cache_aware, KV events", "cache_aware, sticky"} <= {*RULES}


@pytest.mark.parametrize(
    "name",
    ["cache_aware", "cache_aware, KV events", "peer", "oracle", "prefix_hash", "manual", "least_load, sticky"],
)
def test_what_keeps_beginnings_together_finds_more_of_them(name):
    assert run(name).hit > 1.3 * run("random").hit


@pytest.mark.parametrize("name", RULES)
def test_every_turn_is_served_once(name):
    whole = conversations(SMALL, 2)
    fleet = Fleet(SMALL, RULES[name])
    outcome = fleet.run(whole)
    assert len(outcome.ttft) == len(outcome.waited) == sum(len(each.turns) for each in whole)
    assert all(
        ttft >= waited + OVERHEAD for ttft, waited in zip(sorted(outcome.ttft), sorted(outcome.waited), strict=True)
    )
    assert [engine.worker.load + engine.whole + engine.worker.tokens for engine in fleet.engines] == [0] * 4


def test_events_tell_the_policy_exactly_what_is_cached():
    whole = conversations(SMALL, 4)
    small = replace(SMALL, cache=20_000)  # of which much is thrown out again
    fleet = Fleet(small, RULES["cache_aware, KV events"])
    fleet.run(whole)
    asked = [Request(each, len(each.turns) - 1, 0.0) for each in whole]
    for request in asked:
        request.as_ids = True
        known = fleet.rule.exact.overlaps(request, fleet.workers)
        assert known == {engine.worker: BLOCK * engine.cached(request) for engine in fleet.engines}
    assert any(0 < engine.cached(request) < request.blocks for engine in fleet.engines for request in asked)


def test_an_engine_says_what_waits():
    engine = Engine(0, 100 * BLOCK)
    conversation = Conversation("x", b"", b"a" * 6 * BLOCK * 4, [Turn(0, 6 * BLOCK * 4, 1)], 4.0)
    engine.keep(Request(conversation, 0, 0))
    other = Conversation("x", b"", b"a" * 3 * BLOCK * 4 + b"b" * 3 * BLOCK * 4, [Turn(0, 6 * BLOCK * 4, 1)], 4.0)
    engine.queue.append(Request(other, 0, 0))
    engine.worker.begin(7)
    engine.says(5.0)
    load = engine.worker.engine_load
    assert (load.at, load.running, load.waiting, load.waiting_tokens) == (5.0, 0, 1, 3 * BLOCK)
    assert (engine.worker.load_then, engine.worker.tokens_then) == (1, 7)


def test_tables_have_the_mean_and_the_ends_of_all_seeds():
    cells = [
        report.Cell("chat", rule, seed, hit, 1.0, p99, 1.0, 0.0, 0.0)
        for rule, seed, hit, p99 in (
            ("cache_aware", 1, 0.7, 1.0),
            ("cache_aware", 2, 0.8, 3.0),
            ("peer", 1, 0.6, 2.0),
            ("peer", 2, 0.9, 4.0),
        )
    ]
    assert "| cache_aware | 75.0 (70.0 to 80.0) |" in report.tables(cells)
    lines = report.beside(cells, "cache_aware", ["peer"]).splitlines()
    # Seed by seed, not of the means.
    assert lines[-1] == "| peer | chat | +0.0 (-10.0 to +10.0) | 1.00 | 0.62 (0.50 to 0.75) |"


def test_decode_workers_make_every_token():
    shorter = replace(SMALL, seconds=10.0)
    whole = conversations(shorter, 1)
    decodes = Decodes(shorter, DECODE_RULES["least_load, sticky"])
    outcome = decodes.run(whole)
    assert outcome.mean > 0.010  # a step takes as long, and more with each request
    assert 0 < outcome.transferred < 1
    assert all(worker.load == worker.tokens == 0 for worker in decodes.workers)


def test_a_turn_begins_as_the_one_before():
    for each in conversations(SMALL, 3):
        prompts = [each.prompt(turn)[:-2] for turn in each.turns]
        assert all(after.startswith(before) for before, after in itertools.pairwise(prompts))


def test_an_engine_keeps_what_came_last():
    engine = Engine(0, 10 * BLOCK)
    first, second = (
        Conversation("x", b"", letter * 6 * BLOCK * 4, [Turn(0, 6 * BLOCK * 4, 1)], 4.0) for letter in (b"a", b"b")
    )
    engine.keep(Request(first, 0, 0))
    assert engine.cached(Request(first, 0, 0)) == 6
    engine.keep(Request(second, 0, 0))
    assert engine.cached(Request(second, 0, 0)) == 6
    assert engine.cached(Request(first, 0, 0)) == 4
    whole, cached = engine.seconds(Request(first, 0, 0), 0), engine.seconds(Request(first, 0, 0), 4)
    assert whole - cached == pytest.approx(4 * BLOCK / RATE, rel=0.01)
