"""What Envoy has met with at the workers: failed connections and ejections, from its admin interface.

An Envoy in front of several services like this one, or with clients that do not pass this one, knows of connections
that nobody here has heard of. What it knows is a reason to look, and no more: a worker is judged by our own probes and
by what our own requests meet with, so that nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import aiohttp

from extproc.dataplane.admin import EnvoyAdmin
from extproc.workers.endpoints import DECODE_CLUSTER, PREFILL_CLUSTER
from extproc.workers.worker import Role, Worker

_ROLES: Final = {PREFILL_CLUSTER: Role.PREFILL, DECODE_CLUSTER: Role.DECODE}
_log = logging.getLogger(__name__)


class Host(NamedTuple):
    """One host of a role cluster, as ``/clusters?format=json`` shows it.

    Attributes:
        connects, failed_connects: TCP connections begun, and those of them that were not made, since Envoy knows it.
        ejected: Envoy's outlier detection has thrown it out. Our own configuration has none; another may.
    """

    connects: int
    failed_connects: int
    ejected: bool


Hosts = Mapping[tuple[Role, str], Host]  # by role and "ip:port", IPv6 in brackets


def read_hosts(clusters: Any) -> dict[tuple[Role, str], Host]:
    """The hosts of the role clusters in an answer of ``/clusters?format=json`` (envoy.admin.v3.Clusters)."""
    found = {}
    for cluster in clusters.get("cluster_statuses", ()):
        role = _ROLES.get(cluster["name"])
        if role is None:
            continue
        for status in cluster.get("host_statuses", ()):
            address = status["address"]["socket_address"]
            ip, port = address["address"], address["port_value"]
            name = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
            figures = {stat["name"]: int(stat.get("value", 0)) for stat in status.get("stats", ())}
            ejected = bool(status.get("health_status", {}).get("failed_outlier_check"))
            found[role, name] = Host(figures.get("cx_total", 0), figures.get("cx_connect_fail", 0), ejected)
    return found


def troubled(before: Hosts, now: Hosts) -> Iterable[tuple[Role, str]]:
    """Who has become unreachable between two looks, as far as can be seen: connections failed, and none was made.

    Or it was ejected. One of which only some connections fail has its requests go elsewhere, and is not conspicuous.
    """
    for key, host in now.items():
        past = before.get(key)
        if past is None or past.connects > host.connects:  # new here, or Envoy counts anew
            past = Host(0, 0, ejected=False)
        failed = host.failed_connects - past.failed_connects
        if (host.ejected and not past.ejected) or (failed > 0 and host.connects - past.connects <= failed):
            yield key


class HostWatch:
    """Looks at Envoy's hosts every ``interval`` seconds, and has workers looked at with which it has trouble.

    Args:
        admin: the way to ask.
        workers: all there are.
        look_again: is told of workers that should be probed.
        interval: seconds between two looks. A look costs 15 µs per worker here, and about as much in Envoy.
    """

    def __init__(
        self, admin: EnvoyAdmin, workers: Iterable[Worker], look_again: Callable[[Worker], None], interval: float
    ) -> None:
        self._admin = admin
        self._workers = workers
        self._look_again = look_again
        self._interval = interval
        self._hosts: Hosts | None = None
        self._silent = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin looking. Needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="hosts")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    async def look(self) -> None:
        """Look once. The first look only says how things were before. An Envoy that is not there is logged, once."""
        try:
            hosts = read_hosts(await self._admin.clusters())
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not self._silent:
                _log.warning(
                    "Envoy's admin interface does not tell of its hosts: %s", str(error) or type(error).__name__
                )
            self._silent = True
            return
        self._silent = False
        before, self._hosts = self._hosts, hosts
        if before is None or not (found := set(troubled(before, hosts))):
            return
        for worker in self._workers:
            if worker.endpoint is not None and (worker.role, worker.endpoint) in found:
                _log.info("Envoy has trouble with a worker", extra={"worker": worker.name, "role": worker.role.value})
                self._look_again(worker)

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval)
