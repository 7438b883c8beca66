"""Which workers have room for the legs of a request.

A policy is asked among all candidates first, as if there were room everywhere, which mostly there is. Where its choice
has none, that choice is taken back, so that nobody's turn is used up by it and nothing is learnt of it, and those that
have room are chosen among.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from extproc.workers.worker import Role, Worker


class NoRoomError(Exception):
    """Workers could serve the request, but all have as many legs as they may; of which role, ``role`` says."""

    def __init__(self, role: Role) -> None:
        super().__init__(role.value)
        self.role = role


class Room:
    """What a request needs of a worker.

    Args:
        taken: workers that have no room for it, because others wait for them.
        legs: how many legs go to each worker of a pair, by the prefill worker; None: one. A request that one worker
            answers alone is one leg.
    """

    __slots__ = ("legs", "taken")

    def __init__(self, taken: Collection[Worker] = (), legs: Callable[[Worker], int] | None = None) -> None:
        self.taken = taken
        self.legs = legs

    def on(self, worker: Worker, legs: int = 1) -> bool:
        """Whether so many legs may go to ``worker`` now."""
        return (worker.limit is None or worker.has_room(legs)) and worker not in self.taken


ONE_LEG: Final = Room()
