"""The engine's requests that run nothing on the model: what it is, how it fares, aborts, counting, ranking."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from extproc.mock.api import STUMBLE, Reply, parse
from extproc.mock.exchange import TEXT, Exchange
from extproc.mock.prompts import chat_prompt
from extproc.mock.runner import send
from extproc.mock.sglang import bodies, info, loads
from extproc.mock.sglang.api import error, parse_v1
from extproc.mock.sglang.engine import Mode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.mock.sglang.engine import Engine

_HEALTH_SECONDS = 20  # SGLANG_HEALTH_CHECK_TIMEOUT
_NOT_FLUSHED = b"Flush cache failed.\n"
_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)


class Control:
    """These requests of one engine. ``health_delay``: seconds that ``/health`` takes (the engine generates a token)."""

    def __init__(self, engine: Engine, identity: Callable[[], info.Identity], health_delay: float) -> None:
        self._engine = engine
        self._identity = identity
        self._health_delay = health_delay
        self._profiling = False
        self._turn = 0  # of the rank that the last health check went to

    def routes(self) -> dict[str, tuple[str, Callable[[Exchange], Awaitable[None]]]]:
        """Path to methods and handler."""
        return {
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/rerank": ("POST, PUT", self._rerank),
            "/abort_request": ("POST", self._abort),
            "/flush_cache": ("GET, POST", self._flush_cache),
            "/start_profile": ("GET, POST", self._start_profile),
            "/stop_profile": ("GET, POST", self._stop_profile),
            "/health": ("GET", self._health),
            "/health_generate": ("GET", self._health),
            "/ready": ("GET", self._empty),
            "/ping": ("GET", self._empty),
            "/": ("GET, HEAD", self._root),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/model_info": ("GET", self._model_info),
            "/get_model_info": ("GET", self._model_info),
            "/server_info": ("GET", self._server_info),
            "/get_server_info": ("GET", self._server_info),
            "/v1/loads": ("GET", self._loads),
        }

    async def one_model(self, exchange: Exchange) -> None:
        """``GET /v1/models/{name}``."""
        card = self._identity().model_card()
        name = exchange.record.path.removeprefix("/v1/models/")
        if name == card["id"]:
            await send(exchange, Reply.json(200, card))
            return
        problem = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        await send(exchange, Reply.json(404, {"error": problem}))

    async def _count_tokens(self, exchange: Exchange) -> None:
        body = parse_v1(bodies.CountTokens, exchange.record)
        count = chat_prompt(body.messages, body.tools, body.system).length
        await send(exchange, Reply.json(200, {"input_tokens": count}))

    async def _rerank(self, exchange: Exchange) -> None:
        """As an engine that serves a reranker; one with a chat model answers 400."""
        body = parse_v1(bodies.Rerank, exchange.record)
        if not body.query or not body.documents:
            message = "Query cannot be empty" if not body.query else "Documents cannot be empty"
            await send(exchange, Reply.json(400, error(message, "BadRequestError", 400)))
            return
        await send(exchange, Reply.json(200, _ranked(body)))

    async def _abort(self, exchange: Exchange) -> None:
        body = parse(bodies.Abort, exchange.record.body)
        if body.rid or body.abort_all:
            self._engine.abort(body.rid or "", everything=body.abort_all)
        await self._empty(exchange)

    async def _flush_cache(self, exchange: Exchange) -> None:
        if self._engine.live:
            await exchange.reply(400, _NOT_FLUSHED, TEXT)
        else:
            await exchange.reply(200, _FLUSHED, TEXT)

    async def _start_profile(self, exchange: Exchange) -> None:
        if exchange.record.body not in (b"", b"null"):
            parse(bodies.Profile, exchange.record.body)
        if self._profiling:  # RuntimeError: Profiling is already in progress. Call /stop_profile first.
            await send(exchange, STUMBLE)
            return
        self._profiling = True
        await exchange.reply(200, b"Start profiling.\n", TEXT)

    async def _stop_profile(self, exchange: Exchange) -> None:
        if not self._profiling:  # RuntimeError: Profiling is not in progress. Call /start_profile first.
            await send(exchange, STUMBLE)
            return
        self._profiling = False
        await exchange.reply(200, b"Stop profiling. This will take some time.\n", TEXT)

    async def _health(self, exchange: Exchange) -> None:
        """A token of one rank: a prefill's first one, as the room of health checks is 0, else of each in turn."""
        if self._health_delay:
            await asyncio.sleep(self._health_delay)
        engine = self._engine
        self._turn = 0 if engine.mode is Mode.PREFILL else (self._turn + 1) % engine.dp_size
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await engine.works(self._turn)
        except TimeoutError:
            await exchange.reply(503, b"", None)
            return
        await self._empty(exchange)

    async def _empty(self, exchange: Exchange) -> None:
        await exchange.reply(200, b"", None)

    async def _root(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'"SGLang is running"')

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, loads.metrics(self._engine, self._identity().model), TEXT)

    async def _models(self, exchange: Exchange) -> None:
        await send(exchange, Reply.json(200, {"object": "list", "data": [self._identity().model_card()]}))

    async def _model_info(self, exchange: Exchange) -> None:
        await send(exchange, Reply.json(200, self._identity().model_info()))

    async def _server_info(self, exchange: Exchange) -> None:
        """Every rank is asked for its state, and waited for."""
        for rank in range(self._engine.dp_size):
            await self._engine.works(rank)
        await send(exchange, Reply.json(200, self._identity().server_info(self._engine.running)))

    async def _loads(self, exchange: Exchange) -> None:
        query = parse_qs(exchange.record.query)
        wanted = query.get("include", [""])[-1]
        include = {section.strip() for section in wanted.split(",")} if wanted else set()
        if not include <= loads.SECTIONS:
            await exchange.reply(500, b"Internal Server Error", TEXT)
            return
        rank = query.get("dp_rank", [""])[-1]
        found = loads.loads(self._engine, self._identity().version, include, int(rank) if rank.isdigit() else None)
        await send(exchange, Reply.json(200, found))


def _ranked(body: bodies.Rerank) -> list[dict[str, Any]]:
    """Scores that depend on query and document alone, best first."""
    scored: list[dict[str, Any]] = [
        {
            "score": (zlib.crc32(orjson.dumps([body.query, document])) % 1000) / 1000,
            "document": document if body.return_documents else None,
            "index": index,
        }
        for index, document in enumerate(body.documents)
    ]
    scored.sort(key=lambda entry: -float(entry["score"]))
    return scored[: body.top_n]
