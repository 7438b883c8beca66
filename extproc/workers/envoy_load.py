"""What Envoy has under way to each worker: of this sidecar, of others behind the same Envoy, of whoever else sends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import aiohttp

from extproc.workers.load_poll import INTERVAL, STALE, jittered
from extproc.workers.registry import Registry
from extproc.workers.worker import Worker

# How many requests Envoy has under way, by cluster (a role's value) and address ("ip:port").
Active = Mapping[tuple[str, str], int]

_logger: Final = logging.getLogger(__name__)


class EnvoyLoadMonitor:
    """Keeps ``envoy_active`` of the registry's workers up to date, from :meth:`start` to :meth:`stop`.

    Args:
        registry: whose workers.
        ask: asks Envoy; may raise ``aiohttp.ClientError`` or ``TimeoutError``.
        interval: seconds between two questions. An answer older than STALE intervals counts no more.
        told: is called with each worker after each answer.
    """

    def __init__(
        self,
        registry: Registry,
        ask: Callable[[], Awaitable[Active]],
        interval: float = INTERVAL,
        told: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._ask = ask
        self._interval = interval
        self._told = told
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin asking. Needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="load-envoy")

    async def stop(self) -> None:
        """Stop asking; returns when no question is under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._tell({})

    async def _run(self) -> None:
        heard = time.monotonic()
        while True:
            try:
                self._tell(await self._ask())
                heard = time.monotonic()
            except (aiohttp.ClientError, TimeoutError) as error:
                _logger.debug("Envoy does not say what it has under way", extra={"reason": str(error)})
            except Exception:
                _logger.exception("asking Envoy what it has under way failed; going on")
            if time.monotonic() - heard > (STALE - 1) * self._interval:  # it would be too old before the next answer
                self._tell({})
            await asyncio.sleep(jittered(self._interval))

    def _tell(self, active: Active) -> None:
        for worker in self._registry:
            at = worker.endpoint
            worker.envoy_active = None if at is None else active.get((worker.role.value, at))
            self._told(worker)
