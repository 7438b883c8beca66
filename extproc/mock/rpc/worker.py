"""A mock worker over gRPC: an engine's server, with the rendezvous, leases and pins of the HTTP mocks behind it.

``async with RpcMock("vllm", "prefill", connector=NIXL) as mock: ...`` starts one; ``mock.url`` is where it listens,
``mock.legs`` the ``Generate`` calls (each with its ``message``), ``mock.calls`` the other ones. How it answers may be
changed while it runs, and by a leg's metadata ``x-mock-fault``. What it writes: ``rpc/model.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]

from extproc.mock.engine import Pace
from extproc.mock.observed import PATIENCE, Observed
from extproc.mock.recorder import Outcome
from extproc.mock.rpc import sockets
from extproc.mock.rpc.backends import Backend, RoomsBackend, SglangBackend, TokenspeedBackend, VllmBackend
from extproc.mock.rpc.generator import Generator
from extproc.mock.rpc.server import RpcServer, serialized
from extproc.mock.sglang.engine import Layout, Patience
from extproc.mock.vllm.mooncake import Mooncake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from extproc.mock.faults import Fault, Rule
    from extproc.mock.rpc.engines import Facts
    from extproc.mock.sglang import engine as sglang
    from extproc.mock.vllm import engine as vllm


class RpcMock(RpcServer, Observed):
    """One gRPC worker; arguments and attributes as of RpcServer, and these.

    Args:
        tokens: length of an answer that nothing limits.
        first_token_delay, token_delay: what a prompt and a token take, in seconds.
        record_limit: how many legs are remembered.
        faults: what goes wrong from the start.
        engine_options: of vLLM those of ``mock.vllm.engine.Options``, and ``lease``; of the others ``patience``,
            ``layout`` and ``dp_attention``, see ``mock.sglang.engine``.
        options: RpcServer's.
    """

    def __init__(
        self,
        engine: str,
        role: str = "regular",
        *,
        tokens: int = 16,
        first_token_delay: float = 0.0,
        token_delay: float = 0.0,
        record_limit: int = 100_000,
        faults: tuple[Fault | Rule, ...] = (),
        engine_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        RpcServer.__init__(self, engine, role, **options)
        Observed.__init__(self, role, record_limit, faults)
        self._backend = _backend(self.facts, self.recorder.changed, engine_options or {})
        self._generator: Generator[Any] = Generator(
            self,
            self._backend.engine,
            Pace(first_token_delay, token_delay, tokens),
            path=f"/{self.facts.service}/Generate",
            read=self.facts.messages().GenerateRequest.FromString,
            api=self._backend.api,
            crash=self.crash,
            cut=self._cut,
        )
        self._answers["Abort"] = self._abort
        self._ending: asyncio.Task[None] | None = None

    # --- life ---

    async def stop(self, grace: float = 0.0) -> None:
        """Stop; calls under way have ``grace`` seconds to finish."""
        self._generator.ending = self._generator.ending or Outcome.STOPPED
        await super().stop(grace)

    def crash(self) -> None:
        """Die as a killed process does: listener and connections are gone at once, nothing is answered."""
        self.crashed.set()
        self._generator.ending = Outcome.CRASHED
        self._backend.kill()
        server, self._server = self._server, None
        if server is not None:
            sockets.cut(self.port)
            self._ending = asyncio.get_running_loop().create_task(server.stop(0))

    async def _open(self) -> None:
        await self._backend.start(self.host)

    async def _close(self) -> None:
        if self._ending is not None:
            await self._ending
        await self._backend.stop()

    # --- the engine ---

    @property
    def pace(self) -> Pace:
        """How fast tokens come; may be replaced while the mock runs."""
        return self._generator.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self._generator.pace = pace

    @property
    def running(self) -> int:
        """How many sequences its engine has."""
        return len(self._backend.engine.live)

    @property
    def rooms(self) -> int:
        """How many rooms of a prefill are not empty."""
        return len(self._rooms.bootstrap.rooms)

    @property
    def pins(self) -> tuple[str, ...]:
        """Whose blocks are kept for decodes that have not come: request names (NIXL) or transfer ids (Mooncake)."""
        return self._vllm.pins.keys

    @property
    def expired(self) -> int:
        """How many pins have ended by their lease."""
        return self._vllm.pins.expired

    def expire(self) -> None:
        """Let go of all blocks that are kept, as when leases end."""
        self._vllm.pins.clear()

    @property
    def fetched(self) -> int:
        """How many tokens' caches a decode of vLLM has fetched."""
        return sum(totals.hits for totals in self._vllm.totals)

    async def freed(self, patience: float = PATIENCE) -> None:
        """Wait until no blocks are kept."""
        await self.recorder.until(lambda: not self.pins, patience)

    async def holding(self, count: int = 1, patience: float = PATIENCE) -> None:
        """Wait until the blocks of ``count`` requests are kept."""
        await self.recorder.until(lambda: len(self.pins) >= count, patience)

    @property
    def asked_for(self) -> tuple[str, ...]:
        """The transfers that decodes wait for at a prefill of Mooncake."""
        connector = self._vllm.connector
        return connector.wanted if isinstance(connector, Mooncake) else ()

    async def wanted(self, count: int = 1, patience: float = PATIENCE) -> None:
        """Wait until decodes wait for ``count`` transfers."""
        await self.recorder.until(lambda: len(self.asked_for) == count, patience)

    @property
    def _answering(self) -> int:
        return self._generator.answering

    @property
    def _vllm(self) -> vllm.Engine:
        assert isinstance(self._backend, VllmBackend)
        return self._backend.engine

    @property
    def _rooms(self) -> sglang.Engine:
        assert isinstance(self._backend, RoomsBackend)
        return self._backend.engine

    def _cut(self, peer: str) -> None:
        sockets.cut(self.port, sockets.peer_port(peer))

    # --- methods ---

    def _handlers(self) -> tuple[Any, ...]:
        generate = {"Generate": grpc.unary_stream_rpc_method_handler(self._generate)}
        abort = self.facts.messages().AbortRequest.FromString
        generate["Abort"] = grpc.unary_unary_rpc_method_handler(
            self._method("Abort"), request_deserializer=abort, response_serializer=serialized
        )
        return (grpc.method_handlers_generic_handler(self.facts.service, generate), *super()._handlers())

    async def _asked(self, name: str, request: Any, context: Any) -> None:
        self.recorder.changed()
        await super()._asked(name, request, context)

    async def _generate(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        if self.hang or "Generate" in self.errors:
            await self._asked("Generate", self.facts.messages().GenerateRequest.FromString(data), context)
        async for message in self._generator(data, context):
            yield message

    async def _abort(self, request: Any, _context: Any) -> Any:
        return self._backend.abort(request)

    async def _loads(self, _request: Any, _context: Any) -> Any:
        return self.facts.loads(self._backend.busy())


def _backend(facts: Facts, on_change: Callable[[], None], options: dict[str, Any]) -> Backend:
    if facts.engine == "vllm":
        return VllmBackend(facts, on_change, **{"lease": None, **options})
    kind = SglangBackend if facts.engine == "sglang" else TokenspeedBackend
    return kind(facts, **{"patience": Patience(), "layout": Layout(), "dp_attention": True, **options})
