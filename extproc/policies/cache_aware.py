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

import heapq
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from extproc.policies.cache_options import CacheAwareSettings, CacheIndex
from extproc.policies.policy import Policy, RequestView
from extproc.policies.prefix_index import PrefixIndex
from extproc.policies.prompt_chain import BYTES_PER_TOKEN, Cuts, PromptChain
from extproc.policies.worker_cache import Booking
from extproc.workers.worker import Role, Worker

# Tuned with ``python -m bench.simulate``; figures in docs/policies.md.
RECENT_SECONDS: Final = 120.0  # the time constant by which what was put into a cache becomes old
# What a byte costs that a cache lacks, beside itself: at least so much, so much more where the cache has been filled
# once within that time, and no more than so much for a whole prompt.
LEAST_TOLL: Final = 0.5
TOLL: Final = 3.0
MOST_TOLL: Final = 131_072.0  # bytes
_OVERHEAD: Final = 1024  # bytes that might be prefilled in the time that the smallest prompt takes
_REMEMBERED: Final = 0.9  # of how fast a worker was, at its next answer
_SLOWEST: Final = 32.0
_FASTEST: Final = 0.25
_USUAL_ROOM: Final = 400_000  # tokens of a cache, until an engine says how many
# A decode worker's: what one more request costs beside its tokens, and what a held token spares.
_DECODE_REQUEST: Final = 256
_DECODE_SPARED: Final = 0.1
# Every so manieth prompt may go to the worker that was given least of late, if that had a small part of what others had
# and it does not cost much.
_WARM_UP_EVERY: Final = 16
_COLD: Final = 0.25
_WARM_UP_TOKENS: Final = 1024
# Of more candidates so many are looked at, by chance, and those that hold something.
MOST_LOOKED_AT: Final = 32
SAMPLE: Final = 16
_SETS: Final = 16
_HASH_HOLDERS: Final = 3
_AVERAGED: Final = 16  # prompts, of whose bytes for a token the mean counts
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
    """See the module. (Measured: 5 µs for a small chat with 2 candidates; docs/policies.md has more.)"""

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
        self._sets: dict[int, tuple[Sequence[Worker], frozenset[Worker]]] = {}  # by identity of the candidates
        usage = min(settings.balance_token_usage_threshold, settings.overload_token_usage_threshold)
        self._looks_at_usage = usage < 1

    # -- what it is told ------------------------------------------------------------------------------------------

    def learn(self, request: RequestView, worker: Worker) -> None:
        """See Policy."""
        now = self._now()
        booking = request.notes.get(self)
        if booking is not None:
            self._clock(booking, worker, now)  # type: ignore[arg-type]
            self.over(request.notes)
        cache, chain = self._index.cache(worker), self._chain(request)
        self._per_token += (max(BYTES_PER_TOKEN, _per_token(chain, request)) - self._per_token) / _AVERAGED
        load = worker.engine_load
        if load is not None and load.max_tokens:
            cache.room = self._usual_room = self._per_token * load.max_tokens
        new = self._index.add(chain, worker, now)
        cache.recent += new * self._growth(now)
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

    def held(self, request: RequestView, worker: Worker) -> int:
        """About how many tokens of the beginning of the prompt the KV cache of ``worker`` is known to hold."""
        chain = self._chain(request)
        known = None if self._exact is None else self._exact.overlaps(request, (worker,))
        if known is not None and worker in known:
            return known[worker]
        # Not what is on its way to it: this request itself is booked there.
        held = self._index.overlaps(chain, self._now(), booked=False).get(worker, 0)
        return int(held / _per_token(chain, request))

    # -- the choice -----------------------------------------------------------------------------------------------

    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """See Policy."""
        if self in request.notes:  # it was chosen for already, and nothing came of it
            self.over(request.notes)
        now = self._now()
        chain = self._chain(request)
        among = candidates if len(candidates) <= MOST_LOOKED_AT else _neighbours(candidates)
        overlaps = self._overlaps(request, chain, among, now, sampled=among is not candidates)
        if among is not candidates and overlaps:
            members = self._members(candidates)
            among = [*dict.fromkeys((*among, *(worker for worker in overlaps if worker in members)))]
        costs = self._costs(chain, among, overlaps, self._growth(now))
        best = self._best(chain, among, costs, overlaps)
        chosen = among[best]
        request.notes[self] = self._index.book(chain, overlaps.get(chosen, 0), chosen, now)
        if limit == 1 or len(among) == 1:
            return (chosen,)
        order = heapq.nsmallest(limit, range(len(among)), key=costs.__getitem__)
        return [chosen, *[among[place] for place in order if place != best][: limit - 1]]

    def _overlaps(
        self, request: RequestView, chain: PromptChain, among: Sequence[Worker], now: float, *, sampled: bool = False
    ) -> dict[Worker, int]:
        """How many bytes of the prompt workers hold, ``among`` and others."""
        overlaps = self._index.overlaps(chain, now, among if sampled else ())
        if self._exact is not None:
            known = self._exact.overlaps(request, among)
            if known is not None:
                per_token = _per_token(chain, request)
                for worker, tokens in known.items():
                    overlaps[worker] = min(chain.size, round(per_token * tokens))
                # No engine says what is only on its way to it.
                for worker, size in self._index.promised(chain, now).items():
                    overlaps[worker] = max(overlaps.get(worker, 0), size)
        return overlaps

    def _costs(
        self, chain: PromptChain, among: Sequence[Worker], overlaps: Mapping[Worker, int], growth: float
    ) -> list[float]:
        """In bytes, of which a token is a few."""
        settings, index_cache = self._settings, self._index.caches
        size, decay = chain.size, settings.overlap_decay
        least = settings.cache_threshold * size
        if self._looks_at_usage and self._lopsided(among):
            overlaps = {}
        pace = self._done / self._took if self._took else 1.0
        per_token = self._per_token
        costs = []
        for worker in among:
            held: float = overlaps.get(worker, 0)
            if held:
                if held < least:
                    held = 0
                elif decay:
                    held /= 1 + decay * worker.load
            load = per_token * worker.tokens
            if self._decode:
                costs.append(load + per_token * _DECODE_REQUEST * worker.load - _DECODE_SPARED * held)
                continue
            cache = index_cache.get(worker)
            if cache is None:
                new = size - held  # by its events alone, or nothing
                costs.append(load + new + min(new * LEAST_TOLL, MOST_TOLL))
                continue
            if cache.pending < load:
                load = cache.pending
            if cache.done and load:
                # What it holds may be less than is known, or the worker slower than others.
                load *= min(_SLOWEST, max(_FASTEST, cache.took / cache.done * pace))
            new = size - held
            room = cache.room if cache.room < math.inf else self._usual_room
            toll = LEAST_TOLL + TOLL * cache.recent / (growth * room)
            costs.append(load + new + min(new * toll, MOST_TOLL))
        return costs

    def _best(
        self, chain: PromptChain, among: Sequence[Worker], costs: list[float], overlaps: Mapping[Worker, int]
    ) -> int:
        """The place of the one that is chosen."""
        settings = self._settings
        lowest = min(costs)
        best = costs.index(lowest)
        self._calls += 1
        if settings.selection_temperature:
            spread = settings.selection_temperature * max(chain.size, 1)
            weights = [math.exp((lowest - cost) / spread) for cost in costs]
            best = random.choices(range(len(among)), weights)[0]  # noqa: S311
        elif not self._calls % _WARM_UP_EVERY and not self._decode and len(among) > 1:
            best = self._colder(among, overlaps, best)
        load = among[best].load
        if load > settings.balance_abs_threshold:
            mean = sum(worker.load for worker in among) / len(among)
            most = max(settings.balance_rel_threshold * mean, settings.balance_abs_threshold + mean)
            if load > most:
                places = [place for place, worker in enumerate(among) if worker.load <= most]
                best = min(places, key=costs.__getitem__)
        return best

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
        if booking.over or booking.cache.worker is not worker:
            return
        took, done = now - booking.at, booking.ahead + _OVERHEAD
        cache = booking.cache
        cache.took, cache.done = cache.took * _REMEMBERED + took, cache.done * _REMEMBERED + done
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

    def _members(self, candidates: Sequence[Worker]) -> Collection[Worker]:
        """The candidates as a set, which is the fleet's own tuple until something changes."""
        found = self._sets.get(id(candidates))
        if found is None or found[0] is not candidates:
            if len(self._sets) >= _SETS:
                self._sets.clear()
            found = self._sets[id(candidates)] = (candidates, frozenset(candidates))
        return found[1]

    def _growth(self, now: float) -> float:
        """What was put into a cache now counts for so many times as much as at the epoch: so nothing has to decay."""
        exponent = (now - self._epoch) / RECENT_SECONDS
        if exponent > _GROWN:
            shrunk = math.exp(-exponent)
            for cache in self._index.caches.values():
                cache.recent *= shrunk
            self._epoch, exponent = now, 0.0
        return math.exp(exponent)


def _per_token(chain: PromptChain, request: RequestView) -> float:
    """Bytes of this prompt for one of its tokens, as :meth:`RequestView.prompt_tokens` counts them."""
    return max(1, chain.size) / max(1, request.prompt_tokens())


def _neighbours(candidates: Sequence[Worker]) -> Sequence[Worker]:
    """``SAMPLE`` of them that stand together, as likely at one place as at another (0.3 µs; random.sample takes 10)."""
    start = int(random.random() * len(candidates))  # noqa: S311
    found = candidates[start : start + SAMPLE]
    return found if len(found) == SAMPLE else (*found, *candidates[: SAMPLE - len(found)])
