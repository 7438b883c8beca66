"""What is asked of every worker at once: to flush its cache, to start or stop its profiler.

SGLang 0.5.23 (``entrypoints/http_server.py``): ``POST /flush_cache`` is 400 while requests are under way;
``/start_profile`` and ``/stop_profile``. vLLM 0.32: ``POST /reset_prefix_cache`` (``serve/dev/cache/api_router.py``)
answers ``{"success": bool}`` and is there with ``VLLM_SERVER_DEV_MODE=1`` only; the profiler's paths, the same as
SGLang's (``serve/profile/api_router.py``), with ``--profiler-config`` only. gRPC servers: see
:mod:`extproc.workers.rpc.orders`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import orjson
from aiohttp import web

from extproc.control.auth import AUDIT
from extproc.control.replies import fault, reply
from extproc.workers.client import Answer, NoAnswerError, WorkerClient
from extproc.workers.registry import Registry
from extproc.workers.rpc.orders import NotDoneError, do
from extproc.workers.rpc.services import FLUSH_CACHE, START_PROFILE, STOP_PROFILE
from extproc.workers.worker import Status, Worker

_AT_ONCE: Final = 64  # workers
_TIMEOUT: Final = 60.0  # seconds; a profiler that stops writes its trace first
_SHOWN_ERROR: Final = 300  # characters of a worker's own words


@dataclass(frozen=True, slots=True)
class _Order:
    """Something to ask for.

    Attributes:
        paths: where, by runtime.
        counted: the name of the number of workers that have done it.
        done: the message when all have.
        lacking: why a worker may not have the path, by runtime.
        method: what it is called over gRPC.
    """

    paths: dict[str, str]
    counted: str
    done: str
    lacking: dict[str, str]
    method: str


_PROFILER: Final = {"vllm": "vLLM has it with --profiler-config only"}
_ORDERS: Final = {
    "/flush_cache": _Order(
        {"sglang": "/flush_cache", "vllm": "/reset_prefix_cache"},
        "workers_flushed",
        "Successfully flushed cache on all {} workers",
        {"vllm": "vLLM has it with VLLM_SERVER_DEV_MODE=1 only"},
        FLUSH_CACHE,
    ),
    "/start_profile": _Order(
        {"sglang": "/start_profile", "vllm": "/start_profile"},
        "workers_started",
        "Profiling started on all {} workers",
        _PROFILER,
        START_PROFILE,
    ),
    "/stop_profile": _Order(
        {"sglang": "/stop_profile", "vllm": "/stop_profile"},
        "workers_stopped",
        "Profiling stopped on all {} workers",
        _PROFILER,
        STOP_PROFILE,
    ),
}


class _FailedError(Exception):
    """The worker did not do it; the message says why."""


class FleetRoutes:
    """The handlers; ``client`` asks the workers directly."""

    def __init__(self, registry: Registry, client: WorkerClient) -> None:
        self._registry = registry
        self._client = client

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.post(path, self._ask_all) for path in _ORDERS]

    async def _ask_all(self, request: web.Request) -> web.Response:
        try:
            body = _body(await request.read())
        except ValueError as error:
            return fault(400, "invalid_json", f"The body, which is passed on to the workers, is not one: {error}")
        order = _ORDERS[request.path]
        # Engines, not entries: one may have several, for its roles or its data-parallel ranks.
        workers = {worker.base_url: worker for worker in self._registry if worker.status is not Status.DRAINING}
        gate = asyncio.Semaphore(_AT_ONCE)
        problems = await asyncio.gather(*(self._problem(worker, order, body, gate) for worker in workers.values()))
        failed = [{"worker": name, "error": why} for name, why in zip(workers, problems, strict=True) if why]
        said: dict[str, object] = {"workers": len(workers), "failed": len(failed)}
        request[AUDIT] = said
        over_grpc = sum(worker.url.is_grpc for worker in workers.values())
        return _summary(order, list(workers), failed, over_grpc)

    async def _problem(self, worker: Worker, order: _Order, body: object, gate: asyncio.Semaphore) -> str:
        """Ask one worker; why it did not do it, empty when it did."""
        try:
            async with gate:
                if worker.url.is_grpc:
                    await do(self._client.rpc, worker, order.method, body, within=_TIMEOUT)
                    return ""
                path = order.paths[worker.runtime]
                answer = await self._client.post(worker, path, body, within=_TIMEOUT)
            _check(answer, path, order.lacking.get(worker.runtime, "this engine does not have it"))
        except (NoAnswerError, NotDoneError, _FailedError) as error:
            return str(error)
        return ""


def _body(raw: bytes) -> object:
    """What is passed on: an object, or nothing. Raises ValueError."""
    if not raw:
        return None
    body = orjson.loads(raw)
    if not isinstance(body, dict):
        raise ValueError("expected an object")
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise ValueError("nested too deeply to be passed on") from None
    return body


def _check(answer: Answer, path: str, lacking: str) -> None:
    if answer.status in (404, 405):
        raise _FailedError(f"POST {path}: HTTP {answer.status}; {lacking}")
    if not answer.ok:
        words = answer.body.decode("utf-8", "replace").strip()[:_SHOWN_ERROR]
        raise _FailedError(f"POST {path}: HTTP {answer.status}" + (f": {words}" if words else ""))
    if _says_no(answer.body):
        raise _FailedError(f"POST {path}: not done: requests under way hold the cache")


def _says_no(body: bytes) -> bool:
    """Whether it is vLLM's ``{"success": false}``."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and value.get("success") is False


def _summary(order: _Order, names: list[str], failed: list[dict[str, str]], over_grpc: int) -> web.Response:
    unwilling = {entry["worker"] for entry in failed}
    successful = [name for name in names if name not in unwilling]
    message = f"{len(successful)} of {len(names)} workers did it; see failed"
    return reply(
        {
            "status": "partial_success" if failed else "success",
            "message": message if failed else order.done.format(len(names)),
            order.counted: len(successful),
            "total_http_workers": len(names) - over_grpc,
            "total_grpc_workers": over_grpc,
            "total_zmq_workers_skipped": 0,
            "total_workers": len(names),
            "successful": successful,
            "failed": failed,
        },
        206 if failed else 200,
    )
