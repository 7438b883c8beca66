"""The benchmark's gRPC engines: what they answer, what they refuse, and what an answer made of it must have."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from itertools import count

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2, vllm_engine_pb2

from bench.engine import CHUNKS, Kind
from bench.rpc import Check, Meeting, RpcEngine
from extproc.mock.rpc.model import END, VOCABULARY, decoded

ASKED = json.dumps({"do_remote_decode": True, "do_remote_prefill": False})


@asynccontextmanager
async def pair(kind):
    meeting, numbers = Meeting(), count(1)
    engines = [RpcEngine(kind, role, 0.0, meeting, numbers) for role in ("prefill", "decode")]
    yield engines, [await engine.start() for engine in engines]
    for engine in engines:
        await engine.stop()


async def ask(port, request):
    """The answers to one ``Generate``, or its status."""
    is_vllm = isinstance(request, vllm_engine_pb2.GenerateRequest)
    messages = vllm_engine_pb2 if is_vllm else sglang_scheduler_pb2
    service = "vllm.grpc.engine.VllmEngine" if is_vllm else "sglang.grpc.scheduler.SglangScheduler"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(f"/{service}/Generate", response_deserializer=messages.GenerateResponse.FromString)
        try:
            return [answer async for answer in call(request.SerializeToString())]
        except grpc.aio.AioRpcError as error:
            return error.code()


def sglang(room):
    request = sglang_scheduler_pb2.GenerateRequest(request_id="r", stream=True)
    request.disaggregated_params.bootstrap_room = room
    return request


def vllm(params, *, most=256, stream=False):
    request = vllm_engine_pb2.GenerateRequest(request_id="r", kv_transfer_params_json=params, stream=stream)
    request.sampling_params.max_tokens = most
    return request


async def test_legs_meet_in_a_room_and_the_decode_streams_a_token_a_message():
    async with pair(Kind.SGLANG_GRPC) as ((prefill, decode), ports):
        waiting = asyncio.ensure_future(ask(ports[1], sglang(7)))
        first = await ask(ports[0], sglang(7))
        answers = await waiting
        assert len(first[0].chunk.token_ids) == 1
        ids = [token for answer in answers[:-1] for token in answer.chunk.token_ids]
        assert (len(ids), ids[-1]) == (CHUNKS, END)
        assert answers[-1].complete.completion_tokens == CHUNKS
        assert prefill.counts.handoffs == decode.counts.handoffs == 1
        assert await ask(ports[1], sglang_scheduler_pb2.GenerateRequest()) is grpc.StatusCode.INTERNAL


async def test_a_decode_takes_what_a_prefill_answered_once_and_nothing_else():
    async with pair(Kind.VLLM_GRPC) as ((prefill, decode), ports):
        assert await ask(ports[0], vllm(ASKED)) is grpc.StatusCode.INTERNAL  # more than one token
        (answer,) = await ask(ports[0], vllm(ASKED, most=1))
        given = answer.complete.kv_transfer_params_json
        assert await ask(ports[1], vllm(json.dumps(json.loads(given) | {"tp_size": 2}))) is grpc.StatusCode.INTERNAL
        (whole,) = await ask(ports[1], vllm(given))
        assert whole.complete.output_ids[-1] == END
        assert await ask(ports[1], vllm(given)) is grpc.StatusCode.INTERNAL
        assert (prefill.counts.handoffs, decode.counts.handoffs) == (1, 1)


@pytest.mark.parametrize(("text", "tokens", "right"), [("", 3, True), ("x", 3, False), ("", 2, False)])
def test_an_answer_is_checked_by_its_text_and_its_count_of_tokens(text, tokens, right):
    ids = range(VOCABULARY - CHUNKS + 1, VOCABULARY - CHUNKS + 3)
    body = {
        "choices": [{"message": {"content": decoded(ids) + text}}],
        "usage": {"completion_tokens": tokens},
    }
    assert (Check(streamed=False)(json.dumps(body).encode()) is None) == right


def test_a_stream_without_its_end_is_no_answer():
    assert Check(streamed=True)(b'data: {"choices":[]}\n\n') is not None
