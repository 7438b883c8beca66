"""What workers hold of a request's prompt, by their engines' own events: the exact index behind cache_aware.

Exact for prompts that are given as token ids, and for workers whose events are followed from the beginning. Of text
nothing can be said without the engine's tokenizer and chat template: there :meth:`EventPrefixes.overlaps` says so, and
events only tell when a cache was emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from extproc.policies.block_index import BlockIndex, Holder, Root
from extproc.policies.policy import RequestView
from extproc.policies.token_prompt import TokenPrompt
from extproc.workers.kv_events import Cleared, Event, Space
from extproc.workers.worker import Worker

_NOTE: Final = object()  # the key of what is kept with a request


class EventPrefixes:
    """A CachedPrefixes (:mod:`extproc.policies.cache_aware`), and the Sink of :mod:`extproc.workers.kv_event_feed`.

    Args:
        most: blocks that are remembered, of all workers together.
        emptied: is told of workers whose cache is empty or unknown now, for what others may believe of it.
    """

    def __init__(self, most: int, emptied: Callable[[Worker], None] = lambda _: None) -> None:
        self._index = BlockIndex(most)
        self._holders: dict[Worker, Holder] = {}
        self._emptied = emptied

    # -- what a policy asks ---------------------------------------------------------------------------------------

    def overlaps(self, request: RequestView, candidates: Sequence[Worker]) -> Mapping[Worker, int] | None:
        """See CachedPrefixes. (Measured: 1 µs, 0.15 µs per candidate, and 0.8 µs per block that somebody holds.)"""
        holders = self._holders
        if not holders:
            return None
        prompt = request.notes.get(_NOTE, _NOTE)
        if prompt is _NOTE:
            prompt = request.notes[_NOTE] = TokenPrompt.of(request.prompt_bytes())
        if not isinstance(prompt, TokenPrompt):
            return None
        space = self._space(request)
        found: dict[Worker, int] = {}
        sizes: dict[int, dict[Holder, Worker]] = {}
        for worker in candidates:
            holder = holders.get(worker)
            if holder is None:
                continue
            if holder.whole:
                found[worker] = 0
            if holder.size:
                sizes.setdefault(holder.size, {})[holder] = worker
        for size, group in sizes.items():
            root: Root = (space, size)
            for holder, tokens in self._index.overlaps(prompt, root, group).items():
                found[group[holder]] = tokens
        return found

    def learn(self, request: RequestView, worker: Worker) -> None:
        """See CachedPrefixes. The events say it, mostly before the answer does."""

    def forget(self, worker: Worker) -> None:
        """See CachedPrefixes. The feed tells when a worker's events are no longer followed."""

    # -- what the feed tells --------------------------------------------------------------------------------------

    def begin(self, worker: Worker) -> None:
        """The events of ``worker`` are followed from now on."""
        if worker not in self._holders:
            self._holders[worker] = self._index.holder()

    def apply(self, worker: Worker, events: Sequence[Event]) -> None:
        """These have happened in its cache."""
        holder = self._holders[worker]
        for event in events:
            self._index.apply(holder, event)
            if isinstance(event, Cleared):
                self._emptied(worker)

    def lose(self, worker: Worker) -> None:
        """Events are missing, or it may be another process: nothing is known of its cache."""
        holder = self._holders[worker]
        self._index.clear(holder)
        holder.whole = False

    def restart(self, worker: Worker) -> None:
        """All that has ever happened in its cache follows: it is empty now."""
        self.lose(worker)
        self._holders[worker].whole = True

    def end(self, worker: Worker) -> None:
        """Its events are followed no more."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._index.leave(holder)

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
