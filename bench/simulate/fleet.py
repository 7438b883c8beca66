"""Prefill workers with finite prefix caches, and what a policy makes of them. Time is simulated."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from bench.simulate.traffic import Conversation, Scenario, Turn
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

OVERHEAD = 0.015  # seconds for each prefill
RATE = 12_000.0  # tokens prefilled per second
CONTEXT = 200_000.0  # tokens of context that make it half as fast
DECODE_STEP = 0.025
_BLOCK = 64


class Rule(Protocol):
    """A policy, or what stands for one."""

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """Where ``request`` goes."""

    def prefilled(self, request: Request, engine: Engine) -> None:
        """It is there."""

    def restarted(self, engine: Engine) -> None:
        """It has lost its cache."""


class Request:
    """One turn on its way. It is the RequestView of the policies, too."""

    __slots__ = ("arrived", "blocks", "conversation", "fields", "notes", "number", "turn")
    model = "m"

    def __init__(self, conversation: Conversation, number: int, arrived: float) -> None:
        self.conversation = conversation
        self.number = number
        self.turn: Turn = conversation.turns[number]
        self.arrived = arrived
        self.blocks = conversation.tokens(self.turn) // _BLOCK
        self.fields: Mapping[str, bytes] = {}
        self.notes: dict[object, object] = {}

    def prompt_tokens(self) -> int:
        """As a gateway guesses it."""
        return (self.turn.end + 100) // 4

    def prompt_bytes(self, most: int | None = None) -> bytes:
        """The messages."""
        return self.conversation.prompt(self.turn)[:most]

    def own_id(self) -> str:
        """None."""
        return ""

    def prompt_context(self) -> bytes:
        """The tools."""
        return self.conversation.context


class Engine:
    """One prefill worker: one prompt after the other, and an LRU cache of blocks."""

    def __init__(self, number: int, cache: int) -> None:
        self.worker = Worker(f"p{number}", WorkerUrl("http", f"p{number}", 1), Role.PREFILL)
        self.worker.status, self.worker.endpoint = Status.READY, f"10.0.0.{number}:1"
        self.worker.engine_load = EngineLoad(0, [RankLoad(max_tokens=cache)])
        self.queue: deque[Request] = deque()
        self.running: Request | None = None
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.room = cache // _BLOCK
        self.busy_until = 0.0
        self.busy = 0.0
        self.whole = 0  # requests it has whose answer is not over

    def cached(self, request: Request) -> int:
        """How many of its blocks are in the cache from the beginning on."""
        cache, found = self.cache, 0
        for block in request.conversation.blocks[: request.blocks]:
            if block not in cache:
                break
            found += 1
        return found

    def seconds(self, request: Request, cached: int) -> float:
        """How long its prefill takes with so many blocks cached."""
        tokens = request.conversation.tokens(request.turn)
        new = max(1, tokens - cached * _BLOCK)
        return OVERHEAD + new / RATE * (1 + tokens / CONTEXT)

    def keep(self, request: Request) -> None:
        """Its blocks are the most recent ones, the first of them more than the last."""
        cache = self.cache
        for block in reversed(request.conversation.blocks[: request.blocks]):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.room:
            cache.popitem(last=False)


@dataclass(slots=True)
class Outcome:
    """What came of a scenario under a rule."""

    ttft: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    tokens: int = 0
    hits: int = 0
    busy: Sequence[float] = ()
    longest: list[int] = field(default_factory=list)  # of the queues, beside their mean, at each arrival
    mean: list[float] = field(default_factory=list)
    moves: int = 0
    later: int = 0  # turns that were not the first, and how many of them changed the worker


class Fleet:
    """The engines of a scenario and the events of its time."""

    def __init__(self, scenario: Scenario, rule: Callable[[Fleet], Rule]) -> None:
        self.now = 0.0
        self.engines = [Engine(number, scenario.cache) for number in range(scenario.workers)]
        self.workers = tuple(engine.worker for engine in self.engines)
        self.of = {engine.worker: engine for engine in self.engines}
        self.outcome = Outcome()
        self._scenario = scenario
        self._rule = rule(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._last: dict[int, Engine] = {}

    def run(self, conversations: Sequence[Conversation]) -> Outcome:
        """All of them to their end."""
        for conversation in conversations:
            self._at(conversation.turns[0].at, lambda conversation=conversation: self._arrives(conversation, 0))
        if self._scenario.restart is not None:
            self._at(self._scenario.restart, self._restart)
        events = self._events
        while events:
            self.now, _, act = heapq.heappop(events)
            act()
        self.outcome.busy = [engine.busy for engine in self.engines]
        return self.outcome

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _arrives(self, conversation: Conversation, number: int) -> None:
        request = Request(conversation, number, self.now)
        lengths = [engine.worker.load for engine in self.engines]
        self.outcome.longest.append(max(lengths))
        self.outcome.mean.append(sum(lengths) / len(lengths))
        engine = self._rule.choose(self, request)
        engine.worker.begin(request.prompt_tokens())
        engine.whole += 1
        if number:
            self.outcome.later += 1
            self.outcome.moves += self._last[id(conversation)] is not engine
        self._last[id(conversation)] = engine
        engine.queue.append(request)
        if engine.running is None:
            self._start(engine)

    def _start(self, engine: Engine) -> None:
        request = engine.running = engine.queue.popleft()
        cached = engine.cached(request)
        seconds = engine.seconds(request, cached)
        outcome = self.outcome
        outcome.waited.append(self.now - request.arrived)
        outcome.tokens += request.conversation.tokens(request.turn)
        outcome.hits += cached * _BLOCK
        engine.busy += seconds
        engine.busy_until = self.now + seconds
        self._at(engine.busy_until, lambda: self._done(engine, request))

    def _done(self, engine: Engine, request: Request) -> None:
        engine.keep(request)
        engine.worker.end(0, request.prompt_tokens())
        self.outcome.ttft.append(self.now - request.arrived)
        self._rule.prefilled(request, engine)
        decode = request.turn.output * DECODE_STEP
        self._at(self.now + decode, lambda: self._over(engine, request))
        engine.running = None
        if engine.queue:
            self._start(engine)

    def _over(self, engine: Engine, request: Request) -> None:
        engine.whole -= 1
        conversation, following = request.conversation, request.number + 1
        if following < len(conversation.turns):
            when = max(conversation.turns[following].at, self.now + 1.0)
            self._at(when, lambda: self._arrives(conversation, following))

    def _restart(self) -> None:
        """The process is another one; what it had in its queue is taken to be done by it all the same."""
        engine = self.engines[0]
        engine.cache.clear()
        self._rule.restarted(engine)
