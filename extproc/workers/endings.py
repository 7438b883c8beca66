"""Tasks that were told to end and may still be at it."""

from __future__ import annotations

import asyncio


class Endings:
    """Keeps them until they have ended: whoever stops waits for all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Tell a task to end."""
        task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Returns when those that were told to end have ended."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
