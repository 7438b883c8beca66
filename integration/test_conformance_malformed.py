"""What both servers owe a peer that does not speak gRPC well, or at all: a status, and never a crash.

grpcio's client cannot be made to misbehave, so a bare HTTP/2 client and bare sockets do it. The engine below grpcio's
server is not ours: it drops a stream's bytes from the first malformed prefix on without a word and goes on as if the
stream had ended there, serves any content type, and ignores some broken frames. The expectations say where.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import ngh2
import pytest
from conformance_rig import PATIENCE, SERVERS, Calls, RawClient, Server, raw_client

from extproc.transport.grpc_framing import Status, frame
from extproc.transport.grpcio_server import GrpcioProcessServer
from extproc.transport.methods import PROCESS_PATH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_SETTINGS = bytes.fromhex("000000040000000000")


@pytest.fixture(params=SERVERS, ids=lambda each: each.__name__)
def server_type(request: pytest.FixtureRequest) -> type[Server]:
    return request.param


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
async def server(server_type: type[Server], calls: Calls, path: str) -> AsyncIterator[Server]:
    """A server that must still serve when the test is over, and must have closed every call once."""
    server = server_type()
    await server.start(f"unix:{path}", calls.process)
    yield server
    async with raw_client(path) as client:
        stream = client.open()
        client.data(stream, frame(b"still there?"), end_stream=True)
        answer = await client.ended(stream)
        assert (answer.status, answer.data, answer.grpc_status) == (200, frame(b"still there?"), 0)
    await server.drain(0)
    assert [handler.ends for handler in calls.handlers] == [1] * len(calls.handlers)
    assert server.open_calls == 0


@pytest.fixture
async def client(server: Server, path: str) -> AsyncIterator[RawClient]:
    assert server.address
    async with raw_client(path) as client:
        yield client


# framing that is legal and unusual


async def test_a_message_in_single_bytes(client: RawClient) -> None:
    stream = client.open()
    for byte in frame(b"hello") + frame(b"") + frame(b"world"):
        client.data(stream, bytes((byte,)))
    client.data(stream, b"", end_stream=True)
    answer = await client.ended(stream)
    assert (answer.data, answer.grpc_status) == (frame(b"hello") + frame(b"") + frame(b"world"), 0)


async def test_frames_cut_everywhere(client: RawClient) -> None:
    """Three messages in two DATA frames, cut at every place in turn, each cut on a stream of its own."""
    whole = frame(b"a" * 3) + frame(b"") + frame(b"b" * 20)
    streams = []
    for cut in range(1, len(whole)):
        streams.append(client.open())
        client.data(streams[-1], whole[:cut])
        client.data(streams[-1], whole[cut:], end_stream=True)
    for stream in streams:
        answer = await client.ended(stream)
        assert (answer.data, answer.grpc_status) == (whole, 0)


async def test_end_of_stream_with_the_headers(client: RawClient, calls: Calls) -> None:
    answer = await client.ended(client.open(end_stream=True))
    assert (answer.status, answer.data, answer.grpc_status) == (200, b"", 0)
    await calls.all_ended(1)


async def test_content_type_with_a_suffix(client: RawClient) -> None:
    stream = client.open(extra=((b"content-type", b"application/grpc+proto"),))
    client.data(stream, frame(b"hello"), end_stream=True)
    assert (await client.ended(stream)).grpc_status == 0


async def test_request_trailers_end_the_call(client: RawClient, calls: Calls) -> None:
    stream = client.open()
    client.data(stream, frame(b"hello"))
    await calls.until(lambda: bool(calls.handlers) and calls.handlers[0].messages == 1)
    client.h2.send_trailers(stream, ((b"x-trailer", b"1"),))
    client.flush()
    answer = await client.ended(stream)
    assert (answer.data, answer.grpc_status) == (frame(b"hello"), 0)
    await calls.all_ended(1)


# framing that is not


@pytest.mark.parametrize(
    ("data", "codes"),
    [
        pytest.param(b"\1\0\0\0\3abc", {Status.INTERNAL, Status.UNIMPLEMENTED}, id="compressed without an encoding"),
        pytest.param(b"\7\0\0\0\3abc", {Status.INTERNAL}, id="unknown flag"),
        pytest.param(b"\0\xff\xff\xff\xff", {Status.RESOURCE_EXHAUSTED}, id="4 GiB"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", {Status.INTERNAL}, id="text"),
        pytest.param(frame(b"fine") + b"\2\0\0\0\0", {Status.INTERNAL}, id="second of two"),
    ],
)
async def test_a_bad_prefix_is_answered_by_a_status(
    client: RawClient, calls: Calls, server_type: type[Server], data: bytes, codes: set[Status]
) -> None:
    stream = client.open()
    client.data(stream, data, end_stream=server_type is GrpcioProcessServer)
    answer = await client.ended(stream)
    assert answer.status == 200
    assert answer.grpc_status in (codes | {Status.OK} if server_type is GrpcioProcessServer else codes)
    await calls.all_ended(1)


async def test_a_compressed_message_is_refused(client: RawClient) -> None:
    stream = client.open(extra=((b"grpc-encoding", b"gzip"),))
    client.data(stream, b"\1\0\0\0\3abc")
    assert (await client.ended(stream)).grpc_status in {Status.UNIMPLEMENTED, Status.INTERNAL}


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\0", b"\0\0\0\0\5", b"\0\0\0\0\5abc", frame(b"ok") + b"\0\0"])
async def test_a_message_cut_short_by_the_end_is_internal(
    client: RawClient, calls: Calls, server_type: type[Server], data: bytes
) -> None:
    stream = client.open()
    client.data(stream, data, end_stream=True)
    answer = await client.ended(stream)
    assert answer.grpc_status in (
        {Status.OK, Status.INTERNAL} if server_type is GrpcioProcessServer else {Status.INTERNAL}
    )
    await calls.all_ended(1)


async def test_a_bad_message_does_not_harm_the_connections_other_calls(client: RawClient, calls: Calls) -> None:
    good, bad = client.open(), client.open()
    client.data(good, frame(b"hello"))
    client.data(bad, b"\0\xff\xff\xff\xff" + bytes(100))
    assert (await client.ended(bad)).grpc_status == Status.RESOURCE_EXHAUSTED
    client.data(good, frame(b"again"), end_stream=True)
    answer = await client.ended(good)
    assert (answer.data, answer.grpc_status) == (frame(b"hello") + frame(b"again"), 0)
    await calls.all_ended(2)


async def test_a_stream_that_we_end_is_reset_when_its_peer_goes_on(client: RawClient) -> None:
    """Otherwise the peer's half would stay open, and count, for as long as the connection lives."""
    stream = client.open()
    client.data(stream, frame(b"!abort 7 enough"))
    answer = await client.ended(stream)
    await client.until(lambda: answer.reset is not None)
    assert (answer.grpc_status, answer.reset) == (7, ngh2.ErrorCode.NO_ERROR)


