"""Sticky sessions: requests with the same routing key to the worker that had the last one, over any policy.

What: a key (:mod:`extproc.policies.routing_key`) that has no worker gets the one that the policy below chooses; the key
goes there from then on, for each role and model apart. Up to two workers are remembered of a key: one that is no
candidate (not usable, not a partner of the prefill worker, not near it) is passed over, and whoever then answered is
the first one from then on. When to use: conversations and agents, whose next prompt begins with the last one. Fields:
``--routing-key-headers``, ``rid`` of the body. Failure: where a worker has two requests of one key under way, further
ones go elsewhere until one ends, so that a key with much traffic does not sit on one worker; a prefill leg is under way
until it was answered, a decode leg until the request is over. A key that nobody used for ``--max-idle-secs`` is
forgotten; so is the one unused longest when there are 100,000 (each takes half a kilobyte). Nothing is lost but a
cache. Source: the peer's ``--routing-key-override``, which holds both legs until the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from extproc.policies.least import followed
from extproc.policies.policy import Policy, RequestView
from extproc.policies.routing_key import RoutingKeys
from extproc.policies.wrapper import Wrapper
from extproc.workers.worker import Role, Worker

MOST_UNDER_WAY: Final = 2  # requests of one key with one worker
MOST_KEYS: Final = 100_000
_REMEMBERED: Final = 2  # workers of a key
_SPARE: Final = 3  # that the policy is asked for, should the first be one of those that are full

_Key = tuple[str | None, bytes]  # model and routing key


class _Assignment:
    """Whom one key has."""

    __slots__ = ("kept", "under_way", "used", "workers")

    def __init__(self) -> None:
        self.workers: list[Worker] = []  # who is to serve, and who did when that could not
        self.under_way: dict[Worker, int] = {}
        self.used = 0.0
        self.kept = True  # else it was forgotten, though a request of it is still under way


class _Hold:
    """One request's place with the worker of its key."""

    __slots__ = ("assignment", "before", "spilled", "worker")

    def __init__(self, assignment: _Assignment) -> None:
        self.assignment = assignment
        self.worker: Worker | None = None  # None: it holds none
        self.spilled = False  # it went there only because another was full
        self.before: list[Worker] | None = None  # whom the key had, where the policy was asked for another

    def take(self, worker: Worker) -> None:
        """Hold ``worker`` instead of what was held."""
        self.release()
        self.worker = worker
        under_way = self.assignment.under_way
        under_way[worker] = under_way.get(worker, 0) + 1

    def release(self) -> None:
        """Hold nothing any more."""
        worker, self.worker = self.worker, None
        if worker is not None:
            under_way = self.assignment.under_way
            left = under_way[worker] = under_way[worker] - 1
            if not left:
                del under_way[worker]


