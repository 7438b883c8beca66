"""Which handoff a pair of gRPC servers uses: by what its prefill worker runs, and how it moves KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.handoff.grpc import RpcHandoff
from extproc.handoff.grpc_mooncake import FormerMooncakeHandoff, MooncakeRpcHandoff
from extproc.handoff.grpc_rooms import sglang_rooms, tokenspeed_rooms
from extproc.handoff.grpc_vllm import nixl, passthrough
from extproc.workers.worker import MOONCAKE, NIXL, Worker


class RpcHandoffs:
    """One of each.

    Args:
        mooncake_in_turn: have Mooncake's decode legs wait for their prefills.
    """

    def __init__(self, *, mooncake_in_turn: bool = False) -> None:
        self._sglang: RpcHandoff = sglang_rooms()
        self._tokenspeed: RpcHandoff = tokenspeed_rooms()
        self._nixl: RpcHandoff = nixl()
        self._mooncake: RpcHandoff = MooncakeRpcHandoff(in_turn=mooncake_in_turn)
        self._former_mooncake: RpcHandoff = FormerMooncakeHandoff()
        self._passthrough: RpcHandoff = passthrough()

    def __iter__(self) -> Iterator[RpcHandoff]:
        yield self._sglang
        yield self._tokenspeed
        yield self._nixl
        yield self._mooncake
        yield self._former_mooncake
        yield self._passthrough

    def of(self, prefill: Worker) -> RpcHandoff:
        """The handoff from ``prefill`` to the decode workers it may be paired with."""
        if prefill.runtime == "vllm":
            if prefill.kv_connector == MOONCAKE:
                return self._mooncake if prefill.kv_engines else self._former_mooncake
            return self._nixl if prefill.kv_connector == NIXL else self._passthrough
        return self._tokenspeed if prefill.runtime == "tokenspeed" else self._sglang

    @property
    def live(self) -> int:
        """How many rooms are taken."""
        return sum(handoff.live for handoff in self)
