"""Mooncake prefill workers that restart and are healthy again before the next probe: nobody else would notice.

A decode that is told a former engine id hangs or recomputes (:mod:`extproc.workers.mooncake_refresh`), and no request
fails in a way that says so. So each such worker's bootstrap server is asked which engines it knows far more often than
the worker is probed. Engine ids or addresses are others after every start, so that the answer need only be compared
with the one before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from extproc.workers.bootstrap import is_mooncake
from extproc.workers.client import NoAnswerError, WorkerClient
from extproc.workers.endings import Endings
from extproc.workers.kv_engines import QUERY
from extproc.workers.registry import Change, Registry
from extproc.workers.rounds import Rounds
from extproc.workers.worker import MOONCAKE_BOOTSTRAP_PORT, Status, Worker

_RANDOM: Final = secrets.SystemRandom()
_JITTER: Final = 0.1
_logger = logging.getLogger(__name__)


class Restarts:
    """Asks the bootstrap server of every READY Mooncake prefill worker, from :meth:`start` to :meth:`stop`.

    Args:
        registry: whose workers.
        client: asks.
        changed: is told of a worker whose answer is another than the one before; of its first answer too, as it may
            have restarted since it was looked at.
        gate: bounds questions under way at once.
        interval: seconds between two questions to a worker, more or less by a tenth.
        within: seconds that an answer may take.
    """

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        changed: Callable[[Worker], None],
        gate: asyncio.Semaphore,
        *,
        interval: float,
        within: float,
    ) -> None:
        self._registry = registry
        self._client = client
        self._report = changed
        self._gate = gate
        self._interval = interval
        self._within = within
        self._rounds = Rounds()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endings = Endings()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin asking. Needs a running event loop."""
        self._unsubscribe = self._registry.subscribe(self._changed)
        for worker in self._registry:
            self._changed(worker, Change.ADDED)

    async def stop(self) -> None:
        """Stop asking; returns when no question is under way."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for worker_id in tuple(self._tasks):
            self._endings.cancel(self._tasks.pop(worker_id))
        await self._endings.wait()

    def _changed(self, worker: Worker, _change: Change) -> None:
        is_asked = worker.status is Status.READY and is_mooncake(worker) and worker.server is worker
        if is_asked and worker.id not in self._tasks:
            name = f"restarts-{worker.id}"
            self._tasks[worker.id] = asyncio.get_running_loop().create_task(self._watch(worker), name=name)
        elif not is_asked and worker.id in self._tasks:
            self._endings.cancel(self._tasks.pop(worker.id))

    async def _watch(self, worker: Worker) -> None:
        before: bytes | None = b""
        while True:
            await self._rounds.sleep(self._interval * (1 + _RANDOM.uniform(-_JITTER, _JITTER)))
            try:
                async with self._gate:
                    now = await self._ask(worker)
                if now != before:
                    before = now
                    self._report(worker)
            except Exception:
                _logger.exception("looking for a restart failed; going on", extra={"worker": worker.name})

    async def _ask(self, worker: Worker) -> bytes | None:
        """What its bootstrap server says; None: nothing of use."""
        port = worker.bootstrap_port or MOONCAKE_BOOTSTRAP_PORT
        try:
            answer = await self._client.get_beside(worker, port, QUERY, within=self._within)
        except NoAnswerError:
            return None
        return answer.body if answer.ok else None
