"""From who is registered to who should be; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from extproc.discovery.wanted import Key, Wanted


class Step(Enum):
    """What is to be done about one address; the values are those of the metric's label ``change``."""

    REMOVE = "removed"
    REPLACE = "replaced"  # the same address, another pod or another protocol: the former worker ends, a new one begins
    CHANGE = "changed"  # the same worker, registered otherwise
    ADD = "added"


def steps(known: Mapping[Key, Wanted], wanted: Mapping[Key, Wanted]) -> Iterator[tuple[Step, Key]]:
    """What leads from ``known`` to ``wanted``, what ends first: an address may be free for another role then.

    What is wanted and not ready is no reason to add anything, and neither to remove the worker of the same pod.
    """
    for key in known.keys() - wanted.keys():
        yield Step.REMOVE, key
    added = []
    for key, now in wanted.items():
        before = known.get(key)
        if before is None:
            if now.ready:
                added.append(key)
        elif before is not now:
            step = _step(before, now)
            if step is not None:
                yield step, key
    for key in added:
        yield Step.ADD, key


def _step(before: Wanted, now: Wanted) -> Step | None:
    if (before.owner, before.spec.url) != (now.owner, now.spec.url):
        return Step.REPLACE if now.ready else Step.REMOVE
    return None if before.spec == now.spec else Step.CHANGE
