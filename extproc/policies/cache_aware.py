"""cache_aware: the worker that costs the fleet least, for what it holds of the prompt and what it has still to do.

What: of each candidate it is reckoned what a prompt costs there: what is on its way to it already, and what its prefix
cache lacks of the prompt. The former counts for more where the worker has been slow with what it had to do, be it
slower than others or without what it was taken to hold. The latter counts for more the faster that cache is being
filled: what is put in throws something else out. So a conversation stays where it is while that is not much slower;
what is new goes where there is room; what many begin with comes to be held by several. A worker that was given next to
nothing of late gets some of the short ones, too.

What a cache holds is guessed from what its worker answered as it should (:mod:`extproc.policies.prefix_index`), or
known from an exact index (:class:`CachedPrefixes`). Between choice and answer a prompt is booked, so that others that
begin as it does follow it rather than scatter.

When to use: prompts that have beginnings in common, such as conversations, agents, long instructions. For decode
workers, which are handed the whole cache, what they hold only spares a transfer: there the tokens in their care decide,
and what they hold only among about equal ones.

Fields: the model and the prompt as it stands in the body (text, messages or token ids; of a list of prompts the first
ones count most), and what the model reads before it (tools, ``system``, ``instructions``). Failure: none; a wrong
guess costs time. Source: the peer's policy of this name, whose options it takes. That one goes by the share of the
prompt that is known and, within it, by requests in flight; the simulation in docs/policies.md compares the two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from extproc.policies.cache_costs import decode_costs, prefill_costs
from extproc.policies.cache_options import CacheAwareSettings, CacheIndex
from extproc.policies.many import Many
from extproc.policies.policy import Policy, RequestView
from extproc.policies.prefix_index import PrefixIndex
from extproc.policies.prompt_chain import BYTES_PER_TOKEN, Cuts, PromptChain
from extproc.policies.worker_cache import Booking, WorkerCache
from extproc.workers.worker import Role, Worker

# Tuned with ``python -m bench.simulate``; figures in docs/policies.md.
RECENT_SECONDS: Final = 120.0  # the time constant by which what was put into a cache becomes old
_OVERHEAD: Final = 1024  # bytes that might be prefilled in the time that the smallest prompt takes
_REMEMBERED: Final = 0.9  # of how fast a worker was, at its next answer
_USUAL_ROOM: Final = 400_000  # tokens of a cache, until an engine says how many
# Every so manieth prompt may go to the worker that was given least of late, if that had a small part of what others had
# and it does not cost much.
_WARM_UP_EVERY: Final = 16
_COLD: Final = 0.25
_WARM_UP_TOKENS: Final = 1024
# Of more candidates so many are looked at, by chance, and those that hold something.
MOST_LOOKED_AT: Final = 16
SAMPLE: Final = 8
_HASH_HOLDERS: Final = 3
_AVERAGED: Final = 16  # prompts, of whose bytes for a token the mean counts
_UNLIKE: Final = 1 / 16  # of the usual room of a cache; what differs less is not worth a look at all of them
_GROWN: Final = 200.0  # of an exponent
_CHAIN: Final = "prompt chain"  # both roles' policies look at the same


class CachedPrefixes(Protocol):
    """An exact index of what workers' prefix caches hold, such as one that follows their events."""

    def overlaps(self, request: RequestView, candidates: Sequence[Worker]) -> Mapping[Worker, int] | None:
        """How many tokens of the beginning of ``request``'s prompt the workers hold of which that is known.

        A worker that is known to hold nothing of it is there with 0; of one that is not there (it sends no events)
        the approximate index is asked. None: nothing is known of such a prompt, such as text without a tokenizer; the
        approximate index is asked for all. ``request.notes`` keeps what has to be worked out once per request. It must
        not take longer than some 20 µs and 0.1 µs per candidate.
        """

    def learn(self, request: RequestView, worker: Worker) -> None:
        """``worker`` was sent ``request`` and answered as it should: it has the prompt, whatever events say yet."""

    def forget(self, worker: Worker) -> None:
        """``worker`` is gone, or may be another process: what it had is lost."""


