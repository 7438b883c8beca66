"""How many legs a worker may have, from what the operator, its engine and Envoy say."""

from __future__ import annotations

import pytest
from fakes import ranks, worker

from extproc.admission.room import Rooms
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role


@pytest.fixture
def freed():
    return []


@pytest.fixture
def rooms(freed):
    return Rooms(3, freed.append)


def speaks(rooms, decode, running=0, waiting=0, most=8):
    decode.engine_load = EngineLoad(0.0, [RankLoad(running=running, waiting=waiting, max_running=most)])
    rooms.engine_spoke(decode)


def test_a_prefill_may_have_what_the_operator_says(rooms, freed):
    prefill = worker(Role.PREFILL, 1)
    rooms.watch(prefill)
    assert prefill.limit == 3
    turn = prefill.begin()
    assert freed == []
    prefill.end(turn)
    assert freed == [prefill]
    Rooms(0, freed.append).watch(prefill)
    assert prefill.limit is None


def test_a_decode_may_have_what_its_engine_runs(rooms, freed):
    decode = worker(Role.DECODE, 1)
    rooms.watch(decode)
    assert decode.limit is None
    speaks(rooms, decode)
    assert decode.limit == 8
    speaks(rooms, decode, most=4)
    assert (decode.limit, freed) == (4, [])
    speaks(rooms, decode, most=6)
    assert (decode.limit, freed) == (6, [decode])
    decode.engine_load = None
    rooms.engine_spoke(decode)
    assert (decode.limit, freed) == (None, [decode, decode])


@pytest.mark.parametrize("label", ["max_running_requests", "max_num_seqs"])
def test_or_what_its_labels_say(rooms, label):
    decode = worker(Role.DECODE, 1, labels={label: "5"})
    rooms.watch(decode)
    assert decode.limit == 5


@pytest.mark.parametrize("text", ["many", "0", "-1", "²", "٣", "9" * 14, "9" * 400, "9" * 5000])
def test_a_label_that_is_no_limit(rooms, text):
    other = worker(Role.DECODE, 1, labels={"max_num_seqs": text})
    rooms.watch(other)
    assert other.limit is None


@pytest.mark.parametrize(("engine", "label", "limit"), [(8, "5", 5), (4, "5", 4)])
def test_of_what_both_say_the_least_counts(rooms, engine, label, limit):
    """An operator can have a decode given fewer; more than its engine runs would only wait there."""
    decode = worker(Role.DECODE, 1, labels={"max_running_requests": label})
    rooms.watch(decode)
    speaks(rooms, decode, most=engine)
    assert decode.limit == limit


def test_less_what_others_have_there(rooms):
    decode = worker(Role.DECODE, 1)
    decode.load = 2
    rooms.watch(decode)
    speaks(rooms, decode, running=3, waiting=2)
    assert decode.limit == 8  # it may be of another moment
    speaks(rooms, decode, running=3, waiting=2)
    assert decode.limit == 5
    decode.envoy_active = 6
    rooms.envoy_spoke(decode)
    assert decode.limit == 5
    rooms.envoy_spoke(decode)
    assert decode.limit == 4
    decode.envoy_active = 60
    rooms.envoy_spoke(decode)
    rooms.envoy_spoke(decode)
    assert decode.limit == 0
    decode.envoy_active = None
    rooms.envoy_spoke(decode)
    assert decode.limit == 5
    rooms.forget(decode)
    rooms.watch(decode)
    assert decode.limit == 8


def test_envoy_knows_nothing_of_one_rank(rooms):
    decode, _ = ranks(Role.DECODE, 1, 2)
    rooms.watch(decode)
    for _ in range(2):
        speaks(rooms, decode)
        decode.envoy_active = 7
        rooms.envoy_spoke(decode)
    assert decode.limit == 8


def test_room_is_for_all_legs_of_a_request_or_for_none():
    decode = worker(Role.DECODE, 1)
    assert decode.has_room(1000)
    decode.limit, decode.load, decode.promised = 4, 1, 1
    assert decode.has_room(2)
    assert not decode.has_room(3)
    assert not decode.has_room(9)
    decode.load = decode.promised = 0
    assert decode.has_room(9)  # it could never have more
    decode.limit = 0
    assert not decode.has_room()
