"""What is held when nothing is under way: the soak compares it from time to time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from product import soon
from soak_fleet import SoakedProduct

from extproc.exchange.direct import DirectCourse
from extproc.exchange.relayed import RelayedCourse
from extproc.exchange.session import Session

_PATIENCE = 60.0  # seconds until all has to be back: Envoy keeps idle connections for 3, an abort may take 5
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_ACTIVE = (
    "http.clients.downstream_rq_active",
    "http.clients.downstream_cx_active",
    "http.egress.downstream_rq_active",
    "cluster.extproc.upstream_rq_active",
    *(f"cluster.{role}.upstream_{what}_active" for role in ("prefill", "decode") for what in ("rq", "cx")),
)
_PER_REQUEST = tuple(f"extproc.{part}." for part in ("exchange", "transport", "apis", "merge", "handoff"))
_SLACK = 10  # objects of other kinds, such as a worker's
# A counter for every combination of labels that came about; whose turn it is in a few sets of workers.
_BOUNDED = ("extproc.control.metrics", "extproc.policies.round_robin")


@dataclass(slots=True)
class Footprint:
    """What the test's process (gateway, workers and clients) and Envoy hold. Memory is in MiB."""

    files: int
    envoy_files: int
    memory: int
    envoy_memory: int
    tasks: Counter[str]
    objects: Counter[type]  # of our own classes

    @classmethod
    def of(cls, product: SoakedProduct) -> Footprint:
        """As it is now."""
        pid = str(product.envoy.pid)
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc: what is free counts no more
            trim(0)
        objects = Counter(map(type, gc.get_objects()))
        for kind in list(objects):
            if not str(kind.__module__).startswith("extproc.") or kind.__module__ in _BOUNDED:
                del objects[kind]
        tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
        return cls(_files("self"), _files(pid), _memory("self"), _memory(pid), tasks, objects)

    def more_than(self, other: Footprint) -> list[str]:
        """What there is more of than in ``other``, memory aside."""
        more = [f"{count} tasks {name}" for name, count in (self.tasks - other.tasks).items()]
        for kind, count in (self.objects - other.objects).items():
            if count > (0 if kind.__module__.startswith(_PER_REQUEST) else _SLACK):
                more.append(f"{count} objects {kind.__module__}.{kind.__qualname__}")
        if self.files > other.files or self.envoy_files > other.envoy_files:
            more.append(f"files: {self.files}, not {other.files}; Envoy's: {self.envoy_files}, not {other.envoy_files}")
        return more


async def at_rest(product: SoakedProduct, before: Footprint | None = None) -> Footprint:
    """Wait until nothing is under way, and nothing is held that was not held ``before``; what is held all the same."""
    await soon(lambda: not any(mock.engine.live for mock in product.mocks), "workers still run requests")
    await product.settled()
    await product.client.close()
    assert not any(each.load for each in product.registered), "a worker that is gone has a load"
    product.registered = set(product.service.registry)
    product.records.all.clear()
    deadline = time.monotonic() + _PATIENCE
    while True:
        active = {name: value for name in _ACTIVE if (value := await gauge(product, name))}
        for mock in product.mocks:
            mock.clear()
        footprint = Footprint.of(product)
        more = footprint.more_than(before) if before is not None else []
        if not active and not more:
            return footprint
        assert time.monotonic() < deadline, f"left in Envoy: {active}, left in this process: {more}"
        await asyncio.sleep(0.25)


async def gauge(product: SoakedProduct, name: str) -> int:
    """One of Envoy's, which may be too busy to say it at once."""
    async with asyncio.timeout(_PATIENCE):
        while True:
            with contextlib.suppress(TimeoutError):
                return await product.envoy.admin.gauge(name)


def exchanges() -> list[object]:
    """The requests that are still in memory."""
    return [each for each in gc.get_objects() if isinstance(each, Session | DirectCourse | RelayedCourse)]


def _files(pid: str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _memory(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB // 1024
