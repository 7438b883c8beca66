"""All workers of the fleet: who is registered, who may be given requests, and what Envoy knows of them.

The registry holds state and makes it consistent; it asks nobody anything itself. :mod:`extproc.workers.health` tells it
addresses, states and identities. Everything happens on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from extproc.workers import ranks
from extproc.workers.addresses import Addresses, EndpointTakenError
from extproc.workers.breaker import BreakerSettings
from extproc.workers.changes import Change, Subscriber, Subscribers, WorkerExistsError, WorkerLeavesError
from extproc.workers.circuits import Circuits
from extproc.workers.draining import Draining
from extproc.workers.metadata import Metadata
from extproc.workers.overload import Overloads, OverloadSettings
from extproc.workers.pairing import PairingMode
from extproc.workers.publication import Publish
from extproc.workers.record import Record, named
from extproc.workers.roster import Roster
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import KvEngine, Role, Status, Worker

__all__ = ["Change", "Registry", "Subscriber", "WorkerExistsError", "WorkerLeavesError"]

_logger = logging.getLogger(__name__)


class Registry(Roster):
    """See the module. ``publish`` tells Envoy of endpoints and returns once Envoy has acknowledged them.

    ``drain_limit`` (seconds) bounds the wait for requests under way when a worker is removed or moves; one that is
    removed stays for its ``drain_settle_secs`` at least, if it was registered with that.
    ``drain_poll`` is how often their number is looked at. ``breaker`` and ``overload``: of workers without
    settings of their own.
    ``pairing`` says how prefill and decode workers are compared. ``dp_aware``: a server with several data-parallel
    ranks has an entry for each (:mod:`extproc.workers.ranks`); whatever is told of one of them holds for all.
    """

    def __init__(
        self,
        publish: Publish,
        *,
        drain_limit: float = 180.0,
        drain_poll: float = 0.1,
        publish_retry: float = 5.0,
        pairing: PairingMode = PairingMode.LENIENT,
        breaker: BreakerSettings | None = None,
        overload: OverloadSettings | None = None,
        dp_aware: bool = False,
    ) -> None:
        overload = overload or OverloadSettings()
        super().__init__(pairing, sheds=overload.shed, refusal=lambda: self._addresses.refusal)
        self.dp_aware = dp_aware
        self._by_url: dict[tuple[str, Role], Record] = {}
        self._subscribers = Subscribers()
        self._draining = Draining(drain_limit, drain_poll)
        self.circuits = Circuits(breaker or BreakerSettings(), self._circuit_moved)
        self.overloads = Overloads(overload, self._overload_moved)
        self._addresses = Addresses(
            publish, moved=self._moved, until_idle=self._draining.until_idle, retry_delay=publish_retry
        )

    # -- coming and going -----------------------------------------------------------------------------------------

    def add(self, spec: WorkerSpec) -> Worker:
        """Register a worker; it is PENDING until it has been found healthy.

        It stands for the whole server until that has said that it has several ranks, and for the first of them then.

        The id belongs to URL and role for as long as the worker is registered, however often it fails meanwhile. One
        that is being removed is in nobody's way: the new worker is used while the requests of the former one end.
        Raises WorkerExistsError.
        """
        key = (str(spec.url), spec.role)
        if key in self._by_url:
            raise WorkerExistsError(self._by_url[key].worker)
        record = Record.of(spec)
        worker = record.worker
        self.circuits.watch(worker, spec.resilience)
        self.overloads.watch(worker, spec.overload)
        if worker.unserved:
            _logger.warning("worker added", extra=named(worker) | {"reason": worker.unserved})
        else:
            _logger.info("worker added", extra=named(worker))
        self._records[worker.id] = self._by_url[key] = record
        self._tell(worker, Change.ADDED)
        return worker

    def change(self, worker: Worker, spec: WorkerSpec) -> None:
        """Let the worker have another registration: from now on, and without leaving rotation.

        What it has said of itself holds where ``spec`` says nothing. ``spec`` is of the same URL and role. It is that
        of all ranks of the server. Raises WorkerLeavesError.
        """
        found = self._registered(worker).found
        for record in self._entries(worker):
            record.change(spec)
            self.circuits.change(record.worker, spec.resilience)
            self.overloads.watch(record.worker, spec.overload)
        _logger.info("worker changed", extra=named(worker))
        if found is not None:
            self.describe(worker, found)
        for record in self._entries(worker):
            record.worker.kv_engines = ranks.engines_of(record.worker, record.worker.kv_engines)
            self._tell(record.worker, Change.SPEC)

    def replace(self, worker: Worker, spec: WorkerSpec) -> None:
        """Register the worker anew under its id: it is PENDING until it has been found healthy and what it now is.

        One that is READY, and of which nothing that matters for requests is another, stays so and is asked anew.
        Requests under way go on. ``spec`` is of the same URL and role. Not for one of several ranks. Raises
        WorkerLeavesError.
        """
        record = self._registered(worker)
        if worker.status is Status.READY and spec.requested_as(record.spec):
            self.change(worker, spec)
            return
        record.replace(spec)
        self.circuits.change(worker, spec.resilience)
        self.overloads.watch(worker, spec.overload)
        self._set_status(record, Status.PENDING, "")
        self._tell(worker, Change.SPEC)

    def remove(self, worker: Worker) -> None:
        """Give the worker no more requests, let those under way end, then forget it. Repeating it changes nothing.

        A rank goes with all others of its server.
        """
        if worker.id not in self._records or worker.status is Status.DRAINING:
            return
        server = worker.server
        del self._by_url[server.base_url, server.role]
        self._addresses.retire(server)
        for record in self._entries(server):
            self._set_status(record, Status.DRAINING, "being removed")
        self._draining.begin(self._drain(server), server)

    def cordon(self, worker: Worker, reason: str) -> None:
        """Give the worker no new requests for now, for ``reason``; empty: give it some again.

        Unlike one that is out it is probed, followed and trusted as before, and its requests go on. All ranks of a
        server are alike.
        """
        for record in self._entries(worker):
            if record.worker.cordoned != reason:
                record.worker.cordoned = reason
                _logger.info("worker cordoned" if reason else "worker uncordoned", extra=named(record.worker))
                self._tell(record.worker, Change.CORDON)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call ``callback`` at every change, at once and synchronously. Returns what ends the subscription."""
        return self._subscribers.add(callback)

    async def close(self) -> None:
        """End everything under way. The workers stay as they are."""
        await self._draining.close()
        self.circuits.close()
        await self._addresses.close()

    # -- what health checking tells -------------------------------------------------------------------------------

    def set_status(self, worker: Worker, status: Status, reason: str = "") -> None:
        """Set a worker's state and what is wrong with it. A worker that is draining or gone stays so."""
        if worker.status is not Status.DRAINING:
            for record in self._entries(worker):
                self._set_status(record, status, reason)

    def hold(self, rank: Worker, reason: str) -> None:
        """Keep one data-parallel rank NOT_READY for ``reason``, however its server is; empty: no longer."""
        record = self._records.get(rank.id)
        if record is not None and rank.status is not Status.DRAINING:
            record.held = reason
            self._set_status(record, *record.told)

    def is_held(self, rank: Worker) -> bool:
        """Whether the rank is out by :meth:`hold`."""
        record = self._records.get(rank.id)
        return record is not None and bool(record.held)

    def describe(self, worker: Worker, found: Metadata) -> None:
        """Take over what the worker said of itself, where the registration does not say otherwise.

        Its ranks are as many then as the server says, in doubt against the registration.
        """
        for record in self._entries(worker):
            record.describe(found, ranks_known=self.dp_aware)
            self._tell(record.worker, Change.IDENTITY)
        if self.dp_aware and worker.id in self._records:
            self._set_ranks(worker, ranks.count(worker, found))

    def set_engines(self, worker: Worker, engines: tuple[KvEngine, ...]) -> None:
        """Say which engine cores a decode must be told of: one of each rank."""
        if self.dp_aware and worker.id in self._records and engines:
            self._set_ranks(worker, ranks.count_of(worker, engines))
        for record in self._entries(worker):
            own = ranks.engines_of(record.worker, engines)
            before = record.worker.kv_engines
            if before != own:
                record.worker.kv_engines = own
                self._tell(record.worker, Change.IDENTITY)
                if before and own:
                    self._tell(record.worker, Change.RESTARTED)

    def restarted(self, worker: Worker, engines: Collection[str]) -> None:
        """Say that these engine cores of the worker's server, by their ids, are other processes by now."""
        for record in self._entries(worker):
            if any(engine.id in engines for engine in record.worker.kv_engines):
                self._tell(record.worker, Change.RESTARTED)

    def set_tokenizer(self, model: str, missing: str) -> None:
        """Say why there is no tokenizer for ``model``, of its gRPC workers; empty when there is one."""
        for record in self._records.values():
            if record.worker.url.is_grpc and model in record.worker.model_ids:
                record.worker.no_tokenizer = missing
        self._index.forget_reasons()

    def place(self, worker: Worker, ip: str) -> None:
        """Say where the worker is. Envoy is told, and requests go there once it has acknowledged.

        Raises EndpointTakenError when another worker of the role is there; this
        worker is then nowhere.
        """
        registered = worker.id in self._records and worker.status is not Status.DRAINING
        worker = worker.server
        for entry in ranks.entries(worker) if registered else ():
            entry.ip = ip
        if registered and worker.role in (Role.PREFILL, Role.DECODE):
            try:
                self._addresses.place(worker, ip)
            except EndpointTakenError:
                for entry in ranks.entries(worker):
                    entry.ip = None  # whoever is there is another worker, with another key
                raise

    # -- inside ---------------------------------------------------------------------------------------------------

    def _registered(self, worker: Worker) -> Record:
        record = self._records.get(worker.id)
        if record is None or worker.status is Status.DRAINING:
            raise WorkerLeavesError(f"Worker {worker.id} is being removed")
        return record

    def _entries(self, worker: Worker) -> list[Record]:
        """The records of all entries of a server; none when it is gone."""
        if worker.id not in self._records:
            return []
        return [self._records[entry.id] for entry in ranks.entries(worker)]

    def _set_ranks(self, worker: Worker, size: int) -> None:
        """Have ``size`` entries for a server: new ones are in the state of the first, those that are left over end."""
        former = ranks.entries(worker)
        if size == len(former) or worker.status is Status.DRAINING:
            return
        first = self._records[former[0].id]
        new = [first.another(ranks_known=self.dp_aware) for _ in range(size - len(former))]
        for record in new:
            self.circuits.watch(record.worker, first.spec.resilience)
            self.overloads.watch(record.worker, first.spec.overload)
        _logger.info("worker ranks", extra=named(first.worker) | {"were": len(former), "ranks": size})
        for entry in former[size:]:
            entry.ranks = ()
        ranks.form([*former[:size], *(record.worker for record in new)])
        if size == 1:  # a server as a whole is judged by its own signs of life, which let no rank in again
            self.hold(former[0], "")
        self._records |= {record.worker.id: record for record in new}
        for entry in former[:size]:
            self._tell(entry, Change.IDENTITY)
        for record in new:
            self._tell(record.worker, Change.ADDED)
        for entry in former[size:]:
            self._set_status(self._records[entry.id], Status.DRAINING, "the server has no such rank any more")
            self._draining.begin(self._drain_rank(entry), entry)

    def _set_status(self, record: Record, status: Status, reason: str) -> None:
        moved = record.set_status(status, reason)
        self._index.forget_reasons()
        if not moved:
            return
        worker = record.worker
        if worker.status is Status.READY:
            worker.breaker.rested()  # it was out for a while, and may be another process
        self._addresses.tell_health(worker)
        self._tell(worker, Change.STATUS)

    def _circuit_moved(self, worker: Worker) -> None:
        if worker.id in self._records:
            self._addresses.tell_health(worker)
            self._tell(worker, Change.CIRCUIT)

    def _overload_moved(self, worker: Worker) -> None:
        if worker.id in self._records:
            self._tell(worker, Change.OVERLOAD)

    def _tell(self, worker: Worker, change: Change) -> None:
        self._index.forget()
        self._subscribers.tell(worker, change)

    def _moved(self, worker: Worker) -> None:
        for entry in ranks.entries(worker):
            entry.endpoint = worker.endpoint
            self._tell(entry, Change.ENDPOINT)

    async def _drain(self, server: Worker) -> None:
        settle = self._records[server.id].spec.health.drain_settle_secs
        await asyncio.gather(asyncio.sleep(settle or 0), self._draining.until_idle(server))
        await self._addresses.forget(server)
        for entry in ranks.entries(server):
            self._forget(entry)

    async def _drain_rank(self, worker: Worker) -> None:
        await self._draining.until_idle(worker)
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        worker.endpoint = None
        del self._records[worker.id]
        self.circuits.forget(worker)
        self.overloads.forget(worker)
        _logger.info("worker removed", extra=named(worker))
        self._tell(worker, Change.REMOVED)
