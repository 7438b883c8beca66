"""What the tests of workers and control API stand on: an Envoy that acknowledges on demand, and small engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from extproc.workers.client import WorkerClient
from extproc.workers.endpoints import Endpoint, Snapshot
from extproc.workers.health import Monitor
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.metadata import Metadata
from extproc.workers.registry import Registry
from extproc.workers.resolver import Resolver
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, Status, Worker, WorkerUrl

LONG = 60.0  # seconds; how long a test waits for what should be there in milliseconds
FAST = HealthSettings(timeout=LONG, interval=0.02)
SLOW = HealthSettings(timeout=LONG, interval=60)  # what happens within a test was not waited for
PACE = Pace(seek=0.01, confirm=0.005, report=0.02, resolve=0.02)


@dataclass
class FakeEnvoy:
    """Stands for ``AdsServer.publish``: remembers snapshots; acknowledges at once, when released, or never."""

    published: list[Snapshot] = field(default_factory=list)
    acknowledged: Snapshot = field(default_factory=Snapshot)
    refusal: Exception | None = None
    publishing: int = 0
    overlapped: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def hold(self) -> None:
        """Acknowledge nothing until :meth:`release`."""
        self.gate.clear()
        self.started.clear()

    def release(self) -> None:
        """Acknowledge what is held, and everything later."""
        self.gate.set()

    async def publish(self, snapshot: Snapshot) -> None:
        """See extproc.workers.publication.Publish."""
        self.publishing += 1
        self.overlapped |= self.publishing > 1
        self.published.append(snapshot)
        self.started.set()
        try:
            await self.gate.wait()
        finally:
            self.publishing -= 1
        if self.refusal is not None:
            raise self.refusal
        self.acknowledged = snapshot

    def addresses(self, role: Role) -> list[str]:
        """What Envoy knows of a role now."""
        known = self.acknowledged.prefill if role is Role.PREFILL else self.acknowledged.decode
        return [endpoint.address for endpoint in known]


def spec(role: Role, url: str, **more: Any) -> WorkerSpec:
    """A registration."""
    return WorkerSpec(WorkerUrl.parse(url), role, **more)


def endpoint(ip: str, port: int = 8000, hostname: str = "w") -> Endpoint:
    """An endpoint of worker ``http://w:8000``."""
    return Endpoint(ip=ip, port=port, hostname=hostname)


def add_ready(registry: Registry, role: Role, url: str, *models: str, ip: str | None = None) -> Worker:
    """A worker that is healthy and placed; Envoy has not acknowledged it yet."""
    worker = registry.add(spec(role, url))
    if models:
        registry.describe(worker, Metadata(model_ids=models))
    registry.place(worker, ip or worker.url.host)
    registry.set_status(worker, Status.READY)
    return worker


async def until(registry: Registry, condition: Callable[[], bool], within: float = LONG) -> None:
    """Wait for a change of the registry that makes ``condition`` true."""
    changed = asyncio.Event()
    unsubscribe = registry.subscribe(lambda _worker, _change: changed.set())
    try:
        async with asyncio.timeout(within):
            while not condition():
                await changed.wait()
                changed.clear()
    finally:
        unsubscribe()


