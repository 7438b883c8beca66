"""What the tests of real gRPC servers know of them, by asking them straight."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from rpc_servers import RpcServer
from smg_grpc_proto.generated import sglang_scheduler_pb2, vllm_engine_pb2

_SERVICES: dict[str, tuple[str, Any]] = {
    "sglang": ("sglang.grpc.scheduler.SglangScheduler", sglang_scheduler_pb2),
    "vllm": ("vllm.grpc.engine.VllmEngine", vllm_engine_pb2),
}
_TRANSFERS = re.compile(r"Num successful transfers=(\d+)")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class RpcPair:
    """A prefill and a decode server behind a gateway.

    Attributes:
        kind: one of rpc_servers.KINDS.
        engine: ``vllm`` or ``sglang``.
        url: the gateway's.
    """

    kind: str
    engine: str
    prefill: RpcServer
    decode: RpcServer
    url: str


async def in_flight(server: RpcServer, engine: str) -> int:
    """How many requests a server has, in any of its queues."""
    service, pb = _SERVICES[engine]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        if engine == "vllm":  # its figures are refreshed when the engine steps, so it is made to
            step = pb.GenerateRequest(
                request_id=f"step-{next(_numbers)}",
                tokenized=pb.TokenizedInput(input_ids=[5]),
                sampling_params=pb.SamplingParams(max_tokens=1),
            )
            generate = channel.unary_stream(f"/{service}/Generate", request_serializer=_serialized)
            async for _ in generate(step, timeout=10):
                pass
        ask = channel.unary_unary(
            f"/{service}/GetLoads",
            request_serializer=_serialized,
            response_deserializer=pb.GetLoadsResponse.FromString,
        )
        answer = await ask(pb.GetLoadsRequest(include=["all"]), timeout=10)
    waiting = 0
    for load in answer.loads:
        waiting += load.num_running_reqs + load.num_waiting_reqs
        if engine == "sglang":
            queues = load.disaggregation
            waiting += queues.prefill_prealloc_queue_reqs + queues.prefill_inflight_queue_reqs
            waiting += queues.decode_prealloc_queue_reqs + queues.decode_transfer_queue_reqs
    return int(waiting)


async def seconds_until(server: RpcServer, engine: str, *, busy: bool, patience: float = 20) -> float:
    """How long it takes until a server has work, or none."""
    started = time.monotonic()
    while (await in_flight(server, engine) > 0) is not busy:
        assert time.monotonic() - started < patience, f"{server.name} is still {'idle' if busy else 'busy'}"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


def transfers(server: RpcServer) -> int:
    """How many KV caches a vLLM decode says in its log that it has fetched; it says so every ten seconds."""
    return sum(int(count) for count in _TRANSFERS.findall(server.log.read_text(errors="replace")))


def _serialized(message: Any) -> bytes:
    made: bytes = message.SerializeToString()
    return made
