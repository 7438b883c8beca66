"""gRPC workers behind a real Envoy: a client's request becomes a call, its messages an answer of the service's own.

What exchange/ rests on when it carries a decode leg to such a worker through the late filter.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from dataplane_rig import Rig, leg_headers, make_certificates, unreachable
from dataplane_script import Call, Scripted, Stage, change, fields
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from http2_client import Stream
from http_client import Exchange
from played_rpc_worker import METHOD, Asked, RpcWorker, fails, never, says

from extproc.names import CLUSTER, DESTINATION, ERROR_CODE, LATE, LOCAL_REPLY, METADATA_NAMESPACE
from extproc.workers.endpoints import DECODE_GRPC_CLUSTER, PREFILL_GRPC_CLUSTER

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE = 60.0
EVENTS = {"content-type": "text/event-stream"}
PASS_TRAILERS = ep.ProcessingResponse(response_trailers=ep.TrailersResponse())


def frame(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    certificates = tmp_path_factory.mktemp("certificates")
    make_certificates(certificates)
    rig = Rig(tmp_path_factory.mktemp("rig"), ca_file=str(certificates / "ca.pem"))
    rig.certificates = certificates  # type: ignore[attr-defined]
    rig.extproc = Scripted(rig.config.extproc)
    await rig.start()
    yield rig
    await rig.stop()


@pytest_asyncio.fixture(loop_scope="module", params=["http1", "http2"])
async def stage(rig: Rig, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    assert isinstance(rig.extproc, Scripted)
    stage = Stage(rig, rig.extproc, request.param)
    yield stage
    await stage.close()


@pytest_asyncio.fixture(loop_scope="module")
async def worker() -> AsyncIterator[RpcWorker]:
    worker = await RpcWorker().start()
    yield worker
    await worker.stop()


async def release(call: Call, to: str) -> None:
    """Make a client's request a gRPC call."""
    await call.next("request_headers")
    body = await call.next("request_body")
    while not body.end_of_stream:
        body = await call.next("request_body")
    first, second = ep.ProcessingResponse(), ep.ProcessingResponse()
    first.dynamic_metadata.update({METADATA_NAMESPACE: {DESTINATION: to}})
    headers = {":path": METHOD, "content-type": "application/grpc", "te": "trailers", CLUSTER: DECODE_GRPC_CLUSTER}
    change(first.request_headers, headers)
    first.request_headers.response.header_mutation.remove_headers.append("content-length")
    first.request_headers.response.clear_route_cache = True
    second.request_body.response.body_mutation.streamed_response.body = frame(b"question")
    second.request_body.response.body_mutation.streamed_response.end_of_stream = True
    await call.send(first)
    await call.send(second)


async def mark(call: Call, name: str) -> dict[str, str]:
    """Asked about the head of a call's answer, which is returned: have a second call see the answer."""
    head = await call.next("response_headers")
    assert not head.end_of_stream
    response = ep.ProcessingResponse()
    change(response.response_headers, {LATE: name})
    await call.send(response)
    return fields(head)


async def called(stage: Stage, worker: RpcWorker) -> tuple[Exchange | Stream, Call]:
    await stage.rig.know(worker.endpoint)
    asked = await stage.ask()
    call = await stage.service.call()
    await release(call, worker.address)
    return asked, call


def status_of(trailers: Any) -> tuple[str, str]:
    said = {header.key: header.raw_value.decode() for header in trailers.trailers.headers}
    return said["grpc-status"], said.get("grpc-message", "")


async def end(second: Call, rest: bytes = b"") -> None:
    """What is left of the answer, then its trailers without what is gRPC's."""
    if rest:
        await second.body(rest)
    response = ep.ProcessingResponse()
    response.response_trailers.header_mutation.remove_headers.extend(["grpc-status", "grpc-message"])
    await second.send(response)


async def read_to_trailers(second: Call) -> tuple[bytes, Any]:
    """All messages' bytes, and the trailers."""
    body = b""
    async with asyncio.timeout(PATIENCE):
        while True:
            message = await second._messages.get()
            if message.WhichOneof("request") == "response_trailers":
                return body, message.response_trailers
            assert not message.response_body.end_of_stream  # which the trailers say
            body += message.response_body.body


async def test_messages_come_as_they_are_sent_and_so_does_the_answer(stage: Stage, worker: RpcWorker) -> None:
    more = asyncio.Event()

    async def behave(asked: Asked) -> None:
        await asked.say(b"one")
        await more.wait()
        await asked.say(b"two")

    worker.behave = behave
    asked, call = await called(stage, worker)
    arrived = await worker.arrived()
    assert arrived.request == b"question"
    assert "content-length" not in arrived.metadata
    head = await mark(call, "a")
    assert head["content-type"] == "application/grpc"
    second = await stage.second("a")
    assert (await second.next("response_body")).body == frame(b"one")
    await second.head(**EVENTS)
    await second.body(b"data: 1\n\n")
    await asked.until(b"data: 1\n\n")
    assert (asked.reply.status, asked.reply.header("content-type")) == (200, "text/event-stream")
    more.set()
    assert status_of(await call.next("response_trailers")) == ("0", "")  # the first call hears of them, too, and first
    await call.send(PASS_TRAILERS)
    body, trailers = await read_to_trailers(second)
    assert (body, status_of(trailers)) == (frame(b"two"), ("0", ""))
    await end(second, b"data: 2\n\n")  # more may be said after them
    reply = await asked.whole()
    assert reply.events == ["1", "2"]
    await call.gone()
    await second.gone()


