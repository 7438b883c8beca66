"""Which handoff a pair uses: by what its prefill worker runs, and how it moves KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from extproc.handoff.handoff import Handoff
from extproc.handoff.mooncake import MooncakeHandoff
from extproc.handoff.nixl import NixlHandoff
from extproc.handoff.passthrough import PassthroughHandoff
from extproc.handoff.sglang import SglangHandoff
from extproc.workers.worker import MOONCAKE, NIXL, Worker

VLLM: Final = "vllm"


class Handoffs:
    """One of each.

    Args:
        mooncake_in_turn: have Mooncake's decode legs wait for their prefills.
    """

    def __init__(self, *, mooncake_in_turn: bool = False) -> None:
        self._sglang = SglangHandoff()
        self._passthrough = PassthroughHandoff()
        self._of_vllm: dict[str, Handoff] = {NIXL: NixlHandoff(), MOONCAKE: MooncakeHandoff(in_turn=mooncake_in_turn)}

    def __iter__(self) -> Iterator[Handoff]:
        yield self._sglang
        yield from self._of_vllm.values()
        yield self._passthrough

    def of(self, prefill: Worker) -> Handoff:
        """The handoff from ``prefill`` to the decode workers it may be paired with."""
        if prefill.runtime == VLLM:
            return self._of_vllm.get(prefill.kv_connector, self._passthrough)
        return self._sglang

    @property
    def live(self) -> int:
        """How many rooms are taken."""
        return sum(handoff.live for handoff in self)
