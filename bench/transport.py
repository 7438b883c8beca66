"""CPU µs per request of the transport alone: ``python -m bench.transport``.

The pattern is Envoy 1.40's for one small chat request, as recorded: the messages of request headers, of the body and
of its end in a DATA frame each; two answers; the message of response headers; one answer; a reset, which is how Envoy
ends the stream.

``memory`` feeds one connection's protocol object from an in-memory peer and times only our side of it: no sockets, no
loop. ``ngh2`` is the server's side of a request, ``egress`` a leg. ``socket`` runs a server on uvloop in a child
process and reads that process's CPU time while an ngh2 client drives it over a unix socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ngh2
import uvloop

from extproc.transport.egress import EgressClient
from extproc.transport.egress_connection import EgressConnection
from extproc.transport.grpc_framing import frame
from extproc.transport.grpcio_server import GrpcioProcessServer
from extproc.transport.health import HealthStatuses
from extproc.transport.methods import PROCESS_PATH, method_table
from extproc.transport.ngh2_connection import ServerConnection
from extproc.transport.ngh2_server import Ngh2ProcessServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection as Pipe

    from extproc.transport.interface import Call

_REQUEST_MESSAGES = (b"h" * 900, b"b" * 300, b"e" * 6)
_RESPONSE_MESSAGE = b"r" * 500
_ANSWERS = (b"1" * 200, b"2" * 350)
_LAST_ANSWER = b"3" * 4
_REQUEST = (
    (b":method", b"POST"),
    (b":path", PROCESS_PATH.encode()),
    (b":authority", b"extproc"),
    (b":scheme", b"http"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-envoy-internal", b"true"),
    (b"x-forwarded-for", b"127.0.0.1"),
)
_LEG = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"localhost:30000"),
    (b":path", b"/v1/chat/completions"),
    (b"x-gateway-destination-endpoint", b"10.0.0.1:30000"),
    (b"x-pd-cluster", b"prefill"),
    (b"x-request-id", b"01234567-89ab-cdef-0123-456789abcdef"),
    (b"user-agent", b"bench"),
    (b"accept", b"*/*"),
    (b"content-type", b"application/json"),
    (b"content-length", b"2000"),
)
_LEG_ANSWER = (
    (b":status", b"200"),
    (b"content-type", b"application/json"),
    (b"content-length", b"500"),
    (b"date", b"Thu, 01 Jan 2026 00:00:00 GMT"),
    (b"server", b"envoy"),
)
_UNLIMITED = (10**9, 10**9)
_CLIENT = ngh2.Configuration(
    stream_reset_rate_limit=_UNLIMITED, glitch_rate_limit=_UNLIMITED, peer_max_concurrent_streams=100_000
)


class Handler:
    """Answers as the exchange does, without any work between."""

    __slots__ = ("_call", "_seen")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._seen = 0

    def received(self, message: bytes) -> None:  # noqa: ARG002
        self._seen += 1
        if self._seen == 3:
            for answer in _ANSWERS:
                self._call.send(answer)
        elif self._seen == 4:
            self._call.send(_LAST_ANSWER)

    def drained(self) -> None:
        pass

    def closed(self) -> None:
        pass


class _FakeTransport:
    """Collects what the protocol writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        pass

    def get_extra_info(self, name: str) -> None:  # noqa: ARG002
        return None

    def take(self) -> bytes:
        data = b"".join(self.written)
        self.written.clear()
        return data