async def test_a_short_answer_may_be_there_whole_before_the_second_call(stage: Stage, worker: RpcWorker) -> None:
    """If it comes to Envoy in one piece, that opens the second call only when the first has let the trailers pass."""
    worker.behave = says(b"one", b"two")
    asked, call = await called(stage, worker)
    await mark(call, "a")
    await call.next("response_trailers")
    await call.send(PASS_TRAILERS)
    second = await stage.second("a")
    await second.head(**EVENTS)
    body, _ = await read_to_trailers(second)
    assert body == frame(b"one") + frame(b"two")
    await end(second, b"all of it")
    assert (await asked.whole()).body == b"all of it"
    await call.gone()


async def test_a_whole_answer_has_a_length(stage: Stage, worker: RpcWorker) -> None:
    worker.behave = says(b"one")
    asked, call = await called(stage, worker)
    await mark(call, "a")
    await call.next("response_trailers")
    await call.send(PASS_TRAILERS)
    second = await stage.second("a")
    await read_to_trailers(second)
    await second.head(**{"content-length": "3", "content-type": "application/json"})
    await end(second, b"{1}")
    reply = await asked.whole()
    assert (reply.status, reply.header("content-length"), reply.body) == (200, "3", b"{1}")


@pytest.mark.parametrize("status", [429, 200])
async def test_an_error_after_a_message_still_gets_a_status(stage: Stage, worker: RpcWorker, status: int) -> None:
    """As long as the second call has said nothing: the head is its to give."""
    worker.behave = fails(grpc.StatusCode.INTERNAL, "broken: 100% of it", b"one")
    asked, call = await called(stage, worker)
    await mark(call, "a")
    assert status_of(await call.next("response_trailers")) == ("13", "broken: 100%25 of it")
    await call.send(PASS_TRAILERS)
    second = await stage.second("a")
    await read_to_trailers(second)
    await second.head(status, **{"content-type": "application/json"})
    await end(second, b"{}")
    assert ((await asked.whole()).status, asked.reply.body) == (status, b"{}")


async def test_a_head_that_is_all_there_is(stage: Stage, worker: RpcWorker) -> None:
    """An error before the first message: it can be another answer at once, and one of a second call's."""
    worker.behave = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
    for late in (False, True):
        asked, call = await called(stage, worker)
        head = await call.next("response_headers")
        assert head.end_of_stream
        assert (fields(head)["grpc-status"], fields(head)["grpc-message"]) == ("8", "busy")
        response = ep.ProcessingResponse()
        change(response.response_headers, {LATE: "a"} if late else {":status": "429", "content-type": "x/y"})
        response.response_headers.response.header_mutation.remove_headers.extend(["grpc-status", "grpc-message"])
        response.response_headers.response.status = ep.CommonResponse.CONTINUE_AND_REPLACE
        response.response_headers.response.body_mutation.body = b"too much"
        await call.send(response)
        if late:
            second = await stage.second("a")
            await second.head(200, **EVENTS)
            await second.body(b"data: 1\n\n", end=True)
        reply = await asked.whole()
        assert (reply.status, reply.body) == ((200, b"data: 1\n\n") if late else (429, b"too much"))
        assert reply.header("grpc-status") is None
        await call.gone()


async def test_the_answer_may_end_before_the_call_does(stage: Stage, worker: RpcWorker) -> None:
    """The client has all of it at once; Envoy cancels the call."""

    async def behave(asked: Asked) -> None:
        await asked.say(b"one")
        await never(asked)

    worker.behave = behave
    asked, call = await called(stage, worker)
    arrived = await worker.arrived()
    await mark(call, "a")
    second = await stage.second("a")
    await second.next("response_body")
    await second.head(**EVENTS)
    await second.body(b"data: 1\n\n", end=True)
    assert (await asked.whole()).events == ["1"]
    async with asyncio.timeout(PATIENCE):
        await arrived.ended.wait()
    assert arrived.cancelled
    await call.gone()
    await second.gone()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_cancels_the_call(stage: Stage, worker: RpcWorker, begun: bool) -> None:  # noqa: FBT001
    async def behave(asked: Asked) -> None:
        if begun:
            await asked.say(b"one")
        await never(asked)

    worker.behave = behave
    asked, call = await called(stage, worker)
    arrived = await worker.arrived()
    if begun:
        await mark(call, "a")
        second = await stage.second("a")
        await second.next("response_body")
        await second.head(**EVENTS)
        await second.body(b"data: 1\n\n")
        await asked.until(b"data: 1\n\n")
    asked.reset()
    async with asyncio.timeout(PATIENCE):
        await arrived.ended.wait()
    assert arrived.cancelled
    await call.gone()
    if begun:
        await second.gone()


