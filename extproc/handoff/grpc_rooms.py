"""SGLang and TokenSpeed over gRPC: both legs at once, meeting in a room of the prefill worker's bootstrap server.

What: prefill and decode get the same request and the same place to meet, and the decode pulls nothing until the prefill
pushed its KV cache; as over HTTP (``handoff/sglang.py``). When to use: workers of these engines that were started for
one role.
Fields: SGLang's ``disaggregated_params``, TokenSpeed's ``kv_bootstrap_info``: ``bootstrap_host`` and ``bootstrap_port``
of the prefill worker (8998 unless registered), ``bootstrap_room``. A room has 31 bits with SGLang, 63 with TokenSpeed,
so among those that are live none is given twice. With data parallelism it is congruent to the prefill's rank modulo
their number: SGLang's server reads no rank from a request, and the engine's default (``follow_bootstrap_room``) sends
both legs to that rank's rooms. The rank stands in the request all the same, for servers that read it.
Failure: a lone leg waits for the engine's own timeout (300 s), so the other one is ended: its call, and its name by
``Abort``. An SGLang decode may be ended at any time (0.5.23): pages that a prefill may still write to are kept until it
says that it has stopped, or 30 s (``disaggregation/decode.py``, deferred KV release; Mooncake, NIXL, MoRI). Of
TokenSpeed's releases nobody has said so, though its source reads as if it waits itself (docs/grpc-requests.md): a
decode that may be receiving is left running until it shows a token, or for 30 s.
Source: smg-grpc-proto 0.4.28; smg-grpc-servicer 0.14.1; sglang 0.5.23 srt/managers/scheduler.py (``abort_request``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.engines.engine import Engine, Room
from extproc.engines.frames import frame
from extproc.engines.sglang import SglangEngine
from extproc.engines.tokenspeed import TokenspeedEngine
from extproc.generation.asked import Generation
from extproc.handoff.grpc_answers import broke_off, leg_name
from extproc.handoff.handoff import Alone, Handed, Plan
from extproc.handoff.sglang import HOLD_SECONDS, Rooms
from extproc.workers.worker import Role, Worker

BOOTSTRAP_PORT: Final = 8998  # the default of --disaggregation-bootstrap-port
SGLANG_BITS: Final = 31
TOKENSPEED_BITS: Final = 63
RECEIVING_SECONDS: Final = 30.0


class RoomHandoff:
    """See the module, and RpcHandoff.

    Args:
        engine: whose.
        bits: of a room.
        receiving: see RpcHandoff.
    """

    in_turn = False
    lets_finish = False
    pushes = False
    blame = HOLD_SECONDS  # as over HTTP
    waivable = False

    def __init__(self, engine: Engine, bits: int, receiving: float) -> None:
        self.engine = engine
        self.name = engine.runtime
        self.receiving = receiving
        self._rooms = Rooms(bits)

    @property
    def live(self) -> int:
        """See RpcHandoff."""
        return len(self._rooms)

    def alone(self, generation: Generation, prefill: Worker) -> Alone | None:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. A worker that was started for one role serves nothing without the other."""
        return None

    def single(self, generation: Generation, worker: Worker) -> Plan:
        """See RpcHandoff."""
        name = leg_name(generation)
        message = self.engine.request(generation, None, Role.REGULAR, name, worker.dp_rank)
        return Plan(b"", frame(message), names=(name,), rank=worker.dp_rank)

    def plan(self, generation: Generation, prefill: Worker, decode: Worker | None) -> Plan:
        """See RpcHandoff."""
        rooms = self._rooms.mint(1, prefill.dp_rank or 0, prefill.dp_size)
        try:
            name = leg_name(generation)
            meeting = Room(prefill.bootstrap_host, prefill.bootstrap_port or BOOTSTRAP_PORT, rooms[0])
            rank = None if decode is None else decode.dp_rank
            return Plan(
                frame(self.engine.request(generation, meeting, Role.PREFILL, name, prefill.dp_rank)),
                frame(self.engine.request(generation, meeting, Role.DECODE, name, rank)),
                rooms,
                (name,),
            )
        except BaseException:
            self._rooms.release(rooms)
            raise

    def handed(self, generation: Generation, plan: Plan, answer: bytes) -> Handed:
        """See RpcHandoff. The legs do not run in turn."""
        raise NotImplementedError

    def hold(self, generation: Generation) -> float:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. The servers' heads come with the first token."""
        return 0.0

    def release(self, plan: Plan) -> None:
        """See RpcHandoff."""
        self._rooms.release(plan.rooms)

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See RpcHandoff."""
        return [(path, frame(message)) for path, message in self.engine.abort(plan.names)]

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. What a decode does not fetch, the abort frees."""
        return ()

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - RpcHandoff's signature
        """See RpcHandoff. The abort is enough."""
        return ()

    def failed(self, answer: bytes) -> bool:
        """See RpcHandoff."""
        return broke_off(self.engine, answer)


def sglang_rooms() -> RoomHandoff:
    """SGLang's."""
    return RoomHandoff(SglangEngine(), SGLANG_BITS, 0.0)


def tokenspeed_rooms() -> RoomHandoff:
    """TokenSpeed's."""
    return RoomHandoff(TokenspeedEngine(), TOKENSPEED_BITS, RECEIVING_SECONDS)