# requests that are not gRPC


@pytest.mark.parametrize("content_type", [b"application/json", b"text/plain", b""])
async def test_another_content_type_is_415(
    client: RawClient, calls: Calls, server_type: type[Server], content_type: bytes
) -> None:
    stream = client.open(extra=((b"content-type", content_type),))
    client.data(stream, b"{}", end_stream=True)
    answer = await client.ended(stream)
    if server_type is not GrpcioProcessServer:
        assert answer.status == 415
        assert not calls.handlers


async def test_an_unknown_path_is_unimplemented(client: RawClient) -> None:
    assert (await client.ended(client.open("/x"))).grpc_status == Status.UNIMPLEMENTED


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"CONNECT"])
async def test_another_http_method_is_no_call(client: RawClient, calls: Calls, method: bytes) -> None:
    stream = client.open(extra=((b":method", method),))
    client.data(stream, frame(b"hello"), end_stream=True)
    answer = await client.ended(stream)
    assert answer.status == 405 or answer.grpc_status or answer.reset is not None
    assert not calls.handlers


# resets and flow control


async def test_a_reset_in_the_middle_of_a_message_closes_the_call(client: RawClient, calls: Calls) -> None:
    stream = client.open()
    client.data(stream, frame(b"hello") + b"\0\0\0\1\0abc")
    await calls.until(lambda: bool(calls.handlers) and calls.handlers[0].messages == 1)
    client.h2.reset_stream(stream, ngh2.ErrorCode.CANCEL)
    client.flush()
    await calls.all_ended(1)


