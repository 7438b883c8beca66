"""An ext_proc service whose side the tests play, message by message, and a client for it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from dataplane_rig import OVERWRITE, ExtProc, Rig, Worker
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from http2_client import Http2Client, Stream
from http_client import Client, Exchange

from extproc.names import DESTINATION, ERROR_CODE, LATE, METADATA_NAMESPACE, UPSTREAM

PATH = "/v1/chat/completions"
PATIENCE = 60.0
PASS = ep.ProcessingResponse(response_headers=ep.HeadersResponse())


class Call:
    """One gRPC stream of Envoy's."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.kinds: list[str] = []  # of the messages that came
        self.closed = asyncio.Event()
        self.refused = asyncio.Event()

    async def run(self) -> None:
        """Take in what comes until Envoy ends the stream or the test does."""
        reading, refusing = asyncio.ensure_future(self._read()), asyncio.ensure_future(self.refused.wait())
        try:
            await asyncio.wait({reading, refusing}, return_when=asyncio.FIRST_COMPLETED)
            if self.refused.is_set():
                await self._context.abort(grpc.StatusCode.INTERNAL, "asked to")
        finally:
            reading.cancel()
            refusing.cancel()
            self.closed.set()

    async def _read(self) -> None:
        while (message := await self._context.read()) is not grpc.aio.EOF:
            self.kinds.append(message.WhichOneof("request"))
            self._messages.put_nowait(message)

    async def next(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(PATIENCE):
            message = await self._messages.get()
        assert message.WhichOneof("request") == kind
        return getattr(message, kind)

    async def send(self, response: Any) -> None:
        await self._context.write(response)

    async def gone(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.closed.wait()

    # -- the first call --

    async def release(self, to: str) -> None:
        """Take the whole request and let it go to a worker."""
        await self.next("request_headers")
        body = await self.next("request_body")
        while not body.end_of_stream:
            body = await self.next("request_body")
        first, second = ep.ProcessingResponse(), ep.ProcessingResponse()
        first.dynamic_metadata.update({METADATA_NAMESPACE: {DESTINATION: to}})
        change(first.request_headers, {"content-length": "2"})
        second.request_body.response.body_mutation.streamed_response.body = b"{}"
        second.request_body.response.body_mutation.streamed_response.end_of_stream = True
        await self.send(first)
        await self.send(second)

    async def give_up(self, name: str, status: int = 200) -> None:
        """Leave the worker; a second call is to answer."""
        response = ep.ProcessingResponse()
        response.immediate_response.status.code = status
        response.immediate_response.body = b"never seen"
        mutate(response.immediate_response.headers, {LATE: name})
        await self.send(response)

    async def put_off(self, name: str) -> dict[str, str]:
        """Asked about an answer's head, which is returned: have a second call answer."""
        head = fields(await self.next("response_headers"))
        response = ep.ProcessingResponse()
        change(response.response_headers, {LATE: name})
        # The second call can say nothing of a body as long as there is none: the worker's may never come.
        response.response_headers.response.status = ep.CommonResponse.CONTINUE_AND_REPLACE
        response.response_headers.response.body_mutation.body = b"never seen"
        await self.send(response)
        return head

    # -- the second call --

    async def head(self, status: int = 200, **headers: str) -> None:
        """Answer with this head."""
        response = ep.ProcessingResponse()
        change(response.response_headers, {":status": str(status)} | headers)
        theirs = [LATE, ERROR_CODE, UPSTREAM, *(() if "content-length" in headers else ("content-length",))]
        response.response_headers.response.header_mutation.remove_headers.extend(theirs)
        await self.send(response)

    async def body(self, piece: bytes, *, end: bool = False) -> None:
        """Answer with the next piece of a body."""
        response = ep.ProcessingResponse()
        streamed = response.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = piece, end
        await self.send(response)


def fields(message: Any) -> dict[str, str]:
    return {header.key: header.raw_value.decode() for header in message.headers.headers}


def change(message: Any, headers: dict[str, str]) -> None:
    mutate(message.response.header_mutation, headers)


def mutate(mutation: Any, headers: dict[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode()


class Scripted(ExtProc):
    """An ext_proc service whose calls the tests answer."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.calls: asyncio.Queue[Call] = asyncio.Queue()

    async def Process(self, _: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802 - gRPC's name
        call = Call(context)
        self.calls.put_nowait(call)
        await call.run()

    async def call(self) -> Call:
        """The next one that Envoy opens."""
        async with asyncio.timeout(PATIENCE):
            return await self.calls.get()


class Stage:
    """One Envoy, the calls that come from it, and a client with one connection."""

    def __init__(self, rig: Rig, service: Scripted, protocol: str) -> None:
        self.rig = rig
        self.service = service
        self.protocol = protocol
        self._client = Client(rig.host, rig.port)
        self._http2: Http2Client | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str = PATH, method: str = "POST") -> Exchange | Stream:
        """Send a request, on the connection of the last one."""
        host, port = self.rig.host, self.rig.port
        if self.protocol == "http2":
            self._http2 = self._http2 or await Http2Client.connect(host, port)
            stream = self._http2.open(path, method=method)
            stream.send(b"{}", end=True)
            return stream
        self._streams = self._streams or await asyncio.open_connection(host, port)
        exchange = Exchange(*self._streams, method)
        await exchange.send(self._client.request_head(method, path, [("content-length", "2")]) + b"{}")
        return exchange

    async def released(self, worker: Worker) -> tuple[Exchange | Stream, Call]:
        """A client's request that has been released to ``worker``, and is there."""
        await self.rig.know(worker.endpoint)
        asked = await self.ask()
        call = await self.service.call()
        worker.arrived.clear()
        await call.release(worker.address)
        async with asyncio.timeout(PATIENCE):
            await worker.arrived.wait()
        return asked, call

    async def second(self, name: str) -> Call:
        """The second call for the request of this name: its head is there."""
        call = await self.service.call()
        head = await call.next("response_headers")
        assert fields(head)[LATE] == name
        return call

    async def close(self) -> None:
        """Leave. Fails when a call came that the test did not expect."""
        if self._streams is not None:
            self._streams[1].close()
        if self._http2 is not None:
            await self._http2.close()
        assert self.service.calls.empty()
