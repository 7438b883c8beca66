"""How long a prompt would wait at a worker, in seconds: what least_load and power_of_two compare.

``(tokens under way + tokens that others have put into its queue) / throughput + weight * k / (1 - k)``, where ``k`` is
the share of its KV cache in use.

Tokens under way are those of this gateway's prompts, which it knows at once. The engine's own figures are as old as the
last question (``--load-monitor-interval``), and have our requests in them: of its queue counts what is more than we had
under way when it was asked. The peer adds to the engine's queue all that it sent since, and takes off nothing that was
done since: after 10 s it shows minutes of work where there are none.

The throughput is what the engine says it generates. Where nobody waits that only says how much it was asked for, and an
idle engine would seem slow: then it counts only if it is more than the default. (The peer divides by it always.)

A worker that says nothing while others do counts as having no queue of others and their mean throughput. When none
says anything, requests under way are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from extproc.workers.load import EngineLoad
from extproc.workers.worker import Worker

_FRESH: Final = 0.25  # seconds: figures of engines are read again after so long; they come every few seconds
_REMEMBERED: Final = 64  # sets of candidates
_FULLEST: Final = 0.999
_SLOWEST: Final = 1e-3  # tokens per second: one over less may be infinite, and no number times 0

_Row = tuple[Worker, float, float]  # worker, seconds, seconds per token under way


class _Table(NamedTuple):
    candidates: Sequence[Worker]  # held, so that no other object can have its identity
    rows: list[_Row]  # twice, so that a stretch from any place on is one slice
    workers: Sequence[Worker]  # the same
    known: bool  # an engine said something
    until: float


class ExpectedWait:
    """Estimates for sets of candidates.

    Args:
        now: the clock, in seconds.
        kv_weight: seconds that a half full KV cache is worth.
        throughput: tokens per second of an engine that does not say it.
        mean_tokens: tokens of a waiting prompt where an engine counts only how many wait.
    """

    def __init__(
        self, now: Callable[[], float], kv_weight: float = 0.15, throughput: float = 2000.0, mean_tokens: int = 1024
    ) -> None:
        self._now = now
        self._kv_weight = kv_weight
        self._throughput = throughput
        self._mean_tokens = mean_tokens
        self._tables: dict[int, _Table] = {}

    def rows(self, candidates: Sequence[Worker], start: int, count: int) -> tuple[Sequence[Worker], list[float]]:
        """``count`` of ``candidates`` from ``start`` on, cyclically, and what is expected of each."""
        table = self._table(candidates)
        end = start + count
        workers = table.workers[start:end]
        if table.known:
            return workers, [fixed + each * worker.tokens for worker, fixed, each in table.rows[start:end]]
        return workers, [worker.load for worker in workers]

    def of(self, candidates: Sequence[Worker], place: int) -> float:
        """What is expected of the candidate at ``place``; to be compared with others of the same candidates."""
        table = self._table(candidates)
        worker, fixed, each = table.rows[place]
        return fixed + each * worker.tokens if table.known else worker.load

    def _table(self, candidates: Sequence[Worker]) -> _Table:
        table = self._tables.get(id(candidates))
        now = self._now()
        if table is None or now >= table.until:
            table = self._read(candidates, now + _FRESH)
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            self._tables[id(candidates)] = table
        return table

    def _read(self, candidates: Sequence[Worker], until: float) -> _Table:
        rates = [self._rate(load) for worker in candidates if (load := worker.engine_load) is not None]
        mean = sum(rates) / len(rates) if rates else self._throughput
        rows = [self._row(worker, mean) for worker in candidates]
        return _Table(candidates, rows * 2, (*candidates, *candidates), bool(rates), until)

    def _row(self, worker: Worker, mean: float) -> _Row:
        load = worker.engine_load
        if load is None:
            return worker, 0.0, 1 / mean
        each = 1 / self._rate(load)
        queued = load.waiting_tokens
        if queued is None:
            queued = (load.waiting or 0) * self._mean_tokens
        used = min(load.kv_usage or 0.0, _FULLEST)
        return worker, max(0, queued - worker.tokens_then) * each + self._kv_weight * used / (1 - used), each

    def _rate(self, load: EngineLoad) -> float:
        said = load.throughput or 0.0
        return max(said, _SLOWEST) if said > 0 and load.waiting else max(said, self._throughput)