class CacheAwarePolicy(Policy):
    """See the module. (Measured for both roles: 11 µs for a small chat with 100 workers; docs/policies.md has more.)"""

    learns = True
    holds = True

    def __init__(
        self,
        settings: CacheAwareSettings,
        now: Callable[[], float],
        role: Role = Role.PREFILL,
        exact: CachedPrefixes | None = None,
    ) -> None:
        """``now``: monotonic seconds. ``exact``: counts before what is guessed."""
        self._now = now
        self._exact = exact
        self._settings = settings
        self._decode = role is Role.DECODE
        boundaries = [BYTES_PER_TOKEN * tokens for tokens in settings.cache_boundaries]
        self._cuts = Cuts(boundaries, first=4 * BYTES_PER_TOKEN * settings.block_size)
        hashed = settings.cache_index is CacheIndex.HASH
        self._index = PrefixIndex(
            settings.max_tree_size,
            self._cuts,
            sweep=settings.eviction_interval_secs,
            ttl=settings.cache_ttl_secs if hashed else math.inf,
            most_holders=_HASH_HOLDERS if hashed else None,
        )
        self._epoch = now()  # ``recent`` of every cache is larger by e to the time since then
        self._per_token = float(BYTES_PER_TOKEN)  # bytes of a prompt for one token: ids as JSON are longer than text
        self._usual_room = self._per_token * _USUAL_ROOM  # of a cache that nobody says the size of
        self._calls = 0
        self._took = self._done = 0.0  # of all workers
        self._many = Many(SAMPLE)
        usage = min(settings.balance_token_usage_threshold, settings.overload_token_usage_threshold)
        self._looks_at_usage = usage < 1
        self._most_legs = settings.balance_abs_threshold
        self._temperature = settings.selection_temperature
        self._counts_less = self._looks_at_usage or settings.cache_threshold > 0 or settings.overlap_decay > 0

    # -- what it is told ------------------------------------------------------------------------------------------

    def learn(self, request: RequestView, worker: Worker) -> None:
        """See Policy."""
        now = self._now()
        booking = request.notes.get(self)
        if booking is not None:
            if not self._decode:
                self._clock(booking, worker, now)  # type: ignore[arg-type]
            self.over(request.notes)
        cache, chain = self._index.cache(worker), self._chain(request)
        self._per_token += (max(BYTES_PER_TOKEN, _per_token(chain, request)) - self._per_token) / _AVERAGED
        load = worker.engine_load
        if load is not None and load.max_tokens:
            cache.room = self._per_token * load.max_tokens
            self._is_usual(cache.room)
        new = self._index.add(chain, worker, now)
        if not self._decode:
            cache.recent += new * self._growth(now)
            self._fill(cache)
        if self._exact is not None:
            self._exact.learn(request, worker)

    def over(self, notes: dict[object, object]) -> None:
        """See Policy."""
        booking = notes.pop(self, None)
        if booking is not None:
            self._index.take_back(booking)  # type: ignore[arg-type]

    def forget(self, worker: Worker) -> None:
        """See Policy."""
        self._index.forget(worker)
        if self._exact is not None:
            self._exact.forget(worker)

    def held(self, request: RequestView, workers: Sequence[Worker]) -> Mapping[Worker, int]:
        """See Policy. What is guessed is a part of the prompt, in bytes: it has the same part of its tokens."""
        chain = self._chain(request)
        # Not what is on its way to them.
        guessed = self._index.overlaps(chain, self._now(), booked=False)
        tokens, size = request.prompt_tokens(), max(1, chain.size)
        held = {worker: tokens * known // size for worker, known in guessed.items()}
        exact = None if self._exact is None else self._exact.overlaps(request, workers)
        return held if exact is None else held | dict(exact)

    # -- the choice -----------------------------------------------------------------------------------------------

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        notes = request.notes
        if self in notes:  # it was chosen for already, and nothing came of it
            self.over(notes)
        now = self._now()
        chain = self._chain(request)
        if len(candidates) <= MOST_LOOKED_AT:
            among = candidates
            overlaps = self._index.overlaps(chain, now)
            if self._exact is not None:
                self._correct(overlaps, request, chain, among, now)
        else:
            some = self._many.some(candidates)
            among = some.workers
            overlaps = self._index.overlaps(chain, now, among)
            if self._exact is not None:
                self._correct(overlaps, request, chain, among, now)
            if overlaps and (others := some.others(overlaps)):
                among = (*among, *others)
        return self._choose(chain, among, overlaps, limit, notes, now)

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """See Policy. Of many that fit some are looked at, too, and those that hold something."""
        if len(candidates) <= MOST_LOOKED_AT:
            return super().pass_over(candidates, limit, request, fits)
        self.take_back(request)
        some = self._many.some_that_fit(candidates, fits)
        among = some.workers
        if not among:
            return ()
        now = self._now()
        chain = self._chain(request)
        overlaps = self._index.overlaps(chain, now, among)
        if self._exact is not None:
            self._correct(overlaps, request, chain, among, now)
        among = (*among, *filter(fits, some.others(overlaps)))
        return self._choose(chain, among, overlaps, limit, request.notes, now)

    def _choose(
        self,
        chain: PromptChain,
        among: Sequence[Worker],
        overlaps: dict[Worker, int],
        limit: int,
        notes: dict[object, object],
        now: float,
    ) -> Sequence[Worker]:
        """The one that costs least, and up to ``limit`` in all; it is booked there."""
        costs = self._costs(chain.size, among, overlaps, now)
        best = costs.index(min(costs))
        self._calls += 1
        if self._temperature:
            best = self._any(chain, costs)
        elif not self._calls % _WARM_UP_EVERY and not self._decode and len(among) > 1:
            best = self._colder(among, overlaps, best)
        chosen = among[best]
        if chosen.load > self._most_legs:
            best = self._balanced(among, costs, best)
            chosen = among[best]
        notes[self] = self._index.book(chain, overlaps.get(chosen, 0), chosen, now)
        if limit == 1 or len(among) == 1:
            return (chosen,)
        order = sorted(range(len(among)), key=costs.__getitem__)  # of 16, a quarter of heapq.nsmallest's time
        if order[0] != best:
            order.remove(best)
            order.insert(0, best)
        return [among[place] for place in order[:limit]]

    def take_back(self, request: RequestView) -> None:
        """See Policy."""
        self._calls -= 1
        self.over(request.notes)

    def _correct(
        self, overlaps: dict[Worker, int], request: RequestView, chain: PromptChain, among: Sequence[Worker], now: float
    ) -> None:
        """What is known counts before what is guessed of how many bytes workers hold."""
        assert self._exact is not None
        known = self._exact.overlaps(request, among)
        if known is None:
            return
        per_token = 0.0
        for worker, tokens in known.items():
            if tokens:
                # Token ids in JSON are longer than text.
                per_token = per_token or _per_token(chain, request)
                overlaps[worker] = min(chain.size, round(per_token * tokens))
            elif worker in overlaps:
                overlaps[worker] = 0
        # No engine says what is only on its way to it.
        for worker, size in self._index.promised(chain, now).items():
            overlaps[worker] = max(overlaps.get(worker, 0), size)

    def _costs(self, size: int, among: Sequence[Worker], overlaps: dict[Worker, int], now: float) -> list[float]:
        """Of a prompt of ``size`` bytes."""
        held: Mapping[Worker, float] = overlaps
        if held and self._counts_less:
            held = self._counted(size, among, overlaps)
        if self._decode:
            return decode_costs(among, held, self._per_token)
        pace = self._done / self._took if self._took else 1.0
        return prefill_costs(
            among, held, size, self._index.caches, per_token=self._per_token, pace=pace, growth=self._growth(now)
        )

    def _counted(self, size: int, among: Sequence[Worker], overlaps: Mapping[Worker, int]) -> Mapping[Worker, float]:
        """What is held, as far as options let it count."""
        settings = self._settings
        if self._looks_at_usage and self._lopsided(among):
            return {}
        least, decay = settings.cache_threshold * size, settings.overlap_decay
        return {worker: held / (1 + decay * worker.load) for worker, held in overlaps.items() if held >= least}

    def _any(self, chain: PromptChain, costs: list[float]) -> int:
        """The place of any, the more likely the less it costs."""
        spread, lowest = self._temperature * max(chain.size, 1), min(costs)
        weights = [math.exp((lowest - cost) / spread) for cost in costs]
        return random.choices(range(len(costs)), weights)[0]  # noqa: S311

    def _balanced(self, among: Sequence[Worker], costs: list[float], best: int) -> int:
        """The same place, or that of another if that one has too much more to do than others."""
        loads = [worker.load for worker in among]
        mean = sum(loads) / len(loads)
        most = max(self._settings.balance_rel_threshold * mean, self._most_legs + mean)
        if loads[best] <= most:
            return best
        return min([place for place, load in enumerate(loads) if load <= most], key=costs.__getitem__)

    def _colder(self, among: Sequence[Worker], overlaps: Mapping[Worker, int], best: int) -> int:
        """The place of a worker that has had next to nothing of late, if there is one and it does not cost much."""
        caches = self._index.caches
        recent = [caches[worker].recent if worker in caches else 0.0 for worker in among]
        coldest = min(recent)
        place = recent.index(coldest)
        cold = coldest < _COLD * sum(recent) / len(recent) and among[place].load <= among[best].load
        lacks = overlaps.get(among[best], 0) - overlaps.get(among[place], 0)
        return place if cold and lacks <= _WARM_UP_TOKENS * BYTES_PER_TOKEN else best

    def _lopsided(self, among: Sequence[Worker]) -> bool:
        """Whether KV caches are so full, or unequally full, that load decides alone."""
        loads = [worker.engine_load for worker in among]
        usages = [load.kv_usage for load in loads if load is not None and load.kv_usage is not None]
        if not usages:
            return False
        settings, fullest = self._settings, max(usages)
        spread = fullest - min(usages)
        return fullest > settings.overload_token_usage_threshold or spread > settings.balance_token_usage_threshold

    def _clock(self, booking: Booking, worker: Worker, now: float) -> None:
        """How long a worker took for what it had to do, and all workers do."""
        cache = booking.cache
        if booking.over or cache.worker is not worker or cache.room < 0:  # it is another process since
            return
        took, done = now - booking.at, booking.ahead + _OVERHEAD
        cache.took, cache.done = cache.took * _REMEMBERED + took, cache.done * _REMEMBERED + done
        cache.slowness = cache.took / cache.done
        share = 1 - (1 - _REMEMBERED) / len(self._index.caches)
        self._took, self._done = self._took * share + took, self._done * share + done

    # -- what it keeps --------------------------------------------------------------------------------------------

    def _chain(self, request: RequestView) -> PromptChain:
        notes = request.notes
        chain = notes.get(_CHAIN)
        if chain is None:
            context = request.prompt_context()
            prompt = context + request.prompt_bytes() if context else request.prompt_bytes()
            chain = notes[_CHAIN] = PromptChain(prompt, self._cuts, request.model)
        return chain  # type: ignore[return-value]

    def _is_usual(self, room: float) -> None:
        """An engine says that its cache keeps so many bytes: so may those of others that do not say it."""
        if abs(room - self._usual_room) > _UNLIKE * self._usual_room:
            self._usual_room = room
            for cache in self._index.caches.values():
                self._fill(cache)

    def _fill(self, cache: WorkerCache) -> None:
        cache.filled = cache.recent / (cache.room if cache.room < math.inf else self._usual_room)

    def _growth(self, now: float) -> float:
        """What was put into a cache now counts for so many times as much as at the epoch: so nothing has to decay."""
        exponent = (now - self._epoch) / RECENT_SECONDS
        if exponent > _GROWN:
            shrunk = math.exp(-exponent)
            for cache in self._index.caches.values():
                cache.recent *= shrunk
                cache.filled *= shrunk
            self._epoch, exponent = now, 0.0
        return math.exp(exponent)


def _per_token(chain: PromptChain, request: RequestView) -> float:
    """Bytes of this prompt for one of its tokens, as :meth:`RequestView.prompt_tokens` counts them."""
    return max(1, chain.size) / max(1, request.prompt_tokens())