async def test_a_client_that_reads_slowly_makes_the_worker_wait(stage: Stage, worker: RpcWorker) -> None:
    """Envoy reads no more of the call: so the worker's writes block, and nobody keeps what the client does not read."""

    async def flood(asked: Asked) -> None:
        while True:
            await asked.say(b"x" * 4096)

    worker.behave = flood
    asked, call = await called(stage, worker)
    arrived = await worker.arrived()
    await mark(call, "a")
    second = await stage.second("a")
    await second.head(**EVENTS)
    transport = stage._http2._transport if stage._http2 is not None else asked._writer.transport  # type: ignore[union-attr]
    transport.pause_reading()
    said = 0

    async def pump() -> None:
        nonlocal said
        while True:
            chunk = (await second.next("response_body")).body
            await second.body(chunk)
            said += len(chunk)

    pumping = asyncio.create_task(pump())
    await _still(lambda: arrived.written)
    assert said < 32 << 20  # most of which the kernel holds; this one has large socket buffers
    before = arrived.written
    transport.resume_reading()
    async with asyncio.timeout(PATIENCE):
        while arrived.written < before + 100:
            await (asked.progress() if isinstance(asked, Stream) else asked.piece())
    pumping.cancel()
    asked.reset()
    await second.gone()
    await call.gone()


async def _still(count: Any) -> None:
    """Wait until a count has not changed for a while."""
    async with asyncio.timeout(PATIENCE):
        last, same = -1, 0
        while same < 5:
            await asyncio.sleep(0.1)
            same = same + 1 if count() == last else 0
            last = count()


async def test_what_envoy_says_itself_is_what_an_http_client_understands(stage: Stage) -> None:
    with unreachable(refuses=True) as gone:
        await stage.rig.know(gone.endpoint.__class__(gone.endpoint.ip, gone.endpoint.port, "x", grpc=True))
        asked = await stage.ask()
        call = await stage.service.call()
        await release(call, gone.address)
        head = fields(await call.next("response_headers"))
        assert (head[":status"], head[ERROR_CODE]) == ("503", "decode_unreachable")
        await call.send(ep.ProcessingResponse(response_headers=ep.HeadersResponse()))
        assert (await asked.whole()).code == "decode_unreachable"
        await call.gone()


async def test_the_next_worker_of_the_list_gets_the_same_message(stage: Stage, worker: RpcWorker) -> None:
    worker.behave = says(b"one")
    with unreachable(refuses=True) as gone:
        dead = gone.endpoint.__class__(gone.endpoint.ip, gone.endpoint.port, "x", grpc=True)
        await stage.rig.know(dead, worker.endpoint)
        asked = await stage.ask()
        call = await stage.service.call()
        await release(call, f"{gone.address},{worker.address}")
        assert (await worker.arrived()).request == b"question"
        await mark(call, "a")
        await call.next("response_trailers")
        await call.send(PASS_TRAILERS)
        second = await stage.second("a")
        await read_to_trailers(second)
        await second.head()
        await end(second, b"done")
        assert (await asked.whole()).body == b"done"


# Legs of the service


async def leg(rig: Rig, to: str, cluster: str = PREFILL_GRPC_CLUSTER) -> Any:
    connection = await rig.egress()
    headers = leg_headers(to, b"", cluster) | {":path": METHOD, "content-type": "application/grpc", "te": "trailers"}
    headers.pop("content-length")
    stream = connection.send(headers, frame(b"question"))
    async with asyncio.timeout(PATIENCE):
        return await connection.streams[stream].done


async def test_a_leg_is_a_call(rig: Rig, worker: RpcWorker) -> None:
    worker.behave = says(b"one", b"two")
    await rig.know(worker.endpoint)
    reply = await leg(rig, worker.address)
    assert (reply.status, reply.body) == (200, frame(b"one") + frame(b"two"))
    assert LOCAL_REPLY not in reply.headers
    worker.behave = fails(grpc.StatusCode.INVALID_ARGUMENT, "no")
    reply = await leg(rig, worker.address)
    assert (reply.status, reply.headers["grpc-status"], reply.headers["grpc-message"]) == (200, "3", "no")


async def test_envoys_own_answer_to_a_leg_is_a_grpc_error_with_its_flags(rig: Rig) -> None:
    with unreachable(refuses=True) as gone:
        await rig.know(gone.endpoint.__class__(gone.endpoint.ip, gone.endpoint.port, "x", grpc=True))
        reply = await leg(rig, gone.address)
    assert (reply.status, reply.headers["grpc-status"], reply.headers[LOCAL_REPLY]) == (200, "14", "UF")


async def test_a_worker_over_tls(rig: Rig) -> None:
    worker = await RpcWorker(says(b"one"), pem=rig.certificates).start()  # type: ignore[attr-defined]
    await rig.know(worker.endpoint)
    reply = await leg(rig, worker.address, DECODE_GRPC_CLUSTER)
    assert (reply.status, reply.body) == (200, frame(b"one"))
    await worker.stop()
