"""``ProcessServer`` on ``grpc.aio``: the conservative one, slower by an order of magnitude."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from extproc.transport.address import SocketFile, TcpAddress, UnixAddress, claim_socket_file, parse_address
from extproc.transport.grpc_framing import DEFAULT_MAX_MESSAGE
from extproc.transport.grpcio_call import GrpcioCall
from extproc.transport.health import HealthStatuses
from extproc.transport.methods import NO_METHODS, Method, method_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.transport.interface import Process


class GrpcioProcessServer:
    """Implements ``ProcessServer`` with grpcio's own HTTP/2 engine.

    ``max_message`` bounds one gRPC message in bytes; a longer one ends its call with RESOURCE_EXHAUSTED. ``others`` are
    methods that it serves besides those of ``ProcessServer``, by path.
    """

    def __init__(self, max_message: int = DEFAULT_MAX_MESSAGE, others: Mapping[str, Method] = NO_METHODS) -> None:
        self._max_message = max_message
        self._others = others
        self._health = HealthStatuses()
        self._calls: set[GrpcioCall] = set()
        self._server: grpc.aio.Server | None = None
        self._socket_file: SocketFile | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """Where the server listens: with the real port when port 0 was asked for."""
        return self._address

    @property
    def open_calls(self) -> int:
        """Calls under way on all connections, health watches included."""
        return len(self._calls)

    async def start(self, address: str, process: Process) -> None:
        """See ``ProcessServer.start``; raises ValueError when ``address`` is not one."""
        parsed = parse_address(address)
        if isinstance(parsed, UnixAddress):
            await claim_socket_file(parsed.path)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_message),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", 1 << 20),
                ("grpc.so_reuseport", 0),  # two servers on one port would share its connections without a word
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_time_ms", 15_000),  # notice a machine that has vanished
                ("grpc.keepalive_timeout_ms", 15_000),
            ]
        )
        server.add_generic_rpc_handlers((_Methods(method_table(process, self._health, self._others), self._calls),))
        try:
            port = server.add_insecure_port(str(parsed))
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, str(error), address) from error
        await server.start()
        self._server = server
        if isinstance(parsed, UnixAddress):
            self._socket_file = SocketFile.bound(parsed.path)
            self._address = address
        else:
            self._address = str(TcpAddress(parsed.host, port))

    def set_serving(self, service: str, serving: bool) -> None:  # noqa: FBT001 -- as in ProcessServer
        """See ``ProcessServer.set_serving``."""
        self._health.set_serving(service, serving)

    async def drain(self, grace: float) -> None:
        """See ``ProcessServer.drain``. May be called again, and before ``start``."""
        if self._server is None:
            return
        if self._socket_file is not None:
            self._socket_file.remove()
        self._health.drain()
        await self._server.stop(grace)
        while self._calls:  # cancelled, but their handlers have yet to hear of it
            await next(iter(self._calls)).ended.wait()


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves every method as a stream of raw messages: on the wire a unary method is nothing else."""

    def __init__(self, methods: dict[str, Method], calls: set[GrpcioCall]) -> None:
        self._handlers = {path: _behaviour(method, calls) for path, method in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def _behaviour(method: Method, calls: set[GrpcioCall]) -> grpc.RpcMethodHandler:
    async def behave(_: object, context: grpc.aio.ServicerContext) -> None:
        call = GrpcioCall(context)
        calls.add(call)
        try:
            await call.run(method)
        finally:
            calls.discard(call)
            call.ended.set()

    return grpc.stream_stream_rpc_method_handler(behave)