async def in_memory(requests: int, concurrency: int) -> float:
    """µs of server time per request, ``concurrency`` requests at the same point of the pattern in every read."""
    methods = {path.encode(): method for path, method in method_table(Handler, HealthStatuses()).items()}
    server = ServerConnection(methods, 64 << 20, Ngh2ProcessServer())
    transport = _FakeTransport()
    server.connection_made(cast("Any", transport))
    client = ngh2.Connection(ngh2.Role.CLIENT, _CLIENT)
    client.initiate_connection({4: 1 << 24})
    client.set_local_window_size(1 << 28)
    spent = 0

    def turn(before: bytes = b"") -> None:
        nonlocal spent
        data = before + client.data_to_send()
        begin = time.thread_time_ns()
        server.data_received(data)
        spent += time.thread_time_ns() - begin
        if answer := transport.take():
            client.receive_data(answer)
            client.events()

    turn()
    turn()
    spent = 0
    for _ in range(requests // concurrency):
        streams = [client.send_request(_REQUEST) for _ in range(concurrency)]
        turn(b"".join(_frames(client, stream) for stream in streams))
        for stream in streams:
            client.send_data(stream, frame(_RESPONSE_MESSAGE))
        turn()
        for stream in streams:
            client.reset_stream(stream, ngh2.ErrorCode.INTERNAL_ERROR)
        turn()
    return spent / 1000 / requests


def _frames(client: ngh2.Connection, stream: int) -> bytes:
    """What a request begins with; a frame per message, as taking the output between them makes it."""
    output = b""
    for message in _REQUEST_MESSAGES:
        client.send_data(stream, frame(message))
        output += client.data_to_send()
    return output


class _Receiver:
    """Takes an answer and forgets it."""

    __slots__ = ()

    def head(self, status: int, headers: object) -> None:
        pass

    def data(self, chunk: bytes) -> None:
        pass

    def trailers(self, headers: object) -> None:
        pass

    def done(self) -> None:
        pass

    def lost(self, reason: object, detail: str) -> None:
        raise AssertionError(reason, detail)


async def legs_in_memory(requests: int, concurrency: int) -> float:
    """µs of the egress client's time per leg: a request of 2 KB, an answer of head, one chunk and end."""
    egress = EgressClient("unused")
    connection = EgressConnection(lambda _: None)
    transport = _FakeTransport()
    connection.connection_made(cast("Any", transport))
    peer = ngh2.Connection(ngh2.Role.SERVER, _CLIENT)
    peer.initiate_connection({3: 100_000, 4: 1 << 24})
    peer.set_local_window_size(1 << 28)
    spent = 0
    peer.receive_data(transport.take())
    connection.data_received(peer.data_to_send())
    peer.receive_data(transport.take())
    egress._usable.append(connection)
    receiver, body = _Receiver(), bytes(2000)
    for _ in range(requests // concurrency):
        begin = time.thread_time_ns()
        for _ in range(concurrency):
            egress.send(_LEG, body, receiver)
        connection._flush()
        spent += time.thread_time_ns() - begin
        peer.receive_data(transport.take())
        for event in peer.events():
            if isinstance(event, ngh2.RequestReceived):
                peer.send_response(event.stream_id, _LEG_ANSWER)
                peer.send_data(event.stream_id, bytes(500), end_stream=True)
        answer = peer.data_to_send()
        begin = time.thread_time_ns()
        connection.data_received(answer)
        spent += time.thread_time_ns() - begin
    assert egress.open_legs == connection.open_legs == 0
    return spent / 1000 / requests


@dataclass(slots=True)
class _Stream:
    answers: int = 0


class _Driver(asyncio.Protocol):
    """An ngh2 client that keeps ``concurrency`` requests under way and counts down."""

    def __init__(self, requests: int, concurrency: int) -> None:
        self._left = requests
        self._concurrency = concurrency
        self._streams: dict[int, _Stream] = {}
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._h2 = ngh2.Connection(ngh2.Role.CLIENT, _CLIENT)
        self._h2.initiate_connection({4: 1 << 24})
        self._h2.set_local_window_size(1 << 28)
        for _ in range(self._concurrency):
            self._open()

    def _open(self) -> None:
        if self._left == 0:
            return
        self._left -= 1
        stream = self._h2.send_request(_REQUEST)
        self._streams[stream] = _Stream()
        self._transport.write(_frames(self._h2, stream))

    def data_received(self, data: bytes) -> None:
        self._h2.receive_data(data)
        for event in self._h2.events():
            if isinstance(event, ngh2.DataReceived) and event.data:
                stream = self._streams[event.stream_id]
                stream.answers += len(event.data)
                if stream.answers == sum(len(frame(answer)) for answer in _ANSWERS):
                    self._h2.send_data(event.stream_id, frame(_RESPONSE_MESSAGE))
                elif stream.answers > sum(len(frame(answer)) for answer in _ANSWERS):
                    self._h2.reset_stream(event.stream_id, ngh2.ErrorCode.INTERNAL_ERROR)
                    del self._streams[event.stream_id]
                    self._open()
        if data := self._h2.data_to_send():
            self._transport.write(data)
        if not self._streams and not self.done.done():
            self.done.set_result(None)


_SERVERS: dict[str, Callable[[], Ngh2ProcessServer | GrpcioProcessServer]] = {
    "ngh2": Ngh2ProcessServer,
    "grpcio": GrpcioProcessServer,
}


def _serve(kind: str, path: str, pipe: Pipe) -> None:
    """The child: serve until told to stop; answer every other message with the CPU seconds used so far."""

    async def main() -> None:
        server = _SERVERS[kind]()
        await server.start(f"unix:{path}", Handler)
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def told() -> None:
            if pipe.recv() == "stop":
                stop.set()
            else:
                pipe.send(time.process_time())

        loop.add_reader(pipe.fileno(), told)
        pipe.send("ready")
        await stop.wait()
        await server.drain(0)

    uvloop.run(main())


def over_socket(kind: str, requests: int, concurrency: int) -> float:
    """CPU µs of the server's process per request."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bench.sock")
        child = context.Process(target=_serve, args=(kind, path, theirs))
        child.start()
        ours.recv()

        def cpu() -> float:
            ours.send("cpu")
            return float(ours.recv())

        async def drive() -> float:
            loop = asyncio.get_running_loop()
            for count in (requests // 10, requests):  # the first round only warms up
                before = cpu()
                transport, driver = await loop.create_unix_connection(lambda n=count: _Driver(n, concurrency), path)
                await driver.done
                transport.close()
            return (cpu() - before) / requests * 1e6

        try:
            return uvloop.run(drive())
        finally:
            ours.send("stop")
            child.join()


def main() -> None:
    """Print a table, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--only", choices=["memory", "ngh2", "grpcio"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for concurrency in (1, 32):
        if options.only in (None, "memory"):
            figures[f"memory ngh2 c={concurrency}"] = min(
                asyncio.run(in_memory(options.requests, concurrency)) for _ in range(3)
            )
            figures[f"memory egress c={concurrency}"] = min(
                asyncio.run(legs_in_memory(options.requests, concurrency)) for _ in range(3)
            )
        for kind in _SERVERS:
            if options.only in (None, kind):
                figures[f"socket {kind} c={concurrency}"] = over_socket(kind, options.requests, concurrency)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"CPU µs per request, {options.requests} requests, {os.cpu_count()} cores")
    for name, value in figures.items():
        print(f"{name:24}{value:8.1f}")


if __name__ == "__main__":
    main()
