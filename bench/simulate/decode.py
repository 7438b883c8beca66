"""Decode workers: what it is worth there to know who holds a prompt.

A decode worker is handed the KV cache of the whole prompt; what its own prefix cache holds of it need not be
transferred (vLLM; SGLang keeps none unless told to). Each of its steps makes a token for every request that it runs,
and takes longer the more those are and the longer their contexts.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Final

from bench.simulate.fleet import Request
from bench.simulate.traffic import BLOCK, SCENARIOS, Scenario, conversations
from extproc.policies.cache_aware import CacheAwarePolicy
from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.policy import Policy
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

_STEP: Final = 0.010  # seconds
_PER_REQUEST: Final = 0.00025
_PER_TOKEN: Final = 1.2e-7  # of context
_TRANSFER: Final = 8e-6  # seconds for a token's KV cache: 160 KB at 20 GB/s


class Decoder:
    """One decode worker; all its requests go on at the same pace."""

    def __init__(self, number: int, room: int) -> None:
        self.worker = Worker(f"d{number}", WorkerUrl("http", f"d{number}", 1), Role.DECODE)
        self.worker.status, self.worker.endpoint = Status.READY, f"10.0.1.{number}:1"
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.room = room // BLOCK
        self.steps = 0.0  # made so far
        self.at = 0.0
        self.context = 0
        self.running: list[tuple[float, int, Request, float]] = []  # the step at which it ends, ..., when it began

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
        while len(self.cache) > self.room:
            self.cache.popitem(last=False)
        return lacking * BLOCK


def _simulate(scenario: Scenario, seed: int, make: Callable[[Callable[[], float]], Policy]) -> tuple[float, ...]:
    """Share transferred, mean and 99th percentile of seconds per token, tokens of the fullest as a multiple."""
    now = 0.0
    policy = make(lambda: now)
    decoders = [Decoder(number, scenario.cache) for number in range(scenario.workers)]
    workers = tuple(each.worker for each in decoders)
    of = dict(zip(workers, decoders, strict=True))
    order = count()
    events: list[tuple[float, int, Callable[[], None]]] = []
    paces: list[float] = []
    lopsided: list[float] = []
    moved = whole = 0

    def arrives(request: Request) -> None:
        nonlocal moved, whole
        decoder = of[policy.rank(workers, 4, request)[0]]
        decoder.worker.begin(request.prompt_tokens())
        lacking = decoder.transfer(request)
        moved, whole = moved + lacking, whole + request.blocks * BLOCK
        heapq.heappush(events, (now + lacking * _TRANSFER, next(order), lambda: starts(decoder, request)))
        loads = [each.context for each in decoders]
        if sum(loads):
            lopsided.append(max(loads) * len(loads) / sum(loads))

    def starts(decoder: Decoder, request: Request) -> None:
        policy.learn(request, decoder.worker)
        decoder.advance(now)
        decoder.context += request.blocks * BLOCK
        heapq.heappush(decoder.running, (decoder.steps + request.turn.output, next(order), request, now))
        looks(decoder)

    def looks(decoder: Decoder) -> None:
        decoder.advance(now)
        while decoder.running and decoder.running[0][0] <= decoder.steps + 1e-6:
            _, _, request, began = heapq.heappop(decoder.running)
            decoder.context -= request.blocks * BLOCK
            decoder.worker.end(0, request.prompt_tokens())
            paces.append((now - began) / request.turn.output)
        if decoder.running:
            again = now + (decoder.running[0][0] - decoder.steps) * decoder.pace()
            heapq.heappush(events, (again, next(order), lambda: looks(decoder)))

    for conversation in conversations(scenario, seed):
        for number, turn in enumerate(conversation.turns):
            request = Request(conversation, number, turn.at)
            heapq.heappush(events, (turn.at, next(order), lambda request=request: arrives(request)))
    while events:
        now, _, act = heapq.heappop(events)
        act()
    paces.sort()
    return moved / whole, fmean(paces), paces[int(len(paces) * 0.99)], fmean(lopsided)


_POLICIES: Final[dict[str, Callable[[Callable[[], float]], Policy]]] = {
    "random": lambda _now: RandomPolicy(),
    "round_robin": lambda _now: RoundRobinPolicy(),
    "cache_aware": lambda now: CacheAwarePolicy(CacheAwareSettings(), now, Role.DECODE),
    "cache_aware as for prefill": lambda now: CacheAwarePolicy(CacheAwareSettings(), now),
}


def compare_decodes(seed: int) -> str:
    """A table in Markdown."""
    lines = ["| scenario | policy | transferred | time per token, mean | p99 | fullest |", "|---|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        if scenario.name in ("chat", "agents", "mixed"):
            for name, make in _POLICIES.items():
                random.seed(seed)
                share, mean, tail, lopsided = _simulate(replace(scenario, seconds=200.0), seed, make)
                lines.append(
                    f"| {scenario.name} | {name} | {share:.0%} | {1000 * mean:.1f} ms | {1000 * tail:.1f} ms "
                    f"| {lopsided:.2f} x |"
                )
    return "\n".join(lines)
