"""The gateway that a show is given on: workers, service and Envoy from start to end, also when interrupted."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import aiohttp

from extproc import logs
from extproc.logs import LogLevel
from extproc.service import Service, startable
from extproc.settings import Settings
from extproc.workers.spec import WorkerSpec

_READY_SECONDS: Final = 60
_INTERRUPTED: Final = 130  # as shells call the end by SIGINT


class ShowError(Exception):
    """The show cannot go on; the message says why."""


class Fleet(NamedTuple):
    """The workers that the gateway is given at start."""

    prefill: tuple[WorkerSpec, ...] = ()
    decode: tuple[WorkerSpec, ...] = ()


class Show(Protocol):
    """What there is to see with one kind of workers."""

    def workers(self) -> AbstractAsyncContextManager[Fleet]:
        """Run them. Raises ShowError."""

    async def perform(self, stage: Stage) -> list[str]:
        """Send the requests and print what becomes of them; what was not as it should be. Raises ShowError."""

    def invite(self, stage: Stage) -> None:
        """Print what the user can try now."""


class Stage:
    """A running gateway."""

    def __init__(self, service: Service, serving: asyncio.Task[int], client: aiohttp.ClientSession) -> None:
        self.client = client
        self._service = service
        self._serving = serving

    @property
    def url(self) -> str:
        """Where clients connect."""
        host, port = self._service.client_address
        return f"http://{host}:{port}"

    @property
    def metrics_url(self) -> str:
        """The gateway's metrics."""
        return f"http://127.0.0.1:{self._service.metrics_port}/metrics"

    async def started(self) -> None:
        """Wait until it serves. Raises ShowError when it ends instead."""
        waiting = asyncio.create_task(self._service.started.wait())
        try:
            await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._serving.done():
            raise ShowError("the gateway did not start")

    async def ready(self) -> None:
        """Wait until it has workers that it can use. Raises ShowError."""
        reason = ""
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            try:
                async with self.client.get(f"{self.url}/readiness") as answer:
                    if answer.status == 200:
                        return
                    reason = await answer.text()
            except aiohttp.ClientError as error:
                reason = str(error)
            await asyncio.sleep(0.05)
        raise ShowError(f"not ready: {reason}")

    async def ended(self) -> int:
        """Wait for the gateway's own end: the exit code."""
        return await asyncio.shield(self._serving)


async def give(show: Show, port: int, *, once: bool) -> int:
    """Give the show; without ``once`` the gateway then serves until it is interrupted. Returns the exit code."""
    logs.configure(LogLevel.WARN)
    return await _Performance(show, port, once=once).run()


class _Performance:
    def __init__(self, show: Show, port: int, *, once: bool) -> None:
        self._show = show
        self._port = port
        self._once = once
        self._shown = False
        self._leaving = False
        self._task: asyncio.Task[int]

    async def run(self) -> int:
        self._task = asyncio.create_task(self._run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        try:
            return await self._task
        except asyncio.CancelledError:
            return 0 if self._shown else _INTERRUPTED

    def _interrupt(self) -> None:
        """End in order; once that has begun, nothing interrupts it: it takes seconds, and leaves no process behind."""
        if not self._leaving:
            self._leaving = True
            self._task.cancel()

    def _leave(self) -> None:
        self._leaving = True

    async def _run(self) -> int:
        try:
            problems = await self._perform()
        except (ShowError, aiohttp.ClientError, TimeoutError) as error:
            problems = [str(error) or repr(error)]
        for problem in problems:
            print(f"wrong: {problem}", file=sys.stderr)
        return 1 if problems else 0

    async def _perform(self) -> list[str]:
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(self._show.workers())
            stage = await stack.enter_async_context(_gateway(fleet, self._port))
            stack.callback(self._leave)  # before the two above are ended
            problems = await self._show.perform(stage)
            if not problems and not self._once:
                self._shown = True
                self._show.invite(stage)
                logs.configure(LogLevel.INFO)
                if code := await stage.ended():
                    problems.append(f"the gateway ended with {code}")
        return problems


@asynccontextmanager
async def _gateway(fleet: Fleet, port: int) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="pd-extproc-demo-") as directory:
        service = Service(_settings(fleet, port, Path(directory) / "run"))
        serving = asyncio.create_task(startable(service))
        try:
            async with aiohttp.ClientSession() as client:
                stage = Stage(service, serving, client)
                await stage.started()
                yield stage
        finally:
            service.stop()
            await serving


def _settings(fleet: Fleet, port: int, run_dir: Path) -> Settings:
    return Settings(
        pd_disaggregation=True,
        prefill=fleet.prefill,
        decode=fleet.decode,
        host="127.0.0.1",
        port=port,
        envoy_admin_port=0,
        prometheus_host="127.0.0.1",
        prometheus_port=0,
        run_dir=run_dir,
        shutdown_grace_period_secs=5,
    )
