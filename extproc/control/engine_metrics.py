"""``GET /engine_metrics``: the Prometheus pages of all workers as one, each series with its worker's ``worker_addr``.

The path is the peer's. The text is version 0.0.4, as both engines write it: the lines of a family come
one after the other there, and so they do here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from aiohttp import web

from extproc.control.metrics import CONTENT_TYPE
from extproc.control.replies import fault
from extproc.workers.client import NoAnswerError, WorkerClient
from extproc.workers.registry import Registry
from extproc.workers.worker import Status, Worker

_PATH: Final = "/metrics"  # SGLang: with --enable-metrics only
_AT_ONCE: Final = 32  # workers
_TIMEOUT: Final = 5.0  # seconds
_ABOUT: Final = ("# HELP ", "# TYPE ")
_PARTS: Final = ("_bucket", "_sum", "_count", "_total", "_created")


class EngineMetricsRoutes:
    """The handler; ``client`` asks the workers directly."""

    def __init__(self, registry: Registry, client: WorkerClient) -> None:
        self._registry = registry
        self._client = client

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get("/engine_metrics", self._show)]

    async def _show(self, _request: web.Request) -> web.Response:
        # Engines, not entries: one may have several, for its roles or its data-parallel ranks.
        # Those over gRPC show no page.
        ready = (worker for worker in self._registry if worker.status is Status.READY and not worker.url.is_grpc)
        workers = {worker.base_url: worker for worker in ready}
        gate = asyncio.Semaphore(_AT_ONCE)
        found = await asyncio.gather(*(self._page(worker, gate) for worker in workers.values()))
        pages = Pages()
        for url, text in zip(workers, found, strict=True):
            if text:
                pages.add(url, text.splitlines())
                await asyncio.sleep(0)  # a page takes about a millisecond, and requests wait
        if pages.empty:
            return fault(503, "no_available_workers", "No worker that is ready shows metrics")
        return web.Response(body=pages.text().encode(), headers={"content-type": CONTENT_TYPE})

    async def _page(self, worker: Worker, gate: asyncio.Semaphore) -> str:
        """What the worker's engine shows; empty where it shows nothing."""
        try:
            async with gate:
                answer = await self._client.get(worker, _PATH, within=_TIMEOUT)
        except NoAnswerError:
            return ""
        return answer.body.decode("utf-8", "replace") if answer.ok else ""


class Pages:
    """Pages put together family by family."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[dict[str, str], list[str]]] = {}  # by name: what is said of it, its series

    @property
    def empty(self) -> bool:
        """Whether nothing has been added."""
        return not self._families

    def add(self, worker_addr: str, lines: Iterable[str]) -> None:
        """Add a page; what says nothing, or is no series, is left out."""
        label = f'worker_addr="{worker_addr}"'
        name = ""
        for line in lines:
            if line.startswith(_ABOUT):
                name = line.split(" ", 3)[2]
                self._family(name)[0].setdefault(line[:7], line)
            elif line and not line.startswith("#"):
                own = line.partition("{")[0].partition(" ")[0]
                if own != name and not any(own == name + part for part in _PARTS):
                    name = own
                if labelled := _labelled(line, own, label):
                    self._family(name)[1].append(labelled)

    def text(self) -> str:
        """The page."""
        parts = [line for said, series in self._families.values() if series for line in (*said.values(), *series)]
        return "\n".join(parts) + "\n"

    def _family(self, name: str) -> tuple[dict[str, str], list[str]]:
        return self._families.setdefault(name, ({}, []))


def _labelled(line: str, name: str, label: str) -> str:
    """A line of a series with one more label; empty when it is none."""
    rest = line[len(name) :]
    if rest.startswith("{"):
        separator = "" if rest[1:].lstrip().startswith("}") else ","
        return f"{name}{{{label}{separator}{rest[1:]}"
    return f"{name}{{{label}}}{rest}" if rest.startswith(" ") and rest.strip() else ""
