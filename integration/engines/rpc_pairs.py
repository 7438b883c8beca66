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
_FIGURES = re.compile(r"Avg prompt throughput: ([\d.]+) .*Avg generation throughput: ([\d.]+) ")
_IDLE = ("0.0", "0.0")
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


async def said_of_transfers(pair: RpcPair, behind: int | None = None, patience: float = 40) -> tuple[int, int]:
    """How many KV caches were handed over, as a vLLM pair's log says once it has said all of them, and its length.

    NIXL's connector counts where caches are fetched, Mooncake's, which pushes them, where they come from. vLLM writes
    that every ten seconds as long as there is work, and then once more, with figures of 0.

    Args:
        behind: what comes behind so many characters of the log counts, and must come; None: all of it.
        patience: seconds.
    """
    server = pair.decode if pair.kind == "nixl" else pair.prefill
    deadline = time.monotonic() + patience
    while True:
        log = server.log.read_text(errors="replace")
        figures = _FIGURES.findall(log, behind or 0)
        if (figures and figures[-1] == _IDLE) or (behind is None and not figures):
            return sum(int(count) for count in _TRANSFERS.findall(log, behind or 0)), len(log)
        assert time.monotonic() < deadline, f"{server.name} does not say that it is idle"
        await asyncio.sleep(0.2)


def _serialized(message: Any) -> bytes:
    made: bytes = message.SerializeToString()
    return made
