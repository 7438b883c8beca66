"""What the data plane's tests stand on: a real Envoy between socket workers, a throw-away ext_proc and two clients.

The ext_proc here decides nothing by itself: a request tells it by ``t-*`` headers what to do. So tests can share
one Envoy without sharing any state.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import ngh2
import yarl
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc

from extproc.dataplane.ads import AdsServer
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.process import EnvoyProcess
from extproc.names import CLUSTER, DESTINATION, METADATA_NAMESPACE
from extproc.workers.endpoints import Endpoint, Snapshot

CHUNK = 60_000
OVERWRITE = 2  # HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def make_certificates(directory: Path) -> ssl.SSLContext:
    """A CA (``ca.pem``) and a server's context with a certificate of that CA for ``worker.test``."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)  # noqa: S607  # on PATH

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test CA")
    openssl("req", *key, "-keyout", "worker.key", "-out", "worker.csr", "-subj", "/CN=worker")
    (directory / "names").write_text("subjectAltName=DNS:worker.test")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "worker.csr", "-out", "worker.pem", *signing)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "worker.pem", directory / "worker.key")
    return context


@dataclass
class Request:
    """What a worker received: the head as it was on the wire."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split()[1]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def names(self) -> set[str]:
        return {key.lower() for key, _ in self.headers}


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[bool]]


def answer(body: bytes = b"", status: str = "200 OK", headers: str = "", *, keep: bool = True) -> Answer:
    """A worker's behaviour: this answer."""

    async def behave(_: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)
        return keep

    return behave


async def hang_up(_: Request, writer: asyncio.StreamWriter) -> bool:
    """A worker's behaviour: read the request, close."""
    writer.close()
    return False


async def never(_: Request, __: asyncio.StreamWriter) -> bool:
    """A worker's behaviour: read the request, say nothing."""
    await asyncio.Event().wait()
    return False


async def garbage(_: Request, writer: asyncio.StreamWriter) -> bool:
    """A worker's behaviour: answer something that is not HTTP."""
    writer.write(b"\x00\x01 this is not HTTP\r\n\r\n")
    return False


@dataclass(frozen=True)
class Unreachable:
    """An address behind which nobody answers."""

    endpoint: Endpoint

    @property
    def address(self) -> str:
        return self.endpoint.address


@contextlib.contextmanager
def unreachable(*, refuses: bool) -> Iterator[Unreachable]:
    """A port of ours that refuses connections, or one whose queue is full so that they are never established."""
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(socket.socket())
        holder.bind(("127.0.0.1", 0))
        if not refuses:
            holder.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.settimeout(0)
                waiting.connect_ex(holder.getsockname())
        yield Unreachable(Endpoint(*holder.getsockname(), "unreachable"))


