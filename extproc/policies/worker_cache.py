"""What is known of one worker's prefix cache, and what is on its way to it."""

from __future__ import annotations

import math
from collections import OrderedDict

from extproc.workers.worker import Worker


class WorkerCache:
    """One worker's prefix cache, as far as is known. Bytes are those of prompts.

    Attributes:
        worker: whose.
        room: how many bytes it keeps; infinite while nobody has said, negative when the worker is gone.
        kept: the beginnings, the one used longest ago first, and how far each reaches: to its cut, or as far as the
            prompt went of which that was the last cut.
        size: bytes up to the cuts.
        seen: when each was used last; only if that matters.
        pending: bytes that it does not hold and that are on their way.
        took, done: seconds and bytes of late, by which the policy reckons how fast the worker is.
        slowness: one over the other; 0 while there are none.
        recent: what of the bytes put in is not long ago; the policy's to reckon.
        filled: how often the cache is filled by them; the policy's, too.
    """

    __slots__ = ("done", "filled", "kept", "pending", "recent", "room", "seen", "size", "slowness", "took", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.room = math.inf
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.size = 0
        self.seen: dict[int, float] = {}
        self.pending = 0
        self.recent = self.filled = 0.0
        self.took = self.done = self.slowness = 0.0


class Booking:
    """What a request will leave in a worker's cache if all goes well.

    Attributes:
        cache: that of the worker.
        size: how many bytes it does not hold yet.
        ahead: bytes that are to be prefilled there until this is done, itself among them.
        at: when it was made.
        numbers: beginnings that are taken to be there because of this.
        until: when it ends by itself.
        over: it has ended.
    """

    __slots__ = ("ahead", "at", "cache", "numbers", "over", "size", "until")

    def __init__(self, cache: WorkerCache, size: int, numbers: list[int], at: float, until: float) -> None:
        self.cache = cache
        self.size = size
        cache.pending += size
        self.ahead = cache.pending
        self.at = at
        self.numbers = numbers
        self.until = until
        self.over = False
