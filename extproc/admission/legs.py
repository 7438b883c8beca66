"""Requests that wait, before any leg is sent, for a worker that has room.

Those that need the same (a model, of a class of priority, without the same failed workers) stand in one line: only its
first is looked at when something changes, so that a wake-up costs as much with a thousand that wait as with one. The
lines are asked in the order of their firsts: the more urgent class, and of a class who came first; who has waited as
long as its class may starve, or for half of the time after which it would be told no, comes before all.

A request of several legs needs room for all of them on one pair, or, where the limit is less, a worker that has none of
ours. While the first of a line waits for that, no other line is given the workers that it could have: what becomes free
gathers, and so it is served. Those behind it wait, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from extproc.admission.pace import Pace
from extproc.admission.priority import CLASSES, Priority
from extproc.admission.waiting import EARLY, Clock, Line, Waiter, Waits, guarded
from extproc.errors import GatewayError
from extproc.workers.worker import Role, Worker

_ROLES: Final = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class LegSettings:
    """The operator's word.

    Attributes:
        prefill_limit: legs that a prefill worker may have at once; 0: any number.
        prefill_queue_size: requests that may wait for one.
        prefill_queue_timeout: seconds that one may wait.
        decode_wait: seconds that a request may wait for a decode worker.
    """

    prefill_limit: int = 0
    prefill_queue_size: int = 100
    prefill_queue_timeout: float = 60.0
    decode_wait: float = 30.0


class Seeker(Waits, Protocol):
    """A request that needs workers.

    Attributes:
        priority: its class.
        need: two that are equal could have the same workers.
        lone: room on one worker may be enough, whatever else lacks it.
    """

    priority: Priority
    need: Hashable
    lone: bool

    def seek(self, without: Collection[Worker]) -> Role | None:
        """Take workers, but none of ``without``. None: this is settled, well or not; else which role lacks room."""

    def claims(self) -> Collection[Worker]:
        """The workers that nobody may be given before it, while it waits: none, unless it needs several slots."""


class _Queue(Line[Seeker]):
    """One line."""

    def __init__(self, priority: Priority, need: Hashable) -> None:
        super().__init__()
        self.key = (priority, need)
        self.priority = priority
        self.lacks = Role.PREFILL  # what its first has no room on


class LegQueue:
    """See the module."""

    def __init__(self, settings: LegSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._queues: dict[Hashable, _Queue] = {}  # none is empty
        self._roles: dict[Waiter[Seeker], Role] = {}  # for whose sake each of those that wait began to
        self._paces = {role: Pace() for role in _ROLES}
        self._numbered = 0
        self._due = False  # a look is scheduled
        self.queued = dict.fromkeys(_ROLES, 0)

    def wait(self, who: Seeker) -> Waiter[Seeker] | None:
        """Have ``who`` take workers, or wait for them; None: it is settled.

        Raises GatewayError when it may not wait.
        """
        if self._due:
            self._look()  # what has become free is for those who came before
        key = (who.priority, who.need)
        queue = self._queues.get(key)
        if queue is None:
            lacks = who.seek(self._claimed(who.priority))
            if lacks is None:
                return None
        else:
            lacks = queue.lacks
        self._check(lacks)
        if queue is None:
            queue = self._queues[key] = _Queue(who.priority, who.need)
            queue.lacks = lacks
        now = self._clock.now()
        self._numbered += 1
        waiter = Waiter(queue, who, now, self._numbered, self)
        self._roles[waiter] = lacks
        self.queued[lacks] += 1
        patience = self._patience(waiter, who.priority)
        waiter.timer = self._clock.after(patience, partial(self._starves, waiter, self._limit(lacks) - patience))
        return waiter

    def give_up(self, waiter: Waiter[Seeker]) -> None:
        """See Queue. Those behind it may need others."""
        if waiter.leave(self._clock.now()):
            self.look_soon()

    def refuse_all(self, error: GatewayError) -> None:
        """Turn away all who wait."""
        for queue in list(self._queues.values()):
            while queue:
                waiter = queue.first
                waiter.leave(self._clock.now())
                guarded(partial(waiter.who.refused, error))

    def freed(self, worker: Worker) -> None:
        """``worker`` may have room."""
        if self._queues and not self._due and self._matters(worker.role):
            self.look_soon()

    @property
    def waiting(self) -> bool:
        """Somebody waits: whoever needs workers comes after those."""
        return bool(self._queues)

    def look_soon(self) -> None:
        """Something has changed: those that wait may be served. Once, however much happens until then."""
        if self._queues and not self._due:
            self._due = True
            self._clock.after(0.0, self._look)  # not at once: whoever says so may be in the middle of something

    # -- inside ---------------------------------------------------------------------------------------------------

    def _matters(self, role: Role) -> bool:
        """Whether room on a worker of this role may help anybody: who has no prefill is not helped by a decode."""
        if role is Role.PREFILL:
            return True
        return any(queue.lacks is Role.DECODE or queue.first.who.lone for queue in self._queues.values())

    def _check(self, lacks: Role) -> None:
        settings = self._settings
        if lacks is Role.PREFILL:
            if self.queued[lacks] >= settings.prefill_queue_size:
                message = "every prefill worker has as many requests as it may, and too many wait"
                raise GatewayError("pd_prefill_queue_full", message, retry_after=self._retry_after(lacks))
        elif not settings.decode_wait:
            raise self._shed(0.0)

    def _limit(self, lacks: Role) -> float:
        return self._settings.prefill_queue_timeout if lacks is Role.PREFILL else self._settings.decode_wait

    def _shed(self, seconds: float) -> GatewayError:
        message = f"no decode worker had room within {seconds:g} s" if seconds else "no decode worker has room"
        after = self._retry_after(Role.DECODE)
        return GatewayError("worker_overload_protection_shed", message, retry_after=after)

    def _retry_after(self, lacks: Role) -> int:
        return self._paces[lacks].retry_after(self.queued[lacks] + 1)

    def _urgency(self, queue: _Queue, now: float, *, classes: bool) -> tuple[int, int]:
        """Of two lines the one with the lesser is asked first. No two have the same.

        ``classes``: those that wait are of several classes.
        """
        first = queue.first
        if not classes:
            return 0, first.number
        starves = first.since + self._patience(first, queue.priority) <= now + EARLY
        return -1 if starves else queue.priority, first.number

    def _patience(self, waiter: Waiter[Seeker], priority: Priority) -> float:
        """After how many seconds it starves.

        Some classes may wait for the gate longer than for a worker: these would be told no before they starve.
        """
        return min(CLASSES[priority].starvation, self._limit(self._roles[waiter]) / 2)

    def _starves(self, waiter: Waiter[Seeker], left: float) -> None:
        """It comes before all others now; in so many seconds it is told no."""
        waiter.timer = self._clock.after(left, partial(self._expired, waiter))
        if self._has_classes():
            self.look_soon()

    def _has_classes(self) -> bool:
        """Those that wait are of several classes."""
        return len({queue.priority for queue in self._queues.values()}) > 1

    def _claimed(self, priority: Priority) -> set[Worker]:
        """Workers for which the first of some line waits, no less urgent than ``priority``, with room for several."""
        firsts = [queue.first.who for queue in self._queues.values() if queue.priority <= priority]
        return {worker for first in firsts for worker in first.claims()}

    def _look(self) -> None:
        """Serve whoever can be served, in order; of each line until its first cannot."""
        self._due = False
        now = self._clock.now()
        claimed: set[Worker] = set()
        classes = self._has_classes()
        order = [(self._urgency(queue, now, classes=classes), queue) for queue in self._queues.values()]
        heapify(order)
        while order:
            _, queue = heappop(order)
            if not queue:
                continue  # what was done for others has ended it
            waiter = queue.first
            lacks = self._seek(waiter, claimed)
            if lacks is not None:
                queue.lacks = lacks
                claimed.update(waiter.who.claims())
                continue
            self._paces[queue.lacks].step(now)
            waiter.leave(now)
            if queue:  # those of other lines may have come before its next one
                heappush(order, (self._urgency(queue, now, classes=classes), queue))

    def _seek(self, waiter: Waiter[Seeker], claimed: Collection[Worker]) -> Role | None:
        lacks: list[Role | None] = [None]  # who fails in an unforeseen way is settled: it has been told

        def step() -> None:
            lacks[0] = waiter.who.seek(claimed)

        guarded(step)
        return lacks[0]

    def _expired(self, waiter: Waiter[Seeker]) -> None:
        queue = self._queues.get((waiter.who.priority, waiter.who.need))
        began = self._roles[waiter]
        lacks = began if queue is None else queue.lacks
        seconds = self._limit(began)
        error = self._shed(seconds)
        if lacks is Role.PREFILL:
            message = f"no prefill worker had room within {seconds:g} s"
            error = GatewayError("pd_prefill_queue_timeout", message, retry_after=self._retry_after(lacks))
        if waiter.leave(self._clock.now()):
            self.look_soon()
            guarded(partial(waiter.who.refused, error))

    def left(self, waiter: Waiter[Seeker]) -> None:
        """See Queue."""
        role = self._roles.pop(waiter)
        self.queued[role] -= 1
        if not self.queued[role]:
            self._paces[role].rest()
        if not waiter.line:
            del self._queues[(waiter.who.priority, waiter.who.need)]
