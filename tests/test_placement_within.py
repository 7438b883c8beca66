"""Placement of requests that name the endpoints among which their workers must be: as if there were no others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from fakes import Asked, mooncake, nixl, ranks, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import GatewayError
from extproc.policies.placement import Placer
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers import index
from extproc.workers.breaker import BreakerState
from extproc.workers.index import Index
from extproc.workers.pairing import PairingMode
from extproc.workers.worker import Role, Worker

P, D = Role.PREFILL, Role.DECODE


class Fleet(Index):
    """Workers, as the registry shows them to placement."""

    def __init__(self, workers: Iterable[Worker], *, sheds: bool = False) -> None:
        self.workers = list(workers)
        super().__init__(lambda: self.workers, PairingMode.LENIENT, sheds=sheds)

    def __len__(self) -> int:
        return len(self.workers)


def placer(fleet: Fleet) -> Placer:
    return Placer(fleet, RoundRobinPolicy(), RoundRobinPolicy())


def within(*workers: Worker, model: str | None = "tiny") -> Asked:
    return Asked(model, within=frozenset(each.endpoint for each in workers if each.endpoint is not None))


def ports(*numbers: int) -> frozenset[str]:
    return frozenset(f"127.0.0.1:{number}" for number in numbers)


def error(place: Placer, request: Asked) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        place.pair(request)
    return refused.value


# -- who is chosen ----------------------------------------------------------------------------------------------------


@given(named=st.sets(st.integers(1, 12)), rounds=st.integers(1, 6), failed=st.integers(0, 3))
def test_it_is_as_if_there_were_no_others(named: set[int], rounds: int, failed: int) -> None:
    """Whatever is asked of placement; several kinds that do not pair are in the fleet."""
    workers = [*nixl((1, 2, 3), (4, 5, 6)), *mooncake((7, 8), (9, 10)), worker(P, 11), worker(D, 12)]
    some = [each for each in workers if each.url.port in named]
    request, places = Asked(within=ports(*named)), (placer(Fleet(workers)), placer(Fleet(some)))
    for _ in range(rounds):
        pairs = []
        for place in places:
            try:
                pairs.append(place.pair(request))
            except GatewayError as refused:
                pairs.append((refused.fault.code,))
        assert pairs[0] == pairs[1]
    without = tuple(some[:failed])
    for like in workers[:1] if some else ():
        assert places[0].has_pair(request, without, like) == places[1].has_pair(request, without, like)
        assert set(places[0].alike(request, like, without)) == set(places[1].alike(request, like, without))
        assert set(places[0].others(request, like, without)) <= set(some)
    for role in (P, D):
        assert places[0].usable(request, role) == places[1].usable(request, role)
    assert set(places[0].decodes(request)) == set(places[1].decodes(request))
    assert places[0].all_decodes(request.within) == places[1].all_decodes(None)


def test_both_are_of_those_that_are_named() -> None:
    workers = nixl((1, 2), (11, 12, 13))
    place = placer(Fleet(workers))
    for _ in range(6):
        pair = place.pair(within(workers[1], workers[2], workers[4]))
        assert pair.prefill is workers[1]
        assert set(pair.decodes) == {workers[2], workers[4]}
    assert {place.pair(Asked()).prefill for _ in range(2)} == set(workers[:2])


def test_all_ranks_of_a_server_are_at_its_endpoint() -> None:
    first, second, prefill = ranks(D, 11, 2), ranks(D, 12, 2), worker(P, 1)
    place = placer(Fleet([prefill, *first, *second]))
    assert {place.pair(within(prefill, second[0])).decodes[0] for _ in range(4)} == set(second)


def test_another_attempt_stays_among_them() -> None:
    workers = nixl((1, 2, 3), (11, 12, 13))
    place = placer(Fleet(workers))
    p1, p2, _, d1, d2, _ = workers
    request = within(p1, p2, d1, d2)
    assert place.has_pair(request, (p1, d1), p1)
    pair = place.pair(request, (p1, d1), p1)
    assert (pair.prefill, list(pair.decodes)) == (p2, [d2])
    assert not place.has_pair(request, (p1, p2), p1)
    assert place.has_pair(Asked(), (p1, p2), p1)
    assert place.others(request, d1, (d1,)) == (d2,)
    assert list(place.alike(request, p1, (p1,))) == [p2]


# -- overload and circuit breakers ------------------------------------------------------------------------------------


def test_one_that_is_overloaded_is_better_than_none() -> None:
    """It does not matter that there are others that are not, which may not be chosen."""
    workers = nixl((1, 2), (11, 12))
    workers[0].overloaded = workers[2].overloaded = "busy"
    place = placer(Fleet(workers))
    assert place.pair(within(workers[0], workers[2])) == (workers[0], (workers[2],))
    assert place.prefills(within(workers[0])) == (workers[0],)
    for _ in range(4):
        assert place.pair(within(*workers[:3])) == (workers[1], (workers[2],))


def test_those_that_are_overloaded_come_in_where_the_others_have_failed() -> None:
    workers = nixl((1, 2), (11, 12))
    workers[0].overloaded = "busy"
    place = placer(Fleet(workers))
    request = within(*workers[:3])
    assert place.pair(request).prefill is workers[1]
    assert place.has_pair(request, (workers[1],), workers[1])
    assert place.pair(request, (workers[1],), workers[1]) == (workers[0], (workers[2],))


def test_where_requests_are_shed_it_is_said() -> None:
    workers = nixl((1, 2), (11, 12))
    workers[0].overloaded = "busy"
    place = placer(Fleet(workers, sheds=True))
    assert error(place, within(workers[0], workers[2])).fault.code == "worker_overload_protection_shed"
    assert place.pair(Asked()).prefill is workers[1]
    with pytest.raises(GatewayError) as refused:
        place.prefills(within(workers[0]))
    assert refused.value.fault.code == "worker_overload_protection_shed"


def test_one_that_is_shut_out_is_better_than_none() -> None:
    workers = nixl((1, 2), (11,))
    workers[0].breaker._become(BreakerState.OPEN)
    assert workers[0].breaker.shuts_out
    place = placer(Fleet(workers))
    assert place.pair(within(workers[0], workers[2])).prefill is workers[0]
    for request in (Asked(), within(*workers)):
        assert {place.pair(request).prefill for _ in range(3)} == {workers[1]}


# -- errors -----------------------------------------------------------------------------------------------------------


AMONG = "among the endpoints that the gateway names (x-gateway-destination-endpoint-subset)"


@pytest.mark.parametrize(("named", "lacks"), [((), P), ((99,), P), ((11,), P), ((1, 2), D)])
def test_nobody_is_named(named: tuple[int, ...], lacks: Role) -> None:
    place = placer(Fleet(nixl()))
    refused = error(place, Asked(within=ports(*named)))
    assert (refused.status, refused.fault.code) == (503, "no_available_workers")
    assert refused.message == f"No {lacks.value} worker is available for model `tiny` {AMONG}"
    with pytest.raises(GatewayError, match="x-gateway-destination-endpoint-subset"):
        place.prefills(Asked(within=ports(11)))


def test_none_of_them_fit() -> None:
    workers = [*nixl((1,), (11,)), *mooncake((2,), (12,))]
    refused = error(placer(Fleet(workers)), within(workers[0], workers[3]))
    assert (refused.status, refused.fault.code) == (503, "no_compatible_pd_pair")
    assert refused.message.endswith(AMONG)


def test_none_of_them_have_a_model_in_common() -> None:
    workers = [worker(role, n, model_ids=(f"m{n % 10}",)) for role, n in ((P, 1), (P, 2), (D, 11), (D, 12))]
    refused = error(placer(Fleet(workers)), within(workers[0], workers[3], model=None))
    assert (refused.status, refused.fault.code) == (503, "no_available_workers")
    assert AMONG in refused.message


def test_a_model_that_nobody_has_is_unknown_all_the_same() -> None:
    place = placer(Fleet(nixl()))
    assert error(place, Asked("other", within=ports())).fault.code == "model_not_found"
    assert AMONG not in error(place, Asked("other")).message


# -- what policies tell sets by ---------------------------------------------------------------------------------------


def test_the_same_set_is_the_same_object_until_something_changes() -> None:
    fleet = Fleet(nixl())
    some = fleet.within(ports(1, 11))
    assert fleet.within(ports(11, 1)) is some
    assert some.usable(P, "tiny") is some.usable(P, "tiny")
    assert some.pairs("tiny") is some.pairs("tiny")
    assert [each.url.port for each in some.usable(P, "tiny")] == [1]
    fleet.workers[0].endpoint = "127.0.0.1:5"
    fleet.forget()
    assert fleet.within(ports(1, 11)).usable(P, "tiny") == ()
    assert fleet.within(ports(5, 11)).usable(P, "tiny") == (fleet.workers[0],)


def test_where_all_are_named_it_is_the_fleet() -> None:
    """A gateway may name a whole pool with every request: that is one set, not two with turns of their own."""
    fleet = Fleet(nixl())
    fleet.workers.append(worker(D, 13))
    fleet.workers[-1].endpoint = None  # not placed yet
    assert fleet.within(ports(1, 2, 11, 12, 99)) is fleet
    place = placer(fleet)
    chosen = [place.pair(request).prefill.url.port for request in (Asked(), Asked(within=ports(1, 2, 11, 12))) * 2]
    assert chosen == [1, 2, 1, 2]


def test_each_set_has_its_turn() -> None:
    place = placer(Fleet(nixl((1, 2, 3), (11, 12, 13))))
    low, high = Asked(within=ports(1, 2, 11, 12)), Asked(within=ports(2, 3, 12, 13))
    chosen = [(place.pair(low).prefill.url.port, place.pair(high).prefill.url.port) for _ in range(4)]
    assert [one for one, _ in chosen] == [1, 2, 1, 2]
    assert sorted(other for _, other in chosen) == [2, 2, 3, 3]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_SUBSETS", 3)
    fleet = Fleet(nixl())
    made = [fleet.within(frozenset({"127.0.0.1:1", f"x{number}"})) for number in range(10)]
    assert len(fleet._within) == 3
    assert fleet.within(frozenset({"127.0.0.1:1", "x9"})) is made[-1]
    assert fleet.within(frozenset({"127.0.0.1:1", "x0"})).usable(P, "tiny") == (fleet.workers[0],)
