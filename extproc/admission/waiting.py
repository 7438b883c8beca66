"""Those who wait, and what they are told."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from extproc.errors import GatewayError

_log: Final = logging.getLogger(__name__)
EARLY: Final = 0.002  # seconds by which a timer may be too soon (uvloop's: seen 1.3 ms): its time has come all the same


class Handle(Protocol):
    """Something scheduled."""

    def cancel(self) -> None:
        """Do not do it."""


class Clock(Protocol):
    """Time; the exchange's."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def after(self, seconds: float, callback: Callable[[], None]) -> Handle:
        """Call ``callback`` once, ``seconds`` from now."""


class Waits(Protocol):
    """Somebody who waits."""

    def waited(self, seconds: float) -> None:
        """It waits no more, for whatever reason, after so many seconds. Is told once, and to be brief."""

    def refused(self, error: GatewayError) -> None:
        """It has waited in vain."""


W = TypeVar("W", bound=Waits)


class Queue(Protocol[W]):
    """What has lines."""

    def give_up(self, waiter: Waiter[W]) -> None:
        """Let it go, if it still waits."""

    def left(self, waiter: Waiter[W]) -> None:
        """It has left its line, for whatever reason."""


class Line(OrderedDict["Waiter[W]", None], Generic[W]):
    """Those who wait for the same, first come, first served; the first is found, and each one taken out, at once."""

    @property
    def first(self) -> Waiter[W]:
        """Who came first. There must be somebody."""
        return next(iter(self))


class Waiter(Generic[W]):
    """One place in a line.

    Args:
        line: which.
        who: waits.
        since: by the clock.
        number: of all that have ever waited.
        queue: whose line it is.
    """

    __slots__ = ("_queue", "line", "number", "since", "timer", "who")

    def __init__(self, line: Line[W], who: W, since: float, number: int, queue: Queue[W]) -> None:
        self.line = line
        self.who = who
        self.since = since
        self.number = number
        self.timer: Handle | None = None
        self._queue = queue
        line[self] = None

    def cancel(self) -> None:
        """``who`` does not want to wait any more; it hears no more than that it waits no more."""
        self._queue.give_up(self)

    def leave(self, now: float) -> bool:
        """Take it out of the line; False when it was not there any more."""
        if self not in self.line:
            return False
        del self.line[self]
        if self.timer is not None:
            self.timer.cancel()
        self._queue.left(self)
        self.who.waited(now - self.since)
        return True


def guarded(step: Callable[[], object]) -> None:
    """Do ``step``: one request's trouble must not keep the others waiting."""
    try:
        step()
    except Exception:  # noqa: BLE001 - logged
        _log.exception("a request that waited could not go on")
