"""What both servers owe any gRPC client, shown by grpcio's."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from conformance_rig import PATIENCE, SERVERS, UNLIMITED, Calls, Server
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.transport.access_logs import AccessLogs
from extproc.transport.health import EXT_PROC
from extproc.transport.methods import HIGH_WATER, LOW_WATER, PROCESS_PATH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Health = health_pb2.HealthCheckResponse


@pytest.fixture(params=SERVERS, ids=lambda each: each.__name__)
def server_type(request: pytest.FixtureRequest) -> type[Server]:
    return request.param


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def server(server_type: type[Server], calls: Calls, tmp_path: Path) -> AsyncIterator[Server]:
    server = server_type()
    await server.start(f"unix:{tmp_path}/s", calls.process)
    yield server
    await server.drain(0)
    assert server.open_calls == 0


@asynccontextmanager
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    options = [*UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(server.address, options) as channel:
        yield channel


def process(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(PROCESS_PATH)()


async def failure(call: Any, message: bytes | None = None) -> tuple[grpc.StatusCode, str]:
    """The status other than OK that ends ``call``, if need be after ``message`` was sent."""
    try:
        async with asyncio.timeout(PATIENCE):
            if message is not None:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    raise AssertionError(f"the call ended with {await call.code()}")


async def test_messages_of_every_size_come_back_in_order(server: Server, calls: Calls) -> None:
    sizes = (0, 1, 5, 16378, 16379, 16380, 16384, 1 << 16, 1 << 20)
    async with channel(server) as connection:
        call = process(connection)
        for size in sizes:
            await call.write(bytes(size))
        await call.done_writing()
        assert [len(message) async for message in call] == list(sizes)
        assert await call.code() is grpc.StatusCode.OK
    await calls.all_ended(1)


async def test_20_mb_in_one_message_and_out_again(server: Server) -> None:
    body = bytes(range(250)) * 80_000
    async with channel(server) as connection:
        call = process(connection)
        await call.write(body)
        assert await call.read() == body


async def test_20_mb_in_many_messages_and_out_again(server: Server, calls: Calls) -> None:
    chunk = bytes(range(256)) * 256
    async with channel(server) as connection:
        call = process(connection)

        async def write() -> None:
            for _ in range(320):
                await call.write(chunk)
            await call.done_writing()

        writing = asyncio.create_task(write())
        assert [message async for message in call] == [chunk] * 320
        await writing
    assert calls.handlers[0].received_bytes == 320 << 16


async def test_many_streams_on_many_connections(server: Server, calls: Calls) -> None:
    async def converse(connection: grpc.aio.Channel, name: bytes) -> None:
        call = process(connection)
        for turn in range(3):
            await call.write(b"%s %d" % (name, turn))
            assert await call.read() == b"%s %d" % (name, turn)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    async def connect(index: int) -> None:
        async with channel(server) as connection:
            await asyncio.gather(*(converse(connection, b"%d/%d" % (index, stream)) for stream in range(40)))

    await asyncio.gather(*(connect(index) for index in range(6)))
    await calls.all_ended(240)
    assert server.open_calls == 0


async def test_half_close_ends_the_call_after_what_was_sent(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"!burst 20")
        await call.done_writing()
        assert len([message async for message in call]) == 20
        assert await call.code() is grpc.StatusCode.OK
        await calls.all_ended(1)


async def test_half_close_without_a_message_is_ok(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    await calls.all_ended(1)


async def test_cancel_closes_the_call_and_not_its_neighbour(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        cancelled, other = process(connection), process(connection)
        for call in (cancelled, other):
            await call.write(b"hello")
            await call.read()
        cancelled.cancel()
        await calls.until(lambda: any(each.ends for each in calls.handlers))
        await other.write(b"still here")
        assert await other.read() == b"still here"
        assert sorted(each.ends for each in calls.handlers) == [0, 1]
    await calls.all_ended(2)


async def test_a_lost_connection_closes_its_calls(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        for _ in range(3):
            call = process(connection)
            await call.write(b"hello")
            await call.read()
    await calls.all_ended(3)


@pytest.mark.parametrize("sent", [0, 2])
async def test_abort_reaches_the_client_with_code_and_detail(server: Server, calls: Calls, sent: int) -> None:
    async with channel(server) as connection:
        call = process(connection)
        for _ in range(sent):
            await call.write(b"hello")
            assert await call.read() == b"hello"
        await call.write("!abort 7 nicht erlaubt: 100 % Ärger".encode())
        assert await failure(call) == (grpc.StatusCode.PERMISSION_DENIED, "nicht erlaubt: 100 % Ärger")
    await calls.all_ended(1)


@pytest.mark.parametrize("where", ["received", "process"])
async def test_a_failing_handler_ends_its_call_only(
    server: Server, calls: Calls, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with channel(server) as connection:
        neighbour = process(connection)
        await neighbour.write(b"hello")
        await neighbour.read()
        calls.fail = where == "process"
        call = process(connection)
        message = b"!fail received" if where == "received" else None
        assert await failure(call, message) == (grpc.StatusCode.INTERNAL, "internal error")
        assert f"RuntimeError: told to fail in {where}" in caplog.text
        await neighbour.write(b"still here")
        assert await neighbour.read() == b"still here"
    await calls.all_ended(1 if where == "process" else 2)


async def test_a_handler_that_fails_in_closed_harms_nobody(
    server: Server, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"!fail closed")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert "RuntimeError: told to fail in closed" in caplog.text
        second = process(connection)
        await second.write(b"hello")
        assert await second.read() == b"hello"
    await calls.all_ended(2)


async def test_nothing_may_be_done_with_a_call_that_is_over(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await calls.all_ended(1)
        over = calls.handlers[0].call
        over.send(b"too late")
        over.pause()
        over.resume()
        over.abort(13, "too late")
        assert over.queued == 0
        assert await call.code() is grpc.StatusCode.OK
    await calls.all_ended(1)


async def test_a_slow_reader_is_seen_and_its_recovery_is_told(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"!burst 160")  # 10 MiB
        await calls.until(lambda: bool(calls.handlers))
        handler = calls.handlers[0]
        await calls.until(lambda: handler.messages == 1)
        assert handler.call.queued > HIGH_WATER
        assert handler.drains == 0
        for _ in range(160):
            assert len(await call.read()) == 1 << 16
        await calls.until(lambda: handler.drains > 0)
        assert handler.call.queued <= LOW_WATER
        assert handler.drains == 1
        await call.write(b"hello")
        assert await call.read() == b"hello"


async def test_a_queue_that_is_filled_again_when_drained_drains_again(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call, other = process(connection), process(connection)
        await call.write(b"!refill 10")
        await other.write(b"!refill 10")
        async with asyncio.timeout(PATIENCE):
            for reader in (call, other):
                for _ in range(400):
                    assert len(await reader.read()) == 1 << 16
        await calls.until(lambda: [each.drains for each in calls.handlers] == [10, 10])


async def test_a_handler_that_fails_in_drained_ends_its_call(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"!fail drained")
        await call.write(b"!burst 160")
        assert (await failure(call))[0] is grpc.StatusCode.INTERNAL
    await calls.all_ended(1)


async def test_pause_holds_the_client_back_and_resume_lets_it_go(server: Server, calls: Calls) -> None:
    total = 400 << 16  # 25 MiB
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"!pause")

        async def write() -> None:
            for _ in range(400):
                await call.write(b"?" * (1 << 16))

        await calls.until(lambda: bool(calls.handlers) and calls.handlers[0].messages == 1)
        writing = asyncio.create_task(write())
        done, _ = await asyncio.wait([writing], timeout=0.3)
        assert not done, "the client could write everything although the call is paused"
        handler = calls.handlers[0]
        assert handler.received_bytes < 8 << 20
        neighbour = process(connection)  # the connection's window is not the call's
        await neighbour.write(b"hello")
        assert await neighbour.read() == b"hello"
        handler.call.resume()
        await calls.until(lambda: handler.received_bytes == total + len(b"!pause"))
        await writing


@pytest.mark.parametrize(
    "path", ["/nope", "/envoy.service.ext_proc.v3.ExternalProcessor/Nope", "/grpc.health.v1.Health/X"]
)
async def test_an_unknown_method_is_unimplemented(server: Server, path: str) -> None:
    async with channel(server) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await connection.unary_unary(path)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_beyond_the_bound_is_resource_exhausted(server_type: type[Server], tmp_path: Path) -> None:
    calls = Calls()
    server = server_type(max_message=100_000)
    await server.start(f"unix:{tmp_path}/bounded", calls.process)
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"?" * 100_000)
        await calls.until(lambda: bool(calls.handlers) and calls.handlers[0].messages == 1)
        await call.write(b"?" * 100_001)
        assert (await failure(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await calls.all_ended(1)
    await server.drain(0)


# access logs


async def test_access_logs_are_received_until_they_are_ended(server_type: type[Server], tmp_path: Path) -> None:
    messages = asyncio.Queue[bytes]()
    logs = AccessLogs(messages.put_nowait)
    server = server_type(others=logs.methods)
    await server.start(f"unix:{tmp_path}/logs", Calls().process)
    path = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
    async with channel(server) as connection, asyncio.timeout(PATIENCE):
        for _ in range(2):  # Envoy opens the next when it has something to say
            stream = connection.stream_unary(path)()
            for message in (b"one", b"two"):
                await stream.write(message)
            assert [await messages.get(), await messages.get()] == [b"one", b"two"]
            logs.end()
            await stream.code()
        stream = connection.stream_unary(path)()
        await stream.write(b"three")
        assert await messages.get() == b"three"
    await server.drain(0)
    logs.end()  # nothing is open any more
    assert server.open_calls == 0


# health


async def test_health_check(server: Server) -> None:
    async with channel(server) as connection:
        stub = health_pb2_grpc.HealthStub(connection)

        async def check(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert [await check(service) for service in ("", "liveness", EXT_PROC)] == [Health.SERVING] * 3
        assert await check("readiness") == Health.NOT_SERVING
        server.set_serving("readiness", serving=True)
        assert await check("readiness") == Health.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        server.set_serving("nobody", serving=True)
        assert await check("nobody") == Health.SERVING


async def test_health_list(server: Server) -> None:
    async with channel(server) as connection:
        answer = await health_pb2_grpc.HealthStub(connection).List(health_pb2.HealthListRequest())
    assert {service: each.status for service, each in answer.statuses.items()} == {
        "": Health.SERVING,
        "liveness": Health.SERVING,
        "readiness": Health.NOT_SERVING,
        EXT_PROC: Health.SERVING,
    }


async def test_health_watch_tells_every_change_and_nothing_else(server: Server) -> None:
    async with channel(server) as connection:
        watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == Health.NOT_SERVING
        server.set_serving("readiness", serving=False)
        server.set_serving("liveness", serving=False)
        server.set_serving("readiness", serving=True)
        assert (await watch.read()).status == Health.SERVING
        server.set_serving("readiness", serving=False)
        assert (await watch.read()).status == Health.NOT_SERVING
        assert server.open_calls == 1


async def test_health_watch_of_a_service_that_comes_later(server: Server) -> None:
    async with channel(server) as connection:
        watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service="later"))
        assert (await watch.read()).status == Health.SERVICE_UNKNOWN
        server.set_serving("later", serving=True)
        assert (await watch.read()).status == Health.SERVING


# addresses and the server's life


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
async def test_tcp(server_type: type[Server], address: str) -> None:
    calls = Calls()
    server = server_type()
    await server.start(address, calls.process)
    host, _, port = server.address.rpartition(":")
    assert (host, int(port) > 0) == (address.removesuffix(":0"), True)
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"hello")
        assert await call.read() == b"hello"
    second = server_type()
    with pytest.raises(OSError, match=r"(?i)address|bind"):
        await second.start(server.address, calls.process)
    await server.drain(0)


async def test_a_live_socket_file_is_not_taken(server: Server, server_type: type[Server], calls: Calls) -> None:
    with pytest.raises(OSError, match="another server"):
        await server_type().start(server.address, calls.process)
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"hello")
        assert await call.read() == b"hello"


async def test_a_stale_socket_file_is_replaced_and_ours_removed(server_type: type[Server], tmp_path: Path) -> None:
    path = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server, calls = server_type(), Calls()
    await server.start(f"unix:{path}", calls.process)
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"hello")
        assert await call.read() == b"hello"
    await server.drain(0)
    assert not path.exists()


async def test_a_file_that_is_no_socket_is_left_alone(server_type: type[Server], tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="not a socket"):
        await server_type().start(f"unix:{path}", Calls().process)
    assert path.read_text() == "data"


async def test_drain_lets_open_calls_end_and_takes_no_new_ones(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        await watch.read()
        call = process(connection)
        await call.write(b"hello")
        assert await call.read() == b"hello"
        draining = asyncio.create_task(server.drain(PATIENCE))
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE  # so the drain has begun
        await call.write(b"still here")
        assert await call.read() == b"still here"
        late = process(connection)
        assert (await failure(late))[0] is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(draining, PATIENCE)
    await calls.all_ended(1)


async def test_drain_ends_what_outlives_the_grace(server: Server, calls: Calls) -> None:
    async with channel(server) as connection:
        call = process(connection)
        await call.write(b"hello")
        assert await call.read() == b"hello"
        await server.drain(0.05)
        await calls.all_ended(1)
        assert (await failure(call))[0] in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    await server.drain(0)  # again is no harm


async def test_drain_before_start_is_no_harm(server_type: type[Server]) -> None:
    await server_type().drain(1)


async def test_the_next_server_takes_over_the_address(server: Server, server_type: type[Server]) -> None:
    await server.drain(0)
    calls, successor = Calls(), server_type()
    await successor.start(server.address, calls.process)
    await server.drain(0)  # must not remove the successor's socket file
    async with channel(successor) as connection:
        call = process(connection)
        await call.write(b"hello")
        assert await call.read() == b"hello"
    await successor.drain(0)
