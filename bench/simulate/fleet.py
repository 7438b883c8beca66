"""Prefill workers with finite prefix caches, and what a policy makes of them. Time is simulated."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from bench.simulate.request import Request
from bench.simulate.traffic import BLOCK, Conversation, Scenario
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

OVERHEAD = 0.015  # seconds for each prefill
RATE = 12_000.0  # tokens prefilled per second
CONTEXT = 200_000.0  # tokens of context that make it half as fast
DECODE_STEP = 0.025
POLLED = 10.0  # seconds between an engine's words about its load, the default of --load-monitor-interval


class Rule(Protocol):
    """A policy, or what stands for one."""

    def choose(self, fleet: Fleet, request: Request) -> Engine:
        """Where ``request`` goes."""

    def prefilled(self, request: Request, engine: Engine) -> None:
        """It is there."""

    def over(self, request: Request) -> None:
        """Its answer is over."""

    def restarted(self, engine: Engine) -> None:
        """It has lost its cache."""


class Kept(NamedTuple):
    """What a prefill has changed in a cache: blocks of ``request`` from ``first`` on are new, ``gone`` have left."""

    request: Request
    first: int
    gone: Sequence[int]


class Engine:
    """One prefill worker: one prompt after the other, and an LRU cache of blocks."""

    def __init__(self, number: int, cache: int) -> None:
        self.worker = Worker(f"p{number}", WorkerUrl("http", f"p{number}", 1), Role.PREFILL)
        self.worker.status, self.worker.endpoint = Status.READY, f"10.0.0.{number}:1"
        self.listener: Callable[[Kept], None] | None = None  # is told what comes into the cache and what leaves it
        self.queue: deque[Request] = deque()
        self.running: Request | None = None
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.size = cache
        self.room = cache // BLOCK
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
        tokens = request.tokens
        new = max(1, tokens - cached * BLOCK)
        return OVERHEAD + new / RATE * (1 + tokens / CONTEXT)

    def keep(self, request: Request) -> None:
        """Its blocks are the most recent ones, the first of them more than the last."""
        cache, blocks = self.cache, request.conversation.blocks[: request.blocks]
        first = self.cached(request)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        gone = []
        while len(cache) > self.room:
            gone.append(cache.popitem(last=False)[0])
        if self.listener is not None:
            self.listener(Kept(request, first, gone))

    def says(self, now: float) -> None:
        """What an engine answers that is asked for its load."""
        worker, queued = self.worker, list(self.queue)
        tokens = sum(request.tokens - self.cached(request) * BLOCK for request in queued)
        used = 0 if self.running is None else self.running.tokens
        usage = min(1.0, used / self.size)
        rank = RankLoad(
            running=int(used > 0), waiting=len(queued), waiting_tokens=tokens, max_tokens=self.size, kv_usage=usage
        )
        worker.engine_load = EngineLoad(now, [rank])
        worker.load_then, worker.tokens_then = worker.load, worker.tokens


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
        self.rule = rule(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._last: dict[int, Engine] = {}
        self._left = 0  # turns whose answers are not over

    def run(self, conversations: Sequence[Conversation]) -> Outcome:
        """All of them to their end."""
        for conversation in conversations:
            self._at(conversation.turns[0].at, lambda conversation=conversation: self._arrives(conversation, 0))
        if self._scenario.restart is not None:
            self._at(self._scenario.restart, self._restart)
        self._left = sum(len(conversation.turns) for conversation in conversations)
        for number, engine in enumerate(self.engines):
            engine.says(0.0)
            self._at(POLLED * number / len(self.engines), lambda engine=engine: self._asks(engine))
        events = self._events
        while events:
            self.now, _, act = heapq.heappop(events)
            act()
        self.outcome.busy = [engine.busy for engine in self.engines]
        return self.outcome

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _asks(self, engine: Engine) -> None:
        engine.says(self.now)
        if self._left:
            self._at(self.now + POLLED, lambda: self._asks(engine))

    def _arrives(self, conversation: Conversation, number: int) -> None:
        request = Request(conversation, number, self.now)
        lengths = [engine.worker.load for engine in self.engines]
        self.outcome.longest.append(max(lengths))
        self.outcome.mean.append(sum(lengths) / len(lengths))
        engine = self.rule.choose(self, request)
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
        outcome.tokens += request.tokens
        outcome.hits += cached * BLOCK
        engine.busy += seconds
        engine.busy_until = self.now + seconds
        self._at(engine.busy_until, lambda: self._done(engine, request))

    def _done(self, engine: Engine, request: Request) -> None:
        engine.keep(request)
        engine.worker.end(0, request.prompt_tokens())
        self.outcome.ttft.append(self.now - request.arrived)
        self.rule.prefilled(request, engine)
        decode = request.turn.output * DECODE_STEP
        self._at(self.now + decode, lambda: self._over(engine, request))
        engine.running = None
        if engine.queue:
            self._start(engine)

    def _over(self, engine: Engine, request: Request) -> None:
        engine.whole -= 1
        self._left -= 1
        self.rule.over(request)
        conversation, following = request.conversation, request.number + 1
        if following < len(conversation.turns):
            when = max(conversation.turns[following].at, self.now + 1.0)
            self._at(when, lambda: self._arrives(conversation, following))

    def _restart(self) -> None:
        """The process is another one; what it had in its queue is taken to be done by it all the same."""
        engine = self.engines[0]
        engine.cache.clear()
        self.rule.restarted(engine)
