"""Who is near whom."""

import pytest
from fakes import worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.workers.topology import NOWHERE, Place, nearness, place_of, tiers
from extproc.workers.worker import Role


def test_labels_say_where_a_worker_is():
    assert place_of({"zone": "a", "rack": "r1", "host": "h"}) == Place("a", "r1", "h")
    node = {"topology.kubernetes.io/zone": "b", "topology.kubernetes.io/rack": "r2", "kubernetes.io/hostname": "n"}
    assert place_of(node) == Place("b", "r2", "n")
    assert place_of({**node, "zone": "a", "rack": ""}) == Place("a", "r2", "n")
    assert place_of({"version": "1"}) is NOWHERE
    assert worker(Role.DECODE, 1, labels={"host": "h"}).place == Place("", "", "h")


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        (("a", "r", "h"), ("a", "r", "h"), 3),
        (("a", "r", "h"), ("a", "r", "i"), 2),
        (("a", "r", "h"), ("a", "q", "h"), 1),  # a host of the same name, in another rack
        (("a", "r", "h"), ("b", "r", "h"), 0),
        (("", "", "h"), ("a", "r", "h"), 3),
        (("", "r", ""), ("a", "r", "h"), 2),
        (("a", "", ""), ("a", "r", "h"), 1),
        (("a", "", ""), ("", "r", "h"), 0),
        (NOWHERE, NOWHERE, 0),
    ],
)
def test_the_narrowest_in_common_counts(one, other, near):
    assert nearness(Place(*one), Place(*other)) == nearness(Place(*other), Place(*one)) == near


def test_groups_are_from_near_to_far():
    labels = [{"zone": "b"}, {"zone": "a"}, {}, {"zone": "a", "rack": "r"}, {"zone": "a"}]
    far, near, nowhere, nearest, near_too = workers = [
        worker(Role.DECODE, port, labels=said) for port, said in enumerate(labels, 1)
    ]
    assert tiers(Place("a", "r", ""), workers) == ((nearest,), (near, near_too), (far, nowhere))
    assert tiers(NOWHERE, workers)[0] is workers
    assert tiers(Place("c", "", ""), workers)[0] is workers


WORDS = st.sampled_from(["", "x", "y"])


@given(st.builds(Place, WORDS, WORDS, WORDS), st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=8))
def test_everybody_is_in_one_group(here, places):
    workers = [
        worker(Role.DECODE, port, labels=dict(zip(("zone", "rack", "host"), place, strict=True)))
        for port, place in enumerate(places, 1)
    ]
    found = tiers(here, workers)
    assert sorted(w.id for tier in found for w in tier) == sorted(w.id for w in workers)
    ranks = [{nearness(here, w.place) for w in tier} for tier in found]
    assert all(len(rank) == 1 for rank in ranks) or found == (workers,)
    assert [max(rank) for rank in ranks] == sorted((max(rank) for rank in ranks), reverse=True)
