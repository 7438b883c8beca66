"""A gRPC worker whose side the tests play: it takes raw messages and does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from extproc.workers.endpoints import Endpoint

SERVICE = "test.Engine"
METHOD = f"/{SERVICE}/Generate"


class Asked:
    """One call that came, answered by the test or by the worker's behaviour."""

    def __init__(self, request: bytes, context: Any) -> None:
        self.request = request
        self.context = context
        self.metadata = dict(context.invocation_metadata())
        self.written = 0  # messages that gRPC has taken
        self.ended = asyncio.Event()  # the call is over, for whatever reason
        self.cancelled = False  # by the other side

    async def say(self, *messages: bytes) -> None:
        """Send messages, each taken before the next."""
        for message in messages:
            await self.context.write(message)
            self.written += 1


Behave = Callable[[Asked], Awaitable[None]]


async def never(_: Asked) -> None:
    """A worker's behaviour: say nothing."""
    await asyncio.Event().wait()


def says(*messages: bytes) -> Behave:
    """A worker's behaviour: these messages, and OK."""

    async def behave(asked: Asked) -> None:
        await asked.say(*messages)

    return behave


def fails(code: grpc.StatusCode, details: str = "", *messages: bytes) -> Behave:
    """A worker's behaviour: these messages, then an error; without messages it is a head and nothing else."""

    async def behave(asked: Asked) -> None:
        await asked.say(*messages)
        await asked.context.abort(code, details)

    return behave


class RpcWorker:
    """A grpc.aio server of one method that streams; over TLS with ``pem``'s key and certificate."""

    def __init__(self, behave: Behave = never, *, pem: Path | None = None, host: str = "127.0.0.1") -> None:
        self.behave = behave
        self.host = host
        self.calls: list[Asked] = []
        self.port = 0
        self._pem = pem
        self._arrivals: asyncio.Queue[Asked] = asyncio.Queue()
        self._server: Any = None

    async def start(self) -> RpcWorker:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_stream_rpc_method_handler(self._generate)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
        address = f"{self.host}:{self.port}"
        if self._pem is None:
            self.port = self._server.add_insecure_port(address)
        else:
            key, chain = (self._pem / "worker.key").read_bytes(), (self._pem / "worker.pem").read_bytes()
            self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(None)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        host = "worker.test" if self._pem else self.host
        return Endpoint(self.host, self.port, host, tls=self._pem is not None, grpc=True)

    async def arrived(self) -> Asked:
        """The next call that has come."""
        async with asyncio.timeout(60):
            return await self._arrivals.get()

    async def _generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked = Asked(request, context)
        self.calls.append(asked)
        self._arrivals.put_nowait(asked)
        try:
            await self.behave(asked)
        except asyncio.CancelledError:
            asked.cancelled = True
            raise
        finally:
            asked.ended.set()
        return
        yield b""  # what makes it a generator
