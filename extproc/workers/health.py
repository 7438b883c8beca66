"""Keeping dead workers out: the monitor that watches every registered worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from extproc.workers.client import WorkerClient
from extproc.workers.contact import Contact, HttpContact
from extproc.workers.endings import Endings
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.mooncake_refresh import MooncakeRefresh
from extproc.workers.registry import Change, Registry
from extproc.workers.resolver import Resolver
from extproc.workers.restarts import Restarts
from extproc.workers.rounds import Rounds
from extproc.workers.rpc.contact import GrpcContact
from extproc.workers.stalls import Stalls
from extproc.workers.watch import Watch
from extproc.workers.worker import Status, Worker


class Monitor:
    """Watches every worker of ``registry``, those registered later too, from :meth:`start` to :meth:`stop`.

    ``token_reuse``: find out which decode workers take token ids; see :mod:`extproc.workers.token_ids`.
    """

    def __init__(
        self,
        registry: Registry,
        client: WorkerClient,
        *,
        settings: HealthSettings | None = None,
        resolver: Resolver | None = None,
        pace: Pace | None = None,
        token_reuse: bool = True,
    ) -> None:
        self._registry = registry
        self._client = client
        self._settings = settings or HealthSettings()
        self._resolver = resolver or Resolver()
        self._pace = pace or Pace()
        self._token_reuse = token_reuse
        self._refresh = MooncakeRefresh(registry, client)
        self._stalls = Stalls(registry, self._ask_for_life, self._ask_rank_for_life, self._settings.stall)
        self._gate = asyncio.Semaphore(self._pace.concurrency)
        self._rounds = Rounds()
        self._restarts = Restarts(
            registry,
            client,
            self._restarted,
            self._gate,
            interval=self._pace.restart,
            within=self._settings.timeout,
        )
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endings = Endings()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin watching. Needs a running event loop."""
        self._unsubscribe = self._registry.subscribe(self._changed)
        for worker in self._registry:
            self._changed(worker, Change.ADDED)
        self._stalls.start()
        self._restarts.start()

    async def stop(self) -> None:
        """Stop watching; returns when no probe is under way."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self._stalls.stop()
        await self._restarts.stop()
        for worker_id in tuple(self._watches):
            self._forget(worker_id)
        await self._endings.wait()

    def report_unreachable(self, worker: Worker) -> None:
        """The data path could not connect to ``worker``: look at it now rather than at the next interval.

        Several of these in a row, or of :meth:`report_failure`, take it out before that.

        Cheap and safe to call for every failed request.
        """
        watch = self._watches.get(worker.server.id)
        if watch is not None:
            watch.report_unreachable()

    def report_failure(self, worker: Worker) -> None:
        """A request to ``worker`` lost its connection: look at it, and ask again what it is.

        Cheap and safe to call for every failed request.
        """
        watch = self._watches.get(worker.server.id)
        if watch is not None:
            watch.report_failure()

    def report_doubt(self, worker: Worker) -> None:
        """A request to ``worker`` was answered in a way that another number of ranks may explain: ask again what it is.

        Cheap and safe to call for every failed request.
        """
        watch = self._watches.get(worker.server.id)
        if watch is not None:
            watch.report_doubt()

    def look_again(self, worker: Worker) -> None:
        """Somebody else has seen trouble with ``worker``: look at it now rather than at the next interval."""
        watch = self._watches.get(worker.server.id)
        if watch is not None:
            watch.look_again()

    def _restarted(self, worker: Worker) -> None:
        watch = self._watches.get(worker.id)
        if watch is not None:
            watch.report_restart()

    async def _ask_for_life(self, worker: Worker) -> None:
        watch = self._watches.get(worker.server.id)
        if watch is not None:
            await watch.ask_for_life()

    async def _ask_rank_for_life(self, worker: Worker) -> None:
        watch = self._watches.get(worker.server.id)
        if watch is not None:
            await watch.ask_rank_for_life(worker)

    def _changed(self, worker: Worker, change: Change) -> None:
        if change is Change.ADDED:
            if worker.server is worker:  # further ranks of a server need no looks of their own
                self._watch(worker)
        elif worker.status is Status.DRAINING:
            self._forget(worker.id)
            if change is Change.REMOVED:
                self._client.rpc.forget(worker)
        elif change is Change.SPEC and worker.server is worker:
            self._respecified(worker)
        if change is Change.STATUS and worker.status is not Status.READY:
            for watch in tuple(self._watches.values()):
                watch.spare()

    def _watch(self, worker: Worker) -> None:
        if worker.status is Status.DRAINING:
            return
        settings = self._settings.overridden(self._registry.spec(worker).health)
        watch = Watch(
            worker,
            self._registry,
            self._contact(worker),
            self._client,
            self._resolver,
            settings,
            self._pace,
            self._gate,
            self._refresh,
            self._rounds,
        )
        self._watches[worker.id] = watch
        self._tasks[worker.id] = asyncio.get_running_loop().create_task(watch.run(), name=f"watch-{worker.id}")

    def _contact(self, worker: Worker) -> Contact:
        if worker.url.is_grpc:
            return GrpcContact(worker, self._client.rpc)
        return HttpContact(worker, self._client, token_reuse=self._token_reuse, dp_aware=self._registry.dp_aware)

    def _respecified(self, worker: Worker) -> None:
        """The worker's registration is another: one that has to join (again) is watched from the beginning."""
        watch = self._watches.get(worker.id)
        if watch is not None and self._registry.has_joined(worker):
            watch.respecified(self._settings.overridden(self._registry.spec(worker).health))
        elif self._unsubscribe is not None:
            self._forget(worker.id)
            self._watch(worker)

    def _forget(self, worker_id: str) -> None:
        if self._watches.pop(worker_id, None) is not None:
            self._endings.cancel(self._tasks.pop(worker_id))