async def eventually(condition: Callable[[], object], within: float = LONG) -> None:
    """Wait for something that no event tells of."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 - see the docstring
            await asyncio.sleep(0.001)


@dataclass
class Engine:
    """A server with the control paths of an SGLang worker; what it answers can be changed at any time.

    ``owner`` "vllm" makes it a vLLM worker: 0.32, unless it ``knows_token_ids`` not. Its bootstrap server listens on a
    port of its own.
    """

    mode: str | None = "prefill"
    models: list[str] = field(default_factory=lambda: ["tiny"])
    owner: str = "sglang"
    bootstrap_port: int | None = 0  # None: it says nothing of one
    engine_ids: dict[str, str] = field(default_factory=dict)  # by rank, as the bootstrap server of Mooncake has them
    knows_token_ids: bool = True  # that a chat's kv_transfer_params may hold them
    ranks: int | None = None  # of vLLM; None: it does not read the header
    hang_posts: bool = False
    refusal: int = 400  # of a completion that asks for too little
    starts: int = 0  # its workers listen at another address after each
    health: int = 200
    key: str | None = None  # that requests must show; to ask how it is, nobody needs one
    model_listing: int = 200
    server_info_path: str = "/server_info"
    extra_info: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, bytes | int] = field(default_factory=dict)  # by path: what it answers there, or with which status
    hang: bool = False
    generates: int = 200  # what SGLang's /health_generate says
    hang_generating: bool = False  # until ``proceed``
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0  # requests, by vLLM's /metrics
    steps: bool = False  # the engine: its figures move
    host: str = "0.0.0.0"
    port: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    posts: list[tuple[str, Any]] = field(default_factory=list)  # path and body
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None
    _bootstrap: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The engine's base URL."""
        return f"http://127.0.0.1:{self.port}"

    def count(self, path: str) -> int:
        """How often ``path`` was asked for."""
        return sum(seen == path for seen, _ in self.requests)

    async def start(self) -> None:
        """Serve; at the same port as before after a :meth:`stop`."""
        self.starts += 1
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]
        await self.start_bootstrap()

    async def start_bootstrap(self) -> None:
        """Serve at the bootstrap port; at the same as before after a :meth:`stop_bootstrap`."""
        app = web.Application()
        app.router.add_get("/query", self._query)
        self._bootstrap = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._bootstrap.setup()
        await web.TCPSite(self._bootstrap, self.host, self.bootstrap_port or 0).start()
        if self.bootstrap_port is not None:
            self.bootstrap_port = self._bootstrap.addresses[0][1]

    async def stop(self) -> None:
        """Close the ports."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.stop_bootstrap()

    async def stop_bootstrap(self) -> None:
        """Close the bootstrap port."""
        if self._bootstrap is not None:
            await self._bootstrap.cleanup()
            self._bootstrap = None

    async def _query(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, {name.lower(): value for name, value in request.headers.items()}))
        address = {"0": {"0": f"tcp://127.0.0.1:{40000 + self.starts}"}}
        entries = {rank: {"engine_id": name, "worker_addr": address} for rank, name in self.engine_ids.items()}
        return web.json_response(entries)

    async def _answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers))
        self.asked.set()
        if self.hang:
            await asyncio.Event().wait()
        if request.path == "/health":
            return web.Response(status=self.health)
        if self._guards(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if (page := self.pages.get(request.path)) is not None:
            return web.Response(status=page) if isinstance(page, int) else web.Response(body=page)
        if request.path == "/health_generate" and self.owner == "sglang":
            if self.hang_generating:
                await self.proceed.wait()
            return web.Response(status=self.generates)
        if request.path == "/metrics" and self.owner == "vllm":
            done = len(self.requests) if self.steps else 0
            return web.Response(text=f"vllm:num_requests_running {self.running}.0\nvllm:prompt_tokens_total {done}\n")
        if request.path == "/v1/models":
            root = {"root": "/models/tiny"} if self.owner == "vllm" else {}
            entries = [{"id": model, "owned_by": self.owner, **root, "max_model_len": 2048} for model in self.models]
            return web.json_response({"object": "list", "data": entries}, status=self.model_listing)
        if self.owner == "vllm":
            found = request.path == "/version"
            return web.json_response({"version": "0.32.0"} if found else {}, status=200 if found else 404)
        if request.path == self.server_info_path:
            return web.json_response(self._server_info())
        if request.path == "/model_info":
            return web.json_response({"is_generation": True, "model_type": "llama", "architectures": ["Llama"]})
        return web.Response(status=404)

    async def _take(self, request: web.Request) -> web.Response:
        """A chat that holds no token ids at all, as an engine that knows them or not answers it; bad completions."""
        body = await request.json()
        self.requests.append((request.path, {name.lower(): value for name, value in request.headers.items()}))
        self.posts.append((request.path, body))
        if self.hang_posts:
            await asyncio.Event().wait()
        wanted = request.headers.get("x-data-parallel-rank")
        if self.ranks is not None and wanted is not None and int(wanted) >= self.ranks:
            return _refusal(f"data_parallel_rank {wanted} is out of range [0, {self.ranks}).", None)
        if self.owner == "vllm" and request.path == "/v1/completions" and body["max_tokens"] < 1:
            return _refusal(f"max_tokens must be at least 1, got {body['max_tokens']}.", "max_tokens", self.refusal)
        if self.owner != "vllm" or request.path != "/v1/chat/completions":
            return web.Response(status=404)
        if body["model"] not in self.models:
            return _refusal(f"The model `{body['model']}` does not exist.", "model", 404)
        if self.knows_token_ids and body["kv_transfer_params"]["prompt_token_ids"] == []:
            ids = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
            return _refusal(ids, "kv_transfer_params.prompt_token_ids")
        return web.json_response({"object": "chat.completion", "choices": []})

    def _guards(self, request: web.Request) -> bool:
        """Whether it asks for a key in vain; vLLM only below /v1."""
        guarded = self.owner != "vllm" or request.path.startswith("/v1")
        return self.key is not None and guarded and request.headers.get("authorization") != f"Bearer {self.key}"

    def _server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"version": "0.5.23", "tp_size": 1, **self.extra_info}
        if self.mode is not None:
            info["disaggregation_mode"] = self.mode
        if self.bootstrap_port is not None:
            info["disaggregation_bootstrap_port"] = self.bootstrap_port
        return info


def _refusal(message: str, param: str | None, status: int = 400) -> web.Response:
    """An error as vLLM shows it."""
    error = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return web.json_response({"error": error}, status=status)


@asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[Engine]:
    """A running :class:`Engine`."""
    server = Engine(**settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Fleet:
    """A registry, its monitor and a name server."""

    def __init__(
        self, settings: HealthSettings, pace: Pace = PACE, *, token_reuse: bool = True, dp_aware: bool = False
    ) -> None:
        self.names: dict[str, Sequence[str]] = {}
        self.looked_up = 0
        self.envoy = FakeEnvoy()
        self.registry = Registry(self.envoy.publish, drain_poll=0.001, dp_aware=dp_aware)
        self.client = WorkerClient()
        self.monitor = Monitor(
            self.registry,
            self.client,
            settings=settings,
            resolver=Resolver(self._lookup),
            pace=pace,
            token_reuse=token_reuse,
        )

    async def _lookup(self, host: str, _port: int) -> Sequence[str]:
        self.looked_up += 1
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[host]

    async def becomes(self, worker: Worker, status: Status) -> None:
        await until(self.registry, lambda: worker.status is status)

    async def is_said(self, worker: Worker, text: str) -> None:
        """Wait until the worker's trouble contains ``text``; reasons alone are not told to subscribers."""
        await eventually(lambda: text in self.registry.trouble(worker))

    async def is_not_said(self, worker: Worker, text: str) -> None:
        """Wait until it does not contain ``text``."""
        await eventually(lambda: text not in self.registry.trouble(worker))


@asynccontextmanager
async def fleet(
    settings: HealthSettings = SLOW, pace: Pace = PACE, *, token_reuse: bool = True, dp_aware: bool = False
) -> AsyncIterator[Fleet]:
    """A running :class:`Fleet`; afterwards nothing of it may be left."""
    made = Fleet(settings, pace, token_reuse=token_reuse, dp_aware=dp_aware)
    made.monitor.start()
    try:
        yield made
    finally:
        await made.monitor.stop()
        await made.registry.close()
        await made.client.close()
    ours = ("watch-", "drain-", "retire-", "publish-", "stalls", "ask-", "restarts-")
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith(ours)] == []
