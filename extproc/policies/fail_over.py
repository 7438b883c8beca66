"""Where else a request may go, of several workers in order of preference: only where the same bytes are right.

A request bears one API key, and one data-parallel rank: in its body or in a header, which Envoy does not change when it
goes on to the next worker of the list. So those may follow the first that take its key, and stand for its rank of
another server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from extproc.workers.worker import Worker

_REMEMBERED: Final = 256  # groups of workers; a fleet has a few per model, and per place where workers say theirs
_Kind = tuple[int | None, str | None, str, str, tuple[str, ...]]  # rank, API key, runtime, connector, models
_Groups = Sequence[Sequence[Worker]]


class _Table(NamedTuple):
    held: object  # so that no other object can have its identity meanwhile
    alike: Mapping[_Kind, _Groups]
    lists: dict[Worker, Sequence[Worker]]


class FailOver:
    """Makes the lists, of at most ``limit`` workers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By identity: the fleet gives the same tuples until something changes.
        self._tables: dict[int, _Table] = {}

    def order(
        self, ranked: Sequence[Worker], groups: _Groups, without: Collection[Worker] = (), *, lasting: bool = True
    ) -> Sequence[Worker]:
        """The first of ``ranked``, and who may follow it.

        Without ranks that are others of ``ranked``. With ranks those may all be of one server: then any of its kind in
        ``groups``, in their order from the first one on, so that not all ranks fail over to the same server.

        Args:
            ranked: chosen of ``groups`` by a policy.
            groups: those that may be sent the request, the preferred ones first, such as the nearest.
            without: those of ``groups`` that are to be left out after all.
            lasting: ``groups``, or its only one, is the fleet's own tuple; lists are remembered for that.
        """
        first = ranked[0]
        if first.dp_rank is not None:
            return self._of_rank(first, groups, without, lasting=lasting)
        for worker in ranked:
            if worker.api_key != first.api_key or worker.dp_rank is not None:
                return [w for w in ranked if w.api_key == first.api_key and w.dp_rank is None]
        return ranked

    def _of_rank(
        self, first: Worker, groups: _Groups, without: Collection[Worker], *, lasting: bool
    ) -> Sequence[Worker]:
        table = self._table(groups) if lasting else _Table(groups, _by_kind(groups), {})
        found = None if without else table.lists.get(first)
        if found is None:
            others = (worker for worker in _others(first, table.alike.get(_kind(first), ())) if worker not in without)
            found = (first, *islice(others, self._limit - 1))
            if not without:
                table.lists[first] = found
        return found

    def _table(self, groups: _Groups) -> _Table:
        held = groups if len(groups) > 1 else groups[0]
        known = self._tables.get(id(held))
        if known is None:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            known = self._tables[id(held)] = _Table(held, _by_kind(groups), {})
        return known


def _kind(worker: Worker) -> _Kind:
    return worker.dp_rank, worker.api_key, worker.runtime, worker.kv_connector, worker.model_ids


def _by_kind(groups: _Groups) -> Mapping[_Kind, _Groups]:
    """The ranks in ``groups`` by their kind, of which a server has one entry."""
    found: dict[_Kind, list[list[Worker]]] = {}
    for number, group in enumerate(groups):
        for worker in group:
            if worker.dp_rank is not None:
                alike = found.setdefault(_kind(worker), [[] for _ in groups])
                alike[number].append(worker)
    return found


def _others(first: Worker, groups: _Groups) -> Iterator[Worker]:
    """All but ``first``, group by group, in each from as far on as ``first`` stands in its own."""
    place = next((group.index(first) for group in groups if first in group), 0)
    for group in groups:
        start = place % len(group) if group else 0
        yield from (worker for worker in (*group[start:], *group[:start]) if worker is not first)
