"""Data-parallel ranks of one server that hang while others work: taken out alone, and let in again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from extproc.workers import ranks
from extproc.workers.rank_life import RankLife
from extproc.workers.registry import Registry
from extproc.workers.worker import Status, Worker

Ask = Callable[[Worker, float], Awaitable[RankLife]]  # a rank's entry, seconds


class WedgedRanks:
    """Those of one server.

    Args:
        server: any of its entries.
        registry: is told.
        ask: has a rank asked for a sign of life.
    """

    def __init__(self, server: Worker, registry: Registry, ask: Ask) -> None:
        self._server = server
        self._registry = registry
        self._ask = ask

    async def look_at(self, rank: Worker, within: float) -> None:
        """``rank`` answers no leg: take it out unless it shows a sign of life, or its engine cannot tell."""
        answers = rank.answers
        life = await self._ask(rank, within)
        if life is RankLife.SILENT and rank.answers == answers and rank.status is Status.READY:
            reason = (
                f"wedged: {rank.load} legs under way, no answer; rank {rank.dp_rank} has not moved for {within:g} s"
            )
            self._registry.hold(rank, reason)

    async def let_in(self, within: float) -> None:
        """Ask those that are out again; they are let in, but for those that still do not move."""
        held = [entry for entry in ranks.entries(self._server) if self._registry.is_held(entry)]
        lives = await asyncio.gather(*(self._ask(entry, within) for entry in held))
        for entry, life in zip(held, lives, strict=True):
            if life is not RankLife.SILENT:
                self._registry.hold(entry, "")

    async def any_lives(self, within: float) -> bool:
        """Whether one of them has shown a sign of life: then not all of the server hangs."""
        lives = await asyncio.gather(*(self._ask(entry, within) for entry in self._server.ranks))
        return RankLife.LIVES in lives

    @property
    def any_held(self) -> bool:
        """Whether one of them is out."""
        return any(self._registry.is_held(entry) for entry in self._server.ranks)
