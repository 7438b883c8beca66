"""The table of who may be paired with whom."""

import itertools

import pytest
from fakes import mooncake, nixl, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.workers.index import Index
from extproc.workers.pairing import PairingMode, may_pair, share_model
from extproc.workers.pairs import Pairs
from extproc.workers.worker import Role


def pairs(*workers, mode=PairingMode.LENIENT, any_model=False):
    sides = [tuple(w for w in workers if w.role is role) for role in (Role.PREFILL, Role.DECODE)]
    return Pairs(*sides, mode, any_model=any_model)


def test_where_all_fit_the_sets_are_those_that_were_given():
    table = pairs(*nixl())
    assert table.prefills is table.usable_prefills
    for prefill in table.prefills:
        assert table.tiers(prefill) == (table.usable_decodes,)
        assert table.tiers(prefill)[0] is table.usable_decodes
    assert table.like(table.prefills[0]) is table.prefills


def test_workers_of_a_kind_share_their_partners():
    fleet = [*nixl((1, 2), (11, 12)), *mooncake((3, 4), (13,)), worker(Role.PREFILL, 5)]
    table = pairs(*fleet)
    one, two, three, four, lonely = table.usable_prefills
    assert table.prefills == (one, two, three, four)
    assert lonely not in table.prefills
    assert table.tiers(one) is table.tiers(two)
    assert table.tiers(three)[0] == (fleet[6],)
    assert table.like(one) == (one, two)
    assert table.like(one) is table.like(two)


def test_without_a_model_the_models_count():
    fleet = [
        worker(Role.PREFILL, 1, model_ids=("a",)),
        worker(Role.PREFILL, 2, model_ids=("b", "c")),
        worker(Role.PREFILL, 3, model_ids=("d",)),
        worker(Role.DECODE, 11, model_ids=("a", "b")),
        worker(Role.DECODE, 12, model_ids=("c",)),
    ]
    table = pairs(*fleet, any_model=True)
    assert table.prefills == (fleet[0], fleet[1])
    assert table.tiers(fleet[0]) == ((fleet[3],),)
    assert table.tiers(fleet[1]) == ((fleet[3], fleet[4]),)
    assert pairs(*fleet).prefills == tuple(fleet[:3])


def test_who_is_alone_is_told_why():
    fleet = [
        *nixl((1,), (11,)),
        worker(Role.PREFILL, 2),
        *mooncake((), (12, 13)),
        worker(Role.DECODE, 14, runtime="vllm", model_ids=("other",)),
    ]
    one, its, alone, other, other_too, elsewhere = fleet
    table = pairs(*fleet, any_model=True)
    assert table.why_alone(one) == table.why_alone(its) == ""
    assert table.why_alone(alone) == (
        'no usable decode worker fits (mismatch on ["runtime"]; '
        'prefill: ["sglang/?/?"], decode: ["vllm/nixl/?", "vllm/mooncake/?"])'
    )
    assert table.why_alone(other).startswith("no usable prefill worker fits")
    assert table.why_alone(other) is table.why_alone(other_too)
    assert table.why_alone(elsewhere) == "no usable prefill worker fits (none has a model in common)"
    assert pairs(alone, any_model=True).why_alone(alone) == ""  # there is nobody at all
    assert pairs(its, any_model=True).why_alone(one) == ""  # which is no fault of its kind


def test_nearness_costs_nothing_where_only_one_side_says_where_it_is():
    table = pairs(worker(Role.PREFILL, 1, labels={"zone": "a"}), worker(Role.DECODE, 11), worker(Role.DECODE, 12))
    assert table.tiers(table.prefills[0])[0] is table.usable_decodes


def test_the_near_come_first_and_neighbours_share_a_table():
    fleet = [worker(Role.PREFILL, port, labels={"zone": zone}) for port, zone in ((1, "a"), (2, "a"), (3, "c"))]
    fleet += [worker(Role.DECODE, port, labels={"zone": zone}) for port, zone in ((11, "b"), (12, "a"), (13, "a"))]
    table = pairs(*fleet)
    first, neighbour, elsewhere, far, near, near_too = fleet
    assert table.tiers(first) == ((near, near_too), (far,))
    assert table.tiers(first) is table.tiers(neighbour)
    assert table.tiers(elsewhere) == ((far, near, near_too),)


def test_only_partners_are_near():
    one, two = nixl((1,), (11,))
    stranger = worker(Role.DECODE, 12, runtime="vllm", kv_connector="MooncakeConnector", labels={"host": "h"})
    one.labels = two.labels = {"host": "h"}
    for w in (one, two):
        w.update_pairing()
    assert pairs(one, two, stranger).tiers(one) == ((two,),)


LABELS = st.fixed_dictionaries(
    {},
    optional={
        "page_size": st.sampled_from(["1", "64"]),
        "zone": st.sampled_from("ab"),
        "pairing_protocol": st.just("x"),
    },
)
KINDS = st.tuples(
    st.sampled_from([Role.PREFILL, Role.DECODE]),
    st.sampled_from([("sglang", ""), ("vllm", "NixlConnector"), ("vllm", "")]),
    st.sampled_from([(), ("a",), ("a", "b"), ("b",)]),
    LABELS,
)


@pytest.mark.parametrize("any_model", [True, False])
@given(st.lists(KINDS, max_size=8), st.sampled_from(PairingMode), st.permutations([1, 2, 3, 4, 5, 6, 6, 7]))
def test_the_table_is_what_comparing_all_pairs_would_find(any_model, kinds, mode, ports):
    """Two of the workers may be one server."""
    fleet = [
        worker(role, port, runtime=runtime, kv_connector=connector, model_ids=models, labels=labels)
        for port, (role, (runtime, connector), models, labels) in zip(ports, kinds, strict=False)
    ]
    for number, made in enumerate(fleet):
        made.id = str(number)
    table = pairs(*fleet, mode=mode, any_model=any_model)
    expected = {
        (p.id, d.id)
        for p, d in itertools.product(table.usable_prefills, table.usable_decodes)
        if may_pair(p, d, mode) and (not any_model or share_model(p, d))
    }
    found = {(p.id, d.id) for p in table.prefills for tier in table.tiers(p) for d in tier}
    assert found == expected
    assert {p.id for p in table.prefills} == {prefill for prefill, _ in expected}
    partnered = {w for pair in expected for w in pair}
    for side, others in ((table.usable_prefills, table.usable_decodes), (table.usable_decodes, table.usable_prefills)):
        assert {w.id for w in side if table.why_alone(w)} == ({w.id for w in side} - partnered if others else set())


def test_models_that_nobody_serves_are_not_remembered():
    workers = [worker(Role.PREFILL, 1), worker(Role.DECODE, 2)]
    index = Index(lambda: workers, PairingMode.LENIENT)
    for number in range(100):
        assert not index.pairs(f"unknown-{number}").prefills
    known = index.pairs("tiny")
    assert index.pairs("tiny") is known
    assert len(index._of_models) == 1
    index.forget()
    assert index.pairs("tiny") is not known
