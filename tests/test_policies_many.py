"""Of many candidates some are looked at."""

from collections import Counter

from fakes import worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.policies.many import Many
from extproc.workers.worker import Role


def workers(count, first=1):
    return tuple(worker(Role.PREFILL, port) for port in range(first, first + count))


@given(count=st.integers(8, 40))
def test_so_many_that_stand_together_and_who_is_beside_them(count):
    candidates, many = workers(count), Many(8)
    twice, strangers = candidates * 2, workers(3, 1000)
    for _ in range(30):
        some = many.some(candidates)
        start = candidates.index(some.workers[0])
        assert some.workers == twice[start : start + 8]
        assert some.others(some.workers) == ()
        beside = [each for each in candidates if each not in some.workers]
        assert list(some.others((*candidates, *strangers))) == beside


def test_each_is_as_likely_as_any_and_a_stretch_is_one_object():
    candidates, many = workers(20), Many(8)
    found = [many.some(candidates) for _ in range(4000)]
    assert len({id(some) for some in found}) == 20
    times = Counter(each for some in found for each in some.workers)
    assert min(times.values()) > 0.8 * 4000 * 8 / 20


def test_of_another_set_there_is_nobody_of_the_last_one():
    many = Many(8)
    for first in range(1, 4000, 20):
        candidates = workers(20, first)
        assert set(many.some(candidates).workers) <= set(candidates)
