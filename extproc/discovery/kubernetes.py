"""Pods as they come and go: listed once, then watched from there on, and listed again when too much was missed.

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. A watch that ends,
however it ends, is resumed at the last version that was heard of, by an event or by a bookmark, so that nothing is
missed; 410 Gone says that it is too old.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Final, Protocol

import aiohttp
import msgspec

from extproc.discovery.errors import ApiError, GoneError
from extproc.discovery.pod import EVENT, FAILURE, POD, PODS, Event
from extproc.discovery.pod_table import PodTable, Row
from extproc.discovery.state import DiscoveryState
from extproc.discovery.wanted import Key, Wanted

_logger: Final = logging.getLogger(__name__)
_GONE: Final = 410
_AT_ONCE: Final = 32  # pods that are read without a pause, some 10 ms
_BOOKMARK: Final = "BOOKMARK"


class PodSource(Protocol):
    """See :class:`extproc.discovery.cluster.Cluster`."""

    async def page(self, more: str | None) -> bytes:
        """A page of the list of pods."""

    def watch(self, version: str, seconds: int, grace: float) -> AsyncGenerator[bytes, None]:
        """Lines of a watch; the first is empty: it has begun."""


@dataclass(frozen=True, slots=True)
class WatchPace:
    """Seconds.

    Attributes:
        renewal: how long one watch lasts: a connection that died without a word is noticed then.
        grace: longer than that, and it has died.
        first, longest: pauses after failures, doubled from one to the next and up to a quarter shorter by chance.
        settled: a watch that lasts as long is none that fails.
    """

    renewal: int = 30
    grace: float = 10.0
    first: float = 0.5
    longest: float = 30.0
    settled: float = 5.0


class _EndedAtOnceError(Exception):
    """The API ends watches as soon as they begin."""


class PodWatcher:
    """Follows pods, and tells ``found`` after every change who should be registered.

    ``connect`` makes a connection to the API, with credentials that are read anew; it is made again after a failure.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[PodSource]],
        table: PodTable,
        state: DiscoveryState,
        found: Callable[[Mapping[Key, Wanted]], None],
        pace: WatchPace | None = None,
    ) -> None:
        self._connect = connect
        self._table = table
        self._state = state
        state.count = table.counts
        self._found = found
        self._pace = pace or WatchPace()
        self._version = ""  # of the last that was heard; empty: all must be listed
        self._pause = self._pace.first
        self._told = ""
        self._telling: asyncio.Handle | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            await self._run()
        finally:
            if self._telling is not None:
                self._telling.cancel()

    async def _run(self) -> None:
        while True:
            wait = 0.0
            try:
                async with self._connect() as source:
                    await self._follow(source)
            except GoneError as error:
                self._version = ""
                self._state.events["gone"] += 1
                _logger.info("too much was missed: listing all pods again", extra={"reason": str(error)})
            except ApiError as error:
                wait = error.retry_after
                self._failed(_reason(error), str(error))
            except Exception as error:  # noqa: BLE001 - credential plugins and their files fail in every way
                self._failed(_reason(error), f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            await asyncio.sleep(max(wait, self._next_pause()))

    async def _follow(self, source: PodSource) -> None:
        """List all pods unless it is known where to go on, and watch; returns never."""
        if not self._version:
            await self._list(source)
        while True:
            began, version = time.monotonic(), self._version
            async with aclosing(source.watch(version, self._pace.renewal, self._pace.grace)) as lines:
                async for line in lines:
                    if line:
                        self._heard(EVENT.decode(line))
                    else:
                        self._heard_well()
            if self._version == version and time.monotonic() - began < min(self._pace.settled, self._pace.renewal / 2):
                raise _EndedAtOnceError("watches end as soon as they begin")
            self._well()

    async def _list(self, source: PodSource) -> None:
        rows: list[Row] = []
        more: str | None = None
        while True:
            page = PODS.decode(await source.page(more))
            for begin in range(0, len(page.items), _AT_ONCE):
                rows += self._table.read(page.items[begin : begin + _AT_ONCE])
                await asyncio.sleep(0)  # others have their turn
            more = page.metadata.more
            if not more:
                break
        self._table.replace(rows)
        self._version = page.metadata.version
        self._state.events["list"] += 1
        self._tell()
        _logger.info("listed pods", extra={"pods": len(rows), "of_the_fleet": len(self._table)})
        self._heard_well()

    def _heard(self, event: Event) -> None:
        match event.type:
            case "ADDED" | "MODIFIED":
                pod = POD.decode(event.object)
                self._table.put(pod)
            case "DELETED":
                pod = POD.decode(event.object)
                self._table.drop(pod)
            case "BOOKMARK":
                pod = POD.decode(event.object)
            case "ERROR":
                self._state.events["error"] += 1
                failure = FAILURE.decode(event.object)
                if failure.code == _GONE:
                    raise GoneError(failure.message)
                raise ApiError(failure.code, failure.message or failure.reason)
            case _:
                raise ApiError(0, f"an event of the unknown type {event.type!r}")
        self._state.events[event.type.lower()] += 1
        self._version = pod.metadata.version or self._version
        if event.type != _BOOKMARK and self._telling is None:  # of many that have come by now, once
            self._telling = asyncio.get_running_loop().call_soon(self._tell)
        self._well()

    def _tell(self) -> None:
        """Pass on who is there now."""
        self._telling = None
        for pod, why in self._table.news():
            _logger.warning("what a pod says of itself is wrong", extra={"pod": pod.name, "reason": why})
        try:
            self._found(self._table.wanted())
        except Exception:
            _logger.exception("registering what was found failed")

    def _well(self) -> None:
        """The watch works: what is known is up to date."""
        self._pause = self._pace.first
        self._heard_well()

    def _heard_well(self) -> None:
        if not self._state.up and self._told:
            _logger.info("the Kubernetes API answers again")
        self._told = ""
        self._state.good(time.time())

    def _failed(self, reason: str, why: str) -> None:
        self._state.failed(reason, _PUBLIC.get(reason, "the Kubernetes API does not answer"))
        if why == self._told:  # again
            return
        self._told = why
        hint = f"; {_HINTS[reason]}" if reason in _HINTS else ""
        _logger.warning("the Kubernetes API fails; what is known holds", extra={"reason": f"{why}{hint}"})

    def _next_pause(self) -> float:
        pause = self._pause * random.uniform(0.75, 1.0)  # noqa: S311 - so that not all gateways come at once
        self._pause = min(self._pace.longest, 2 * self._pause)
        return pause


# What anybody may be told, by reason.
_PUBLIC: Final = {
    "unauthorized": "the Kubernetes API refuses our credentials",
    "forbidden": "the service account may not list and watch pods",
    "invalid": "the Kubernetes API is not understood",
    "config": "the credentials for the Kubernetes API cannot be read",
    "ended": "the Kubernetes API ends every watch",
}
_HINTS: Final = {
    "forbidden": "it takes list and watch of pods: by a Role in --service-discovery-namespace, or, without that, "
    "by a ClusterRole",
}


def _reason(error: Exception) -> str:
    """A word for metrics."""
    match error:
        case ApiError(status=401):
            return "unauthorized"
        case ApiError(status=403):
            return "forbidden"
        case ApiError(status=0) | msgspec.MsgspecError():
            return "invalid"
        case ApiError():
            return "refused"
        case _EndedAtOnceError():
            return "ended"
        case ssl.SSLError() | aiohttp.ClientSSLError():
            return "tls"
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientPayloadError():
            return "cut"
        case aiohttp.ClientError() | ConnectionError():
            return "connection"
    return "config"
