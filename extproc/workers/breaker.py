"""A circuit breaker: what the outcomes of a worker's legs say of it. Pure; time is given to it.

==========  ========================================================  ===========
from        what happens                                              to
==========  ========================================================  ===========
CLOSED      too many failures within the window, see below            OPEN
OPEN        ``timeout`` seconds pass, or the worker was found         HALF_OPEN
            healthy again after an outage
OPEN        ``success_threshold`` legs that were sent all the same    CLOSED
            succeed
HALF_OPEN   ``success_threshold`` trials succeed                      CLOSED
HALF_OPEN   a trial fails                                             OPEN
==========  ========================================================  ===========

Too many are ``failure_threshold`` failures within ``window`` seconds if there was no success between them, or if at
least half of all that ended within the window failed. Neither rule would do alone: a busy worker of whose requests one
in a thousand fails has a hundred failures in two minutes and is well; and one that fails all requests after two good
minutes must not be waited for until the failures are half of them. (The peer counts failures in a row for ever.)

A *trial* is a leg that is sent while the breaker is half open. There are as many at once as must succeed; who has begun
one gives it back when the leg is over, however it ended. A trial without an outcome (the client left, the request was a
bad one, the worker said that it is busy) decides nothing. Outcomes of legs that were sent before the breaker opened say
nothing of the worker as it is now, and are ignored while it is not closed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

_SLICES: Final = 12  # in which the window is counted


class BreakerState(Enum):
    """What a breaker lets through: everything, nothing, or a few trials."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Names and defaults are those of the peer's ``--cb-*`` flags. Times in seconds."""

    failure_threshold: int = 10
    success_threshold: int = 3
    timeout: float = 60.0
    window: float = 120.0
    enabled: bool = True
    capacity: frozenset[int] = frozenset({429, 503})  # statuses that say "busy", not "broken"


def _ignore(_: BreakerState) -> None:
    """Nobody listens."""


class Breaker:
    """See the module.

    Args:
        settings: when it opens and closes.
        now: monotonic time.
        changed: is told, with the state before, when the state or ``shuts_out`` is another.

    Attributes:
        state: what it lets through.
        shuts_out: the worker should get no requests now.
        wary: successes must be told; while it is False they need not be, which is almost always.
        since: when it came into its state, by ``now``.
        trials: under way, in the state HALF_OPEN.
        pushbacks: how often the worker said that it is busy: no failure, and counted for people only.
    """

    __slots__ = (
        "_changed",
        "_failures",
        "_now",
        "_settings",
        "_slices",
        "_streak",
        "_successes",
        "_turn",
        "pushbacks",
        "shuts_out",
        "since",
        "state",
        "trials",
        "wary",
    )

    def __init__(
        self,
        settings: BreakerSettings | None = None,
        now: Callable[[], float] = time.monotonic,
        changed: Callable[[BreakerState], None] = _ignore,
    ) -> None:
        self._settings = settings or BreakerSettings()
        self._now = now
        self._changed = changed
        self.state = BreakerState.CLOSED
        self.shuts_out = False
        self.wary = False
        self.trials = 0
        self.since = now()
        self.pushbacks = 0
        self._turn = 0  # the number of the present state, which legs begun in it know; closed ones need none
        self._successes = 0  # of legs of this turn; while closed: within the window
        self._failures = 0  # within the window
        self._slices: deque[list[float]] = deque()  # [begin, failures, successes], the newest last
        self._streak: deque[float] = deque(maxlen=self._settings.failure_threshold)  # failures without success between

    @property
    def settings(self) -> BreakerSettings:
        """When it opens and closes."""
        return self._settings

    @settings.setter
    def settings(self, settings: BreakerSettings) -> None:
        """Others from now on: it begins anew, closed, unless they are the same."""
        if settings != self._settings:
            self._settings = settings
            self._streak = deque(maxlen=settings.failure_threshold)
            if self.state is BreakerState.CLOSED:
                self._forget()
            else:
                self._become(BreakerState.CLOSED)

    # -- what legs tell -------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """A leg goes out. What is returned must come back with its outcome and with its end; 0: with its outcome."""
        if self.state is BreakerState.CLOSED:
            return 0
        if self.state is BreakerState.HALF_OPEN:
            self.trials += 1
            self._shut()
        return self._turn

    def end(self, turn: int) -> None:
        """A leg is over, however it ended."""
        if turn == self._turn and self.state is BreakerState.HALF_OPEN:
            self.trials -= 1
            self._shut()

    def succeeded(self, turn: int) -> None:
        """A leg was answered as it should be. (Measured: 0.5 µs while wary; who looks at that first pays 0.02 else.)"""
        if self.state is BreakerState.CLOSED:
            if self.wary:
                self._count_success()
        elif turn == self._turn:
            self._successes += 1
            if self._successes >= self._settings.success_threshold:
                self._become(BreakerState.CLOSED)

    def failed(self, turn: int) -> None:
        """A leg failed by the worker's fault: a 5xx, no connection, a broken one."""
        if not self._settings.enabled:
            return
        if self.state is BreakerState.CLOSED:
            self._count_failure()
        elif self.state is BreakerState.HALF_OPEN and turn == self._turn:
            self._become(BreakerState.OPEN)

    # -- what time and others tell --------------------------------------------------------------------------------

    def rested(self) -> None:
        """Its timeout has passed, or the worker is well again after an outage: try it."""
        if self.state is BreakerState.OPEN:
            self._become(BreakerState.HALF_OPEN)

    def explain(self) -> str:
        """Why the worker gets no or few requests, for people; empty while closed."""
        if self.state is BreakerState.CLOSED:
            return ""
        if self.state is BreakerState.HALF_OPEN:
            needed = self._settings.success_threshold
            return f"circuit breaker half open: {self._successes} of {needed} trials have succeeded"
        left = max(0.0, self.since + self._settings.timeout - self._now())
        return f"circuit breaker open: too many of its requests failed; tried again in {left:.0f} s"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _count_failure(self) -> None:
        now = self._now()
        self.wary = True
        self._slice(now)[1] += 1
        self._failures += 1
        self._streak.append(now)
        least = self._settings.failure_threshold
        in_a_row = len(self._streak) == least and self._streak[0] > now - self._settings.window
        if in_a_row or self._failures >= max(least, self._successes):
            self._become(BreakerState.OPEN)

    def _count_success(self) -> None:
        newest = self._slice(self._now())
        self._streak.clear()
        if self._failures:
            newest[2] += 1
            self._successes += 1
        else:
            self._forget()

    def _slice(self, now: float) -> list[float]:
        """The slice of the window that ``now`` is in; those that are too old are dropped."""
        width = self._settings.window / _SLICES
        begin = now - now % width
        slices = self._slices
        while slices and slices[0][0] <= begin - self._settings.window:
            _, failures, successes = slices.popleft()
            self._failures -= int(failures)
            self._successes -= int(successes)
        if not slices or slices[-1][0] < begin:
            slices.append([begin, 0, 0])
        return slices[-1]

    def _become(self, state: BreakerState) -> None:
        before, self.state = self.state, state
        self.since = self._now()
        self._turn += 1
        self.trials = 0
        self._forget()
        self.wary = state is not BreakerState.CLOSED
        self.shuts_out = state is BreakerState.OPEN
        self._changed(before)

    def _forget(self) -> None:
        self.wary = False
        self._failures = self._successes = 0
        self._slices.clear()
        self._streak.clear()

    def _shut(self) -> None:
        full = self.trials >= self._settings.success_threshold
        if full is not self.shuts_out:
            self.shuts_out = full
            self._changed(self.state)
