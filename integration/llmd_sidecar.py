"""A strict stand-in for llm-d's routing sidecar, beside one decode worker, over real sockets.

As llm-d/llm-d-router has it: pkg/sidecar/proxy/dispatch.go, connector_nixlv2.go, connector_sglang.go,
pkg/common/routing/common.go, pkg/common/request (CapSingleToken). It refuses what the real one refuses: a prefill
target outside its allowlist (403), a body that is no JSON object (400).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from typing import Any, Final, Self

import aiohttp
from aiohttp import web

# In the order in which it trusts them.
NAMES: Final = ("x-prefiller-host-port", "x-llm-d-prefiller-host-port")
_APIS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "trailer", "upgrade"}
_NO_PARAMS: Final = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


class LlmdSidecar:
    """``decoder`` is the engine's URL. ``connector``: ``nixlv2`` or ``sglang``, with the one ``bootstrap_port``."""

    def __init__(self, decoder: str, connector: str, allowed: set[str], bootstrap_port: int = 8998) -> None:
        self._decoder = decoder
        self._connector = connector
        self._allowed = allowed
        self._bootstrap_port = bootstrap_port
        self.named: list[str] = []  # prefill targets of the requests, "" for none
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._prefills: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the gateway finds the decode worker."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        for path in _APIS:
            app.router.add_post(path, self._disaggregated)
        app.router.add_route("*", "/{rest:.*}", self._decode)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        for task in list(self._prefills):
            task.cancel()
        await self._session.close()

    async def listen(self) -> None:
        """Accept connections; on the same port as before."""
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def refuse(self) -> None:
        """Refuse connections."""
        await self._site.stop()

    async def _disaggregated(self, request: web.Request) -> web.StreamResponse:
        values: list[str] = []
        for name in NAMES:
            values = values or request.headers.getall(name, [])
        hosts = values[0].split(",") if len(values) == 1 else values
        target = hosts[0].strip() if hosts else ""
        body = await request.read()
        if "x-request-id" in request.headers:  # else it asks what the worker is
            self.named.append(target)
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if not target:
            return await self._decode(request)
        if target.rpartition(":")[0] not in self._allowed:
            return web.Response(status=403, text="Forbidden: prefill target not allowed by SSRF protection")
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            return web.json_response({"error": "invalid JSON"}, status=400)
        run = self._nixl if self._connector == "nixlv2" else self._sglang
        return await run(request, fields, target)

    async def _nixl(self, request: web.Request, fields: dict[str, Any], target: str) -> web.StreamResponse:
        """Prefill, then decode with what it answered."""
        prefill = {
            **fields,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **_NO_PARAMS},
            "max_tokens": 1,
            "stream": False,
        }
        if request.path == "/v1/chat/completions":
            prefill["max_completion_tokens"] = 1
        for key in ("min_tokens", "stream_options"):
            prefill.pop(key, None)
        own = str(uuid.uuid1())
        headers = _forwarded(request, own)
        try:
            async with self._session.post(f"http://{target}{request.path_qs}", json=prefill, headers=headers) as answer:
                said = await answer.read()
        except aiohttp.ClientError:
            return web.Response(status=502)  # Go's reverse proxy
        if not 200 <= answer.status < 300:
            return web.Response(status=answer.status, body=said, headers=_end_to_end(answer))
        params = json.loads(said).get("kv_transfer_params")
        return await self._pass_on(request, json.dumps({**fields, "kv_transfer_params": params}).encode(), headers)

    async def _sglang(self, request: web.Request, fields: dict[str, Any], target: str) -> web.StreamResponse:
        """Both at once; nobody looks at what the prefill answers, nor ends it when the client leaves."""
        both = {
            **fields,
            "bootstrap_host": target.rpartition(":")[0],
            "bootstrap_port": self._bootstrap_port,
            "bootstrap_room": time.time_ns() + random.randrange(1000),
        }
        body = json.dumps(both).encode()
        headers = _forwarded(request)
        task = asyncio.create_task(self._send_prefill(f"http://{target}{request.path_qs}", body, headers))
        self._prefills.add(task)
        task.add_done_callback(self._prefills.discard)
        return await self._pass_on(request, body, headers)

    async def _send_prefill(self, url: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            async with self._session.post(url, data=body, headers=headers) as answer:
                await answer.read()
        except aiohttp.ClientError:
            pass

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        return await self._pass_on(request, await request.read(), _forwarded(request))

    async def _pass_on(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """To the engine beside it, and its answer as it comes."""
        url = self._decoder + request.path_qs
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError:
            return web.Response(status=502)


def _forwarded(request: web.Request, own_id: str = "") -> dict[str, str]:
    """The client's headers, without those that are for the sidecar."""
    headers = {name: value for name, value in request.headers.items() if name.lower() not in {*_HOP, *NAMES}}
    if own_id:
        headers["x-request-id"] = own_id
    return headers


def _end_to_end(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
