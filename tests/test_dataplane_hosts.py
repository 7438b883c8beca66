"""What Envoy's admin interface tells of its hosts, and whom that leads to be looked at."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest

from extproc.dataplane.hosts import Host, HostWatch, read_hosts, troubled
from extproc.workers.worker import Role, Worker, WorkerUrl

P, D = Role.PREFILL, Role.DECODE


def status(ip: str, port: int, connects: int, failed: int, **health: bool) -> dict[str, Any]:
    """One host as Envoy 1.40 shows it: numbers as text, zeros left out."""
    figures = {"cx_total": connects, "cx_connect_fail": failed, "rq_total": 7}
    stats = [{"name": name, **({"value": str(value)} if value else {})} for name, value in figures.items()]
    address = {"socket_address": {"address": ip, "port_value": port}}
    return {"address": address, "stats": stats, "health_status": {"eds_health_status": "HEALTHY", **health}}


def clusters(prefill: list[Any], decode: list[Any]) -> dict[str, Any]:
    return {
        "cluster_statuses": [
            {"name": "prefill", "host_statuses": prefill},
            {"name": "decode", "host_statuses": decode},
            {"name": "ads", "host_statuses": [{"address": {"pipe": {"path": "/x"}}}]},
            {"name": "empty"},
        ]
    }


def test_hosts_are_read_by_role_and_address() -> None:
    answer = clusters([status("10.0.0.1", 1, 3, 1)], [status("::1", 2, 0, 0, failed_outlier_check=True)])
    assert read_hosts(answer) == {
        (P, "10.0.0.1:1"): Host(3, 1, ejected=False),
        (D, "[::1]:2"): Host(0, 0, ejected=True),
    }
    assert read_hosts({}) == {}


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (Host(5, 0, False), Host(8, 3, False), True),  # noqa: FBT003
        (Host(5, 0, False), Host(9, 3, False), False),  # noqa: FBT003 - one connection was made
        (Host(5, 3, False), Host(5, 3, False), False),  # noqa: FBT003
        (Host(5, 3, False), Host(8, 3, False), False),  # noqa: FBT003
        (Host(500, 3, False), Host(2, 2, False), True),  # noqa: FBT003 - another Envoy
        (None, Host(2, 2, False), True),  # noqa: FBT003
        (None, Host(0, 0, False), False),  # noqa: FBT003
        (Host(5, 0, False), Host(5, 0, True), True),  # noqa: FBT003
        (Host(5, 0, True), Host(5, 0, True), False),  # noqa: FBT003
    ],
)
def test_who_is_troubled(before: Host | None, now: Host, found: bool) -> None:  # noqa: FBT001
    key = (P, "10.0.0.1:1")
    assert list(troubled({} if before is None else {key: before}, {key: now})) == ([key] if found else [])


class FakeAdmin:
    """An Envoy that answers what it is given, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = asyncio.Event()

    async def clusters(self) -> Any:
        self.asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def worker(role: Role, endpoint: str | None) -> Worker:
    made = Worker(f"{role.value}-{endpoint}", WorkerUrl("http", "w", 1), role)
    made.endpoint = endpoint
    return made


async def test_workers_with_which_envoy_has_trouble_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    bad, good, elsewhere = worker(P, "10.0.0.1:1"), worker(P, "10.0.0.2:1"), worker(D, "10.0.0.1:1")
    admin = FakeAdmin(
        clusters([status("10.0.0.1", 1, 5, 5), status("10.0.0.2", 1, 0, 0)], [status("10.0.0.1", 1, 0, 0)]),
        clusters([status("10.0.0.1", 1, 6, 6), status("10.0.0.2", 1, 9, 0)], [status("10.0.0.1", 1, 0, 0)]),
    )
    seen: list[Worker] = []
    watch = HostWatch(admin, [bad, good, elsewhere, worker(P, None)], seen.append, 60)  # type: ignore[arg-type]
    await watch.look()
    assert seen == []  # how it was before we came is no news
    with caplog.at_level(logging.INFO):
        await watch.look()
    assert seen == [bad]
    assert "Envoy has trouble with a worker" in caplog.text
    await watch.look()
    assert seen == [bad]


@pytest.mark.parametrize("trouble", [aiohttp.ClientError("down"), TimeoutError(), {"cluster_statuses": [{}]}])
async def test_an_envoy_that_does_not_tell_is_said_once(trouble: Any, caplog: pytest.LogCaptureFixture) -> None:
    admin = FakeAdmin(trouble, trouble, clusters([], []))
    watch = HostWatch(admin, [], lambda _: None, 60)  # type: ignore[arg-type]
    for _ in range(3):
        await watch.look()
    assert caplog.text.count("does not tell of its hosts") == 1


async def test_it_looks_on_until_it_is_stopped() -> None:
    admin = FakeAdmin(clusters([], []))
    watch = HostWatch(admin, [], lambda _: None, 0.001)  # type: ignore[arg-type]
    watch.start()
    for _ in range(3):
        admin.asked.clear()
        async with asyncio.timeout(20):
            await admin.asked.wait()
    await watch.stop()
    assert "hosts" not in {task.get_name() for task in asyncio.all_tasks()}
