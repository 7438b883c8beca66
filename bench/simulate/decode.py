"""Decode workers: what it is worth there to know who holds a prompt.

A decode worker is handed the KV cache of the whole prompt; what its own prefix cache holds of it need not be
transferred (vLLM; SGLang keeps none unless told to). Each of its steps makes a token for every request that it runs,
and takes longer the more those are and the longer their contexts.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Final, NamedTuple, Protocol

from bench.simulate.fleet import POLLED
from bench.simulate.report import spread
from bench.simulate.request import Request
from bench.simulate.rules import Peer
from bench.simulate.traffic import BLOCK, SCENARIOS, Conversation, Scenario, conversations
from extproc.policies.names import PolicyName
from extproc.policies.policy import Policy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

_STEP: Final = 0.010  # seconds
_PER_REQUEST: Final = 0.00025
_PER_TOKEN: Final = 1.2e-7  # of context
_TRANSFER: Final = 8e-6  # seconds for a token's KV cache: 160 KB at 20 GB/s
_SECONDS: Final = 200.0
_SCENARIOS: Final = ("chat", "agents", "mixed")

Clock = Callable[[], float]


class Rule(Protocol):
    """A policy, or what stands for one."""

    def choose(self, workers: Sequence[Worker], request: Request) -> Worker:
        """Where ``request`` goes."""

    def started(self, request: Request, worker: Worker) -> None:
        """Its cache is there."""

    def over(self, request: Request) -> None:
        """Its answer is."""


class Decoder:
    """One decode worker; all its requests go on at the same pace."""

    def __init__(self, number: int, cache: int) -> None:
        self.worker = Worker(f"d{number}", WorkerUrl("http", f"d{number}", 1), Role.DECODE)
        self.worker.status, self.worker.endpoint = Status.READY, f"10.0.1.{number}:1"
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.size = cache
        self.steps = 0.0  # made so far
        self.at = 0.0
        self.context = 0
        self.running: list[tuple[float, int, Request, float]] = []  # the step at which it ends, ..., when it began
        self.looks = 0  # how often it was worked out when the next one ends

    def pace(self) -> float:
        """Seconds that a step takes now."""
        return _STEP + _PER_REQUEST * len(self.running) + _PER_TOKEN * self.context

    def advance(self, now: float) -> None:
        """Make the steps up to now."""
        self.steps += (now - self.at) / self.pace()
        self.at = now

    def transfer(self, request: Request) -> int:
        """Tokens that it lacks of a prompt, which it keeps from now on."""
        blocks = request.conversation.blocks[: request.blocks]
        lacking = next((len(blocks) - place for place, each in enumerate(blocks) if each not in self.cache), 0)
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.size // BLOCK:
            self.cache.popitem(last=False)
        return lacking * BLOCK

    def says(self, now: float) -> None:
        """What an engine answers that is asked for its load."""
        worker, running = self.worker, len(self.running)
        usage = min(1.0, self.context / self.size)
        rank = RankLoad(
            running=running, waiting=0, waiting_tokens=0, max_tokens=self.size, kv_usage=usage,
            throughput=running / self.pace(),
        )  # fmt: skip
        worker.engine_load = EngineLoad(now, [rank])
        worker.load_then, worker.tokens_then = worker.load, worker.tokens


class Outcome(NamedTuple):
    """Share of the prompts' tokens that was transferred; seconds for each token; tokens of the fullest worker."""

    transferred: float
    mean: float
    p99: float
    fullest: float


