"""Real vLLM on this CPU, by the project's own recipe: installed once, then three servers with NIXL."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import aiohttp

import extproc
from extproc.demo.page import Page
from extproc.demo.stage import ShowError

_LAST_LINES: Final = 15
_LONGEST_LINE: Final = 300  # characters
_START_SECONDS: Final = 600.0  # a busy machine takes many times the usual
_PATIENCE: Final = 2.0  # seconds that setup.sh may take to see that all is there
# Only a little: engines that get no processor for 30 s lose the lease of a KV cache.
_NICE: Final = ("nice", "-n", "5")


class RecipeMissingError(Exception):
    """This is no checkout: only that has the recipe."""


class Server(Protocol):
    """A ``vllm_servers.VllmServer`` of the recipe: one engine, with all its processes in one group."""

    name: str
    command: tuple[str, ...]
    probe: str
    registration: dict[str, Any]

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def log(self) -> Path:
        """What it prints."""

    @property
    def running(self) -> bool:
        """Whether its main process is there."""

    def start(self) -> None:
        """Start it."""

    def stop(self) -> None:
        """End all its processes at once."""


class Servers(NamedTuple):
    """The engines of the show: a pair, and one that does all by itself."""

    prefill: Server
    decode: Server
    aggregated: Server


def vllm_recipe() -> Path:
    """The directory with ``setup.sh`` and ``vllm_servers.py``. Raises RecipeMissingError."""
    checkout = Path(extproc.__file__).parent.parent
    recipe = checkout / "integration/engines"
    if not (recipe / "setup.sh").exists():
        raise RecipeMissingError(
            f"--engine vllm-cpu installs vLLM with integration/engines/setup.sh, which {checkout} does not have: "
            "run it from a checkout of the project (make demo DEMO_FLAGS='--engine vllm-cpu')"
        )
    return recipe


async def install(recipe: Path, directory: Path, page: Page) -> None:
    """Have vLLM under ``directory``. Raises ShowError."""
    there = _exists(directory)
    if not there:
        _announce(directory, page)
    log = directory / "setup.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(*_NICE, recipe / "setup.sh", directory, "vllm"),
            env={"PYTHON": sys.executable, **os.environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        if there:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await process.wait()
            if process.returncode is None:  # it was installed by another version of the recipe
                _announce(directory, page)
        async with page.waiting("installing", lambda: f"{_gigabytes(directory):.1f} GB"):
            status = await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            await process.wait()
    if status:
        raise ShowError(f"vLLM could not be installed: setup.sh ended with {status}\n{_last_lines(log)}")


def _exists(directory: Path) -> bool:
    """Whether some version of the recipe has installed vLLM there; makes the directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShowError(f"--engines-dir {directory}: {error.strerror}") from None
    return (directory / "ready-vllm").exists()


def _announce(directory: Path, page: Page) -> None:
    page.heading(f"Installing vLLM for the CPU and a tiny model of random weights under {directory}.")
    page.line("  This is done once, takes about 3 GB and some minutes, and asks nothing.")


@asynccontextmanager
async def running(recipe: Path, directory: Path, page: Page) -> AsyncIterator[Servers]:
    """The three servers, ready; ended with all their processes in any case. Raises ShowError."""
    module = _vllm_servers(recipe, directory)
    servers = Servers(module.prefill("nixl"), module.decode("nixl"), module.aggregated())
    page.heading("Starting three vLLM servers: half a minute or more, and 2.5 GB of memory each.")
    try:
        for server in servers:
            server.command = (*_NICE, *server.command)
            server.start()
        async with page.waiting("starting"):
            await _all_ready(servers, page)
        yield servers
    finally:
        for server in servers:
            server.stop()


def _vllm_servers(recipe: Path, directory: Path) -> Any:
    """The recipe's module: it looks for what was installed in ``$ENGINES_DIR``."""
    os.environ["ENGINES_DIR"] = str(directory)
    sys.path.append(str(recipe))
    return importlib.import_module("vllm_servers")


async def _all_ready(servers: Servers, page: Page) -> None:
    """Wait until all answer. Raises ShowError when one dies or takes too long."""
    started = time.monotonic()
    waiting = list(servers)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client:
        while waiting:
            for server in tuple(waiting):
                passed = time.monotonic() - started
                if await _answers(server, client):
                    waiting.remove(server)
                    page.line(f"  {server.name:<20} {server.url}  ready after {passed:.0f} s  log: {server.log}")
                elif not server.running or passed > _START_SECONDS:
                    reason = f"is not ready after {passed:.0f} s" if server.running else "has ended by itself"
                    raise ShowError(f"{server.name} {reason}\n{_last_lines(server.log)}")
            await asyncio.sleep(0.2)


async def _answers(server: Server, client: aiohttp.ClientSession) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError):
        async with client.get(server.url + server.probe) as answer:
            return answer.status == 200
    return False


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join([f"the last lines of {log}:", *(f"  {line[:_LONGEST_LINE]}" for line in lines)])


def _gigabytes(directory: Path) -> float:
    """What the files there take."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # pip moves its files about
                total += (Path(parent) / name).lstat().st_size
    return total / 1e9
