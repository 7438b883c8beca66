"""The SGLang mock worker: which path does what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from extproc.mock.faults import Fault, Rule
from extproc.mock.http_server import TEXT, Exchange
from extproc.mock.sglang import bodies
from extproc.mock.sglang.batch import Spread, several, single
from extproc.mock.sglang.engine import Batch, CrashError, Engine, EngineError, Mode, Pace, Sequence
from extproc.mock.sglang.openai import DONE, Api, ChatApi, error_body, error_event
from extproc.mock.worker import MockWorker

Body = TypeVar("Body", bound=BaseModel)
_MODES = {"prefill": Mode.PREFILL, "decode": Mode.DECODE, "regular": Mode.REGULAR}


class SglangMock(MockWorker):
    """A strict mock of one SGLang process.

    ``role`` is ``prefill``, ``decode`` or ``regular`` (an aggregated worker). ``tokens`` is the length of an answer that
    nothing limits; delays are in seconds. ``death_delay``: how long a decode takes to notice that its prefill died.
    ``connect_timeout``: how long it tries a bootstrap port where nobody listens. ``wait_timeout``: how long a leg waits
    for the other one.
    """

    inference_paths = frozenset({"/v1/chat/completions"})

    def __init__(
        self,
        role: str = "regular",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bootstrap_port: int = 0,
        model: str = "tiny",
        tokens: int = 16,
        first_token_delay: float = 0.0,
        token_delay: float = 0.0,
        death_delay: float = 2.5,
        connect_timeout: float = 15.0,
        wait_timeout: float = 300.0,
        keep_alive: float = 5.0,
        record_limit: int = 100_000,
        faults: tuple[Fault | Rule, ...] = (),
    ) -> None:
        super().__init__(
            role=role, host=host, port=port, keep_alive=keep_alive, record_limit=record_limit, faults=faults
        )
        self.role = role
        self.model = model
        self.bootstrap_port = bootstrap_port
        self.pace = Pace(first_token_delay, token_delay, tokens)
        self.engine = Engine(
            _MODES[role], death_delay=death_delay, connect_timeout=connect_timeout, wait_timeout=wait_timeout
        )
        self._routes: dict[tuple[str, str], Callable[[Exchange], Awaitable[None]]] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
        }

    # --- life ------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self.engine.mode is Mode.PREFILL:
            self.bootstrap_port = await self.engine.bootstrap.start(self.host, self.bootstrap_port)

    async def _close(self) -> None:
        self.engine.bootstrap.stop()
        await self.engine.prefills.stop()

    def _kill(self) -> None:
        self.engine.bootstrap.stop()

    # --- requests --------------------------------------------------------------------------------------------------

    async def _handle(self, exchange: Exchange) -> None:
        route = self._routes.get((exchange.record.method, exchange.record.path))
        if route is None:
            await exchange.reply(404, b'{"detail":"Not Found"}')
            return
        try:
            await route(exchange)
        except CrashError:
            self.crash()

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, b"", None)

    async def _models(self, exchange: Exchange) -> None:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "root": self.model,
            "parent": None,
            "max_model_len": 131072,
        }
        await exchange.reply(200, orjson.dumps({"object": "list", "data": [card]}))

    async def _chat(self, exchange: Exchange) -> None:
        body = await self._parse(exchange, bodies.Chat)
        if body is None:
            return
        if not body.messages:
            await self._refuse(exchange, EngineError(400, "Messages cannot be empty."))
            return
        spread = Spread(body.rid, body.bootstrap_host, body.bootstrap_port, body.bootstrap_room)
        sampling = ChatApi.sampling(body)
        prompt = ChatApi.prompt(body)
        try:
            if body.n == 1:
                batch = single(prompt, sampling, spread, None)
            else:
                batch = several([prompt], lambda _: sampling, spread, lambda _: None)
            await self._generate(exchange, ChatApi(body), batch, stream=body.stream)
        except EngineError as error:
            await self._refuse(exchange, error)

    async def _generate(self, exchange: Exchange, api: Api, batch: Batch, *, stream: bool) -> None:
        """Run a batch and word the answer; raises EngineError while no byte has been sent."""
        self.engine.admit(batch)
        pace = self._pace(exchange.fault)
        try:
            if stream:
                await self._stream(exchange, api, batch, pace)
                return
            if batch.single:
                await self.engine.complete(batch.sequences[0], pace)
            else:
                async with asyncio.TaskGroup() as group:
                    for sequence in batch.sequences:
                        group.create_task(self.engine.complete(sequence, pace))
            await exchange.reply(200, api.answer(batch))
        finally:
            self.engine.release(batch)

    async def _stream(self, exchange: Exchange, api: Api, batch: Batch, pace: Pace) -> None:
        try:
            async for sequence in self._steps(batch, pace):
                if not exchange.started:
                    await exchange.start()
                await exchange.chunk(api.step(sequence))
            end = api.end(batch)
        except EngineError as error:
            await exchange.start()
            end = error_event(error.message, "InternalServerError", error.status)
        await exchange.chunk(end + DONE)
        await exchange.finish()

    async def _steps(self, batch: Batch, pace: Pace) -> AsyncIterator[Sequence]:
        if batch.single:
            async for sequence in self.engine.run(batch.sequences[0], pace):
                yield sequence
            return
        runs = [self.engine.run(sequence, pace) for sequence in batch.sequences]
        while runs:
            for run in list(runs):
                try:
                    yield await anext(run)
                except StopAsyncIteration:
                    runs.remove(run)

    def _pace(self, fault: Fault | None) -> Pace:
        if fault is None:
            return self.pace
        first, token, tokens = fault.delay_first_token, fault.delay_token, fault.tokens
        return Pace(
            self.pace.first_token if first is None else first,
            self.pace.token if token is None else token,
            self.pace.tokens if tokens is None else tokens,
        )

    async def _parse(self, exchange: Exchange, kind: type[Body]) -> Body | None:
        try:
            data: Any = orjson.loads(exchange.record.body)
            return kind.model_validate(data)
        except orjson.JSONDecodeError as error:
            message = str(error)
        except ValidationError as error:
            message = str(error)
        await exchange.reply(400, orjson.dumps(error_body(message, "Bad Request", 400)))
        return None

    async def _refuse(self, exchange: Exchange, error: EngineError) -> None:
        kind = "BadRequestError" if error.status == 400 else str(error.status)
        await exchange.reply(error.status, orjson.dumps(error_body(error.message, kind, error.status)))
