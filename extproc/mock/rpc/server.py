"""The gRPC server of an engine, but for what it generates: health, what it is, its load, its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from extproc.mock.rpc.engines import COMMON, MOONCAKE, Facts
from extproc.mock.rpc.model import files
from extproc.mock.rpc.tokenizer import bundle, chunks, zipped
from extproc.mock.vllm.engine import core_id
from extproc.mock.vllm.mooncake import Bootstrap

if TYPE_CHECKING:
    from types import TracebackType

_HEALTH: Final = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
_PROFILE_OPTIONS: Final = ("output_dir", "start_step", "num_steps", "with_stack", "record_shapes")


@dataclass(frozen=True, slots=True)
class Call:
    """A question: the method's name, its metadata and message."""

    method: str
    metadata: dict[str, str]
    request: Any


class RpcServer:
    """One gRPC server of an engine.

    Args:
        engine: ``sglang``, ``vllm`` or ``tokenspeed``.
        role: ``prefill``, ``decode`` or ``regular``.
        connector: vLLM's; "" for none.
        host, port: where to listen; 0 is a free port.
        bootstrap_port: of a prefill that decodes meet there; 0 is a free port.
        engine_id: vLLM's; by default a new one; "" for a server that reports none.
        tls: certificate chain and key (PEM); None: without TLS.
        tokenizer: the directory whose files ``GetTokenizer`` gives; None: those of the mocks' own model.

    Attributes:
        facts: what it says of itself.
        healthy: what ``HealthCheck`` says; None: it is not implemented.
        serving: the same of ``grpc.health.v1``.
        hang: nothing is answered.
        errors: by method, the status that it fails with.
        busy: it cannot flush its cache.
        profiler: vLLM was started with one.
        calls: what it was asked, in order.
    """

    def __init__(
        self,
        engine: str,
        role: str = "regular",
        *,
        connector: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        bootstrap_port: int = 0,
        model: str = "tiny",
        dp_size: int = 1,
        engine_id: str | None = None,
        tls: tuple[bytes, bytes] | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        if engine_id is None:
            engine_id = str(uuid4()) if connector else ""
        self.facts = Facts(engine, role, model, connector, engine_id, dp_size, bootstrap_port)
        self.role = role
        self.host = host
        self.port = port
        self.crashed = asyncio.Event()
        self.healthy: bool | None = True
        self.serving: bool | None = True
        self.hang = False
        self.errors: dict[str, Any] = {}
        self.busy = False
        self.profiler = False
        self.tokenizer = tokenizer
        self.calls: list[Call] = []
        self._tls = tls
        self._answers: dict[str, Any] = {
            "HealthCheck": self._health_check,
            "GetModelInfo": self._model_info,
            "GetServerInfo": self._server_info,
            "GetLoads": self._loads,
            "FlushCache": self._flush_cache,
            "StartProfile": self._profile,
            "StopProfile": self._profile,
            "Check": self._check,
        }
        self._server: Any = None
        self._bootstrap: Bootstrap | None = None
        self._listener: asyncio.Server | None = None

    # --- life ---

    @property
    def url(self) -> str:
        """``grpc://host:port``, or ``grpcs://``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'grpcs' if self._tls else 'grpc'}://{host}:{self.port}"

    @property
    def bootstrap_port(self) -> int:
        """Where decodes meet it, if they do."""
        return self.facts.bootstrap_port

    @property
    def has_bootstrap(self) -> bool:
        """Whether decodes meet it at ``bootstrap_port``."""
        return self.role == "prefill" and (self.facts.engine != "vllm" or self.facts.connector == MOONCAKE)

    async def start(self) -> None:
        """Listen; ``port`` and ``bootstrap_port`` are the real ones afterwards. Raises OSError."""
        await self._open()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers(self._handlers())
        address = f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        try:
            if self._tls is None:
                self.port = server.add_insecure_port(address)
            else:
                chain, key = self._tls
                self.port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await server.start()
        self._server = server

    async def stop(self, grace: float = 0.0) -> None:
        """Stop; calls under way have ``grace`` seconds to finish."""
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
        await self._close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def count(self, method: str) -> int:
        """How often it was asked for ``method``."""
        return sum(call.method == method for call in self.calls)

    async def _open(self) -> None:
        """Listen where other legs come."""
        if not self.has_bootstrap:
            return
        facts = self.facts
        if facts.engine == "vllm":
            ranks = range(facts.dp_size)
            self._bootstrap = Bootstrap([core_id(facts.engine_id, rank, facts.dp_size) for rank in ranks])
            self._bootstrap.workers = [f"tcp://{self.host}:{40000 + rank}" for rank in ranks]
            await self._bootstrap.start(self.host, facts.bootstrap_port)
            facts.bootstrap_port = self._bootstrap.port
            return
        self._listener = await asyncio.start_server(lambda _, writer: writer.close(), self.host, facts.bootstrap_port)
        facts.bootstrap_port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        """Let go of everything."""
        if self._bootstrap is not None:
            await self._bootstrap.stop()
            self._bootstrap = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- methods ---

    def _handlers(self) -> tuple[Any, ...]:
        messages = self.facts.messages()
        requests = {name: getattr(messages, f"{name}Request") for name in _OF_ENGINE}
        requests |= {
            "FlushCache": COMMON.FlushCacheRequest,
            "StartProfile": COMMON.StartProfileRequest,
            "StopProfile": COMMON.StopProfileRequest,
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._method(name), request_deserializer=request.FromString, response_serializer=serialized
            )
            for name, request in requests.items()
        }
        methods["GetTokenizer"] = grpc.unary_stream_rpc_method_handler(
            self._get_tokenizer,
            request_deserializer=COMMON.GetTokenizerRequest.FromString,
            response_serializer=serialized,
        )
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._method("Check"))}
        return (
            grpc.method_handlers_generic_handler(self.facts.service, methods),
            grpc.method_handlers_generic_handler(_HEALTH, health),
        )

    def _method(self, name: str) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            await self._asked(name, request, context)
            return await self._answers[name](request, context)

        return answer

    async def _asked(self, name: str, request: Any, context: Any) -> None:
        """A question has come: it may hang, or fail."""
        self.calls.append(Call(name, dict(context.invocation_metadata()), request))
        if self.hang:
            await asyncio.Event().wait()
        if name in self.errors:
            await context.abort(self.errors[name], f"{name} fails")

    async def _get_tokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._asked("GetTokenizer", request, context)
        try:
            archive = zipped(files()) if self.tokenizer is None else bundle(self.tokenizer)
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        for chunk in chunks(archive):
            yield chunk

    async def _health_check(self, _request: Any, context: Any) -> Any:
        if self.healthy is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        message = "Health" if self.healthy else "Engine is not alive"
        return self.facts.messages().HealthCheckResponse(healthy=self.healthy, message=message)

    async def _check(self, request: bytes, context: Any) -> bytes:
        if self.serving is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        service = request[2:].decode()  # the one field there is
        if service not in ("", self.facts.service):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unknown service: {service}")
        return _SERVING if self.serving else _NOT_SERVING

    async def _model_info(self, _request: Any, _context: Any) -> Any:
        return self.facts.model_info()

    async def _server_info(self, _request: Any, _context: Any) -> Any:
        return self.facts.server_info()

    async def _loads(self, _request: Any, _context: Any) -> Any:
        return self.facts.loads()

    async def _flush_cache(self, _request: Any, _context: Any) -> Any:
        message = "KV prefix cache reset refused; requests may be in flight" if self.busy else "flushed"
        return COMMON.FlushCacheResponse(success=not self.busy, message=message)

    async def _profile(self, request: Any, context: Any) -> Any:
        if self.facts.engine == "vllm":
            named = [name for name in _PROFILE_OPTIONS if name in request.DESCRIPTOR.fields_by_name]
            if any(request.HasField(name) for name in named):
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "StartProfile options cannot be set per request on this engine"
                )
            if not self.profiler:
                await context.abort(grpc.StatusCode.INTERNAL, "Profiling is not enabled.")
        return COMMON.ProfileResponse(success=True, message="succeeded")


_OF_ENGINE: Final = ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads")


def serialized(message: Any) -> bytes:
    """A message's bytes."""
    made: bytes = message.SerializeToString()
    return made
