"""``GET /get_loads``: what is under way on each worker, by our count and by its engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from aiohttp import web

from extproc import __version__
from extproc.control.replies import reply
from extproc.workers.registry import Registry
from extproc.workers.worker import Worker

# What a worker's engine says of its load, one mapping for each rank, by the names that SGLang's ``/v1/loads`` has.
# Empty: nothing is known. What is in it stands beside our own figures, and instead of those of the same name.
OwnFigures = Callable[[Worker], Sequence[Mapping[str, object]]]


def nothing_known(_worker: Worker) -> Sequence[Mapping[str, object]]:
    """Nobody asks the engines."""
    return ()


class LoadRoutes:
    """The handler; ``engine_loads`` has the engines' figures."""

    def __init__(self, registry: Registry, engine_loads: OwnFigures) -> None:
        self._registry = registry
        self._engine_loads = engine_loads

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [web.get("/get_loads", self._loads)]

    async def _loads(self, _request: web.Request) -> web.Response:
        loads = [entry for worker in self._registry for entry in self._entries(worker)]
        total = sum(worker.load for worker in self._registry)
        return reply(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": f"pd-extproc-{__version__}",
                "dp_rank_count": len(loads),
                "loads": loads,
                "aggregate": {"total_running_reqs": total, "total_reqs": total},
            }
        )

    def _entries(self, worker: Worker) -> Iterator[dict[str, object]]:
        ours = {
            "worker": worker.name,
            "worker_type": worker.role.value,
            "dp_rank": 0,
            "num_running_reqs": worker.load,
            "num_total_reqs": worker.load,
        }
        for figures in self._engine_loads(worker) or ({},):
            yield {**ours, **figures}
