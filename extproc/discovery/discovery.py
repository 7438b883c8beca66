"""Discovery as the service starts and stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final

from extproc.discovery.file import FileWatcher
from extproc.discovery.pod_table import PodTable
from extproc.discovery.registrar import Registrar
from extproc.discovery.selectors import query
from extproc.discovery.source import FileSource, KubernetesSource
from extproc.discovery.state import DiscoveryState
from extproc.workers.registry import Registry

if TYPE_CHECKING:
    from extproc.discovery.kubernetes import PodWatcher

_log: Final = logging.getLogger(__name__)


class Discovery:
    """Has ``registry`` follow a source of workers, from :meth:`start` to :meth:`stop`."""

    def __init__(self, registry: Registry, source: FileSource | KubernetesSource) -> None:
        self._source = source
        self.state = DiscoveryState("file" if isinstance(source, FileSource) else "kubernetes")
        self._registrar = Registrar(registry, self.state)
        self._run: Callable[[], Coroutine[None, None, None]]
        self._task: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """See that there is something to begin with. Raises DiscoveryError."""
        source, found = self._source, self._registrar.want
        if isinstance(source, FileSource):
            self._run = FileWatcher(source.path, source.api_key, self.state, found, reread=source.reread).run
        else:
            self._run = (await self._pods(source)).run

    def start(self) -> None:
        """Begin, after :meth:`prepare`."""
        self._task = asyncio.create_task(self._run(), name="discovery")

    async def _pods(self, source: KubernetesSource) -> PodWatcher:
        """Kubernetes' client takes a second and 60 MB to load: for those only who want it."""
        from extproc.discovery.cluster import Access, Cluster, check  # noqa: PLC0415
        from extproc.discovery.kubernetes import PodWatcher, WatchPace  # noqa: PLC0415

        access = Access.found()
        await check(access)
        selector = query(list(source.rules.selectors.values()))
        where = {"namespace": source.namespace or "(all)", "selector": selector or "(all pods)"}
        _log.info("looking for workers in Kubernetes", extra=where | {"access": str(access)})
        return PodWatcher(
            lambda: Cluster(access, source.namespace, selector),
            PodTable(source.rules),
            self.state,
            self._registrar.want,
            WatchPace(renewal=max(1, round(source.renewal))),
        )

    async def stop(self) -> None:
        """Follow no longer; the workers stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._registrar.close()
