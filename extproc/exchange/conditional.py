"""Conditional disaggregation: a prompt that is not worth a prefill leg runs on a decode worker alone.

A prefill leg costs a hop and the transfer of a KV cache, and saves the decode worker the computation of the prompt. Of
a short prompt, or one that the decode worker's cache already holds but for the end, that is little. It must be a worker
that serves without a prefill: any vLLM, but no SGLang that was started as a decode (400 ``Disaggregated request
received without bootstrap room id``, 0.5.23 srt/managers/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from extproc.apis.request import InferenceRequest
from extproc.handoff.handoff import Alone, Kv
from extproc.handoff.table import Handoffs
from extproc.policies.placement import Placer
from extproc.workers.worker import Role, Worker

_REMEMBERED: Final = 64  # sets of workers


class Lone(NamedTuple):
    """Who serves a request alone, in order of preference, and why."""

    workers: Sequence[Worker]
    alone: Alone


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

    def short(self, request: InferenceRequest) -> Lone | None:
        """Who serves a request whose prompt is short; None where it is not, or where nobody can.

        To be asked before a pair is chosen: no prefill worker's turn is used up.
        """
        if not self._least:
            return None
        tokens = request.prompt_tokens()
        if tokens >= self._least:
            return None
        workers = self._placer.decodes(request, self._able)
        if not workers:
            return None
        why = f"about {tokens} prompt tokens, fewer than --pd-min-prompt-tokens"
        return Lone(workers, Alone(Role.DECODE, Kv.LOCAL, why))

    def cached(self, request: InferenceRequest, decode: Worker) -> Alone | None:
        """Why ``decode``, chosen for a pair, serves the request alone, having most of its prompt; None: it does not."""
        if not self._least_uncached or not self._handoffs.of(decode).waivable:
            return None
        tokens = request.prompt_tokens()
        held = min(tokens, self._placer.held(request, decode))
        if tokens - held >= self._least_uncached:
            return None
        why = f"about {tokens} prompt tokens, {held} of them cached: fewer to compute than --pd-min-uncached-tokens"
        return Alone(Role.DECODE, Kv.LOCAL, why)

    def _able(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those that serve without a prefill; ``workers`` itself where all do, for policies tell sets by identity."""
        known = self._lone.get(id(workers))
        if known is None:
            able = tuple(worker for worker in workers if self._handoffs.of(worker).waivable)
            if len(self._lone) >= _REMEMBERED:
                self._lone.clear()
            known = self._lone[id(workers)] = workers, workers if len(able) == len(workers) else able
        return known[1]
