"""Conditional disaggregation: a prompt that is not worth a prefill leg runs on a decode worker alone.

A prefill leg costs a hop and the transfer of a KV cache, and saves the decode worker the computation of the prompt. Of
a short prompt, or one that a decode worker's cache already holds but for the end, that is little. It must be a worker
that serves without a prefill: any vLLM, but no SGLang that was started as a decode (400 ``Disaggregated request
received without bootstrap room id``, 0.5.23 srt/managers/scheduler.py).

Both are asked before a pair is chosen: no prefill worker's turn is used up, and no room on one waited for.

A worker that holds a prompt is passed over when it has more than twice the requests under way of the decode worker with
the fewest, and two more: a beginning that many requests have in common would make it serve all of them, while the
others, which never see it, stand idle. A pair takes those, and so another worker comes to hold it. Where no pair has
room, a busy holder is better than to wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from extproc.apis.request import InferenceRequest
from extproc.exchange.lone import Lone
from extproc.handoff.handoff import Alone, Kv
from extproc.handoff.table import Handoffs
from extproc.policies.partners import NEAR_FACTOR
from extproc.policies.placement import Placer
from extproc.policies.room import NoRoomError, Room
from extproc.workers.worker import Role, Worker

_REMEMBERED: Final = 64  # sets of workers


class Conditional:
    """Decides for each request; both limits are in tokens, 0: none.

    Args:
        placer: chooses decode workers, and knows what they hold.
        handoffs: know which workers serve alone.
        least: a prompt of fewer tokens runs on the decode worker.
        least_uncached: so does one of which the decode worker has to compute fewer.
    """

    def __init__(self, placer: Placer, handoffs: Handoffs, *, least: int = 0, least_uncached: int = 0) -> None:
        self._placer = placer
        self._handoffs = handoffs
        self._least = least
        self._least_uncached = least_uncached
        self._lone: dict[int, tuple[Sequence[Worker], Sequence[Worker]]] = {}  # by identity: of all, those who can

    def lone(self, request: InferenceRequest, room: Room | None = None, *, busy: bool = False) -> Lone | None:
        """Who serves a request alone; None where it is to be served by a pair, or nobody can.

        Of a short prompt any decode worker that can; of a cached one those that have enough of it. ``room`` is what the
        first of them must have. Where none has it, NoRoomError is raised for a short prompt; of a cached one it is
        None, for a pair may have room. ``busy``: those that hold a prompt may be busy, for no pair has room.
        """
        tokens = request.prompt_tokens()
        if tokens < self._least:
            workers = self._placer.decodes(request, self._able, room)
            why = f"about {tokens} prompt tokens, fewer than --pd-min-prompt-tokens"
            return Lone(workers, Alone(Role.DECODE, Kv.LOCAL, why)) if workers else None
        return self._cached(request, tokens, room, busy=busy) if self._least_uncached else None

    def may_be_lone(self, request: InferenceRequest) -> bool:
        """Whether one of the decode workers serves it alone, once it has room; no policy is told of the question."""
        able = self._able(self._placer.usable(request, Role.DECODE))
        tokens = request.prompt_tokens()
        if not able or tokens < self._least or not self._least_uncached:
            return bool(able) and tokens < self._least
        return bool(self._holders(able, tokens, self._placer.held(request, able)))

    def _cached(self, request: InferenceRequest, tokens: int, room: Room | None, *, busy: bool) -> Lone | None:
        held: Mapping[Worker, int] = {}

        def holders(workers: Sequence[Worker]) -> Sequence[Worker]:
            nonlocal held
            able = self._able(workers)
            held = self._placer.held(request, able) if able else {}
            found = self._holders(able, tokens, held)
            return found if busy or not found else self._idle(request, able, found)

        try:
            workers = self._placer.decodes(request, holders, room)
        except NoRoomError:
            return None
        if not workers:
            return None
        known = min(tokens, held.get(workers[0], 0))
        why = f"about {tokens} prompt tokens, {known} of them cached: fewer to compute than --pd-min-uncached-tokens"
        return Lone(workers, Alone(Role.DECODE, Kv.LOCAL, why))

    def _holders(self, able: Sequence[Worker], tokens: int, held: Mapping[Worker, int]) -> Sequence[Worker]:
        """Those of ``able`` that hold enough of a prompt of so many tokens."""
        return tuple(w for w in able if tokens - min(tokens, held.get(w, 0)) < self._least_uncached)

    def _idle(self, request: InferenceRequest, able: Sequence[Worker], holders: Sequence[Worker]) -> Sequence[Worker]:
        """Those ``holders`` that are not too busy beside all that are ``able``; all where there is no pair."""
        if not self._placer.usable(request, Role.PREFILL):
            return holders
        most = NEAR_FACTOR * (min([worker.load for worker in able]) + 1)
        return tuple(worker for worker in holders if worker.load <= most)

    def _able(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those that serve without a prefill; ``workers`` itself where all do, for policies tell sets by identity."""
        known = self._lone.get(id(workers))
        if known is None:
            able = tuple(worker for worker in workers if self._handoffs.of(worker).waivable)
            if len(self._lone) >= _REMEMBERED:
                self._lone.clear()
            known = self._lone[id(workers)] = workers, workers if len(able) == len(workers) else able
        return known[1]
