"""The engine's requests that run nothing on the model: what it is, how it fares, tokens, aborts, kept responses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from extproc.mock.api import Reply
from extproc.mock.exchange import TEXT
from extproc.mock.generation import Prompt, word
from extproc.mock.prompts import chat_prompt
from extproc.mock.runner import send
from extproc.mock.vllm import bodies, checks, metrics
from extproc.mock.vllm.anthropic import error_reply
from extproc.mock.vllm.api import RefusedError, error, read, refusal
from extproc.mock.vllm.engine import new_id
from extproc.mock.vllm.responses import Store

if TYPE_CHECKING:
    from extproc.mock.exchange import Exchange
    from extproc.mock.vllm.engine import Engine

Handler = Callable[["Exchange"], Awaitable[None]]
_RESPONSES = "/v1/responses/"


class Control:
    """These requests of one engine."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store
        self._profiling = False

    def routes(self) -> dict[str, tuple[str, Handler]]:
        """Path to methods and handler."""
        options = self._engine.options
        profiler: dict[str, tuple[str, Handler]] = {
            "/start_profile": ("POST", self._start_profile),
            "/stop_profile": ("POST", self._stop_profile),
        }
        dev: dict[str, tuple[str, Handler]] = {"/reset_prefix_cache": ("POST", self._reset_prefix_cache)}
        return {
            **(profiler if options.profiler else {}),
            **(dev if options.dev_mode else {}),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/inference/v1/abort_requests": ("POST", self._abort),
            "/health": ("GET", self._empty),
            "/ping": ("GET, POST", self._empty),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
            "/metrics": ("GET", self._metrics),
            "/metrics/": ("GET", self._some_metrics),
            "/v1/models": ("GET", self._models),
        }

    def response(self, path: str) -> tuple[str, Handler] | None:
        """Methods and handler of a path below ``/v1/responses/``; None: there is none."""
        name = path.removeprefix(_RESPONSES)
        if not path.startswith(_RESPONSES) or not name:
            return None
        if name.endswith("/cancel"):
            return "POST", lambda exchange: send(exchange, self._store.cancel(name.removesuffix("/cancel")))
        return None if "/" in name else ("GET", lambda exchange: send(exchange, self._store.get(name)))

    async def _count_tokens(self, exchange: Exchange) -> None:
        body = read(bodies.CountTokens, exchange.record)
        try:
            checks.model(body.model, self._engine.options)
        except RefusedError as problem:
            await send(exchange, error_reply(problem))
            return
        count = chat_prompt(body.messages, body.tools, body.system).length
        counted = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        await send(exchange, Reply.json(200, counted))

    async def _tokenize(self, exchange: Exchange) -> None:
        chat = b'"messages"' in exchange.record.body
        body: Any = read(bodies.TokenizeChat if chat else bodies.TokenizeText, exchange.record)
        prompt = chat_prompt(body.messages, body.tools) if chat else Prompt(body.prompt)
        tokens = prompt.tokens()
        found = {
            "count": len(tokens),
            "max_model_len": self._engine.options.max_model_len,
            "tokens": [token for token, _ in tokens],
            "token_strs": [text for _, text in tokens] if body.return_token_strs else None,
        }
        await self._if_served(exchange, body.model, found)

    async def _detokenize(self, exchange: Exchange) -> None:
        body = read(bodies.Detokenize, exchange.record)
        await self._if_served(exchange, body.model, {"prompt": "".join(word(token) for token in body.tokens)})

    async def _if_served(self, exchange: Exchange, model: str | None, found: dict[str, Any]) -> None:
        try:
            checks.model(model, self._engine.options)
        except RefusedError as problem:
            await send(exchange, refusal(problem))
        else:
            await send(exchange, Reply.json(200, found))

    async def _abort(self, exchange: Exchange) -> None:
        try:
            body = orjson.loads(exchange.record.body)
        except orjson.JSONDecodeError as problem:
            await send(exchange, Reply.json(400, error(f"JSON decode error: {problem}", "Bad Request", 400)))
            return
        ids = body.get("request_ids")
        if ids is None:
            await send(exchange, Reply.json(400, error("Missing 'request_ids' in request body", "Bad Request", 400)))
            return
        self._engine.abort([ids] if isinstance(ids, str) else ids)
        await self._empty(exchange)

    async def _empty(self, exchange: Exchange) -> None:
        await exchange.reply(200, b"", None)

    async def _reset_prefix_cache(self, exchange: Exchange) -> None:
        await send(exchange, Reply.json(200, {"success": self._engine.blocks.reset()}))

    async def _start_profile(self, exchange: Exchange) -> None:
        if exchange.record.body not in (b"", b"null"):
            read(bodies.StartProfile, exchange.record)
        if self._profiling:
            message = "A profiling session is already active. Call /stop_profile before starting another session."
            await send(exchange, Reply.json(409, error(message, "Conflict", 409)))
            return
        self._profiling = True
        await self._empty(exchange)

    async def _stop_profile(self, exchange: Exchange) -> None:
        self._profiling = False
        await self._empty(exchange)

    async def _version(self, exchange: Exchange) -> None:
        await send(exchange, Reply.json(200, {"version": self._engine.options.version}))

    async def _load(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'{"server_load":0}')  # counted only with --enable-server-load-tracking

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, metrics.text(self._engine), TEXT)

    async def _some_metrics(self, exchange: Exchange) -> None:
        """Behind ``/metrics`` the page is prometheus_client's own: only there are names looked at."""
        names = parse_qs(exchange.record.query).get("name[]")
        await exchange.reply(200, metrics.text(self._engine, names), TEXT)

    async def _models(self, exchange: Exchange) -> None:
        await send(exchange, Reply.json(200, {"object": "list", "data": [self._card()]}))

    def _card(self) -> dict[str, Any]:
        options = self._engine.options
        now = int(time.time())
        permission = {
            "id": f"modelperm-{new_id()}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": options.model,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": options.root or options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
            "permission": [permission],
        }
