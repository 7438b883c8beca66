"""How soon another attempt is worth while: what ``Retry-After`` says to those who could not wait any longer here."""

from __future__ import annotations

from math import ceil
from typing import Final

UNKNOWN: Final = 2  # seconds, where nothing has been seen to move: the peer's
LONGEST: Final = 60
_WEIGHT: Final = 0.1  # of the newest interval in the mean


class Pace:
    """How long a queue takes from one of those that wait to the next."""

    __slots__ = ("_last", "_mean")

    def __init__(self) -> None:
        self._last = 0.0
        self._mean = 0.0

    def rest(self) -> None:
        """Nobody waits any more: what lies between now and the next one says nothing."""
        self._last = 0.0

    def step(self, now: float) -> None:
        """One of those that wait was let in."""
        if self._last:
            interval = now - self._last
            self._mean += (interval - self._mean) * (_WEIGHT if self._mean else 1.0)
        self._last = now

    def retry_after(self, ahead: int) -> int:
        """Whole seconds until ``ahead`` of them will have been let in."""
        return min(LONGEST, max(1, ceil(ahead * self._mean))) if self._mean else UNKNOWN
