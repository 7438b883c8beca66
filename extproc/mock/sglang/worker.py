"""The SGLang mock worker: an engine behind a port, and which path leads where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from extproc.mock.api import InvalidBodyError, Reply, parse
from extproc.mock.engine import CrashError, Pace
from extproc.mock.runner import Runner, send
from extproc.mock.sglang import bodies
from extproc.mock.sglang.anthropic import MessagesApi, error_reply
from extproc.mock.sglang.api import Api, error, in_full, in_short, parse_v1
from extproc.mock.sglang.control import Control
from extproc.mock.sglang.engine import Engine, Layout, Mode, Patience
from extproc.mock.sglang.info import VERSION, Identity
from extproc.mock.sglang.native import GenerateApi
from extproc.mock.sglang.openai import ChatApi, CompletionApi
from extproc.mock.sglang.responses import ResponsesApi
from extproc.mock.worker import MockWorker

if TYPE_CHECKING:
    from extproc.mock.exchange import Exchange
    from extproc.mock.faults import Fault, Rule

_MODES = {"prefill": Mode.PREFILL, "decode": Mode.DECODE, "regular": Mode.REGULAR}
_TWO_FIELDS = (0, 5, 10)  # from which on the prefill's rank has a field of its own
_CORS = (("vary", "Origin"),)


class SglangMock(MockWorker):
    """A strict mock of one SGLang process.

    ``role`` is ``prefill``, ``decode`` or ``regular`` (an aggregated worker); ``tokens`` the length of an answer that
    nothing limits. Times are in seconds: ``first_token_delay`` is the prefill's work, ``health_delay`` what ``/health``
    takes (1 s on the real engine), ``disconnect_delay`` how long a request works on whose client left before anything
    was sent (up to 4 s there); ``dp_size`` is the number of data-parallel ranks, with ``dp_attention`` or without, for
    which a ``version`` before 0.5.10 knows one field; for ``death_delay``, ``connect_timeout`` and ``wait_timeout`` see
    ``Patience``. A decode dies of a prefill whose cache has another ``layout``.
    """

    inference_paths = frozenset(
        {
            "/v1/chat/completions",
            "/v1/completions",
            "/generate",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
            "/v1/rerank",
        }
    )

    def __init__(
        self,
        role: str = "regular",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bootstrap_port: int = 0,
        model: str = "tiny",
        dp_size: int = 1,
        dp_attention: bool = False,
        version: str = VERSION,
        tokens: int = 16,
        first_token_delay: float = 0.0,
        token_delay: float = 0.0,
        health_delay: float = 0.0,
        disconnect_delay: float = 0.0,
        death_delay: float = 2.5,
        connect_timeout: float = 15.0,
        wait_timeout: float = 300.0,
        layout: Layout | None = None,
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
        self.version = version
        self.layout = layout or Layout()
        one_field = tuple(int(part) for part in version.split(".")[:3]) < _TWO_FIELDS
        patience = Patience(death_delay, connect_timeout, wait_timeout)
        self.engine = Engine(
            _MODES[role], patience, self.layout, dp_size, one_field=one_field, dp_attention=dp_attention
        )
        self._runner = Runner(self.engine, Pace(first_token_delay, token_delay, tokens), disconnect_delay)
        self._control = Control(self.engine, self._identity, health_delay)
        self._routes = {
            **self._control.routes(),
            "/v1/chat/completions": ("POST", self._model(bodies.Chat, ChatApi)),
            "/v1/completions": ("POST", self._model(bodies.Completion, CompletionApi)),
            "/generate": ("POST, PUT", self._model(bodies.Generate, GenerateApi)),
            "/v1/messages": ("POST", self._model(bodies.Messages, MessagesApi)),
            "/v1/responses": ("POST", self._model(bodies.Responses, ResponsesApi)),
        }

    @property
    def pace(self) -> Pace:
        """How fast tokens come; may be replaced while the mock runs."""
        return self._runner.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self._runner.pace = pace

    @property
    def has_bootstrap(self) -> bool:
        """Whether decodes meet it at ``bootstrap_port``."""
        return self.engine.mode is Mode.PREFILL

    async def _open(self) -> None:
        if self.has_bootstrap:
            self.bootstrap_port = await self.engine.bootstrap.start(self.host, self.bootstrap_port)

    async def _close(self) -> None:
        await self._runner.stop()
        self.engine.bootstrap.stop()
        await self.engine.prefills.stop()

    def _kill(self) -> None:
        self._runner.kill()
        self.engine.bootstrap.stop()
        self.engine.prefills.kill()

    def _identity(self) -> Identity:
        engine = self.engine
        return Identity(
            engine.mode,
            self.model,
            self.host,
            self.port,
            self.bootstrap_port,
            self.layout,
            dp_size=engine.dp_size,
            version=self.version,
        )

    async def _handle(self, exchange: Exchange) -> None:
        record = exchange.record
        methods, route = self._routes.get(record.path, ("", None))
        if route is None and record.path.startswith("/v1/models/"):
            methods, route = "GET", self._control.one_model
        if route is None:
            await exchange.reply(404, b'{"detail":"Not Found"}')
        elif record.method not in methods.split(", "):
            await exchange.reply(405, b'{"detail":"Method Not Allowed"}', headers=[("allow", methods)])
        else:
            try:
                await route(exchange)
            except InvalidBodyError as problem:
                await send(exchange, _invalid(record.path, problem))
            except CrashError:
                self.crash()

    def _model(self, kind: type[Any], api: Callable[[Any, Mode], Api]) -> Callable[[Exchange], Awaitable[None]]:
        """The handler of a path that runs the model: ``kind`` is its body, ``api`` words its answers."""
        read: Callable[[type[Any], Any], Any] = parse_v1

        async def handle(exchange: Exchange) -> None:
            record = exchange.record
            body = parse(kind, record.body) if kind is bodies.Generate else read(kind, record)
            await self._runner.run(exchange, api(body, self.engine.mode))

        return handle


def _invalid(path: str, problem: InvalidBodyError) -> Reply:
    """What a path says to a body that is no request for it."""
    if path.startswith("/v1/messages"):
        return error_reply(400, "invalid_request_error", in_short(problem))
    if path.startswith("/v1/responses"):
        detail = {"message": in_full(problem), "type": "Bad Request", "param": None, "code": 400}
        return Reply.json(400, {"error": detail})
    return Reply.json(400, error(in_full(problem), "Bad Request", 400))
