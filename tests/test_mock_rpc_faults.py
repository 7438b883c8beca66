"""What a mock gRPC worker does wrong when it is told to, and its other methods."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2

from extproc.mock import Fault, Outcome, Point, RpcMock, Rule
from extproc.mock.rpc import model
from tests.rpc_asks import ask, channel, dial, to_vllm

IDS = list(range(20, 90))
WORDS = model.written(IDS).ids
GONE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def mock() -> AsyncIterator[RpcMock]:
    async with RpcMock("vllm") as mock:
        yield mock


def told(**fault: Any) -> Any:
    return (("x-mock-fault", json.dumps(fault)),)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (14, grpc.StatusCode.UNAVAILABLE),
        (1, grpc.StatusCode.CANCELLED),
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (503, grpc.StatusCode.UNAVAILABLE),
        (500, grpc.StatusCode.INTERNAL),
        (418, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_status(mock: RpcMock, status: int, code: grpc.StatusCode) -> None:
    answer = await ask(mock, to_vllm(IDS), told(status=status, body="as told", retry_after="3"))
    assert (answer.code, answer.details, answer.trailers["retry-after"]) == (code, "as told", "3")
    assert mock.legs[0].status == code.value[0]


async def test_a_rule_counts_and_tells_legs_apart(mock: RpcMock) -> None:
    mock.fail(Rule(Fault(status=429), body_contains=b"unlucky", times=1))
    assert (await ask(mock, to_vllm(IDS, "lucky"))).code is grpc.StatusCode.OK
    codes = [(await ask(mock, to_vllm(IDS, "unlucky"))).code for _ in range(2)]
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK]


async def test_a_fault_may_be_another_roles(mock: RpcMock) -> None:
    other, own = told(prefill={"status": 500}), told(regular={"status": 500})
    assert (await ask(mock, to_vllm(IDS), other)).code is grpc.StatusCode.OK
    assert (await ask(mock, to_vllm(IDS), own)).code is grpc.StatusCode.INTERNAL


async def test_one_that_nobody_understands(mock: RpcMock) -> None:
    assert "unknown fields: nonsense" in (await ask(mock, to_vllm(IDS), told(nonsense=1))).details


@pytest.mark.parametrize(
    ("point", "after", "chunks"), [("before_head", 1, 0), ("after_head", 1, 0), ("mid_body", 1, 1), ("mid_body", 3, 3)]
)
async def test_it_hangs(mock: RpcMock, point: str, after: int, chunks: int) -> None:
    async with channel(mock) as connected:
        call = dial(connected, mock, to_vllm(IDS, stream=True), told(hang=point, after_chunks=after))
        for _ in range(chunks):
            await call.read()
        more = asyncio.ensure_future(call.read())
        await asyncio.wait([more], timeout=0.1)
        assert not more.done()
        call.cancel()
        await asyncio.wait([more])
    await mock.idle()
    assert mock.legs[0].outcome is Outcome.FAULT


@pytest.mark.parametrize("point", ["before_head", "after_head", "mid_body"])
async def test_its_connection_breaks_off(mock: RpcMock, point: str) -> None:
    answer = await ask(mock, to_vllm(IDS, stream=True), told(drop=point))
    assert (answer.code, len(answer.chunks)) == (GONE, 1 if point == "mid_body" else 0)
    await mock.idle()
    assert mock.legs[0].outcome is Outcome.FAULT
    assert (await ask(mock, to_vllm(IDS))).code is grpc.StatusCode.OK


async def test_only_the_leg_that_is_told_loses_its_connection(mock: RpcMock) -> None:
    mock.pace = mock.pace.__class__(token=0.02)
    asking = asyncio.ensure_future(ask(mock, to_vllm(IDS, stream=True)))
    await mock.received()
    assert (await ask(mock, to_vllm(IDS, stream=True), told(drop="mid_body"))).code is GONE
    assert (await asking).streamed == WORDS


async def test_it_ends_well_without_its_end(mock: RpcMock) -> None:
    answer = await ask(mock, to_vllm(IDS, stream=True), told(truncate=True, after_chunks=2))
    assert (answer.code, len(answer.chunks), answer.completes) == (grpc.StatusCode.OK, 2, [])


async def test_it_sends_no_message_at_all(mock: RpcMock) -> None:
    answer = await ask(mock, to_vllm(IDS), told(truncate=True, after_chunks=0))
    assert (answer.code, answer.messages) == (grpc.StatusCode.OK, [])


async def test_messages_that_are_none(mock: RpcMock) -> None:
    answer = await ask(mock, to_vllm(IDS), told(garbage=True))
    assert answer.messages == [None]  # what a client makes of what it cannot read


async def test_the_head_comes_before_anything_is_known(mock: RpcMock) -> None:
    async with channel(mock) as connected:
        call = dial(connected, mock, to_vllm(IDS, stream=True), told(early_head=True, delay_first_token=30))
        assert await call.initial_metadata() is not None
        call.cancel()


async def held(mock: RpcMock, fault: Fault) -> asyncio.Future[Any]:
    """A stream that is under way, and stays so until the fault lets it go."""
    mock.fail(fault)
    asking = asyncio.ensure_future(ask(mock, to_vllm(IDS, stream=True)))
    (leg,) = await mock.received()
    for _ in range(10):
        await asyncio.sleep(0)
    assert leg.ended is None
    return asking


async def test_it_goes_on_when_it_is_let_go(mock: RpcMock) -> None:
    go_on = asyncio.Event()
    asking = await held(mock, Fault(hang=Point.MID_BODY, after_chunks=2, until=go_on))
    go_on.set()
    assert (await asking).streamed == WORDS
    mock.behave()
    go_on.clear()
    mock.fail(Fault(status=503, until=go_on))
    asking = asyncio.ensure_future(ask(mock, to_vllm(IDS)))
    await mock.received(2)
    assert not asking.done()
    go_on.set()
    assert (await asking).code is grpc.StatusCode.UNAVAILABLE


async def test_its_connection_breaks_off_when_it_is_let_go(mock: RpcMock) -> None:
    go_on = asyncio.Event()
    asking = await held(mock, Fault(hang=Point.MID_BODY, drop=Point.MID_BODY, until=go_on))
    go_on.set()
    answer = await asking
    assert (answer.code, len(answer.chunks)) == (GONE, 1)


async def test_its_pace(mock: RpcMock) -> None:
    answer = await ask(mock, to_vllm(IDS), told(tokens=4, delay_first_token=0.03))
    assert list(answer.complete.output_ids) == model.written(IDS, tokens=4).ids
    assert mock.legs[0].first_byte - mock.legs[0].arrived >= 0.03


async def test_it_dies(mock: RpcMock) -> None:
    asking = asyncio.ensure_future(ask(mock, to_vllm(IDS), told(hang=Point.BEFORE_HEAD.value)))
    await mock.received()
    mock.crash()
    assert (await asking).code is GONE
    await mock.idle()
    assert mock.legs[0].outcome is Outcome.CRASHED
    assert (await ask(mock, to_vllm(IDS))).code is GONE


async def test_it_stops_in_order() -> None:
    mock = RpcMock("vllm", token_delay=0.01)
    await mock.start()
    asking = asyncio.ensure_future(ask(mock, to_vllm(IDS, stream=True)))
    await mock.received()
    await mock.stop(60)
    assert (await asking).streamed == WORDS


async def test_its_tokenizer_comes_in_pieces(mock: RpcMock) -> None:
    async with channel(mock) as connected:
        method = connected.unary_stream(
            f"/{mock.facts.service}/GetTokenizer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=common_pb2.GetTokenizerChunk.FromString,
        )
        chunks = [chunk async for chunk in method(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == model.files()
    assert mock.count("GetTokenizer") == 1
