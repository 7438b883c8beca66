"""Where workers are, by their labels, and which are near each other.

A worker's zone, rack and host are the labels of these names, or those that Kubernetes gives a node
(``topology.kubernetes.io/zone``, ``topology.kubernetes.io/rack``, ``kubernetes.io/hostname``); ours win. Two workers
are as near as the narrowest of the three they share, unless a wider one contradicts it: a rack of the same name in
another zone is another rack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from extproc.workers.worker import Worker


class Place(NamedTuple):
    """Empty where nobody has said."""

    zone: str
    rack: str
    host: str


NOWHERE: Final = Place("", "", "")
# Each of Place's fields, and the labels that say it.
_LABELS: Final = (
    ("zone", "topology.kubernetes.io/zone"),
    ("rack", "topology.kubernetes.io/rack"),
    ("host", "kubernetes.io/hostname"),
)


def place_of(labels: Mapping[str, str]) -> Place:
    """Where a worker with these labels is; the one NOWHERE, if they do not say."""
    found = Place._make(next((labels[name] for name in names if labels.get(name)), "") for names in _LABELS)
    return found if any(found) else NOWHERE


def nearness(one: Place, other: Place) -> int:
    """3 for the same host, 2 for the same rack, 1 for the same zone, 0 for anything else."""
    near = 0
    for level, (here, there) in enumerate(zip(one, other, strict=True), 1):
        if here and there:
            if here != there:
                return near
            near = level
    return near


def tiers(here: Place, workers: Sequence[Worker]) -> tuple[Sequence[Worker], ...]:
    """``workers`` (at least one) in groups, the nearest to ``here`` first; none of the groups is empty."""
    if here is NOWHERE:
        return (workers,)
    by_place: dict[Place, int] = {}
    groups: dict[int, list[Worker]] = {}
    for worker in workers:
        near = by_place.get(worker.place)
        if near is None:
            near = by_place[worker.place] = nearness(here, worker.place)
        groups.setdefault(near, []).append(worker)
    if len(groups) == 1:
        return (workers,)
    return tuple(tuple(groups[near]) for near in sorted(groups, reverse=True))
