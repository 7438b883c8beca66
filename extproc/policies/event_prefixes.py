"""What workers hold of a request's prompt, by their engines' own events: the exact index behind cache_aware.

Exact for prompts that are given as token ids, and for workers whose events are followed from the beginning. Of text
nothing can be said without the engine's tokenizer and chat template: there :meth:`EventPrefixes.overlaps` says so, and
events only tell when a cache was emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from extproc.policies.block_index import BlockIndex, Holder
from extproc.policies.policy import RequestView
from extproc.policies.token_prompt import TokenPrompt
from extproc.workers.kv_events import Cleared, Event, Space
from extproc.workers.worker import Worker

_NOTE: Final = object()  # the key of what is kept with a request
_MOST_GROUPS: Final = 2048  # in a large fleet policies look at some of the candidates, from any place on


class _Group(NamedTuple):
    """A set of candidates.

    Attributes:
        candidates: these; held, so that no others can have their identity meanwhile.
        whole: those of whom all is known, each with no tokens.
        sizes: the bits of those whose blocks have so many tokens.
    """

    candidates: Sequence[Worker]
    whole: dict[Worker, int]
    sizes: Sequence[tuple[int, int]]


class EventPrefixes:
    """A CachedPrefixes (:mod:`extproc.policies.cache_aware`), and the Sink of :mod:`extproc.workers.kv_event_feed`.

    Args:
        most: blocks that are remembered, of all workers together.
        emptied: is told of workers whose cache was emptied, for what others may believe of it.
    """

    def __init__(self, most: int, emptied: Callable[[Worker], None] = lambda _: None) -> None:
        self._index = BlockIndex(most)
        self._holders: dict[Worker, Holder] = {}
        self._workers: dict[int, Worker] = {}  # by their bit
        self._groups: dict[int, _Group] = {}  # by identity of the candidates
        self._emptied = emptied

    # -- what a policy asks ---------------------------------------------------------------------------------------

    def overlaps(self, request: RequestView, candidates: Sequence[Worker]) -> Mapping[Worker, int] | None:
        """See CachedPrefixes.

        (Measured: 3 µs, and what :meth:`BlockIndex.overlaps` takes; with 100 candidates 1 µs more, 20 if all of them
        hold something.)
        """
        if not self._holders:
            return None
        prompt = request.notes.get(_NOTE, _NOTE)
        if prompt is _NOTE:
            # A salt keeps blocks apart in ways that are not known here.
            apart = request.prompt_context()
            prompt = request.notes[_NOTE] = None if apart else TokenPrompt.of(request.prompt_bytes())
        if not isinstance(prompt, TokenPrompt):
            return None
        group = self._groups.get(id(candidates))
        if group is None:
            group = self._grouped(candidates)
        found = group.whole.copy()
        space = self._space(request)
        for size, bits in group.sizes:
            for some, tokens in self._index.overlaps(prompt, (space, size), bits):
                self._note(some, tokens, found)
        return found

    def _grouped(self, candidates: Sequence[Worker]) -> _Group:
        """What there is to know of a set of workers until one of them is another."""
        if len(self._groups) >= _MOST_GROUPS:
            self._groups.clear()
        sizes: dict[int, int] = {}
        whole = {}
        for worker in candidates:
            holder = self._holders.get(worker)
            if holder is None:
                continue
            if holder.whole:
                whole[worker] = 0
            if holder.size:
                sizes[holder.size] = sizes.get(holder.size, 0) | holder.bit
        group = _Group(candidates, whole, tuple(sizes.items()))
        if len(candidates) > 1:  # one is asked for as a tuple of its own each time
            self._groups[id(candidates)] = group
        return group

    def _note(self, bits: int, tokens: int, found: dict[Worker, int]) -> None:
        """Those of ``bits`` hold so many tokens."""
        while bits:
            bit = bits & -bits
            found[self._workers[bit]] = tokens
            bits ^= bit

    def learn(self, request: RequestView, worker: Worker) -> None:
        """See CachedPrefixes. The events say it, mostly before the answer does."""

    def forget(self, worker: Worker) -> None:
        """See CachedPrefixes. The feed tells when a worker's events are no longer followed."""

    # -- what the feed tells --------------------------------------------------------------------------------------

    def begin(self, worker: Worker) -> None:
        """The events of ``worker`` are followed from now on."""
        if worker not in self._holders:
            holder = self._holders[worker] = self._index.holder()
            self._workers[holder.bit] = worker
            self._groups.clear()

    def apply(self, worker: Worker, events: Sequence[Event]) -> None:
        """These have happened in its cache."""
        holder = self._holders[worker]
        before = holder.size, holder.whole
        for event in events:
            self._index.apply(holder, event)
            if isinstance(event, Cleared):
                self._emptied(worker)
        if before != (holder.size, holder.whole):
            self._groups.clear()

    def lose(self, worker: Worker) -> None:
        """Events are missing, or it may be another process: nothing is known of its cache."""
        holder = self._holders[worker]
        self._index.clear(holder)
        holder.whole = False
        self._groups.clear()

    def restart(self, worker: Worker) -> None:
        """All that has ever happened in its cache follows: it is empty now."""
        self.lose(worker)
        self._holders[worker].whole = True

    def renew(self, worker: Worker) -> None:
        """It is another process, whose cache began empty: what others believe of it does not hold either."""
        self._emptied(worker)

    def end(self, worker: Worker) -> None:
        """Its events are followed no more."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._index.leave(holder)
            del self._workers[holder.bit]
            self._groups.clear()

    def blocks(self, worker: Worker) -> int:
        """How many blocks it is known to hold."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.blocks)

    def is_whole(self, worker: Worker) -> bool:
        """Whether all that it holds is known."""
        holder = self._holders.get(worker)
        return holder is not None and holder.whole

    def _space(self, request: RequestView) -> Space | None:
        """Where a request's blocks are: those of the LoRA adapter that it names as its model, else the model's own."""
        space = (request.model, None)
        return space if space in self._index.adapters else None
