"""Telling Envoy of endpoints: one publication at a time, and whatever changed meanwhile goes into the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from extproc.workers.endpoints import Snapshot

Publish = Callable[[Snapshot], Awaitable[None]]

# Seconds from one publication to the next, for each endpoint that the first had: all are sent anew however few changed.
# A thousand take some 15 ms of CPU, here and in Envoy, so that a fleet that flaps costs a tenth of a core at most.
SPACING: Final = 0.0002
FREE: Final = 50  # endpoints that count for nothing there

_logger = logging.getLogger(__name__)


def spacing(endpoints: int) -> float:
    """Seconds from a publication of so many to the next."""
    return SPACING * max(0, endpoints - FREE)


class Publisher:
    """Runs ``publish`` whenever asked to and the snapshot differs from the last one that Envoy acknowledged.

    ``build`` makes the snapshot at the moment it is sent; ``acknowledged`` is called with it after ``publish``
    returned. What changes within :func:`spacing` of a publication waits for the rest of that. A publication that raises
    is logged, reported to ``refused`` and tried again after ``retry_delay`` seconds or at the next request. There is a
    task only while there is something to publish.
    """

    def __init__(
        self,
        publish: Publish,
        build: Callable[[], Snapshot],
        *,
        acknowledged: Callable[[Snapshot], None],
        refused: Callable[[str], None],
        retry_delay: float = 5.0,
    ) -> None:
        self._publish = publish
        self._build = build
        self._acknowledged = acknowledged
        self._refused = refused
        self._retry_delay = retry_delay
        self._last: Snapshot | None = None
        self._wanted = False
        self._task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._not_before = 0.0  # by time.monotonic()
        self._rounds: list[asyncio.Future[None]] = []

    def request(self) -> None:
        """Have the current state published soon."""
        self._wanted = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="publish-endpoints")

    async def round(self) -> None:
        """Return after a snapshot that was built after this call has been acknowledged or refused."""
        done = asyncio.get_running_loop().create_future()
        self._rounds.append(done)
        self.request()
        await done

    async def close(self) -> None:
        """Stop publishing; waiters of :meth:`round` are cancelled."""
        self._cancel_retry()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for done in self._rounds:
            done.cancel()

    async def _run(self) -> None:
        try:
            while self._wanted:
                if (wait := self._not_before - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                self._wanted = False
                self._cancel_retry()
                rounds, self._rounds = self._rounds, []
                try:
                    await self._publish_once()
                finally:
                    for done in rounds:
                        if not done.done():
                            done.set_result(None)
        finally:
            self._task = None

    async def _publish_once(self) -> None:
        snapshot = self._build()
        try:
            if snapshot != self._last:
                self._not_before = time.monotonic() + spacing(len(snapshot.prefill) + len(snapshot.decode))
                await self._publish(snapshot)
        except Exception as error:  # noqa: BLE001 - whatever it raises, Envoy may not have the endpoints
            _logger.error("Envoy did not take the endpoints", extra={"error": str(error) or type(error).__name__})
            self._last = None  # nobody knows what Envoy has now
            self._retry = asyncio.get_running_loop().call_later(self._retry_delay, self.request)
            self._refused(str(error) or type(error).__name__)
        else:
            self._last = snapshot
            self._acknowledged(snapshot)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
