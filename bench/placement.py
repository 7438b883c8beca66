"""CPU µs of one placement by each policy: ``python -m bench.placement``.

A placement is ``Placer.pair``: a prefill worker, and decode workers in order, each half of the workers, chosen by a
policy of their own of the same name (bucket, which is for prefill workers, beside round_robin). Every request has a
routing key and a prompt of its own of 2 KB, engines have said how loaded they are, and loads change all the time. What
was chosen is told to be answered, which is measured by itself. The first placement, which makes tables of the fleet, is
left out and shown as ``first``. A second table is of cache_aware, the default, which reads the prompt: other prompts,
and other fleets. Figures are those of the best of 40 short rounds.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bench.placing import Cost, Fleet, chat, ids, measure, text
from extproc.apis.request import InferenceRequest
from extproc.policies.event_prefixes import EventPrefixes
from extproc.policies.names import PolicyName
from extproc.policies.policy import Policy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.kv_events import Stored, packed
from extproc.workers.worker import Role

_SIZES: Final = (2, 64, 100, 1000)
_LIMITS: Final = {64: 20.0, 100: 20.0, 1000: 200.0}  # µs
_KNOWN_LIMIT: Final = 60.0  # µs of a prompt of which 4 KB are known, or with KV events, or legs under way at all
_LONG_LIMIT: Final = 500.0  # µs of 220 KB: "well under a millisecond"
_FULL_LIMIT: Final = 150.0  # µs where most workers have as many legs as they may
_BLOCK: Final = 16  # tokens
_TUNING: Final = Tuning()
_CACHE_AWARE: Final = (PolicyName.CACHE_AWARE, PolicyName.CACHE_AWARE)

Requests = Callable[[int], Iterator[InferenceRequest]]


@dataclass(frozen=True, slots=True)
class _Case:
    """What is measured.

    Attributes:
        name: of it.
        number: requests in a round.
        requests: makes so many.
        policies: makes those of both roles.
        fleet: makes one of so many workers.
        under_way: requests, for each worker.
        known: what all workers have answered, if anything.
        limit: the most µs, where reading the prompt is what costs; 0: by the number of workers.
    """

    name: str
    number: int
    requests: Requests
    policies: Callable[[Fleet], Sequence[Policy]]
    fleet: Callable[[int], Fleet] = Fleet
    under_way: int = 0
    known: Callable[[], InferenceRequest] | None = None
    limit: float = 0.0

    def cost(self, size: int) -> Cost:
        """With so many workers."""
        fleet = self.fleet(size)
        policies = self.policies(fleet)
        if self.known is not None:
            for workers, policy in zip((fleet.prefills, fleet.decodes), policies, strict=True):
                for worker in workers:
                    policy.learn(self.known(), worker)
        return measure(fleet, policies, self.requests, self.number, self.under_way * len(fleet) // 2)


# -- policies ---------------------------------------------------------------------------------------------------------


def _pair_of(names: Sequence[PolicyName], tuning: Tuning, exact: EventPrefixes | None = None) -> list[Policy]:
    roles = (Role.PREFILL, Role.DECODE)
    return [policy_of(name, tuning, time.monotonic, role, None, exact) for name, role in zip(names, roles, strict=True)]


def _of_policies(number: int) -> Iterator[_Case]:
    """One for each policy."""
    for name in PolicyName:
        names = (name, PolicyName.ROUND_ROBIN) if name is PolicyName.BUCKET else (name, name)
        tunings = {name.value: _TUNING}
        if name is PolicyName.LEAST_LOAD:
            tunings["least_load, sticky"] = Tuning(routing_key_override=True)
        for shown, tuning in tunings.items():
            yield _Case(shown, number, _new(2000), lambda _, names=names, tuning=tuning: _pair_of(names, tuning))


def _of_cache_aware(number: int) -> Iterator[_Case]:
    few = max(5, number // 10)
    shared, ids_shared = text(4000), range(16_000)
    case = partial(_Case, policies=lambda _: _pair_of(_CACHE_AWARE, _TUNING))
    yield case("200 bytes, new", number, _new(200))
    yield case("2 KB, new", number, _new(2000))
    yield case("- 4 legs under way at each worker", number, _new(2000), under_way=4, limit=_KNOWN_LIMIT)
    yield case("- 65 to 100", number, _new(2000), fleet=partial(Fleet, legs=(65, 100)))
    yield case("- two kinds that do not pair", number, _new(2000), fleet=partial(Fleet, kinds=2))
    yield case("- every other worker overloaded", number, _new(2000), fleet=partial(Fleet, overloaded=2))
    yield case("- nine of ten at their limit", number, _new(2000), fleet=partial(Fleet, free=10), limit=_FULL_LIMIT)
    yield case(
        "300 bytes after 4 KB that all hold", number, _after(shared), known=lambda: chat(shared), limit=_KNOWN_LIMIT
    )
    yield case("the next turn after 4 KB", number, _Turns(4000, 200), limit=_KNOWN_LIMIT)
    yield case("220 KB, new", few, _new(220_000), limit=_LONG_LIMIT)
    yield case("the next turn after 220 KB", few, _Turns(220_000, 8), limit=_LONG_LIMIT)
    followed = partial(_Case, policies=lambda fleet: _pair_of(_CACHE_AWARE, _TUNING, _followed(fleet, ids_shared)))
    yield followed("with KV events: 2 KB, new", number, _new(2000), limit=_KNOWN_LIMIT)
    yield followed("- 500 token ids, new", number, _ids(range(0), 500), limit=_KNOWN_LIMIT)
    yield followed("- 16,000 token ids that all hold", few, _ids(ids_shared, 100), limit=4 * _LONG_LIMIT)


def _followed(fleet: Fleet, tokens: Sequence[int]) -> EventPrefixes:
    """What is known of workers that hold the blocks of ``tokens``, and have said all that they hold."""
    prefixes = EventPrefixes(10_000_000)
    blocks = Stored(range(len(tokens) // _BLOCK), None, packed(tokens), _BLOCK, None, ())
    for worker in fleet.workers:
        prefixes.begin(worker)
        prefixes.restart(worker)
        prefixes.apply(worker, (blocks,))
    return prefixes


# -- prompts ----------------------------------------------------------------------------------------------------------


def _new(size: int) -> Requests:
    """Of so many bytes, each with a beginning of its own."""
    return lambda number: (chat(text(size)) for _ in range(number))


def _after(shared: str) -> Requests:
    return lambda number: (chat(shared, "so it is", text(300)) for _ in range(number))


def _ids(shared: Iterable[int], size: int) -> Requests:
    """Token ids: ``size`` behind those that are the same."""
    return lambda number: (ids([*shared, *random.choices(range(100_000), k=size)]) for _ in range(number))


class _Turns:
    """Prompts that go on from one of ``conversations`` of so many bytes."""

    def __init__(self, size: int, conversations: int) -> None:
        self._begun = [text(size) for _ in range(conversations)]

    def __call__(self, number: int) -> Iterator[InferenceRequest]:
        return (chat(random.choice(self._begun), "so it is", text(300)) for _ in range(number))


# -- the tables -------------------------------------------------------------------------------------------------------


def _table(of: str, cases: Iterable[_Case]) -> int:
    """Print one; how many figures are more than they may be."""
    slow = 0
    print(f"| {of} | " + " | ".join(f"{size} workers" for size in _SIZES) + " | first of 1,000 | told |")
    print("|---" * (len(_SIZES) + 3) + "|")
    for case in cases:
        costs = {}
        for size in _SIZES:
            random.seed(1)
            costs[size] = case.cost(size)
            slow += costs[size].each > (case.limit or _LIMITS.get(size, _LONG_LIMIT))
        cells = " | ".join(f"{cost.each:.1f} µs" for cost in costs.values())
        last = costs[_SIZES[-1]]
        print(f"| {case.name} | {cells} | {last.first / 1000:.1f} ms | {last.told:.1f} µs |", flush=True)
    return slow


def main() -> int:
    """Print two tables; 1 when something takes longer than it may."""
    parser = argparse.ArgumentParser(prog="bench.placement", description="CPU of one placement by each policy.")
    parser.add_argument("--requests", type=int, default=100, help="in each of 40 rounds")
    parser.add_argument("--table", choices=("policies", "cache_aware"), help="only this one")
    options = parser.parse_args()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as the service
    slow = 0
    if options.table != "cache_aware":
        slow += _table("policy", _of_policies(options.requests))
        print()
    if options.table != "policies":
        slow += _table("cache_aware", _of_cache_aware(options.requests))
    return int(slow > 0)


if __name__ == "__main__":
    raise SystemExit(main())