class Decodes:
    """The workers of a scenario and the events of its time."""

    def __init__(self, scenario: Scenario, make: Callable[[Clock], Rule]) -> None:
        self.now = 0.0
        self._rule = make(lambda: self.now)
        self._decoders = [Decoder(number, scenario.cache) for number in range(scenario.workers)]
        self.workers = tuple(each.worker for each in self._decoders)
        self._of = dict(zip(self.workers, self._decoders, strict=True))
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._paces: list[float] = []
        self._lopsided: list[float] = []
        self._moved = self._whole = self._left = 0

    def run(self, all_of_it: Sequence[Conversation]) -> Outcome:
        """All of them to their end."""
        for conversation in all_of_it:
            for number, turn in enumerate(conversation.turns):
                request = Request(conversation, number, turn.at)
                self._left += 1
                self._at(turn.at, lambda request=request: self._arrives(request))
        for number, decoder in enumerate(self._decoders):
            self._at(POLLED * number / len(self._decoders), lambda decoder=decoder: self._asks(decoder))
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self._paces.sort()
        tail = self._paces[int(len(self._paces) * 0.99)]
        return Outcome(self._moved / self._whole, fmean(self._paces), tail, fmean(self._lopsided))

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _asks(self, decoder: Decoder) -> None:
        decoder.says(self.now)
        if self._left:
            self._at(self.now + POLLED, lambda: self._asks(decoder))

    def _arrives(self, request: Request) -> None:
        decoder = self._of[self._rule.choose(self.workers, request)]
        decoder.worker.begin(request.prompt_tokens())
        lacking = decoder.transfer(request)
        self._moved, self._whole = self._moved + lacking, self._whole + request.blocks * BLOCK
        self._at(self.now + lacking * _TRANSFER, lambda: self._starts(decoder, request))
        loads = [each.context for each in self._decoders]
        if sum(loads):
            self._lopsided.append(max(loads) * len(loads) / sum(loads))

    def _starts(self, decoder: Decoder, request: Request) -> None:
        self._rule.started(request, decoder.worker)
        decoder.advance(self.now)
        decoder.context += request.blocks * BLOCK
        heapq.heappush(decoder.running, (decoder.steps + request.turn.output, next(self._order), request, self.now))
        self._looks(decoder, decoder.looks)

    def _looks(self, decoder: Decoder, look: int) -> None:
        if look != decoder.looks:  # another one began meanwhile
            return
        decoder.looks += 1
        decoder.advance(self.now)
        while decoder.running and decoder.running[0][0] <= decoder.steps + 1e-6:
            _, _, request, began = heapq.heappop(decoder.running)
            decoder.context -= request.blocks * BLOCK
            decoder.worker.end(0, request.prompt_tokens())
            self._rule.over(request)
            self._paces.append((self.now - began) / request.turn.output)
            self._left -= 1
        if decoder.running:
            again = self.now + (decoder.running[0][0] - decoder.steps) * decoder.pace()
            look = decoder.looks
            self._at(again, lambda: self._looks(decoder, look))


class _OfPolicy:
    def __init__(self, policy: Policy, *, keyed: bool) -> None:
        self._policy = policy
        self._keyed = keyed

    def choose(self, workers: Sequence[Worker], request: Request) -> Worker:
        if self._keyed:
            request.fields = {"x-smg-routing-key": request.conversation.key}
        return self._policy.rank(workers, 4, request)[0]

    def started(self, request: Request, worker: Worker) -> None:
        if self._policy.learns:
            self._policy.learn(request, worker)

    def over(self, request: Request) -> None:
        if self._policy.holds:
            self._policy.over(request.notes)


class _OfPeer:
    def __init__(self) -> None:
        self._peer = Peer()

    def choose(self, workers: Sequence[Worker], request: Request) -> Worker:
        return self._peer.pick(workers, request, lambda worker: worker.load)

    def started(self, request: Request, worker: Worker) -> None:
        pass

    def over(self, request: Request) -> None:
        pass


def _policy(
    name: PolicyName, role: Role = Role.DECODE, *, sticky: bool = False, keyed: bool = False
) -> Callable[[Clock], Rule]:
    tuning = Tuning(routing_key_override=sticky)
    return lambda now: _OfPolicy(policy_of(name, tuning, now, role), keyed=keyed or sticky)


# By the name in tables.
RULES: Final[dict[str, Callable[[Clock], Rule]]] = {
    "random": _policy(PolicyName.RANDOM),
    "round_robin": _policy(PolicyName.ROUND_ROBIN),
    "power_of_two": _policy(PolicyName.POWER_OF_TWO),
    "least_load": _policy(PolicyName.LEAST_LOAD),
    "prefix_hash": _policy(PolicyName.PREFIX_HASH),
    "consistent_hashing": _policy(PolicyName.CONSISTENT_HASHING, keyed=True),
    "manual": _policy(PolicyName.MANUAL, keyed=True),
    "least_load, sticky": _policy(PolicyName.LEAST_LOAD, sticky=True),
    "cache_aware": _policy(PolicyName.CACHE_AWARE),
    "cache_aware as for prefill": _policy(PolicyName.CACHE_AWARE, Role.PREFILL),
    "peer": lambda _now: _OfPeer(),
}


def compare_decodes(seeds: Sequence[int]) -> str:
    """A table in Markdown: the mean of the seeds, and the lowest and highest."""
    lines = ["| scenario | policy | transferred, % | ms per token, mean | p99 | fullest |", "|---|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        if scenario.name in _SCENARIOS:
            found = defaultdict(list)
            for seed in seeds:
                shorter = replace(scenario, seconds=_SECONDS)
                whole = conversations(shorter, seed)
                for name, make in RULES.items():
                    random.seed(seed)
                    found[name].append(Decodes(shorter, make).run(whole))
                print(f"{scenario.name} {seed}", file=sys.stderr)
            lines += [f"| {scenario.name} | {name} | {_row(outcomes)} |" for name, outcomes in found.items()]
    return "\n".join(lines)


def _row(outcomes: Sequence[Outcome]) -> str:
    figures = zip(*outcomes, strict=True)
    scaled = zip(figures, (100, 1000, 1000, 1), (0, 1, 1, 2), strict=True)
    return " | ".join(spread([factor * value for value in values], places) for values, factor, places in scaled)