class StickyPolicy(Wrapper):
    """See the module.

    Args:
        inner: chooses for requests without a key, and for keys that have no worker.
        keys: reads them.
        now: the clock, in seconds.
        idle: seconds after which an unused key is forgotten.
        most: requests of a key that a worker may have under way; None for any number.
        groups: is kept up to date: how many keys each worker has.
        chooser: chooses for keys that have no worker instead of ``inner``.
        most_keys: that are remembered.
    """

    def __init__(
        self,
        inner: Policy,
        keys: RoutingKeys,
        now: Callable[[], float],
        idle: float,
        most: int | None = MOST_UNDER_WAY,
        groups: dict[Worker, int] | None = None,
        chooser: Policy | None = None,
        most_keys: int = MOST_KEYS,
    ) -> None:
        super().__init__(inner)
        self.learns = self.holds = True
        self._keys = keys
        self._now = now
        self._idle = idle
        self._most = most
        self._chooser = chooser or inner
        self._groups = {} if groups is None else groups
        self._most_keys = most_keys
        self._assignments: OrderedDict[_Key, _Assignment] = OrderedDict()  # the one unused longest first

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._assignments)

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        key = self._keys.of(request)
        if key is None:
            return self._inner.rank(candidates, limit, request)
        hold = request.notes.get(self)
        if not isinstance(hold, _Hold):
            hold = request.notes[self] = _Hold(self._assignment((request.model, key)))
        hold.release()
        assignment = hold.assignment
        open_to = [worker for worker in assignment.workers if worker in candidates]
        free = [worker for worker in open_to if not self._is_full(assignment, worker)]
        hold.spilled = len(free) < len(open_to)
        hold.before = None if free else list(assignment.workers)
        if free:
            hold.take(free[0])
            return followed(free, candidates, limit)
        ranked = self._chooser.rank(candidates, max(limit, _SPARE), request)
        chosen = next((worker for worker in ranked if not self._is_full(assignment, worker)), ranked[0])
        self._remember(assignment, chosen)
        hold.take(chosen)
        return followed((chosen, *(worker for worker in ranked if worker is not chosen)), candidates, limit)

    def take_back(self, request: RequestView) -> None:
        """See Policy."""
        hold = request.notes.get(self)
        if not isinstance(hold, _Hold):
            self._inner.take_back(request)
            return
        hold.release()
        if hold.before is not None:
            self._chooser.take_back(request)
            self._have(hold.assignment, hold.before)

    def learn(self, request: RequestView, worker: Worker) -> None:
        """See Policy: whoever answered is where the key goes from now on."""
        self._inner.learn(request, worker)
        hold = request.notes.get(self)
        if not isinstance(hold, _Hold):
            return
        assignment = hold.assignment
        if not (hold.spilled and hold.worker is worker) and assignment.workers[:1] != [worker]:
            self._put_first(assignment, worker)
        if worker.role is Role.PREFILL:
            hold.release()
        elif hold.worker not in (None, worker):  # Envoy went on to another
            hold.take(worker)

    def over(self, notes: dict[object, object]) -> None:
        """See Policy."""
        hold = notes.pop(self, None)
        if isinstance(hold, _Hold):
            hold.release()
        self._inner.over(notes)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_full(self, assignment: _Assignment, worker: Worker) -> bool:
        return self._most is not None and assignment.under_way.get(worker, 0) >= self._most

    def _assignment(self, key: _Key) -> _Assignment:
        """That of ``key``, which is being used; those that were not for too long go."""
        assignments, now = self._assignments, self._now()
        while assignments and next(iter(assignments.values())).used <= now - self._idle:
            self._forget_oldest()
        found = assignments.get(key)
        if found is None:
            found = assignments[key] = _Assignment()
            if len(assignments) > self._most_keys:
                self._forget_oldest()
        else:
            assignments.move_to_end(key)
        found.used = now
        return found

    def _forget_oldest(self) -> None:
        _, oldest = self._assignments.popitem(last=False)
        oldest.kept = False
        self._count(oldest, -1)

    def _remember(self, assignment: _Assignment, worker: Worker) -> None:
        """``worker`` serves the key now; it stays behind who was to serve it and cannot now."""
        if worker not in assignment.workers:
            if not assignment.workers:
                self._put_first(assignment, worker)
            else:
                assignment.workers[1:] = [worker]

    def _put_first(self, assignment: _Assignment, worker: Worker) -> None:
        others = [other for other in assignment.workers if other is not worker]
        self._have(assignment, [worker, *others][:_REMEMBERED])

    def _have(self, assignment: _Assignment, workers: list[Worker]) -> None:
        if assignment.kept:
            self._count(assignment, -1)
            assignment.workers = workers
            self._count(assignment, 1)

    def _count(self, assignment: _Assignment, change: int) -> None:
        for worker in assignment.workers[:1]:
            left = self._groups.get(worker, 0) + change
            if left > 0:
                self._groups[worker] = left
            else:
                self._groups.pop(worker, None)
