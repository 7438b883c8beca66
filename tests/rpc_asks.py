"""What is asked of mock gRPC workers, and what they answer."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2

from extproc.mock import RpcMock

ASK = {"do_remote_decode": True, "do_remote_prefill": False}


class Answer(NamedTuple):
    """Messages, in order, and the status that they end with."""

    messages: list[Any]
    code: grpc.StatusCode
    details: str
    trailers: dict[str, str]

    @property
    def chunks(self) -> list[Any]:
        return [message.chunk for message in self.messages if message.HasField("chunk")]

    @property
    def completes(self) -> list[Any]:
        return [message.complete for message in self.messages if message.HasField("complete")]

    @property
    def complete(self) -> Any:
        assert self.code is grpc.StatusCode.OK, self.details
        (found,) = self.completes
        return found

    @property
    def streamed(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


def channel(mock: RpcMock) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"{mock.host}:{mock.port}", options=[("grpc.use_local_subchannel_pool", 1)])


def dial(connected: grpc.aio.Channel, mock: RpcMock, request: Any, metadata: Any = (), timeout: float = 60) -> Any:
    """The call of a ``Generate``."""
    method = connected.unary_stream(
        f"/{mock.facts.service}/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=mock.facts.messages().GenerateResponse.FromString,
    )
    return method(request, metadata=metadata, timeout=timeout)


async def ask(mock: RpcMock, request: Any, metadata: Any = (), patience: float = 60) -> Answer:
    """Ask for a whole answer."""
    messages: list[Any] = []
    async with channel(mock) as connected:
        call = dial(connected, mock, request, metadata, patience)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                messages.append(message)  # noqa: PERF401 - those before an error count
        trailers = {str(name): str(value) for name, value in await call.trailing_metadata()}
        return Answer(messages, await call.code(), await call.details() or "", trailers)


async def abort(mock: RpcMock, *names: str) -> Any:
    """End requests by their names."""
    kind = mock.facts.messages().AbortRequest
    request = kind(request_ids=names) if mock.facts.engine == "vllm" else kind(request_id=names[0], reason="test")
    async with channel(mock) as connected:
        method = connected.unary_unary(
            f"/{mock.facts.service}/Abort",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=mock.facts.messages().AbortResponse.FromString,
        )
        return await method(request, timeout=60)


def to_vllm(ids: Any, name: str = "a", *, stream: bool = False, params: Any = None, **sampling: Any) -> Any:
    """A ``GenerateRequest``; ``params`` are ``kv_transfer_params``."""
    pb = vllm_engine_pb2
    request = pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        stream=stream,
        sampling_params=pb.SamplingParams(**{"temperature": 0, **sampling}),
    )
    if params is not None:
        request.kv_transfer_params_json = params if isinstance(params, str) else json.dumps(params)
    return request


def to_rooms(
    prefill: RpcMock,
    ids: Any,
    name: str = "a",
    *,
    room: int | None = 5,
    stream: bool = False,
    top: int | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    start: int = -1,
    rank: int | None = None,
    **sampling: Any,
) -> Any:
    """A ``GenerateRequest`` whose leg meets the other one at ``prefill``; no ``room``: nowhere."""
    pb = prefill.facts.messages()
    request = pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        stream=stream,
        sampling_params=pb.SamplingParams(**{"n": 1, **sampling}),
        return_logprob=top is not None,
        top_logprobs_num=top or 0,
        logprob_start_len=start,
        data_parallel_rank=rank,
    )
    if room is not None:
        sglang = prefill.facts.engine == "sglang"
        place = request.disaggregated_params if sglang else request.kv_bootstrap_info
        place.bootstrap_host = host
        place.bootstrap_port = prefill.bootstrap_port if port is None else port
        place.bootstrap_room = room
    return request
