"""Work of the mocks that may fail when whoever wanted it has left."""

from __future__ import annotations

import asyncio
from typing import Any


def looked_at(work: asyncio.Future[Any]) -> None:
    """For ``add_done_callback``: a failure is known, and asyncio need not complain that nobody heard of it."""
    if not work.cancelled():
        work.exception()
