"""vLLM's MooncakeConnector over gRPC: as over HTTP (``handoff/mooncake.py``), with the parameters in a message.

What: both legs at once under a ``transfer_id`` minted for every attempt, or in turn. The decode is told which engine
core prefills, by the id that the server's ``GetServerInfo`` has (read again when a worker has recovered), with
``_dp{rank}`` where there are several; one that is not chosen among several is not known. When to use: workers whose
server reports MooncakeConnector.
Fields: see ``handoff/mooncake.py``. A server that reports no engine id is one of before its parameters were JSON: its
decode is told ``kv_transfer_params`` of ``remote_host`` and ``remote_port``, the prefill's bootstrap server, and its
prefill nothing, one after the other, as the peer does it; what becomes of the cache is between them.
Failure: see ``handoff/mooncake.py``. Of one connector core among several, none chosen, the decode computes the prompt.
Source: smg-grpc-servicer 0.14.1, vllm/kv_transfer.py (``params_from_request``); the peer's common/kv_transfer.rs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import orjson

from extproc.engines.engine import Params, Remote
from extproc.generation.asked import Generation
from extproc.handoff.grpc_answers import leg_name
from extproc.handoff.grpc_vllm import HarvestingHandoff, VllmRpcHandoff, order
from extproc.handoff.handoff import Alone, Handed, Kv, Plan
from extproc.handoff.mooncake import ASK, NO_ENGINE, SEVERAL_ENGINES
from extproc.workers.kv_engines import bootstrap_address
from extproc.workers.worker import MOONCAKE_BOOTSTRAP_PORT, Worker


class MooncakeRpcHandoff(VllmRpcHandoff):
    """See the module, and RpcHandoff.

    Args:
        in_turn: the decode leg starts only when the prefill leg is done.
    """

    name = "mooncake"
    pushes = True

    def __init__(self, *, in_turn: bool = False) -> None:
        self.in_turn = in_turn
        self.lets_finish = not in_turn

    def alone(self, generation: Generation, prefill: Worker) -> Alone | None:
        """See RpcHandoff."""
        found = super().alone(generation, prefill)
        if found is not None or len(prefill.kv_engines) == 1:
            return found
        return SEVERAL_ENGINES if prefill.kv_engines else NO_ENGINE

    def plan(self, generation: Generation, prefill: Worker, decode: Worker | None) -> Plan:
        """See RpcHandoff. ``prefill`` has one engine core."""
        name, transfer = leg_name(generation), f"xfer-{random.getrandbits(128):032x}"
        (core,) = prefill.kv_engines
        rank = None if decode is None else decode.dp_rank
        params = orjson.dumps(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": core.id,
                "remote_bootstrap_addr": bootstrap_address(prefill),
                "transfer_id": transfer,
            }
        )
        return Plan(
            self.prefill_leg(generation, prefill, name, ASK % transfer.encode()),
            self.decode_leg(generation, name, rank, Params(params)),
            names=(name,),
            params=params,
            rank=rank,
        )

    def handed(self, generation: Generation, plan: Plan, answer: bytes) -> Handed:
        """See RpcHandoff. Where the cache is was known before."""
        if not answer:
            return self.unaided(generation, plan)
        return Handed(self.decode_leg(generation, plan.names[0], plan.rank, Params(plan.params)), Kv.HANDED)

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See RpcHandoff."""
        transfer = orjson.loads(plan.params)["transfer_id"]
        return [order(ASK % transfer.encode(), max_tokens=1)]


class FormerMooncakeHandoff(HarvestingHandoff):
    """Of servers that report no engine id; see the module, and RpcHandoff."""

    def __init__(self) -> None:
        super().__init__("mooncake", b"", Kv.UNKNOWN)

    def plan(self, generation: Generation, prefill: Worker, decode: Worker | None) -> Plan:
        """See RpcHandoff."""
        plan = super().plan(generation, prefill, decode)
        remote = Remote(prefill.bootstrap_host, prefill.bootstrap_port or MOONCAKE_BOOTSTRAP_PORT)
        return plan._replace(params=orjson.dumps([*remote]))

    def handed(self, generation: Generation, plan: Plan, answer: bytes) -> Handed:
        """See RpcHandoff."""
        if not answer or self.harvested(answer):
            return super().handed(generation, plan, answer)
        remote = Remote(*orjson.loads(plan.params))
        return Handed(self.decode_leg(generation, plan.names[0], plan.rank, remote), Kv.UNKNOWN)

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. Its connector cannot be told."""
        return ()
