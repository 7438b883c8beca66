"""What is compared: the gateway's policies as they are, an oracle, and the peer's rule as it is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from bench.simulate.fleet import Engine, Fleet, Kept, Rule
from bench.simulate.request import Request
from bench.simulate.traffic import BLOCK, ids_of
from extproc.policies.event_prefixes import EventPrefixes
from extproc.policies.names import AssignmentMode, LoadMetric, PolicyName
from extproc.policies.policy import Policy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.kv_events import Event, Removed, Stored, packed
from extproc.workers.worker import Worker

_PIECE: Final = 64  # characters; the peer's tree has single ones
_MOST_BLOCKS: Final = 1_000_000  # the default of --kv-event-max-blocks


class OfPolicy:
    """A policy of the gateway, as placement uses it.

    Args:
        policy: that one.
        keyed: every conversation has a routing key.
        as_ids: prompts come as token ids.
    """

    def __init__(self, policy: Policy, *, keyed: bool = False, as_ids: bool = False) -> None:
        self._policy = policy
        self._keyed = keyed
        self._as_ids = as_ids

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """See Rule."""
        request.as_ids = self._as_ids
        if self._keyed:
            request.fields = {"x-smg-routing-key": request.conversation.key}
        return fleet.of[self._policy.rank(fleet.workers, 1, request)[0]]

    def prefilled(self, request: Request, engine: Engine) -> None:
        """See Rule."""
        if self._policy.learns:
            self._policy.learn(request, engine.worker)

    def over(self, request: Request) -> None:
        """See Rule."""
        if self._policy.holds:
            self._policy.over(request.notes)

    def restarted(self, engine: Engine) -> None:
        """See Rule."""
        self._policy.forget(engine.worker)


class Followed(OfPolicy):
    """cache_aware with the engines' KV events, each there as soon as it has happened."""

    def __init__(self, fleet: Fleet) -> None:
        self.exact = EventPrefixes(_MOST_BLOCKS)
        super().__init__(policy_of(PolicyName.CACHE_AWARE, Tuning(), lambda: fleet.now, exact=self.exact), as_ids=True)
        for engine in fleet.engines:
            self.exact.begin(engine.worker)
            self.exact.restart(engine.worker)
            engine.listener = lambda kept, engine=engine: self.exact.apply(engine.worker, _events(kept))

    def restarted(self, engine: Engine) -> None:
        """See Rule."""
        super().restarted(engine)
        self.exact.restart(engine.worker)


def _events(kept: Kept) -> list[Event]:
    found: list[Event] = []
    names = kept.request.conversation.blocks[: kept.request.blocks]
    new = names[kept.first :]
    if new:
        parent = names[kept.first - 1] if kept.first else None
        tokens = b"".join(packed(ids_of(name)) for name in new)
        found.append(Stored(new, parent, tokens, BLOCK, None, ()))
    if kept.gone:
        found.append(Removed(kept.gone))
    return found


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

    def over(self, request: Request) -> None:
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
        self._tree: dict[int, set[Worker]] = {}
        self._chosen: dict[Worker, int] = {}
        self._pieces: dict[int, list[int]] = {}  # of each conversation

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """See Rule."""
        worker = self.pick(fleet.workers, request, lambda worker: fleet.of[worker].whole)
        return fleet.of[worker]

    def pick(self, workers: Sequence[Worker], request: Request, whole: Callable[[Worker], int]) -> Worker:
        """The same. ``whole``: how many requests it has whose answers are not over."""

        def load(worker: Worker) -> int:
            return worker.load if self._released else whole(worker)

        def least(among: Sequence[Worker]) -> Worker:
            return min(among, key=lambda worker: (load(worker), self._chosen.get(worker, 0)))

        prompt = request.prompt_bytes()
        numbers = self._numbers(request, prompt)
        matched = next((place for place, each in enumerate(numbers) if each not in self._tree), len(numbers))
        if matched and matched * _PIECE / len(prompt) > 0.3:
            chosen = least([worker for worker in workers if worker in self._tree[numbers[matched - 1]]] or workers[:1])
        else:
            chosen = least(workers)
        mean = sum(map(load, workers)) / len(workers)
        if load(chosen) > mean * 1.5 and load(chosen) > mean + 64:
            chosen = least(workers)
        for each in numbers:
            self._tree.setdefault(each, set()).add(chosen)
        self._chosen[chosen] = self._chosen.get(chosen, 0) + 1
        return chosen

    def _numbers(self, request: Request, prompt: bytes) -> list[int]:
        """The nodes of the tree on the way of a prompt; those of the turn before are its beginning but for the end."""
        key = id(request.conversation)
        numbers = self._pieces.get(key, [])
        whole = request.turn.end // _PIECE
        number = numbers[-1] if numbers else 0
        for start in range(len(numbers) * _PIECE, whole * _PIECE, _PIECE):
            number = hash((number, prompt[start : start + _PIECE]))
            numbers.append(number)
        self._pieces[key] = numbers
        return [*numbers, hash((number, prompt[whole * _PIECE :]))]

    def prefilled(self, request: Request, engine: Engine) -> None:
        """See Rule."""

    def over(self, request: Request) -> None:
        """See Rule."""

    def restarted(self, engine: Engine) -> None:
        """See Rule: it comes back under its name."""


def _policy(
    name: PolicyName, tuning: Tuning | None = None, *, keyed: bool = False, as_ids: bool = False
) -> Callable[[Fleet], Rule]:
    def made(fleet: Fleet) -> Rule:
        return OfPolicy(policy_of(name, tuning or Tuning(), lambda: fleet.now), keyed=keyed, as_ids=as_ids)

    return made


_STICKY: Final = Tuning(routing_key_override=True)

# By the name in tables.
RULES: Final[dict[str, Callable[[Fleet], Rule]]] = {
    "random": _policy(PolicyName.RANDOM),
    "round_robin": _policy(PolicyName.ROUND_ROBIN),
    "passthrough": _policy(PolicyName.PASSTHROUGH),
    "power_of_two": _policy(PolicyName.POWER_OF_TWO),
    "power_of_two, least_requests": _policy(
        PolicyName.POWER_OF_TWO, Tuning(power_of_two_load_metric=LoadMetric.LEAST_REQUESTS)
    ),
    "least_load": _policy(PolicyName.LEAST_LOAD),
    "bucket": _policy(PolicyName.BUCKET),
    "prefix_hash": _policy(PolicyName.PREFIX_HASH),
    "consistent_hashing": _policy(PolicyName.CONSISTENT_HASHING, keyed=True),
    "manual": _policy(PolicyName.MANUAL, keyed=True),
    "manual, min_load": _policy(PolicyName.MANUAL, Tuning(assignment_mode=AssignmentMode.MIN_LOAD), keyed=True),
    "least_load, sticky": _policy(PolicyName.LEAST_LOAD, _STICKY, keyed=True),
    "cache_aware": _policy(PolicyName.CACHE_AWARE),
    "cache_aware, sticky": _policy(PolicyName.CACHE_AWARE, _STICKY, keyed=True),
    "cache_aware, token ids": _policy(PolicyName.CACHE_AWARE, as_ids=True),
    "cache_aware, KV events": Followed,
    "peer": lambda _fleet: Peer(),
    "peer, leg's load": lambda _fleet: Peer(released=True),
    "oracle": lambda _fleet: Oracle(),
}
