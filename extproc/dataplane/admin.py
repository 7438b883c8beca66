"""Envoy's admin interface, as far as we use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

from extproc.dataplane.active import ActiveRequests
from extproc.workers.endpoints import ROLES


class EnvoyAdmin:
    """A client of the admin port. Every method raises ``aiohttp.ClientError`` or ``TimeoutError``."""

    def __init__(self, host: str, port: int, timeout: float = 2.0) -> None:
        self._base = f"http://{host}:{port}"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout))

    @classmethod
    def at(cls, address: str) -> EnvoyAdmin:
        """The one at ``host:port``, IPv6 in brackets."""
        host, _, port = address.rpartition(":")
        return cls(host, int(port))

    async def close(self) -> None:
        """Give the connections back."""
        await self._session.close()

    async def is_ready(self) -> bool:
        """Envoy has its first endpoints (or has waited for them long enough) and serves."""
        async with self._session.get(f"{self._base}/ready") as response:
            return response.status == 200

    async def listeners(self) -> dict[str, tuple[str, int]]:
        """Bound TCP addresses by listener name."""
        async with self._session.get(f"{self._base}/listeners?format=json") as response:
            statuses = (await response.json())["listener_statuses"]
        found = {}
        for status in statuses:
            if bound := status["local_address"].get("socket_address"):
                found[status["name"]] = (bound["address"], bound["port_value"])
        return found

    async def clusters(self) -> Any:
        """``/clusters?format=json``: per host requests active, total and failed, failed connections, health flags."""
        async with self._session.get(f"{self._base}/clusters?format=json") as response:
            return await response.json()

    async def clusters_as_text(self, feed: Callable[[bytes], None]) -> None:
        """``/clusters`` as text, in pieces as they come: with a thousand hosts it has 0.8 MB."""
        async with self._session.get(f"{self._base}/clusters") as response:
            response.raise_for_status()
            async for piece in response.content.iter_any():
                feed(piece)

    async def active_requests(self) -> dict[tuple[str, str], int]:
        """Requests under way by role and host ("ip:port"), those of everybody who sends through this Envoy."""
        active = ActiveRequests(ROLES)
        await self.clusters_as_text(active.feed)
        return active.found

    async def gauge(self, name: str) -> int:
        """One counter or gauge; 0 when Envoy has none of that name."""
        query = {"filter": f"^{name}$", "format": "json"}
        async with self._session.get(f"{self._base}/stats", params=query) as response:
            stats = (await response.json())["stats"]
        return next((int(stat["value"]) for stat in stats if stat.get("name") == name), 0)

    async def begin_draining(self) -> None:
        """Accept no new connections; announce the end on those that are open with their next answer."""
        for path in ("/healthcheck/fail", "/drain_listeners?inboundonly"):
            async with self._session.post(self._base + path) as response:
                response.raise_for_status()
