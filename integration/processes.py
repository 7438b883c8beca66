"""``pd-extproc`` as a program: started, listened to, signalled, and looked after when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from http_client import Client, CutError
from product import soon

PATIENCE = 300.0  # seconds; starting Python and Envoy takes some: a demo, on a busy machine, more than 120
_given: set[int] = set()  # ports


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, for programs that cannot say which they took; never the same twice.

    It is none of those that the kernel gives to whoever connects, which any connection may take before the program.
    """
    while True:
        port = random.randrange(15_000, 32_000)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children_of(pid: int) -> set[int]:
    """The processes that ``pid`` started."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(entry.parent.name))
    return found


async def run(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run ``pd-extproc`` to its end: status, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(env),
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


class Gateway:
    """``pd-extproc launch`` with JSON logs, from :meth:`start` to :meth:`close`, which kills what is left.

    ``port`` None takes any; then the log must be one that says which, at level info.
    """

    def __init__(
        self, run_dir: Path, *arguments: str, port: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.run_dir = run_dir
        self.metrics_port = free_port()
        self._port = port
        self._arguments = arguments
        self._env = env
        self.logs: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._family: set[int] = set()
        self._client: Client | None = None

    async def start(self) -> None:
        """Start, and wait until it serves."""
        common = ["--host", "127.0.0.1", "--envoy-admin-port", "0", "--prometheus-host", "127.0.0.1", "--log-json"]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "extproc", "launch", "--pd-disaggregation", *common),
            *("--run-dir", str(self.run_dir), "--prometheus-port", str(self.metrics_port), *self._arguments),
            *("--port", str(self._port or 0)),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(self._env),
        )
        self._reader = asyncio.create_task(self._read_logs())
        try:
            await self._until_serving()
        except BaseException:
            await self.close()
            raise
        self._family = children_of(self.process.pid)

    async def close(self) -> None:
        """Kill it, unless it has ended."""
        if self._client is not None:
            await self._client.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reader

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def client(self) -> Client:
        """A client of the gateway's port."""
        assert self._client is not None
        return self._client

    async def _until_serving(self) -> None:
        if self._port is None:
            address = (await self.said("serving"))["address"]
            self._client = Client("127.0.0.1", int(address.rpartition(":")[2]))
            return
        self._client = Client("127.0.0.1", self._port)
        async with asyncio.timeout(PATIENCE):
            while True:
                assert not self._reader.done(), f"the gateway has ended: {self.logs}"
                try:
                    await self.client.get("/liveness")
                except (ConnectionError, CutError):
                    await asyncio.sleep(0.02)
                except TimeoutError:
                    raise AssertionError(f"port {self._port} accepts but does not answer: {self.logs}") from None
                else:
                    return

    @property
    def envoy(self) -> int:
        """Envoy's process id."""
        (pid,) = self._family
        return pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the gateway's process."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end: its exit status. No process and no socket file may be left."""
        async with asyncio.timeout(PATIENCE):
            status = await self.process.wait()
        await soon(lambda: not any(map(is_alive, self._family)), "processes are left")
        await self._reader
        return status

    async def said(self, message: str, **fields: object) -> dict[str, Any]:
        """Wait for a log line with this message and these fields; the line. Fails when the process ends instead."""
        wanted = {"message": message, **fields}.items()
        async with asyncio.timeout(PATIENCE):
            while True:
                for line in self.logs:
                    if wanted <= line.items():
                        return line
                assert not self._reader.done(), f"{message!r} was never said, but {self.logs}"
                self._news.clear()
                await self._news.wait()

    async def until_ready(self) -> None:
        """Wait until the gateway says that it can serve requests."""
        async with asyncio.timeout(PATIENCE):
            while True:
                if (await self.client.get("/readiness")).status == 200:
                    return
                await asyncio.sleep(0.02)

    async def _read_logs(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                self.logs.append(json.loads(line))
            except json.JSONDecodeError:
                self.logs.append({"message": line.decode().rstrip()})
            self._news.set()
        self._news.set()


class Programs:
    """Programs that are started ahead of the tests that need them: a start is a second or two of one core's work."""

    def __init__(self, cores: int = 2) -> None:
        self._gate = asyncio.Semaphore(cores)
        self._gateways: dict[str, asyncio.Task[Gateway]] = {}
        self._results: dict[str, asyncio.Task[tuple[int, str, str]]] = {}
        self.asked_for: set[str] = set()  # names of those that tests have used

    def prepare_gateway(self, name: str, gateway: Gateway) -> None:
        """Have it started when its turn comes."""
        self._gateways[name] = asyncio.create_task(self._start(gateway), name=f"start {name}")

    def prepare_run(self, name: str, *arguments: str) -> None:
        """Have a command run to its end when its turn comes."""
        self._results[name] = asyncio.create_task(self._run(arguments), name=f"run {name}")

    async def gateway(self, name: str) -> Gateway:
        """The gateway of that name, serving."""
        self.asked_for.add(name)
        return await self._gateways[name]

    async def result(self, name: str) -> tuple[int, str, str]:
        """The command's status, standard output and standard error."""
        self.asked_for.add(name)
        return await self._results[name]

    async def close(self) -> None:
        """Kill the gateways that are still there."""
        tasks = [*self._gateways.values(), *self._results.values()]
        for task in tasks:
            task.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, Gateway):
                await done.close()

    async def _start(self, gateway: Gateway) -> Gateway:
        async with self._gate:
            await gateway.start()
        return gateway

    async def _run(self, arguments: tuple[str, ...]) -> tuple[int, str, str]:
        async with self._gate:
            return await run(*arguments)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PD_EXTPROC_")}
    return own | dict(extra or {})
