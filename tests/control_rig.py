"""A running control API with its registry, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from fleet import FakeEnvoy

from extproc.control.api import ControlApi
from extproc.workers.client import WorkerClient
from extproc.workers.health import Monitor
from extproc.workers.registry import Registry


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str
    json: Any


class Api:
    """A running API, its registry, and a client."""

    def __init__(self, *, dp_aware: bool = False, **settings: Any) -> None:
        self.envoy = FakeEnvoy()
        self.registry = Registry(self.envoy.publish, drain_poll=0.001, dp_aware=dp_aware)
        self.client = WorkerClient()
        self.monitor = Monitor(self.registry, self.client)
        self.api = ControlApi(self.registry, self.client, "127.0.0.1:0", **settings)

    async def ask(self, method: str, path: str, **more: Any) -> Answer:
        url = f"http://127.0.0.1:{self.api.port}{path}"
        async with aiohttp.ClientSession() as session, session.request(method, url, **more) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return Answer(response.status, response.headers, text, await response.json() if is_json and text else None)

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.ask("GET", path, **more)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Api]:
    made = Api(**settings)
    await made.api.start()
    try:
        yield made
    finally:
        await made.api.stop()
        await made.monitor.stop()
        await made.registry.close()
        await made.client.close()
