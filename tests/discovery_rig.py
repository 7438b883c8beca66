"""What the tests of discovery stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(watching: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let a watcher run until it is ended; by itself it must not end."""
    task = asyncio.create_task(watching)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
