"""What is compared: the gateway's policies as they are, an oracle, and the peer's rule as it is published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bench.simulate.fleet import Engine, Fleet, Request, Rule
from extproc.policies.cache_aware import CacheAwarePolicy
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.policy import Policy
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.round_robin import RoundRobinPolicy

_PIECE: Final = 64  # characters; the peer's tree has single ones


class OfPolicy:
    """A policy of the gateway, as placement uses it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """See Rule."""
        return fleet.of[self._policy.rank(fleet.workers, 1, request)[0]]

    def prefilled(self, request: Request, engine: Engine) -> None:
        """See Rule."""
        if self._policy.learns:
            self._policy.learn(request, engine.worker)

    def restarted(self, engine: Engine) -> None:
        """See Rule."""
        self._policy.forget(engine.worker)


class Oracle:
    """Knows every cache and how much work every queue is: who will be done first. It does not see what comes next."""

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """See Rule."""
        blocks = request.conversation.blocks[: request.blocks]

        def done(engine: Engine) -> float:
            wait = max(0.0, engine.busy_until - fleet.now) if engine.running else 0.0
            known = engine.cached(request)
            pending: list[Request] = [*([engine.running] if engine.running else ()), *engine.queue]
            for other in pending:
                known = max(known, _common(other.conversation.blocks[: other.blocks], blocks))
            for other in engine.queue:
                wait += engine.seconds(other, engine.cached(other))
            # Of equal ones the emptier cache: it loses nothing.
            return wait + engine.seconds(request, known) + 1e-6 * len(engine.cache)

        return min(fleet.engines, key=done)

    def prefilled(self, request: Request, engine: Engine) -> None:
        """See Rule."""

    def restarted(self, engine: Engine) -> None:
        """See Rule."""


def _common(one: list[int], other: list[int]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class Peer:
    """The peer's cache_aware for text, as published: a tree of who was chosen for what, and a gate.

    Load is requests in flight, a prefill worker's until the answer is over. ``released``: until its own leg is over.
    """

    def __init__(self, *, released: bool = False) -> None:
        self._released = released
        self._tree: dict[int, set[Engine]] = {}
        self._chosen: dict[Engine, int] = {}

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """See Rule."""
        engines = fleet.engines

        def load(engine: Engine) -> int:
            return engine.worker.load if self._released else engine.whole

        def least(among: list[Engine]) -> Engine:
            return min(among, key=lambda engine: (load(engine), self._chosen.get(engine, 0)))

        prompt = request.prompt_bytes()
        numbers, number = [], 0
        for start in range(0, len(prompt), _PIECE):
            number = hash((number, prompt[start : start + _PIECE]))
            numbers.append(number)
        matched = next((place for place, each in enumerate(numbers) if each not in self._tree), len(numbers))
        if matched and matched * _PIECE / len(prompt) > 0.3:
            chosen = least([engine for engine in engines if engine in self._tree[numbers[matched - 1]]] or engines[:1])
        else:
            chosen = least(engines)
        mean = sum(map(load, engines)) / len(engines)
        if load(chosen) > mean * 1.5 and load(chosen) > mean + 64:
            chosen = least(engines)
        for each in numbers:
            self._tree.setdefault(each, set()).add(chosen)
        self._chosen[chosen] = self._chosen.get(chosen, 0) + 1
        return chosen

    def prefilled(self, request: Request, engine: Engine) -> None:
        """See Rule."""

    def restarted(self, engine: Engine) -> None:
        """See Rule: it comes back under its name."""


def _policy(make: Callable[[Callable[[], float]], Policy]) -> Callable[[Fleet], Rule]:
    return lambda fleet: OfPolicy(make(lambda: fleet.now))


# By the name in tables.
RULES: Final[dict[str, Callable[[Fleet], Rule]]] = {
    "random": _policy(lambda _now: RandomPolicy()),
    "round_robin": _policy(lambda _now: RoundRobinPolicy()),
    "cache_aware": _policy(lambda now: CacheAwarePolicy(CacheAwareSettings(), now)),
    "peer": lambda _fleet: Peer(),
    "peer, leg's load": lambda _fleet: Peer(released=True),
    "oracle": lambda _fleet: Oracle(),
}
