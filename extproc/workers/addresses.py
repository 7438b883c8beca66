"""Where the workers are, as Envoy knows it: published before use, and kept while requests under way may name it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

from extproc.workers.breaker import BreakerState
from extproc.workers.endpoints import Endpoint, Health, Snapshot
from extproc.workers.publication import Publish, Publisher
from extproc.workers.ranks import entries
from extproc.workers.worker import Role, Status, Worker


class EndpointTakenError(Exception):
    """The worker's name resolves to an address that another worker of its role has."""

    def __init__(self, address: str, holder: Worker) -> None:
        super().__init__(f"{address} is already the {holder.role.value} worker {holder.url} ({holder.id})")
        self.address = address
        self.holder = holder


@dataclass(slots=True, eq=False)
class _Place:
    worker: Worker
    wanted: Endpoint | None = None  # where the worker is now
    current: Endpoint | None = None  # what ``worker.endpoint`` says: acknowledged by Envoy
    retired: list[Endpoint] = field(default_factory=list)  # earlier ones that requests under way may still name
    told: Health = Health.HEALTHY  # what the last snapshot says of the worker

    def held(self) -> Iterator[Endpoint]:
        """Where the worker is, and where it is still sent requests until Envoy knows; nobody else may be there."""
        if self.wanted is not None:
            yield self.wanted
        if self.current is not None:
            yield self.current


class Addresses:
    """Sets ``worker.endpoint``, and nobody else does.

    ``publish`` tells Envoy and returns once it has acknowledged; ``moved`` is called when a worker's endpoint is
    another; ``until_idle`` waits until a worker has no request under way, or for long enough.
    """

    def __init__(
        self,
        publish: Publish,
        *,
        moved: Callable[[Worker], None],
        until_idle: Callable[[Worker], Awaitable[None]],
        retry_delay: float,
    ) -> None:
        self.refusal = ""  # why Envoy did not take the last endpoints; empty when it did
        self._places: dict[str, _Place] = {}
        self._holders: dict[tuple[Role, str], _Place] = {}  # by address; some may be there no more
        self._moved = moved
        self._until_idle = until_idle
        self._retiring: set[asyncio.Task[None]] = set()
        self._publisher = Publisher(
            publish, self._snapshot, acknowledged=self._acknowledged, refused=self._refused, retry_delay=retry_delay
        )

    def place(self, worker: Worker, ip: str) -> None:
        """Say where the worker is; see Registry.place. Raises EndpointTakenError."""
        place = self._places.setdefault(worker.id, _Place(worker))
        url = worker.url
        endpoint = Endpoint(ip=ip, port=url.port, hostname=url.host, tls=url.tls, grpc=url.is_grpc)
        if place.wanted == endpoint:
            return
        holder = self._holder(endpoint, place)
        place.wanted = None if holder else endpoint
        if holder is None:
            self._holders[worker.role, endpoint.address] = place
        else:
            self._settle(place)
        self._publisher.request()
        if holder is not None:
            raise EndpointTakenError(endpoint.address, holder)

    def retire(self, worker: Worker) -> None:
        """The worker gets no new requests: where it is may be another's, but Envoy keeps it for those under way."""
        place = self._places.get(worker.id)
        if place is not None:
            if place.current is not None:
                place.retired.append(place.current)
            place.wanted = place.current = None

    def tell_health(self, worker: Worker) -> None:
        """The worker, or a data-parallel rank of it, may be better or worse than Envoy was told."""
        place = self._places.get(worker.server.id)
        if place is not None and place.told is not _health(place.worker):
            self._publisher.request()

    async def forget(self, worker: Worker) -> None:
        """Have Envoy forget the worker; return when it has acknowledged that, or refused to."""
        self._places.pop(worker.id, None)
        worker.endpoint = None
        await self._publisher.round()

    async def close(self) -> None:
        """Publish nothing more."""
        tasks = tuple(self._retiring)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._publisher.close()

    def _holder(self, endpoint: Endpoint, applicant: _Place) -> Worker | None:
        """Who else of the role is at the endpoint's address; retired addresses are free for others."""
        place = self._holders.get((applicant.worker.role, endpoint.address))
        if place is None or place is applicant or self._places.get(place.worker.id) is not place:
            return None
        return place.worker if any(held.address == endpoint.address for held in place.held()) else None

    def _of_role(self, role: Role) -> Iterator[_Place]:
        return (place for place in self._places.values() if place.worker.role is role)

    def _snapshot(self) -> Snapshot:
        places = self._places.values()
        self._holders = {(place.worker.role, held.address): place for place in places for held in place.held()}
        return Snapshot(prefill=self._endpoints(Role.PREFILL), decode=self._endpoints(Role.DECODE))

    def _endpoints(self, role: Role) -> tuple[Endpoint, ...]:
        """What Envoy should know; where a new worker has taken a retired address, the new one counts."""
        places = list(self._of_role(role))
        for place in places:
            place.told = _health(place.worker)
        held = [_in_health(endpoint, place.told) for place in places for endpoint in place.held()]
        retired = [_in_health(endpoint, Health.DRAINING) for place in places for endpoint in place.retired]
        by_address: dict[str, Endpoint] = {}
        for endpoint in (*held, *retired):
            by_address.setdefault(endpoint.address, endpoint)
        return tuple(by_address.values())

    def _acknowledged(self, snapshot: Snapshot) -> None:
        self.refusal = ""
        lists = {Role.PREFILL: snapshot.prefill, Role.DECODE: snapshot.decode}
        known = {role: {_in_health(endpoint, Health.HEALTHY) for endpoint in lists[role]} for role in lists}
        for place in tuple(self._places.values()):
            if place.wanted in known.get(place.worker.role, ()):
                self._settle(place)

    def _refused(self, why: str) -> None:
        self.refusal = why

    def _settle(self, place: _Place) -> None:
        """Make the wanted endpoint the current one; the one before stays with Envoy for a while."""
        if place.current == place.wanted:
            return
        former, place.current = place.current, place.wanted
        place.worker.endpoint = place.current.address if place.current else None
        if former is not None:
            place.retired.append(former)
            task = asyncio.get_running_loop().create_task(self._retire(place, former), name=f"retire-{former.address}")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._moved(place.worker)

    async def _retire(self, place: _Place, endpoint: Endpoint) -> None:
        await self._until_idle(place.worker)
        place.retired.remove(endpoint)
        self._publisher.request()


def _health(worker: Worker) -> Health:
    """What Envoy is told of ``worker``; of one that was never asked how it is, nothing bad.

    Of several ranks none speaks for the others, which have the same endpoint.
    """
    if worker.status is Status.DRAINING:
        return Health.DRAINING
    return Health.UNHEALTHY if all(map(_is_out, entries(worker))) else Health.HEALTHY


def _is_out(entry: Worker) -> bool:
    return entry.status in (Status.NOT_READY, Status.FAILED) or entry.breaker.state is BreakerState.OPEN


def _in_health(endpoint: Endpoint, health: Health) -> Endpoint:
    return endpoint if endpoint.health is health else replace(endpoint, health=health)
