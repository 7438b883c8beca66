"""The whole product for a test: the real service with a real Envoy, strict mock workers, and a client.

The service runs in the test's own process and loop, so that a test can look at what it holds: requests under way,
rooms, loads, legs, tasks. Where a test is about the process itself, see test_product_launch.py.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from http_client import PATIENCE, Client, Headers, Reply
from standstill import Within

from extproc.dataplane.process import EnvoyProcess
from extproc.exchange.record import Observer
from extproc.exchange.record import Record as Finished
from extproc.mock import Record, SglangMock
from extproc.service import Service
from extproc.settings import Settings
from extproc.workers.worker import Worker

# What "at once" means here (seconds), a busy machine's pauses included: what it is told from are the engines' timeouts,
# 2.5 s and more. How long it really takes is measured in bench/.
PROMPT: Final = Within(2.0)


class Records:
    """An Observer that remembers, wakes those who wait, and tells the real one."""

    def __init__(self, inner: Observer) -> None:
        self.all: list[Finished] = []
        self._inner = inner
        self._woken = asyncio.Event()

    def finished(self, record: Finished) -> None:
        """See Observer."""
        self.all.append(record)
        self._inner.finished(record)
        self._woken.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at whenever a request is over."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._woken.clear()
                await self._woken.wait()


class Product:
    """One gateway with its workers. ``settings`` are those of ``pd-extproc launch``, by name.

    Health probes go on, but no number of failures, of probes or requests, takes a worker out, unless ``settings`` say
    so: tests of broken workers want them to be chosen. Mocks that are added later are the test's own. ``wait``: until
    all can be used.
    """

    def __init__(self, prefills: int = 1, decodes: int = 2, *, wait: bool = True, **settings: Any) -> None:
        self.prefills = [self._mock("prefill") for _ in range(prefills)]
        self.decodes = [self._mock("decode") for _ in range(decodes)]
        self.mocks = [*self.prefills, *self.decodes]
        self._given = settings
        self._wait = wait
        self._others = asyncio.all_tasks()

    # -- what its workers are: vllm_product.py has others ---------------------------------------------------------

    def _mock(self, role: str) -> SglangMock:
        return SglangMock(role)

    def _start_option(self, mock: SglangMock) -> object:
        """A worker as ``--prefill``, ``--decode`` or the YAML file say it."""
        return f"{mock.url} {mock.bootstrap_port}" if mock.role == "prefill" else mock.url

    def _registration(self, mock: SglangMock) -> dict[str, object]:
        """What ``POST /workers`` is told besides URL and role."""
        return {"bootstrap_port": mock.bootstrap_port} if mock.role == "prefill" else {}

    async def _nobody_waits(self) -> None:
        """See that no worker waits for another."""
        await soon(lambda: not any(mock.engine.bootstrap.rooms for mock in self.prefills), "a leg waits in a room")

    # -- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="pd-"))
            stack.callback(self._remove_directory)
            for mock in self.mocks:
                await stack.enter_async_context(mock)
            await self._start()
            stack.push_async_callback(self._stop)
            if self._wait:
                await self.ready()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        await asyncio.sleep(0)  # in which what was cancelled ends
        tasks = asyncio.all_tasks() - self._others - {asyncio.current_task()}
        if tasks:  # grpcio's do not end with its server, but after it
            _, tasks = await asyncio.wait(tasks, timeout=PATIENCE)
        assert not tasks, f"tasks are left: {tasks}"

    async def _start(self) -> None:
        self.service = Service(self._settings())
        self.gateway = self.service.gateway
        self.records = Records(self.gateway.observer)
        self.gateway.observer = self.records
        self._running = asyncio.create_task(self.service.run(), name="service")
        waiting = asyncio.create_task(self.service.started.wait())
        async with asyncio.timeout(60):
            await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            self._running.result()
        self.client = Client(*self.service.client_address)

    async def _stop(self) -> None:
        await self.client.close()
        self.service.stop()
        async with asyncio.timeout(60):
            assert await self._running == 0

    def _remove_directory(self) -> None:
        left = list(self.directory.iterdir())
        shutil.rmtree(self.directory)
        assert left == [], "the service left files in its run directory"

    def _settings(self) -> Settings:
        values: dict[str, Any] = {
            "pd_disaggregation": True,
            "host": "127.0.0.1",
            "port": 0,
            "envoy_admin_port": 0,
            "envoy_concurrency": 1,
            "prometheus_host": "127.0.0.1",
            "prometheus_port": 0,
            "run_dir": str(self.directory),
            "health_failure_threshold": 1_000_000,
            "worker_transport_failures": 0,
            "worker_stall_secs": 0,
            "disable_circuit_breaker": True,
            "drain_settle_secs": 0,
            "shutdown_grace_period_secs": 0,
            "policy": "round_robin",  # who is next is known
            "log_level": "error",
            "prefill": [self._start_option(mock) for mock in self.prefills],
            "decode": [self._start_option(mock) for mock in self.decodes],
        }
        return Settings(**values | self._given)

    async def ready(self) -> None:
        """Wait until every registered worker may be given requests."""
        await self.fleet(lambda workers: all(worker.usable for worker in workers))

    async def fleet(self, condition: Callable[[list[Worker]], bool]) -> None:
        """Wait until ``condition`` holds for the registered workers; it is looked at after every change."""
        changed = asyncio.Event()
        unsubscribe = self.service.registry.subscribe(lambda *_: changed.set())
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition(list(self.service.registry)):
                    changed.clear()
                    await changed.wait()
        finally:
            unsubscribe()

    # -- its parts ------------------------------------------------------------------------------------------------

    @property
    def prefill(self) -> SglangMock:
        """The (first) prefill worker."""
        return self.prefills[0]

    @property
    def decode(self) -> SglangMock:
        """The (first) decode worker."""
        return self.decodes[0]

    @property
    def envoy(self) -> EnvoyProcess:
        """The running Envoy."""
        assert self.service._envoy is not None
        return self.service._envoy

    def worker(self, mock: SglangMock) -> Worker:
        """How the service knows a mock."""
        return next(worker for worker in self.service.registry if str(worker.url) == mock.url)

    @property
    def legs(self) -> tuple[Record, Record]:
        """What the two legs of the only request received: prefill, decode."""
        prefills = [leg for mock in self.prefills for leg in mock.legs]
        decodes = [leg for mock in self.decodes for leg in mock.legs]
        assert (len(prefills), len(decodes)) == (1, 1)
        return prefills[0], decodes[0]

    async def post(self, target: str, body: object, headers: Headers = ()) -> Reply:
        """Ask the gateway."""
        return await self.client.post(target, body, headers)

    @property
    def load(self) -> dict[str, int]:
        """The legs under way per worker, where there are any."""
        return {str(worker.url): worker.load for worker in self.service.registry if worker.load}

    # -- its fleet ------------------------------------------------------------------------------------------------

    async def add(self, mock: SglangMock, **fields: object) -> str:
        """Register a mock by ``POST /workers``; its id. It need not run, and is not waited for."""
        body = {"url": mock.url, "worker_type": mock.role, **self._registration(mock), **fields}
        answer = await self.client.post("/workers", body)
        assert answer.status == 202, answer.body
        assert answer.header("location") == f"/workers/{answer.json['worker_id']}"
        return str(answer.json["worker_id"])

    async def remove(self, mock: SglangMock) -> None:
        """Remove a mock by ``DELETE /workers/{id}``, and wait until it is gone."""
        worker = self.worker(mock)
        answer = await self.client.delete(f"/workers/{worker.id}")
        assert answer.status == 202, answer.body
        await self.fleet(lambda workers: worker not in workers)

    # -- between tests --------------------------------------------------------------------------------------------

    async def forget(self) -> None:
        """Make the mocks behave, and forget what was asked so far."""
        for mock in self.mocks:
            mock.behave()
            await mock.accept()
            mock.clear()
        self.records.all.clear()

    async def settled(self) -> None:
        """Wait until no request is under way, and see that nothing is left of any."""
        await self.records.until(lambda: self.gateway.alive == 0)
        assert self.gateway.handoffs.live == 0
        assert self.load == {}
        assert not any(worker.tokens for worker in self.service.registry), "prompt tokens count on"
        assert {worker.name: worker.breaker.trials for worker in self.service.registry if worker.breaker.trials} == {}
        for mock in self.mocks:
            await mock.idle()
            assert mock.engine.live == {}, f"{mock.role} still runs requests"
        # Aborts are sent and not waited for, and a decode says over TCP that it has left a room.
        await soon(lambda: not self.service._egress.open_legs, "legs are left")
        await self._nobody_waits()


def names_of(leg: Record) -> set[str]:
    """The names under which the engine knows a leg: of a list of prompts, each has its own."""
    fields = leg.json
    name = fields.get("rid") or fields["request_id"]
    rooms = fields["bootstrap_room"]
    return {f"{name}_{index}" for index in range(len(rooms))} if isinstance(rooms, list) else {name}


@contextmanager
def held(mocks: Iterable[SglangMock]) -> Iterator[None]:
    """Have the engines of these workers stand still meanwhile: no leg that they have comes to its end."""
    engines = [mock.engine for mock in mocks]
    for engine in engines:
        engine.hang(0)
    try:
        yield
    finally:
        for engine in engines:
            engine.revive(0)


async def soon(condition: Callable[[], bool], complaint: str, within: float = PATIENCE) -> None:
    """Wait for something that no event tells of."""
    began, bound = time.monotonic(), Within(within)
    while not condition():
        assert time.monotonic() - began < bound, complaint
        await asyncio.sleep(0.002)
