"""The gateway as the real command in front of real engines, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from servers import free_port

READY_SECONDS = 60.0
# Broken workers are noticed, and back, within seconds.
HEALTH = (
    *("--health-check-interval-secs", "2"),
    *("--health-failure-threshold", "1"),
    *("--health-success-threshold", "1"),
)

Body = dict[str, Any]


@contextlib.contextmanager
def gateway(directory: Path, *options: str) -> Iterator[str]:
    """``pd-extproc launch``: its URL, once it answers at all."""
    port = free_port()
    common = ["--host", "127.0.0.1", "--port", str(port), "--run-dir", str(directory)]
    common += ["--envoy-admin-port", "0", "--prometheus-port", "0", "--drain-settle-secs", "0", *HEALTH]
    common += ["--load-monitor-interval", "1"]
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "extproc", "launch", "--pd-disaggregation", *common, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_alive(url, process, log)
        yield url
    finally:
        process.terminate()
        assert process.wait(30) == 0, log.read_text()


def _wait_alive(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/liveness", timeout=5):  # noqa: S310 - our own URL
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


async def ready(client: aiohttp.ClientSession, url: str) -> None:
    """Wait until the gateway can serve by some pair."""
    started = time.monotonic()
    while True:
        async with client.get(f"{url}/readiness") as response:
            if response.ok:
                return
            assert time.monotonic() - started < READY_SECONDS, await response.text()
        await asyncio.sleep(0.1)


async def loads_until(
    client: aiohttp.ClientSession, url: str, worker: str, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """What the gateway says of the load of a worker, once ``condition`` holds for it."""
    started = time.monotonic()
    while True:
        async with client.get(f"{url}/get_loads") as response:
            loads = {load["worker"]: load for load in (await response.json())["loads"]}
        if worker in loads and condition(loads[worker]):
            return loads[worker]
        assert time.monotonic() - started < READY_SECONDS, loads
        await asyncio.sleep(0.1)


async def post(client: aiohttp.ClientSession, base: str, path: str, body: Body) -> str:
    """A 200's text."""
    async with client.post(base + path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        assert response.headers.get("Connection") != "close"
        return text
