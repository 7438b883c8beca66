"""CPU µs of one placement by each policy: ``python -m bench.placement``.

A placement is ``Placer.pair``: a prefill worker, and decode workers in order, each half of the workers, chosen by a
policy of their own of the same name (bucket, which is for prefill workers, beside round_robin). Every request has a
routing key and a prompt of its own, engines have said how loaded they are, and loads change all the time. What was
chosen is told to be answered, which is measured by itself. The first placement, which makes tables of the fleet, is
left out and shown as ``first``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from extproc.policies.names import PolicyName
from extproc.policies.placement import Placer
from extproc.policies.policy import Policy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.pairing import PairingMode
from extproc.workers.pairs import Pairs
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

_SIZES: Final = (2, 100, 1000)
_ROUNDS: Final = 7
_LIMITS: Final = {100: 20.0, 1000: 200.0}  # µs
_CACHE_AWARE_LIMITS: Final = {100: 80.0, 1000: 200.0}  # it reads the prompt


@dataclass(slots=True)
class _Request:
    fields: dict[str, bytes]
    prompt: bytes
    tokens: int
    model: str | None = "bench"
    notes: dict[object, object] = field(default_factory=dict)

    def prompt_tokens(self) -> int:
        return self.tokens

    def prompt_bytes(self, most: int | None = None) -> bytes:
        return self.prompt[:most]

    def own_id(self) -> str:
        return ""

    def prompt_context(self) -> bytes:
        return b""


class _Fleet:
    def __init__(self, prefills: tuple[Worker, ...], decodes: tuple[Worker, ...]) -> None:
        self._of = {Role.PREFILL: prefills, Role.DECODE: decodes}
        self._pairs = Pairs(prefills, decodes, PairingMode.LENIENT, any_model=False)

    def usable(self, role: Role, model: str | None) -> tuple[Worker, ...]:  # noqa: ARG002
        return self._of[role]

    def healthy(self, role: Role) -> tuple[Worker, ...]:
        return self._of[role]

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def pairs(self, model: str | None) -> Pairs:  # noqa: ARG002
        return self._pairs

    def knows_model(self, model: str) -> bool:  # noqa: ARG002
        return True


def _workers(role: Role, count: int) -> tuple[Worker, ...]:
    made = []
    for number in range(count):
        host = f"10.{role is Role.DECODE:d}.{number >> 8}.{number & 255}"
        worker = Worker(f"{role.value}-{number}", WorkerUrl("http", host, 8000), role, model_ids=("bench",))
        worker.status, worker.endpoint = Status.READY, f"{host}:8000"
        worker.load = worker.load_then = random.randrange(20)
        worker.tokens = worker.tokens_then = random.randrange(40_000)
        said = RankLoad(running=5, waiting=2, waiting_tokens=random.randrange(9000), kv_usage=random.random())
        worker.engine_load = EngineLoad(0.0, [said])
        made.append(worker)
    return tuple(made)


def _policies() -> Iterator[tuple[str, list[Policy]]]:
    """Prefill and decode policy by the name of what is measured."""
    sticky = Tuning(routing_key_override=True)
    for name in PolicyName:
        names = (name, PolicyName.ROUND_ROBIN) if name is PolicyName.BUCKET else (name, name)
        yield name.value, [policy_of(each, Tuning(), time.monotonic) for each in names]
        if name is PolicyName.LEAST_LOAD:
            yield f"{name.value}, sticky", [policy_of(each, sticky, time.monotonic) for each in names]


def _requests(count: int) -> list[_Request]:
    made = []
    for number in range(count):
        prompt = b'[{"role":"user","content":"%d' % number + b"x" * 2000
        made.append(_Request({"x-smg-routing-key": b"%x" % number}, prompt, random.randrange(1, 9000)))
    return made


def measure(policies: list[Policy], count: int, requests: int) -> tuple[float, float, float]:
    """µs of CPU of the first placement, of one later (the median of rounds), and of being told of its answers."""
    prefills, decodes = _workers(Role.PREFILL, max(1, count // 2)), _workers(Role.DECODE, max(1, count // 2))
    placer = Placer(_Fleet(prefills, decodes), *policies)
    begun = time.process_time()
    placer.pair(_requests(1)[0])
    first = time.process_time() - begun
    placing, telling = [], []
    for _ in range(_ROUNDS):
        batch = _requests(requests)
        spent = told = 0.0
        for request in batch:
            begun = time.thread_time()
            pair = placer.pair(request)
            spent += time.thread_time() - begun
            for worker in (pair.prefill, pair.decodes[0]):
                worker.load += 1
                worker.tokens += request.tokens
            begun = time.thread_time()
            placer.answered(request, pair.prefill)
            placer.answered(request, pair.decodes[0])
            if request.notes:
                placer.over(request.notes)
            told += time.thread_time() - begun
            for worker in (pair.prefill, random.choice(decodes)):
                worker.load = max(0, worker.load - 1)
                worker.tokens = max(0, worker.tokens - request.tokens)
        placing.append(spent / requests)
        telling.append(told / requests)
    clock = _clock()
    return first * 1e6, median(placing) * 1e6 - clock, median(telling) * 1e6 - clock


def _clock() -> float:
    """µs that reading the clock takes."""
    begun = time.thread_time()
    for _ in range(10_000):
        time.thread_time()
    return (time.thread_time() - begun) * 100


def main() -> int:
    """Print a table; 1 when a policy takes longer than it may."""
    parser = argparse.ArgumentParser(prog="bench.placement", description="CPU of one placement by each policy.")
    parser.add_argument("--requests", type=int, default=1000, help="in each of 7 rounds")
    options = parser.parse_args()
    slow = 0
    print("| policy | " + " | ".join(f"{size} workers" for size in _SIZES) + " | first of 1,000 | told |")
    print("|---" * (len(_SIZES) + 3) + "|")
    for place, (name, _) in enumerate(_policies()):
        random.seed(1)
        cells, first, told = [], 0.0, 0.0
        limits = _CACHE_AWARE_LIMITS if name == PolicyName.CACHE_AWARE.value else _LIMITS
        for size in _SIZES:
            _, policies = list(_policies())[place]
            first, each, told = measure(policies, size, options.requests)
            slow += each > limits.get(size, 1e9)
            cells.append(f"{each:.1f} µs")
        print(f"| {name} | {' | '.join(cells)} | {first / 1000:.1f} ms | {max(0.0, told):.1f} µs |", flush=True)
    return int(slow > 0)


if __name__ == "__main__":
    raise SystemExit(main())
