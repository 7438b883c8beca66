"""Which beginnings of prompts workers hold, as far as one can tell from what they were sent: their caches, simulated.

An engine's prefix cache keeps what was used last. So for each worker the beginnings that it was sent
(:mod:`extproc.policies.prompt_chain`) are kept in that order, as many as fit into its cache, whose size engines say;
those of the longest end go first, as in the engine. Beside that it is kept who holds a beginning.

All together take no more memory than is allowed: a worker that takes more than its part loses what it was sent longest
ago. A worker that is gone is passed over from then on; what was known of it is cleared away little by little.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from extproc.policies.prompt_chain import Cuts, PromptChain
from extproc.policies.worker_cache import Booking, WorkerCache
from extproc.workers.worker import Worker

# Bytes of resident memory, measured (CPython 3.11; ``python -m bench.index_memory``) while old beginnings go and new
# ones come, which leaves dicts up to six times as large as what is in them: a beginning with one holder; with several
# it takes more; each further holder; and when a holder used it last, where that is known.
RECORD_BYTES: Final = 440
SHARED_BYTES: Final = 220
HOLDER_BYTES: Final = 260
AGE_BYTES: Final = 140
_MOST_BOOKINGS: Final = 4096
_GONE: Final = -1.0
_CLEARED: Final = 64  # records at a time
_ANY: Final = 1 << 30


_Holders = set[WorkerCache]


class PrefixIndex:
    """What the workers of one role hold, as far as their prompts came this way."""

    def __init__(
        self,
        memory: int,
        cuts: Cuts,
        *,
        ttl: float = math.inf,
        most_holders: int | None = None,
        sweep: float = 60.0,
        booked_for: float = 60.0,
    ) -> None:
        """
        Args:
            memory: the most that it may take, in bytes, bookings not counted.
            cuts: where all prompts are cut.
            ttl: seconds after which what was not used again is taken for lost.
            most_holders: how many workers may be known to hold one beginning; None: any number.
            sweep: seconds between two looks at what is lost by age.
            booked_for: seconds after which a booking is taken back of which nothing has been heard.
        """
        self._memory = memory
        self._cuts = cuts
        self._ttl = ttl
        self._ages = ttl < math.inf
        age = AGE_BYTES if self._ages else 0
        self._record_bytes, self._holder_bytes = RECORD_BYTES + age, HOLDER_BYTES + age
        self._most_holders = most_holders or _ANY
        self._sweep = sweep
        self._swept = -math.inf
        self._booked_for = booked_for
        self._entries: dict[int, WorkerCache | _Holders] = {}
        self.caches: dict[Worker, WorkerCache] = {}
        self._gone: deque[WorkerCache] = deque()
        self._booked: dict[int, Booking] = {}
        self._bookings: deque[Booking] = deque()  # in the order in which they end, those taken back among them
        self.size = 0  # bytes of memory, about

    def __len__(self) -> int:
        """How many beginnings are known."""
        return len(self._entries)

    def cache(self, worker: Worker) -> WorkerCache:
        """What is known of ``worker``."""
        cache = self.caches.get(worker)
        if cache is None:
            cache = self.caches[worker] = WorkerCache(worker)
        return cache

    # -- questions ------------------------------------------------------------------------------------------------

    def overlaps(
        self, chain: PromptChain, now: float, few: Sequence[Worker] = (), *, booked: bool = True
    ) -> dict[Worker, int]:
        """How many bytes of the beginning of a prompt each worker holds that holds any.

        ``booked``: what is on its way to them counts, too.
        Of a beginning that very many hold only those of ``few`` are looked at, when there are any.
        (Measured with 220 KB that one worker has: 15 µs; 1 µs for a small chat.)
        """
        entries = self._entries
        numbers = chain.numbers
        found: list[WorkerCache | _Holders] = []
        for number in numbers:
            entry = entries.get(number)
            if entry is None:
                break
            found.append(entry)
        depth = len(found)
        overlaps: dict[Worker, int] = {}
        if booked and depth < len(numbers) and numbers[depth] in self._booked:
            self._booked_beyond(chain, depth, now, overlaps)
        if not depth:
            return overlaps
        many = 2 * len(few) or _ANY
        most = 1
        before: object = None
        for place in range(depth - 1, -1, -1):
            entry = found[place]
            if entry is before:
                continue
            before = entry
            if type(entry) is WorkerCache:
                if entry.worker not in overlaps:
                    self._note(overlaps, (entry,), chain, place, now)
                continue
            # Who holds the longer beginning holds the shorter one: if no more do, they are the same.
            if len(entry) <= most:  # type: ignore[arg-type]
                continue
            most = len(entry)  # type: ignore[arg-type]
            holders: _Holders = entry  # type: ignore[assignment]
            if most > many:
                caches = self.caches
                some = [cache for worker in few if (cache := caches.get(worker)) in holders]
                self._note(overlaps, some, chain, place, now)
            else:
                self._note(overlaps, holders, chain, place, now)
        return overlaps

    def _note(
        self, overlaps: dict[Worker, int], holders: Iterable[WorkerCache], chain: PromptChain, place: int, now: float
    ) -> None:
        """``holders`` hold the beginning up to a cut, those apart that are gone, or do not any more by age."""
        number, size = chain.numbers[place], chain.size
        since = now - self._ttl
        for cache in holders:
            worker = cache.worker
            if worker in overlaps or cache.room < 0 or (self._ages and cache.seen[number] < since):
                continue
            reach = cache.kept[number]
            overlaps[worker] = reach if reach < size else size  # noqa: FURB136 - min() is a call

    def _booked_beyond(self, chain: PromptChain, depth: int, now: float, overlaps: dict[Worker, int]) -> None:
        """Who will hold more than the first ``depth`` cuts, of which is known who holds them."""
        booked, ends = self._booked, chain.ends
        for place, number in enumerate(chain.numbers[depth:], depth):
            booking = booked.get(number)
            if booking is None:
                return
            if booking.until > now and booking.cache.room >= 0:
                overlaps[booking.cache.worker] = ends[place]

    # -- bookings -------------------------------------------------------------------------------------------------

    def book(self, chain: PromptChain, held: int, worker: Worker, now: float) -> Booking:
        """``worker`` was chosen for a prompt of which it holds the first ``held`` bytes.

        Others that begin as this one are to find it there until that is learned, taken back, or too long ago.
        (Measured with 220 KB: 10 µs; with a small chat 1 µs.)
        """
        bookings = self._bookings
        while bookings and (bookings[0].over or bookings[0].until <= now or len(bookings) >= _MOST_BOOKINGS):
            self.take_back(bookings.popleft())
        # Of several workers that are on their way to hold it, the last one counts: it has less to do first.
        numbers = chain.numbers[bisect_right(chain.ends, held) :] if held else chain.numbers
        cache = self.caches.get(worker) or self.cache(worker)
        booking = Booking(cache, max(0, chain.size - held), numbers, now, now + self._booked_for)
        self._booked.update(dict.fromkeys(numbers, booking))
        bookings.append(booking)
        return booking

    def promised(self, chain: PromptChain, now: float) -> dict[Worker, int]:
        """How many bytes of the beginning of a prompt workers will hold for which it is booked."""
        found: dict[Worker, int] = {}
        if self._booked:
            for place, number in enumerate(chain.numbers):
                booking = self._booked.get(number)
                if booking is not None and booking.until > now and booking.cache.room >= 0:
                    found[booking.cache.worker] = chain.ends[place]
        return found

    def take_back(self, booking: Booking) -> None:
        """It has become knowledge, or nothing will come of it."""
        if booking.over:
            return
        booking.over = True
        booking.cache.pending -= booking.size
        for number in booking.numbers:
            if self._booked.get(number) is booking:
                del self._booked[number]

    # -- knowledge ------------------------------------------------------------------------------------------------

    def add(self, chain: PromptChain, worker: Worker, now: float) -> int:
        """``worker`` has prefilled a prompt: how many bytes of it are new there.

        (Measured with 220 KB: 25 µs; with a small chat 2 µs.)
        """
        cache, numbers, ends = self.cache(worker), chain.numbers, chain.ends
        self._cuts.within(chain.size)  # another role's policy may have made the chain, with cuts of its own
        kept, count = cache.kept, len(numbers)
        held = 0
        # The longest beginning first: so the shortest one, which the others are of no use without, goes last.
        for place in range(count - 1, -1, -1):
            number = numbers[place]
            reach = kept.get(number)
            if reach is None:
                kept[number] = ends[place]
                cache.size += ends[place] - (ends[place - 1] if place else 0)
                self._hold(number, cache)
            else:
                kept.move_to_end(number)
                held = held or reach
        if count:
            last = chain.size if count == len(ends) else min(chain.size, ends[count] - 1)
            if kept[numbers[-1]] < last:
                kept[numbers[-1]] = last
        if self._ages:
            cache.seen.update(dict.fromkeys(numbers, now))
        self._shrink(cache, now)
        return max(0, chain.size - held)

    def forget(self, worker: Worker) -> None:
        """``worker`` holds nothing any more."""
        cache = self.caches.pop(worker, None)
        if cache is not None:
            cache.room = _GONE
            self._gone.append(cache)

    def _hold(self, number: int, cache: WorkerCache) -> None:
        """Note that ``cache`` holds a beginning that it did not hold."""
        entries = self._entries
        entry = entries.get(number)
        if entry is None:
            entries[number] = cache
            self.size += self._record_bytes
            return
        if type(entry) is WorkerCache:
            if self._most_holders == 1:
                self._drop(entry, number)
                self._hold(number, cache)
                return
            entries[number] = {entry, cache}
            self.size += SHARED_BYTES + self._holder_bytes
            return
        holders: _Holders = entry  # type: ignore[assignment]
        holders.add(cache)
        self.size += self._holder_bytes
        if len(holders) > self._most_holders:
            self._drop(next(other for other in holders if other is not cache), number)

    def _shrink(self, cache: WorkerCache, now: float) -> None:
        """Drop what ``cache`` has lost, and what is too much altogether, or lost with its worker or by age."""
        while cache.size > cache.room:
            self._drop_oldest(cache)
        if self._gone:
            self._clear(self._gone[0])
        while self.size > self._memory:
            self._clear(self._gone[0] if self._gone else self._greedy(cache))
        if self._ages and now - self._swept >= self._sweep:
            self._swept, since = now, now - self._ttl
            for other in self.caches.values():
                while other.kept and other.seen[next(iter(other.kept))] < since:
                    self._drop_oldest(other)

    def _greedy(self, cache: WorkerCache) -> WorkerCache:
        """Who is to make place: ``cache``, unless it takes less than its part."""
        caches = self.caches.values()
        if len(cache.kept) * len(caches) >= sum(len(other.kept) for other in caches):
            return cache
        return max(caches, key=lambda other: len(other.kept))

    def _clear(self, cache: WorkerCache) -> None:
        """Drop some of what it holds."""
        for _ in range(min(_CLEARED, len(cache.kept))):
            self._drop_oldest(cache)
        if cache.room < 0 and not cache.kept:
            self._gone.popleft()

    def _drop_oldest(self, cache: WorkerCache) -> None:
        self._drop(cache, next(iter(cache.kept)))

    def _drop(self, cache: WorkerCache, number: int) -> None:
        """``cache`` does not hold a beginning any more."""
        reach = cache.kept.pop(number)
        ends = self._cuts.ends
        place = bisect_right(ends, reach) - 1
        cache.size -= ends[place] - (ends[place - 1] if place else 0)
        cache.seen.pop(number, None)
        entry = self._entries[number]
        if entry is cache:
            del self._entries[number]
            self.size -= self._record_bytes
            return
        holders: _Holders = entry  # type: ignore[assignment]
        holders.remove(cache)
        self.size -= self._holder_bytes
        if len(holders) == 1:
            self._entries[number] = holders.pop()
            self.size -= SHARED_BYTES