class Worker:
    """A tiny HTTP/1.1 server that records raw requests and answers as told."""

    def __init__(
        self, behave: Answer | None = None, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self.behave = behave
        self.host = host
        self.tls = tls
        self.requests: list[Request] = []
        self.connections = 0
        self.server_names: list[str | None] = []
        self.arrived = asyncio.Event()
        self.closed_early = asyncio.Event()  # the connection ended before the answer
        self.closed = asyncio.Event()  # a connection ended
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, port: int = 0) -> Worker:
        if self.tls is not None:
            self.tls.sni_callback = lambda _, name, __: self.server_names.append(name)
        self._server = await asyncio.start_server(self._connection, self.host, port, ssl=self.tls, backlog=2000)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.close()
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        return Endpoint(self.host, self.port, "").address

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port, self.host, tls=self.tls is not None)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                while await self._exchange(reader, writer):
                    await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
        finally:
            self._writers.discard(writer)
            self.closed.set()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read_request(reader)
        self.requests.append(request)
        self.arrived.set()
        behave = self.behave or answer(self.address.encode())
        working = asyncio.ensure_future(behave(request, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            self.closed_early.set()
            working.cancel()
            return False
        keep = working.result()
        await writer.drain()
        if not leaving.done():
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
        elif leaving.result():
            raise AssertionError("a worker got the next request before it had answered the last")
        return keep


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in head[1:] if line]
    request = Request(head[0], headers, b"")  # type: ignore[arg-type]
    if length := request.header("content-length"):
        request.body = await reader.readexactly(int(length))
    elif request.header("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            request.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    return request


class ExtProc(ep_grpc.ExternalProcessorServicer):
    """Does what the request's ``t-*`` headers say.

    ``t-to``: destinations. ``t-path``: another path. ``t-cluster``: a CLUSTER header, and the route is looked up again.
    ``t-immediate``: an ImmediateResponse with that status and a JSON body. ``t-hold``: release only when
    :attr:`release` is set. ``t-abort``: end the stream with an error.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.release = asyncio.Event()
        self.requests: list[dict[str, str]] = []
        self.responses: list[dict[str, str]] = []
        self.ended = 0
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        ep_grpc.add_ExternalProcessorServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        headers: dict[str, str] = {}
        body = b""
        try:
            async for message in requests:
                kind = message.WhichOneof("request")
                if kind == "request_headers":
                    headers = _headers(message.request_headers)
                    self.requests.append(headers)
                    if not message.request_headers.end_of_stream:
                        continue
                elif kind == "request_body":
                    body += message.request_body.body
                    if not message.request_body.end_of_stream:
                        continue
                elif kind == "response_headers":
                    self.responses.append(_headers(message.response_headers))
                    yield ep.ProcessingResponse(response_headers=ep.HeadersResponse())
                    continue
                elif kind == "response_trailers":
                    yield ep.ProcessingResponse(response_trailers=ep.TrailersResponse())
                    continue
                if "t-abort" in headers:
                    await context.abort(grpc.StatusCode.INTERNAL, "asked to")
                for response in await self._decide(headers, body, bodyless=kind == "request_headers"):
                    yield response
        finally:
            async with self._changed:
                self.ended += 1
                self._changed.notify_all()

    async def has_ended(self, count: int) -> None:
        """Wait until so many streams are over."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.ended >= count)

    async def _decide(self, headers: dict[str, str], body: bytes, *, bodyless: bool) -> list[Any]:
        if "t-hold" in headers:
            await self.release.wait()
        if status := headers.get("t-immediate"):
            immediate = ep.ImmediateResponse(body=json.dumps({"from": "ext_proc"}).encode())
            immediate.status.code = int(status)
            _set(immediate.headers, "content-type", "application/json")
            _set(immediate.headers, "x-pd-error-code", "from_ext_proc")
            return [ep.ProcessingResponse(immediate_response=immediate)]
        first = ep.ProcessingResponse()
        first.dynamic_metadata.update({METADATA_NAMESPACE: {DESTINATION: headers.get("t-to", "")}})
        common = first.request_headers.response
        common.header_mutation.remove_headers.extend(name for name in headers if name.startswith("t-"))
        if path := headers.get("t-path"):
            _set(common.header_mutation, ":path", path)
        if cluster := headers.get("t-cluster"):
            _set(common.header_mutation, CLUSTER, cluster)
            common.clear_route_cache = True
        if bodyless:
            return [first]
        _set(common.header_mutation, "content-length", str(len(body)))
        return [first, *_chunks(body)]


def _chunks(body: bytes) -> list[Any]:
    responses = []
    for start in range(0, max(len(body), 1), CHUNK):
        response = ep.ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK]
        streamed.end_of_stream = start + CHUNK >= len(body)
        responses.append(response)
    return responses


def _headers(message: Any) -> dict[str, str]:
    return {header.key: header.raw_value.decode() for header in message.headers.headers}


def _set(mutation: Any, key: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value, option.append_action = key, value.encode(), OVERWRITE


@dataclass
class Reply:
    """An answer as a client saw it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str | None, str]:
        """Status, error header, code in the body."""
        return self.status, self.headers.get("x-pd-error-code"), self.json["error"]["code"]


@dataclass
class _Stream:
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    done: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Http2Connection(asyncio.Protocol):
    """An HTTP/2 client: of the egress listener as the service is one, or of the client port."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.streams: dict[int, _Stream] = {}
        self.lost = asyncio.Event()
        unlimited = (10**9, 10**9)
        configuration = ngh2.Configuration(
            stream_reset_rate_limit=unlimited, glitch_rate_limit=unlimited, peer_max_concurrent_streams=100_000
        )
        self.h2 = ngh2.Connection(ngh2.Role.CLIENT, configuration)
        self.h2.initiate_connection({4: 1 << 24})
        self.h2.set_local_window_size(1 << 26)
        self.flush()

    def connection_lost(self, _: Exception | None) -> None:
        self.lost.set()
        for stream in self.streams.values():
            if not stream.done.done():
                stream.done.set_exception(ConnectionResetError("egress connection lost"))

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)

    def send(self, headers: dict[str, str], body: bytes = b"") -> int:
        stream = self.h2.send_request([(key.encode(), value.encode()) for key, value in headers.items()])
        self.h2.send_data(stream, body, end_stream=True)
        self.streams[stream] = _Stream()
        self.flush()
        return stream

    def cancel(self, stream: int) -> None:
        self.h2.reset_stream(stream, 8)
        self.streams.pop(stream).done.cancel()
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.h2.receive_data(data)
        for event in self.h2.events():
            stream = self.streams.get(getattr(event, "stream_id", 0))
            if stream is None:
                continue
            if isinstance(event, ngh2.ResponseReceived):
                stream.headers = {h[0].decode(): h[1].decode() for h in event.headers}
            elif isinstance(event, ngh2.DataReceived):
                stream.body += event.data
            elif isinstance(event, ngh2.StreamClosed) and not stream.done.done():
                if event.error_code:
                    stream.done.set_exception(ConnectionResetError(f"stream reset: {event.error_code}"))
                else:
                    headers = dict(stream.headers)
                    stream.done.set_result(Reply(int(headers.pop(":status", "0")), headers, stream.body))
        self.flush()


class Rig:
    """One Envoy with everything around it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        defaults = DataplaneConfig(
            extproc=f"unix:{directory}/extproc.sock",
            ads=f"unix:{directory}/ads.sock",
            control=f"unix:{directory}/control.sock",
            egress=f"unix:{directory}/egress.sock",
            client_host="127.0.0.1",
            client_port=0,
            admin_port=0,
            concurrency=1,
            connect_timeout=10,  # a handshake of TLS takes its time on a busy machine
        )
        self.config = replace(defaults, **options)
        self.extproc = ExtProc(self.config.extproc)
        self.ads = AdsServer(self.config.ads)
        self.envoy = EnvoyProcess(self.config)
        self._control: web.AppRunner | None = None
        self._workers: list[Worker] = []
        self._egress: Http2Connection | None = None

    async def start(self) -> None:
        await self.ads.start()
        await self.extproc.start()
        await self.start_control()
        await self.envoy.start()
        self.session = aiohttp.ClientSession()
        self.host, self.port = self.envoy.client_address
        self.url = f"http://{self.host}:{self.port}"

    async def stop(self) -> None:
        await self.session.close()
        if self._egress is not None:
            self._egress.transport.close()
        await self.envoy.stop(0)
        for worker in self._workers:
            await worker.stop()
        await self.stop_control()
        await self.extproc.stop()
        await self.ads.stop()

    async def start_control(self) -> None:
        async def echo(request: web.Request) -> web.Response:
            return web.json_response({"control": f"{request.method} {request.raw_path}"})

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", echo)
        self._control = web.AppRunner(application)
        await self._control.setup()
        await web.UnixSite(self._control, self.config.control.removeprefix("unix:")).start()

    async def stop_control(self) -> None:
        assert self._control is not None
        await self._control.cleanup()

    async def worker(self, behave: Answer | None = None, **options: Any) -> Worker:
        """A started worker that is stopped with the rig; Envoy does not know it yet."""
        worker = await Worker(behave, **options).start()
        self._workers.append(worker)
        return worker

    async def know(self, *endpoints: Endpoint, prefill: tuple[Endpoint, ...] | None = None) -> None:
        """Make these Envoy's decode workers, and its prefill workers unless ``prefill`` names others."""
        await self.ads.publish(Snapshot(prefill=endpoints if prefill is None else prefill, decode=endpoints))

    async def post(
        self,
        to: str = "",
        body: bytes = b"{}",
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """A client's request through the ext_proc to the destinations ``to``."""
        return await self.request("POST", path, body, {"t-to": to, **(headers or {})})

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        url = yarl.URL(self.url + path, encoded=True)
        data = None if body is None else io.BytesIO(body)
        async with self.session.request(method, url, data=data, headers=headers) as response:
            return Reply(
                response.status,
                {key.lower(): value for key, value in response.headers.items()},
                await response.read(),
            )

    async def egress(self) -> Http2Connection:
        """The connection that carries the legs."""
        if self._egress is None or self._egress.lost.is_set():
            loop = asyncio.get_running_loop()
            path = self.config.egress.removeprefix("unix:")
            _, self._egress = await loop.create_unix_connection(Http2Connection, path)
        return self._egress

    async def http2(self) -> Http2Connection:
        """A client with HTTP/2."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Http2Connection, self.host, self.port)
        return connection

    async def leg(
        self,
        to: str,
        body: bytes = b"{}",
        cluster: str = "prefill",
        headers: dict[str, str] | None = None,
        patience: float = 60,
    ) -> Reply:
        """A leg of the service through the egress listener."""
        connection = await self.egress()
        stream = connection.send(leg_headers(to, body, cluster) | (headers or {}), body)
        async with asyncio.timeout(patience):
            return await connection.streams[stream].done


def leg_headers(to: str, body: bytes, cluster: str = "prefill") -> dict[str, str]:
    return {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        ":scheme": "http",
        ":authority": "pd",
        "content-length": str(len(body)),
        DESTINATION: to,
        CLUSTER: cluster,
    }
