"""The vLLM mock worker: an engine behind a port, and which path leads where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from extproc.mock.api import InvalidBodyError
from extproc.mock.engine import CrashError, Pace
from extproc.mock.observed import PATIENCE
from extproc.mock.runner import Runner, send
from extproc.mock.vllm import bodies
from extproc.mock.vllm.anthropic import MessagesApi
from extproc.mock.vllm.api import Api, Context, invalid, read
from extproc.mock.vllm.chat import ChatApi
from extproc.mock.vllm.completion import CompletionApi
from extproc.mock.vllm.control import Control
from extproc.mock.vllm.conversation import is_probe
from extproc.mock.vllm.engine import Engine, Options, Role, new_id
from extproc.mock.vllm.generate import GenerateApi
from extproc.mock.vllm.mooncake import Mooncake
from extproc.mock.vllm.nixl import Nixl
from extproc.mock.vllm.responses import ResponsesApi, Store
from extproc.mock.worker import MockWorker

if TYPE_CHECKING:
    from extproc.mock.exchange import Exchange
    from extproc.mock.faults import Fault, Rule
    from extproc.mock.kv_events import Publisher
    from extproc.mock.recorder import Record

NIXL = "NixlConnector"
MOONCAKE = "MooncakeConnector"
_NIXL_LEASE = 30.0  # kv_lease_duration
_MOONCAKE_LEASE = 480.0  # VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
_TURNED_AWAY = frozenset({429, 503})  # by what stands before the handlers
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "aggregated": Role.AGGREGATED}


class VllmMock(MockWorker):
    """A strict mock of one vLLM process.

    ``role`` is ``prefill``, ``decode`` or ``aggregated``; ``connector`` is ``NixlConnector``, ``MooncakeConnector`` or
    empty (none). ``side_channel_port`` is where decodes fetch KV caches, on ``host`` or ``side_channel_host``, which is
    what they are told (VLLM_NIXL_SIDE_CHANNEL_HOST: a name that they know); ``bootstrap_port`` where a Mooncake prefill
    answers ``GET /query``; both are real after ``start``. ``tokens`` is the length of an answer that nothing limits.
    Times are in seconds: ``first_token_delay`` is what computing a prompt takes, ``token_delay`` a token, ``lease`` how
    long blocks wait for a decode (None: the engine's default). ``options`` are those of ``Options``, by name.
    """

    inference_paths = frozenset(
        {
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
            "/inference/v1/generate",
            "/tokenize",
            "/detokenize",
        }
    )

    def __init__(
        self,
        role: str = "aggregated",
        *,
        connector: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        side_channel_host: str | None = None,
        side_channel_port: int = 0,
        bootstrap_port: int = 0,
        engine_id: str | None = None,
        model: str = "mock-model",
        tokens: int = 16,
        first_token_delay: float = 0.0,
        token_delay: float = 0.0,
        keep_alive: float = 5.0,
        record_limit: int = 100_000,
        faults: tuple[Fault | Rule, ...] = (),
        lease: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            role=role, host=host, port=port, keep_alive=keep_alive, record_limit=record_limit, faults=faults
        )
        self.role = role
        self.model = model
        self.engine_id = engine_id or f"{new_id(8)}-{new_id(4)}-{new_id(4)}-{new_id(4)}-{new_id(12)}"
        self.connector_name = ("" if role == "aggregated" else NIXL) if connector is None else connector
        self._side_channel_host = side_channel_host or host
        self.side_channel_port = side_channel_port
        self.bootstrap_port = bootstrap_port
        if lease is None:
            lease = _MOONCAKE_LEASE if self.connector_name == MOONCAKE else _NIXL_LEASE
        self._server.on_injected = self._on_injected
        self.engine = Engine(_ROLES[role], Options(model=model, lease=lease, **options))
        self.engine.connector = self._connector = self._connect()
        self.publisher: Publisher | None = None  # of KV events, after ``start``
        self.store = Store()
        self._runner = Runner(self.engine, Pace(first_token_delay, token_delay, tokens), 0.0, self._refused)
        self._control = Control(self.engine, self.store)
        self._routes = {
            **self._control.routes(),
            "/v1/chat/completions": ("POST", self._model(bodies.Chat, ChatApi)),
            "/v1/completions": ("POST", self._model(bodies.Completion, CompletionApi)),
            "/v1/messages": ("POST", self._model(bodies.Messages, MessagesApi)),
            "/v1/responses": ("POST", self._model(bodies.Responses, self._responses)),
            "/inference/v1/generate": ("POST", self._model(bodies.Generate, GenerateApi)),
        }

    @property
    def pace(self) -> Pace:
        """How fast tokens come; may be replaced while the mock runs."""
        return self._runner.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self._runner.pace = pace

    # --- what tests look at ---

    @property
    def pinned(self) -> int:
        """How many blocks are kept for decodes that have not come."""
        return self.engine.pins.count

    @property
    def pins(self) -> tuple[str, ...]:
        """Whose blocks these are: the prefills' request ids (NIXL) or transfer ids (Mooncake)."""
        return self.engine.pins.keys

    @property
    def expired(self) -> int:
        """How many pins have ended by their lease."""
        return self.engine.pins.expired

    @property
    def external_hits(self) -> int:
        """How many tokens were fetched from prefills."""
        return sum(totals.hits for totals in self.engine.totals)

    @property
    def bootstrap_url(self) -> str:
        """Where a Mooncake prefill answers ``/query``: the decode's ``remote_bootstrap_addr``."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.bootstrap_port}"

    @property
    def bootstrap_queries(self) -> int:
        """How often it was asked."""
        return self._connector.bootstrap.queries if isinstance(self._connector, Mooncake) else 0

    async def freed(self, patience: float = PATIENCE) -> None:
        """Wait until no blocks are pinned."""
        await self.recorder.until(lambda: not self.pinned, patience)

    async def holding(self, count: int = 1, patience: float = PATIENCE) -> None:
        """Wait until the blocks of ``count`` requests are pinned."""
        await self.recorder.until(lambda: len(self.pins) >= count, patience)

    async def wanted(self, count: int = 1, patience: float = PATIENCE) -> None:
        """Wait until decodes wait for ``count`` transfers by Mooncake."""
        await self.recorder.until(lambda: len(self.asked_for) == count, patience)

    async def refuse(self) -> None:
        """See MockWorker; a process that takes no connections is gone, and nobody waits at it."""
        await super().refuse()
        if isinstance(self._connector, Mooncake):
            self._connector.deaf = True

    async def accept(self) -> None:
        """See MockWorker."""
        await super().accept()
        if isinstance(self._connector, Mooncake):
            self._connector.deaf = False

    @property
    def asked_for(self) -> tuple[str, ...]:
        """The transfers that decodes wait for by Mooncake."""
        return self._connector.wanted if isinstance(self._connector, Mooncake) else ()

    async def meet(self, prefill: VllmMock) -> None:
        """By Mooncake, know the way to ``prefill``, as after a first request."""
        if isinstance(self._connector, Mooncake):
            await self._connector.meet(f"http://{prefill.host}:{prefill.bootstrap_port}")

    @property
    def searching(self) -> bool:
        """A decode is asking a bootstrap server for the way."""
        return isinstance(self._connector, Mooncake) and self._connector.searching > 0

    @property
    def has_bootstrap(self) -> bool:
        """Whether decodes ask at ``bootstrap_port`` for the way."""
        return isinstance(self._connector, Mooncake) and self.role != "decode"

    # --- the worker's part ---

    def _is_probe(self, record: Record) -> bool:
        return is_probe(record)

    def _connect(self) -> Nixl | Mooncake | None:
        if self.connector_name == NIXL:
            return Nixl(self.engine, self.engine_id)
        if self.connector_name == MOONCAKE:
            return Mooncake(self.engine, self.engine_id, self.recorder.changed)
        if self.connector_name:
            raise ValueError(f"unknown connector: {self.connector_name}")
        return None

    async def _open(self) -> None:
        self.engine.pins.watch(self.recorder.changed)
        if self.engine.options.kv_events:
            self._publish_events()
        connector = self._connector
        if connector is None:
            return
        await connector.start(self._side_channel_host, self.side_channel_port)
        self.side_channel_port = connector.port
        if isinstance(connector, Mooncake) and self.has_bootstrap:
            await connector.bootstrap.start(self.host, self.bootstrap_port)
            self.bootstrap_port = connector.bootstrap.port

    def _publish_events(self) -> None:
        from extproc.mock.kv_events import Publisher  # noqa: PLC0415 - ZeroMQ is loaded where it is needed

        ports = (0, 0) if self.publisher is None else (self.publisher.port, self.publisher.replay_port)
        publisher = self.publisher = Publisher(*ports)

        def tell(*events: object) -> None:
            if events:
                publisher.publish(*events)

        self.engine.blocks.tell = tell

    async def _close(self) -> None:
        await self._runner.stop()
        await asyncio.gather(*self._end(), return_exceptions=True)
        if isinstance(self._connector, Mooncake):
            await self._connector.bootstrap.stop()

    def _kill(self) -> None:
        self._end()

    def _end(self) -> list[asyncio.Task[Any]]:
        """Nothing is done any more; the tasks that end by that."""
        self._runner.kill()
        if self.publisher is not None:
            self.engine.blocks.tell = None
            self.publisher.close()
        if isinstance(self._connector, Mooncake):
            self._connector.bootstrap.kill()
        return self.engine.kill()

    async def _handle(self, exchange: Exchange) -> None:
        record = exchange.record
        methods, route = self._routes.get(record.path) or self._control.response(record.path) or ("", None)
        if route is None:
            await exchange.reply(404, b'{"detail":"Not Found"}')
        elif record.method not in methods.split(", "):
            await exchange.reply(405, b'{"detail":"Method Not Allowed"}', headers=[("allow", methods)])
        else:
            try:
                await route(exchange)
            except InvalidBodyError as problem:
                await send(exchange, invalid(problem))
            except CrashError:
                self.crash()

    def _refused(self, api: object) -> None:
        """``_with_kv_transfer_rejection_cleanup`` (0.32), which takes every end but a good one for a refusal."""
        if isinstance(api, Api) and api.frees_when_refused and self._server.ending is None:
            self.engine.reject(api.handoff, api.rank)

    def _on_injected(self, record: Record) -> None:
        """Errors come from handlers, but for those with which a server turns requests away."""
        if not record.inference or record.status in _TURNED_AWAY:
            return
        try:
            params = json.loads(record.body)["kv_transfer_params"]
        except (ValueError, LookupError, TypeError):
            return
        if isinstance(params, dict):
            self.engine.reject(params)

    def _responses(self, context: Context, body: bodies.Responses) -> ResponsesApi:
        return ResponsesApi(context, body, self.store)

    def _model(self, kind: type[Any], api: Callable[[Context, Any], Api]) -> Callable[[Exchange], Awaitable[None]]:
        """The handler of a path that runs the model: ``kind`` is its body, ``api`` words its answers."""
        parse: Callable[[type[Any], Any], Any] = read

        async def handle(exchange: Exchange) -> None:
            record = exchange.record
            context = Context(self.engine.options, record)
            await self._runner.run(exchange, api(context, parse(kind, record)))

        return handle
