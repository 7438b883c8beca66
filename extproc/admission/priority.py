"""Classes of priority, and which of them a request is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

PRIORITY: Final = "x-smg-priority"
TENANT: Final = "x-smg-tenant-id"


class Priority(IntEnum):
    """The peer's classes, the most urgent first."""

    SYSTEM = 0
    INTERACTIVE = 1
    DEFAULT = 2
    BULK = 3


_BY_NAME: Final = {priority.name.lower().encode(): priority for priority in Priority}


@dataclass(frozen=True, slots=True)
class ClassRules:
    """What a class may count on.

    Attributes:
        floor, share: so many slots, or so large a part of all, whichever is more, are kept for it.
        queue_size: requests of it that may wait.
        timeout: seconds that one may wait.
        starvation: seconds after which one that waits goes before all others, and may have what is kept for them.
        preempts: one that comes when there is no slot for it ends one of a lesser class that has not been answered yet.
    """

    floor: int
    share: float
    queue_size: int
    timeout: float
    starvation: float
    preempts: bool = False


# The peer's (middleware/scheduler/config.rs).
CLASSES: Final[Mapping[Priority, ClassRules]] = {
    Priority.SYSTEM: ClassRules(32, 0.0, 64, 30.0, 5.0, preempts=True),
    Priority.INTERACTIVE: ClassRules(128, 0.25, 256, 30.0, 5.0, preempts=True),
    Priority.DEFAULT: ClassRules(0, 0.10, 512, 60.0, 30.0),
    Priority.BULK: ClassRules(0, 0.0, 1024, 300.0, 120.0),
}


def kept(limit: int, classes: Mapping[Priority, ClassRules]) -> list[int]:
    """How many of ``limit`` slots are kept for each class, in order.

    Floors are meant for thousands of slots. Where they would take more than half of those that there are, all are made
    smaller alike, so that whoever comes may have the other half.
    """
    wanted = [max(rules.floor, int(rules.share * limit)) for _, rules in sorted(classes.items())]
    total, most = sum(wanted), limit // 2
    return wanted if total <= most else [count * most // total for count in wanted]


@dataclass(frozen=True, slots=True)
class Tenants:
    """The highest class that each tenant may ask for.

    Attributes:
        highest: by tenant.
        others: that of a tenant that is not among them, and of a request that names none.
    """

    highest: Mapping[str, Priority] = field(default_factory=dict)
    others: Priority = Priority.INTERACTIVE

    def priority(self, fields: Mapping[str, bytes]) -> Priority:
        """The class of a request with these headers; one that is not known counts as ``default``."""
        asked = _BY_NAME.get(fields.get(PRIORITY, b"").strip().lower(), Priority.DEFAULT)
        highest = self.others
        if self.highest:
            highest = self.highest.get(fields.get(TENANT, b"").decode("latin-1"), highest)
        return max(asked, highest)
