"""Where else a request may go, of several workers in order of preference: only where the same bytes are right.

A request bears one API key, and one data-parallel rank: in its body or in a header, which Envoy does not change when it
goes on to the next worker of the list. So those may follow the first that take its key, and stand for its rank of
another server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from extproc.workers.worker import Pairing, Worker

_REMEMBERED: Final = 32  # sets of workers; a fleet has two per model
_Kind = tuple[int, str | None, Pairing, tuple[str, ...]]  # rank, API key, what must fit a prefill, models


class FailOver:
    """Makes the lists, of at most ``limit`` workers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By identity: the fleet gives the same tuple until something changes. Held, so that no other object can have
        # its identity meanwhile.
        self._tables: dict[int, tuple[Sequence[Worker], Mapping[Worker, Sequence[Worker]]]] = {}

    def order(self, ranked: Sequence[Worker], candidates: Sequence[Worker]) -> Sequence[Worker]:
        """The first of ``ranked``, and who may follow it.

        Without ranks that are others of ``ranked``. With ranks those may all be of one server: then any of its kind of
        ``candidates``, in their order from the first one on, so that not all ranks fail over to the same server.

        Args:
            candidates: has ``ranked`` among it. Best the fleet's own tuple, of which the lists are remembered.
        """
        first = ranked[0]
        if first.dp_rank is not None:
            return self._table(candidates)[first]
        for worker in ranked:
            if worker.api_key != first.api_key or worker.dp_rank is not None:
                return [w for w in ranked if w.api_key == first.api_key and w.dp_rank is None]
        return ranked

    def _table(self, candidates: Sequence[Worker]) -> Mapping[Worker, Sequence[Worker]]:
        """The list of each of ``candidates`` that is a rank."""
        known = self._tables.get(id(candidates))
        if known is None:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            known = self._tables[id(candidates)] = candidates, self._lists(candidates)
        return known[1]

    def _lists(self, candidates: Sequence[Worker]) -> dict[Worker, Sequence[Worker]]:
        alike: dict[_Kind, list[Worker]] = {}  # a server has one entry of each rank
        for worker in candidates:
            if worker.dp_rank is not None:
                kind = worker.dp_rank, worker.api_key, worker.pairing, worker.model_ids
                alike.setdefault(kind, []).append(worker)
        return {
            worker: (*workers[place:], *workers[:place])[: self._limit]
            for workers in alike.values()
            for place, worker in enumerate(workers)
        }