async def test_messages_and_the_reset_in_one_read(client: RawClient, calls: Calls) -> None:
    """The handler answers a stream that is gone already."""
    headers = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", PROCESS_PATH.encode()), (b":authority", b"x"))
    stream = client.h2.send_request((*headers, (b"te", b"trailers"), (b"content-type", b"application/grpc")))
    output = client.h2.data_to_send()
    client.h2.send_data(stream, frame(b"hello"))
    output += client.h2.data_to_send()
    client.h2.reset_stream(stream)
    client.transport.write(output + client.h2.data_to_send())
    await calls.until(lambda: len(calls.handlers) == 1 or bool(client.lost.is_set()))
    await calls.all_ended(1)


async def test_a_peer_that_grants_no_window_gets_nothing_and_holds_nobody_up(
    server: Server, path: str, calls: Calls
) -> None:
    assert server.address
    async with raw_client(path, {ngh2.Setting.INITIAL_WINDOW_SIZE: 0}) as client:
        stalled = client.open()
        client.data(stalled, frame(b"!size 100000"))
        await calls.until(lambda: bool(calls.handlers) and calls.handlers[0].messages == 1)
        assert calls.handlers[0].call.queued >= 100_000
        async with raw_client(path) as other:
            stream = other.open()
            other.data(stream, frame(b"hello"), end_stream=True)
            assert (await other.ended(stream)).grpc_status == 0
        client.h2.set_local_window_size(1 << 20, stream_id=stalled)
        client.flush()
        client.data(stalled, frame(b"hello"))
        await client.until(lambda: len(client.answers[stalled].data) == 100_015)
        assert calls.handlers[0].call.queued < 100_000


async def test_a_peer_that_does_not_read_its_socket_is_held_back(client: RawClient, calls: Calls) -> None:
    """The transport's buffer is full long before the peer's windows are: what follows has to count as queued."""
    client.h2.set_local_window_size(1 << 30)
    stream = client.open()
    client.h2.set_local_window_size(1 << 30, stream_id=stream)
    client.data(stream, frame(b"?"))
    await calls.until(lambda: bool(calls.handlers) and calls.handlers[0].messages == 1)
    client.transport.pause_reading()
    client.data(stream, frame(b"!burst 320"))  # 20 MiB
    handler = calls.handlers[0]
    await calls.until(lambda: handler.messages == 2)
    assert handler.call.queued > 10 << 20
    client.transport.resume_reading()
    await calls.until(lambda: handler.drains == 1)
    await client.until(lambda: len(client.answers[stream].data) == 320 * ((1 << 16) + 5))


# no HTTP/2 at all


async def talk(path: str, data: bytes, *, leave: bool = False) -> None:
    """Send ``data`` and read until the server closes; ``leave``: after we have closed our side."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    if leave:
        writer.write_eof()
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP/1"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), id="TLS"),
        pytest.param(_PREFACE[:-4] + b"XX\r\n" + bytes(100), id="almost the preface"),
    ],
)
async def test_what_is_no_preface_closes_the_connection(server: Server, path: str, garbage: bytes) -> None:
    assert server.address
    await talk(path, garbage)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param("000001000100000001ff", id="undefined header index"),
        pytest.param("00000500010000000000000000ff", id="DATA on stream 0"),
        pytest.param("0000050001000000010000000000", id="DATA on an idle stream"),
        pytest.param("000004030000000001000000ff", id="RST_STREAM on an idle stream"),
        pytest.param("00000408000000000000000000", id="WINDOW_UPDATE by nothing"),
        pytest.param("ffffff000100000001", id="frame too large"),
        pytest.param("000005040000000000aabbccddee", id="SETTINGS of odd length"),
        pytest.param("000001090400000001" + "82", id="CONTINUATION of nothing"),
    ],
)
async def test_a_broken_frame_closes_the_connection(server: Server, path: str, frames: str) -> None:
    await talk(path, _PREFACE + _EMPTY_SETTINGS + bytes.fromhex(frames), leave=isinstance(server, GrpcioProcessServer))


async def test_random_bytes_do_no_harm(server: Server, path: str) -> None:
    """After a good start, 200 connections send noise and leave."""
    assert server.address
    noise = random.Random(1)

    def frames() -> bytes:
        data = b""
        for _ in range(noise.randrange(1, 20)):
            kind, flags, stream = noise.randrange(12), noise.randrange(256), noise.choice([0, 1, 2, 3, 5, 1 << 30])
            payload = noise.randbytes(noise.choice([0, 1, 4, 5, 6, 8, 16, 100]))
            data += len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
        return data

    for _ in range(20):
        await asyncio.gather(*(talk(path, _PREFACE + _EMPTY_SETTINGS + frames(), leave=True) for _ in range(10)))
