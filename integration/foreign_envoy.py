"""A real Envoy that somebody else has configured, not the service: from a document to its first request."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from extproc.dataplane.process import find_envoy

PATIENCE = 60.0


class ForeignEnvoy:
    """Runs ``bootstrap`` with an admin interface; ``listener``: the one whose port is wanted."""

    def __init__(self, bootstrap: dict[str, Any], listener: str) -> None:
        self._bootstrap = bootstrap | {"admin": {"address": _loopback(0)}}
        self._listener = listener
        self.address = ("127.0.0.1", 0)

    async def __aenter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="pd-envoy-"))
        (self._directory / "envoy.yaml").write_text(yaml.safe_dump(self._bootstrap))
        self._process = await asyncio.create_subprocess_exec(
            *(find_envoy(None), "-c", str(self._directory / "envoy.yaml"), "--disable-hot-restart"),
            *("--concurrency", "1", "--log-level", "warn", "--log-path", str(self._directory / "log")),
            *("--admin-address-path", str(self._directory / "admin")),
            stdin=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(PATIENCE):
                self.address = await self._until_listening()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def ask(self, path: str) -> str:
        """What the admin interface says."""
        host = (self._directory / "admin").read_text().strip()
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}{path}") as answer:
            return await answer.text()

    async def _until_listening(self) -> tuple[str, int]:
        while True:
            if self._process.returncode is not None:
                raise AssertionError((self._directory / "log").read_text())
            try:
                listeners = await self.ask("/listeners")
                ready = (await self.ask("/ready")).startswith("LIVE")
            except (OSError, aiohttp.ClientError):
                listeners, ready = "", False
            found = [line.rpartition("::") for line in listeners.splitlines()]
            for name, _, where in found:
                if name == self._listener and ready:
                    host, _, port = where.rpartition(":")
                    return host, int(port)
            await asyncio.sleep(0.02)

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
        shutil.rmtree(self._directory)


def _loopback(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
