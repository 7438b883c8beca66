"""Fleets and requests of which placements are measured (:mod:`bench.placement`)."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, Api
from extproc.policies.placement import Pair, Placer
from extproc.policies.policy import Policy
from extproc.policies.room import ONE_LEG
from extproc.workers.index import Index
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.pairing import PairingMode
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

MODEL: Final = "bench"
_ROUNDS: Final = 40
_WORDS: Final = ("alpha", "beta", "gamma", "delta", "token", "cache", "prompt", "answer")
_TEXT: Final = " ".join(random.choices(_WORDS, k=60_000))
_numbers: Final = count()


class Fleet(Index):
    """Ready workers, half of each role, as the registry shows them to placement.

    Args:
        size: how many; at least one of each role.
        legs: how many each has under way, which no request of the bench ends: from, to.
        kinds: groups of workers that may be paired only among themselves.
        overloaded: every so manieth is; 0: nobody.
        free: all but every so manieth have as many legs as they may; 0: nobody has.
    """

    def __init__(
        self, size: int, *, legs: tuple[int, int] = (0, 20), kinds: int = 1, overloaded: int = 0, free: int = 0
    ) -> None:
        self.prefills = _workers(Role.PREFILL, size, legs, kinds, overloaded)
        self.decodes = _workers(Role.DECODE, size, legs, kinds, overloaded)
        self.workers = (*self.prefills, *self.decodes)
        for workers in (self.prefills, self.decodes) if free else ():
            for number, worker in enumerate(workers):
                worker.limit = 0 if number % free else 1 << 30
        super().__init__(lambda: self.workers, PairingMode.LENIENT)

    def __len__(self) -> int:
        return len(self.workers)


def _workers(role: Role, size: int, legs: tuple[int, int], kinds: int, overloaded: int) -> tuple[Worker, ...]:
    made = []
    for number in range(max(1, size // 2)):
        host = f"10.{role is Role.DECODE:d}.{number >> 8}.{number & 255}"
        labels = {"pairing_protocol": f"kind {number % kinds}"} if kinds > 1 else {}
        url = WorkerUrl("http", host, 8000)
        worker = Worker(f"{role.value}-{number}", url, role, model_ids=(MODEL,), labels=labels)
        worker.status, worker.endpoint = Status.READY, f"{host}:8000"
        worker.load = worker.load_then = random.randint(*legs)
        worker.tokens = worker.tokens_then = random.randrange(40_000)
        said = RankLoad(running=5, waiting=2, waiting_tokens=random.randrange(9000), kv_usage=random.random())
        worker.engine_load = EngineLoad(0.0, [said])
        if overloaded and number % overloaded == 0:
            worker.overloaded = "as the engine says"
        made.append(worker)
    return tuple(made)


# -- requests ---------------------------------------------------------------------------------------------------------


def text(size: int) -> str:
    """So many characters that no other prompt begins with."""
    number = next(_numbers)
    begin = number * 7919 % 10_000
    return f"{number} {_TEXT[begin : begin + size]}"[:size]


def chat(*messages: str) -> InferenceRequest:
    """A chat; every other message is the assistant's."""
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": content} for place, content in enumerate(messages)]
    return _read(CHAT, {"model": MODEL, "messages": said})


def ids(tokens: Sequence[int]) -> InferenceRequest:
    """A completion of a prompt that is given as token ids."""
    return _read(COMPLETIONS, {"model": MODEL, "prompt": list(tokens)})


def _read(api: Api, body: object) -> InferenceRequest:
    key = b"%x" % random.randrange(500)  # as many conversations; sessions know them after the first rounds
    return InferenceRequest.read(api, json.dumps(body).encode(), {"x-smg-routing-key": key})


# -- measuring --------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """µs of CPU: of the first placement, of one later, and of being told of its answers."""

    first: float
    each: float
    told: float


@dataclass(slots=True)
class _Placed:
    """A request that is under way."""

    request: InferenceRequest
    pair: Pair
    tokens: int
    turns: tuple[int, int]


def measure(
    fleet: Fleet,
    policies: Sequence[Policy],
    requests: Callable[[int], Iterator[InferenceRequest]],
    number: int,
    under_way: int = 0,
) -> Cost:
    """The best of some rounds of ``number`` requests; each is answered when ``under_way`` later ones are placed.

    A machine that others use too is quiet for a short round now and then: hence many short ones.
    """
    prefill, decode = policies
    placer = Placer(fleet, prefill, decode)
    (begun,) = requests(1)
    first = _clocked(lambda: placer.pair(begun, room=ONE_LEG))
    placer.over(begun.notes)
    for worker in fleet.workers:  # everybody has served something
        placer.answered(chat(text(1000)), worker)
    clock = min(_clocked(lambda: None) for _ in range(1000))
    waiting: deque[_Placed] = deque()
    placing, telling = [], []
    for round_number in range(-1, _ROUNDS):
        spent = told = 0.0
        # At first as many as are to be under way.
        for request in requests(number if round_number >= 0 else under_way):
            before = time.thread_time()
            pair = placer.pair(request, room=ONE_LEG)
            spent += time.thread_time() - before
            tokens = request.prompt_tokens()
            waiting.append(_Placed(request, pair, tokens, (pair.prefill.begin(tokens), pair.decodes[0].begin(tokens))))
            while len(waiting) > under_way:
                told += _answered(placer, waiting.popleft()) - clock
        if round_number >= 0:
            placing.append(spent / number - clock)
            telling.append(told / number)
    while waiting:
        _answered(placer, waiting.popleft())
    return Cost(first * 1e6, min(placing) * 1e6, max(0.0, min(telling)) * 1e6)


def _answered(placer: Placer, placed: _Placed) -> float:
    """Tell of both answers; the seconds it takes."""
    request, pair = placed.request, placed.pair
    before = time.thread_time()
    placer.answered(request, pair.prefill)
    placer.answered(request, pair.decodes[0])
    if request.notes:
        placer.over(request.notes)
    spent = time.thread_time() - before
    for worker, turn in zip((pair.prefill, pair.decodes[0]), placed.turns, strict=True):
        worker.end(turn, placed.tokens)
    return spent


def _clocked(what: Callable[[], object]) -> float:
    before = time.thread_time()
    what()
    return time.thread_time() - before
