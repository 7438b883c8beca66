"""Has those registered who were found, and no others: workers that somebody registered by hand are left alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from extproc.discovery.protocol import NoProtocolError, protocol_of
from extproc.discovery.state import DiscoveryState
from extproc.discovery.steps import Step, steps
from extproc.discovery.wanted import Key, Wanted
from extproc.workers.registry import Registry, WorkerExistsError
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Status, Worker

_AT_ONCE: Final = 256  # servers that are asked which protocol they speak; some may be behind a closed door
_ASK_SECONDS: Final = 5.0  # for an answer
_FIRST_PAUSE: Final = 0.5  # seconds between two questions to a server
_LONGEST_PAUSE: Final = 5.0
_NOT_READY: Final = "its pod is not ready"

_log: Final = logging.getLogger(__name__)

Ask = Callable[[str, int, float], Awaitable[str]]


@dataclass(slots=True, eq=False)
class _Entry:
    """One that was found.

    Attributes:
        worker: registered here; it may have been removed by hand since. None while it is being asked, or because
            somebody else had registered it.
        asking: finds out its protocol.
    """

    wanted: Wanted
    worker: Worker | None = None
    asking: asyncio.Task[None] | None = None


class Registrar:
    """Makes ``registry`` follow what is found. ``ask`` is :func:`extproc.discovery.protocol.protocol_of`.

    A worker that is removed by hand stays away until its pod is another one, and what is changed by hand stays so
    until the pod says something else. One whose pod is not ready stays where it is, and is given no new requests.
    """

    def __init__(self, registry: Registry, state: DiscoveryState, ask: Ask = protocol_of) -> None:
        self._registry = registry
        self._state = state
        self._ask_protocol = ask
        self._entries: dict[Key, _Entry] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def want(self, wanted: Mapping[Key, Wanted]) -> None:
        """These should be registered, and nobody else that was found before."""
        known = {key: entry.wanted for key, entry in self._entries.items()}
        for step, key in list(steps(known, wanted)):
            self._state.changes[step.value] += 1
            match step:
                case Step.REMOVE:
                    self._remove(key)
                case Step.REPLACE:
                    _log.info("another one at a worker's address", extra=_named(wanted[key]))
                    self._remove(key)
                    self._add(wanted[key])
                case Step.CHANGE:
                    self._change(self._entries[key], wanted[key])
                case Step.ADD:
                    self._add(wanted[key])
        for key, entry in self._entries.items():
            if entry.wanted is not wanted[key]:
                entry.wanted = wanted[key]
                self._set_ready(entry)

    async def close(self) -> None:
        """Find and register nobody any more; the workers stay."""
        asking = [entry.asking for entry in self._entries.values() if entry.asking is not None]
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    def _add(self, wanted: Wanted) -> None:
        entry = self._entries[wanted.key] = _Entry(wanted)
        if wanted.protocol_known:
            self._register(entry, wanted.spec)
            return
        entry.asking = asyncio.get_running_loop().create_task(self._ask(entry), name=f"ask-{wanted.name}")
        self._state.waiting += 1
        entry.asking.add_done_callback(self._asked)

    def _asked(self, _task: asyncio.Task[None]) -> None:
        self._state.waiting -= 1

    def _register(self, entry: _Entry, spec: WorkerSpec) -> None:
        try:
            entry.worker = self._registry.add(spec)
        except WorkerExistsError as error:
            extra = _named(entry.wanted) | {"worker_id": error.worker.id}
            _log.info("found a worker that somebody else registered: it is left as it is", extra=extra)
            return
        self._set_ready(entry)
        _log.info("found a worker", extra=_named(entry.wanted) | {"worker_id": entry.worker.id})

    def _set_ready(self, entry: _Entry) -> None:
        worker = self._own(entry)
        if worker is not None:
            self._registry.cordon(worker, "" if entry.wanted.ready else _NOT_READY)

    def _change(self, entry: _Entry, wanted: Wanted) -> None:
        worker = self._own(entry)
        if worker is None:
            return
        spec = _over(worker.url.scheme, wanted.spec)
        if worker.ranks:
            self._registry.change(worker, spec)
        else:
            self._registry.replace(worker, spec)

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        if entry.asking is not None:
            entry.asking.cancel()
        worker = self._own(entry)
        if worker is not None:
            _log.info("a found worker is to go", extra=_named(entry.wanted) | {"worker_id": worker.id})
            self._registry.remove(worker)

    def _own(self, entry: _Entry) -> Worker | None:
        """The worker that was registered here, if it is still there."""
        worker = None if entry.worker is None else self._registry.get(entry.worker.id)
        return None if worker is None or worker.status is Status.DRAINING else worker

    async def _ask(self, entry: _Entry) -> None:
        """Register a worker as soon as its protocol is known."""
        url, pause, told = entry.wanted.spec.url, _FIRST_PAUSE, ""
        while True:
            try:
                async with self._gate:
                    protocol = await self._ask_protocol(url.host, url.port, _ASK_SECONDS)
                break
            except NoProtocolError as error:
                if str(error) != told:
                    told = str(error)
                    extra = _named(entry.wanted) | {"reason": told}
                    _log.warning("found a worker that does not answer yet", extra=extra)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
        entry.asking = None
        self._register(entry, _over(protocol, entry.wanted.spec))


def _over(scheme: str, spec: WorkerSpec) -> WorkerSpec:
    return spec if spec.url.scheme == scheme else replace(spec, url=replace(spec.url, scheme=scheme))


def _named(wanted: Wanted) -> dict[str, object]:
    return {"role": wanted.spec.role.value, "address": wanted.spec.url.authority, "found": wanted.name}
