"""Threads for what would hold up the event loop: long prompts. So many at once, and so many that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from extproc.errors import GatewayError

Cancel = Callable[[], None]
MOST_WAITING: Final = 512
_T = TypeVar("_T")


def nothing() -> None:
    """Cancels what is over."""


class Threads:
    """See the module.

    Args:
        count: how many threads.
        most_waiting: how many pieces of work may wait for one of them.
    """

    def __init__(self, count: int, most_waiting: int = MOST_WAITING) -> None:
        self._count = count
        self._most = count + most_waiting
        self._under_way = 0
        self._pool: ThreadPoolExecutor | None = None  # made when it is first needed

    @property
    def under_way(self) -> int:
        """Pieces of work that run or wait, those among them that were cancelled while they ran."""
        return self._under_way

    def run(self, work: Callable[[], _T], then: Callable[[_T | BaseException], None]) -> Cancel:
        """Have a thread do ``work``, and call ``then`` on the event loop with what came of it, unless it is cancelled.

        Raises GatewayError (503) when too many wait.
        """
        if self._under_way >= self._most:
            raise GatewayError(
                "tokenization_queue_full", f"{self._most} long prompts wait to be tokenised", retry_after=1
            )
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="text")
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        self._under_way += 1
        waits = True

        def done() -> None:
            self._under_way -= 1
            if waits:
                outcome: _T | BaseException = _outcome(future)
                then(outcome)

        def cancel() -> None:
            nonlocal waits
            waits = False
            future.cancel()

        def tell(_future: Future[_T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done)

        future.add_done_callback(tell)
        return cancel

    def stop(self) -> None:
        """Begin nothing more, and wait for nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _outcome(future: Future[_T]) -> _T | BaseException:
    if future.cancelled():
        return GatewayError("draining", "the gateway is stopping", retry_after=1)
    error = future.exception()
    return future.result() if error is None else error
