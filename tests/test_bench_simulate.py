"""The simulation of policies: what it rests on, and that it can be repeated."""

import itertools
import random
from dataclasses import replace

import pytest

from bench.simulate import report
from bench.simulate.fleet import OVERHEAD, RATE, Engine, Fleet, Request
from bench.simulate.rules import RULES
from bench.simulate.traffic import BLOCK, SCENARIOS, Conversation, Turn, conversations

SMALL = replace(SCENARIOS[0], seconds=25.0, workers=4, rate=3.0)


def run(name, seed=1):
    random.seed(seed)
    return report.cell(SMALL.name, name, Fleet(SMALL, RULES[name]).run(conversations(SMALL, seed)))


@pytest.mark.parametrize("name", ["cache_aware", "peer", "oracle", "random"])
def test_equal_seeds_give_equal_figures(name):
    assert run(name) == run(name)


def test_what_knows_of_caches_finds_more_in_them():
    assert min(run("cache_aware").hit, run("peer").hit, run("oracle").hit) > 1.5 * run("random").hit


def test_every_turn_is_served_once():
    whole = conversations(SMALL, 2)
    outcome = Fleet(SMALL, RULES["round_robin"]).run(whole)
    assert len(outcome.ttft) == len(outcome.waited) == sum(len(each.turns) for each in whole)
    assert all(
        ttft >= waited + OVERHEAD for ttft, waited in zip(sorted(outcome.ttft), sorted(outcome.waited), strict=True)
    )


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
