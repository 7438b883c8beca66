"""Waiting for the requests under way of workers that go or move."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine

from extproc.workers import ranks
from extproc.workers.worker import Worker

_logger = logging.getLogger(__name__)


class Draining:
    """Bounds the wait by ``limit`` seconds; ``poll`` (seconds) is how often the requests' number is looked at."""

    def __init__(self, limit: float, poll: float) -> None:
        self._limit = limit
        self._poll = poll
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, draining: Coroutine[None, None, None], worker: Worker) -> None:
        """Let ``worker`` go, by ``draining``."""
        task = asyncio.get_running_loop().create_task(draining, name=f"drain-{worker.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until_idle(self, worker: Worker) -> None:
        """Return when no request is under way to the worker, or to any rank of its server; or after long enough."""
        deadline = time.monotonic() + self._limit
        while load := ranks.load(worker):
            if time.monotonic() >= deadline:
                extra = {"worker": worker.name, "role": worker.role.value, "worker_id": worker.id, "load": load}
                _logger.warning("waited long enough for a worker's requests", extra=extra)
                return
            await asyncio.sleep(self._poll)

    async def close(self) -> None:
        """End what is under way. The workers stay as they are."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
