"""The engine behind a mock gRPC server: the HTTP mocks' own with another model, and what its server does to it."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from extproc.mock.engine import Engine
from extproc.mock.recorder import Record
from extproc.mock.rpc import model
from extproc.mock.rpc.api import Api
from extproc.mock.rpc.engines import BLOCK_SIZE, BLOCKS, MOONCAKE, NIXL, Facts
from extproc.mock.rpc.sglang import SglangApi
from extproc.mock.rpc.tokenspeed import TokenspeedApi
from extproc.mock.rpc.vllm import VllmApi
from extproc.mock.sglang import engine as sglang
from extproc.mock.vllm import engine as vllm
from extproc.mock.vllm.mooncake import Mooncake
from extproc.mock.vllm.nixl import Nixl

_NIXL_LEASE: Final = 30.0
_MOONCAKE_LEASE: Final = 480.0
_ROLES: Final = {"prefill": vllm.Role.PREFILL, "decode": vllm.Role.DECODE, "regular": vllm.Role.AGGREGATED}


class Backend(ABC):
    """One engine process."""

    engine: Engine[Any]

    @abstractmethod
    def api(self, request: Any, record: Record) -> Api[Any]:
        """Words the answer to a ``Generate``."""

    @abstractmethod
    def abort(self, request: Any) -> Any:
        """Do as an ``AbortRequest`` says; returns the ``AbortResponse``."""

    @abstractmethod
    async def start(self, host: str) -> None:
        """Listen for other legs; where they meet is among the facts then."""

    @abstractmethod
    def kill(self) -> list[asyncio.Task[Any]]:
        """Nothing goes on; the tasks that end by that."""

    async def stop(self) -> None:
        """The same, and wait for it."""
        await asyncio.gather(*self.kill(), return_exceptions=True)

    @abstractmethod
    def busy(self) -> list[int]:
        """How many requests each rank has."""


class VllmBackend(Backend):
    """vLLM's. ``options`` are those of ``mock.vllm.engine.Options``."""

    engine: vllm.Engine

    def __init__(self, facts: Facts, on_change: Callable[[], None], *, lease: float | None, **options: Any) -> None:
        if lease is None:
            lease = _MOONCAKE_LEASE if facts.connector == MOONCAKE else _NIXL_LEASE
        given = {"max_model_len": model.CONTEXT, "block_size": BLOCK_SIZE, "blocks": BLOCKS, **options}
        self._facts = facts
        self._on_change = on_change
        self.engine = vllm.Engine(
            _ROLES[facts.role],
            vllm.Options(model=facts.model, root=f"/models/{facts.model}", dp_size=facts.dp_size, lease=lease, **given),
        )
        self.engine.write = model.write
        self.engine.pins.watch(on_change)
        self.connector: Nixl | Mooncake | None = None

    def api(self, request: Any, record: Record) -> VllmApi:
        """See Backend."""
        return VllmApi(self.engine, request, record)

    def abort(self, request: Any) -> Any:
        """See Backend. What it does not know it does not mind."""
        self.engine.abort(list(request.request_ids))
        return self._facts.messages().AbortResponse()

    async def start(self, host: str) -> None:
        """See Backend."""
        facts = self._facts
        if facts.connector == NIXL:
            self.connector = Nixl(self.engine, facts.engine_id)
        elif facts.connector == MOONCAKE and facts.engine_id:
            self.connector = Mooncake(self.engine, facts.engine_id, self._on_change)
        self.engine.connector = self.connector
        if self.connector is None:
            return
        await self.connector.start(host, 0)
        if isinstance(self.connector, Mooncake) and facts.role == "prefill":
            await self.connector.bootstrap.start(host, facts.bootstrap_port)
            facts.bootstrap_port = self.connector.bootstrap.port

    def kill(self) -> list[asyncio.Task[Any]]:
        """See Backend."""
        if isinstance(self.connector, Mooncake):
            self.connector.bootstrap.kill()
        return self.engine.kill()

    async def stop(self) -> None:
        """See Backend."""
        await super().stop()
        if isinstance(self.connector, Mooncake):
            await self.connector.bootstrap.stop()

    def busy(self) -> list[int]:
        """See Backend."""
        ranks = [sequence.rank for sequence in self.engine.live.values()]
        return [ranks.count(rank) for rank in range(self._facts.dp_size)]


class RoomsBackend(Backend):
    """SGLang's, and TokenSpeed's, of which nothing else is known than that its legs meet as SGLang's do."""

    engine: sglang.Engine

    def __init__(self, facts: Facts, *, patience: sglang.Patience, layout: sglang.Layout, dp_attention: bool) -> None:
        self._facts = facts
        mode = sglang.Mode(facts.mode)
        self.engine = sglang.Engine(mode, patience, layout, facts.dp_size, dp_attention=dp_attention)
        self.engine.write = model.write

    async def start(self, host: str) -> None:
        """See Backend."""
        if self._facts.role == "prefill":
            self._facts.bootstrap_port = await self.engine.bootstrap.start(host, self._facts.bootstrap_port)

    def kill(self) -> list[asyncio.Task[Any]]:
        """See Backend."""
        self.engine.bootstrap.stop()
        return list(self.engine.prefills.kill())

    def busy(self) -> list[int]:
        """See Backend."""
        return self.engine.running

    def _stop(self, sequence: sglang.Sequence) -> None:
        if sequence.stopper is not None and not sequence.stopper.done():
            sequence.stopper.set_result(None)


class SglangBackend(RoomsBackend):
    """SGLang's."""

    def api(self, request: Any, record: Record) -> SglangApi:  # noqa: ARG002 - Backend's signature
        """See Backend."""
        return SglangApi(self.engine, request)

    def abort(self, request: Any) -> Any:
        """See Backend. The scheduler ends all whose name begins so; the server says yes to everything."""
        for sequence in list(self.engine.live.values()):
            if sequence.rid.startswith(request.request_id):
                self._stop(sequence)
        return self._facts.messages().AbortResponse(success=True, message=f"Request {request.request_id} aborted")


class TokenspeedBackend(RoomsBackend):
    """TokenSpeed's."""

    def api(self, request: Any, record: Record) -> TokenspeedApi:  # noqa: ARG002 - Backend's signature
        """See Backend."""
        return TokenspeedApi(self.engine, request)

    def abort(self, request: Any) -> Any:
        """See Backend. A request of several samples is known by its name alone."""
        name = request.request_id
        sample = re.compile(rf"{re.escape(name)}-n\d+")
        targets = [each for each in self.engine.live.values() if each.rid == name or sample.fullmatch(each.rid)]
        for sequence in targets:
            self._stop(sequence)
        message = f"Aborted {len(targets)} request(s) for {name}" if targets else f"Request {name} not found"
        return self._facts.messages().AbortResponse(success=bool(targets), message=message)
