"""What all handoffs between vLLM servers over gRPC have in common, and the two that need nothing else.

What: the prefill leg is the request as one of a single token; the decode leg is the request, and is told in
``kv_transfer_params_json`` where the prompt's KV cache is, by what the prefill's answer says, byte for byte. Both legs
have the same name, which NIXL of vLLM before 0.13 wants. When to use: NIXL where the connector is NixlConnector; with
any other that is not Mooncake's, nothing is asked for and what comes back is handed on (``handoff/passthrough.py``).
Fields: see ``handoff/nixl.py``.
Failure: a decode computes the prompt itself where it is not told enough. A prefill's blocks that no decode fetches are
freed by a decode worker that refuses a request which bears the parameters, before it is scheduled (``max_tokens`` 0):
its server tells the connector (``_notify_kv_transfer_rejected``). A vLLM decode may be ended at any time: of one that
waits for a cache the scheduler keeps the blocks until its worker has received them (``finish_requests``).
Source: smg-grpc-servicer 0.14.1, vllm/servicer.py, vllm/kv_transfer.py; vllm 0.32, v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from extproc.engines.engine import Meeting, Params
from extproc.engines.frames import frame
from extproc.engines.vllm import VllmEngine
from extproc.errors import GatewayError
from extproc.generation.asked import Generation
from extproc.handoff import vllm
from extproc.handoff.grpc_answers import broke_off, ended, leg_name
from extproc.handoff.handoff import Alone, Handed, Kv, Plan
from extproc.handoff.nixl import ASK
from extproc.workers.worker import Role, Worker

ANY_TOKEN: Final = 0  # every vocabulary has it
_SCORES: Final = Alone(Role.PREFILL, Kv.NONE)


class VllmRpcHandoff:
    """The part of RpcHandoff that does not depend on the connector."""

    engine = VllmEngine()
    live = 0  # there are no rooms
    lets_finish = False
    pushes = False
    blame = 0.0
    waivable = True
    receiving = 0.0

    def alone(self, generation: Generation, prefill: Worker) -> Alone | None:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. The answer ends with the prefill where at most one token is asked for."""
        return _SCORES if generation.sampling.max_tokens in vllm.SCORING else None

    def single(self, generation: Generation, worker: Worker) -> Plan:
        """See RpcHandoff."""
        name = leg_name(generation)
        message = self.engine.request(generation, None, Role.REGULAR, name, worker.dp_rank)
        return Plan(b"", frame(message), names=(name,), rank=worker.dp_rank)

    def hold(self, generation: Generation) -> float:
        """See RpcHandoff. A server may begin to answer before it has anything to say."""
        return vllm.HOLD_SECONDS if generation.stream else 0.0

    def release(self, plan: Plan) -> None:
        """See RpcHandoff. There is nothing to give back."""

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See RpcHandoff."""
        return [(path, frame(message)) for path, message in self.engine.abort(plan.names)]

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:
        """See RpcHandoff."""
        return [order(params, max_tokens=0)] if params else []

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. No decode waits for a prefill that has not answered."""
        return ()

    def failed(self, answer: bytes) -> bool:
        """See RpcHandoff."""
        return broke_off(self.engine, answer)

    def prefill_leg(self, generation: Generation, prefill: Worker, name: str, ask: bytes) -> bytes:
        """The prefill leg; ``ask`` is its ``kv_transfer_params``, empty for none."""
        meeting = Params(ask) if ask else None
        return frame(self.engine.request(generation, meeting, Role.PREFILL, name, prefill.dp_rank))

    def decode_leg(self, generation: Generation, name: str, rank: int | None, meeting: Meeting | None) -> bytes:
        """The decode leg behind a prefill."""
        return frame(self.engine.request(generation, meeting, Role.DECODE, name, rank))

    def unaided(self, generation: Generation, plan: Plan) -> Handed:
        """The decode leg without a prefill: it computes all that is asked for."""
        message = self.engine.request(generation, None, Role.REGULAR, plan.names[0], plan.rank)
        return Handed(frame(message), Kv.RECOMPUTED)


class HarvestingHandoff(VllmRpcHandoff):
    """See the module, and RpcHandoff.

    Args:
        name: see RpcHandoff.
        ask: what the prefill leg's ``kv_transfer_params`` are; empty for none.
        without: what becomes of the cache where the prefill's answer has no parameters.
    """

    in_turn = True

    def __init__(self, name: str, ask: bytes, without: Kv) -> None:
        self.name = name
        self._ask = ask
        self._without = without

    def plan(self, generation: Generation, prefill: Worker, decode: Worker | None) -> Plan:
        """See RpcHandoff."""
        name = leg_name(generation)
        leg = self.prefill_leg(generation, prefill, name, self._ask)
        return Plan(leg, b"", names=(name,), rank=None if decode is None else decode.dp_rank)

    def handed(self, generation: Generation, plan: Plan, answer: bytes) -> Handed:
        """See RpcHandoff."""
        if not answer:
            return self.unaided(generation, plan)
        params = self.harvested(answer)
        body = self.decode_leg(generation, plan.names[0], plan.rank, Params(params) if params else None)
        return Handed(body, Kv.HANDED if params else self._without, params)

    def harvested(self, answer: bytes) -> bytes:
        """The parameters in a prefill's answer; empty where there are none that a decode survives."""
        complete = ended(self.engine, answer)
        params = b"" if complete is None else complete.kv_params
        try:
            return params if params and vllm.is_whole(params, needed=bool(self._ask)) else b""
        except GatewayError:
            return b""


def nixl() -> HarvestingHandoff:
    """NIXL's: without parameters the decode computes the prompt itself."""
    return HarvestingHandoff("nixl", ASK, Kv.RECOMPUTED)


def passthrough() -> HarvestingHandoff:
    """Other connectors': without parameters the cache is where they share it, as far as anybody can tell."""
    return HarvestingHandoff("passthrough", b"", Kv.UNKNOWN)


def order(params: bytes, *, max_tokens: int) -> tuple[bytes, bytes]:
    """Path and body of a call of our own with these ``kv_transfer_params``, about a prompt of one token."""
    message = pb.GenerateRequest(
        request_id=f"order-{random.getrandbits(64):016x}",
        tokenized=pb.TokenizedInput(input_ids=[ANY_TOKEN]),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        kv_transfer_params_json=params.decode(),
    )
    return VllmEngine.generate_path, frame(message.SerializeToString())
