"""What Envoy's admin interface tells of its hosts, and whom that leads to be looked at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import pytest

from extproc.dataplane.hosts import Host, HostPage, HostWatch, troubled
from extproc.workers.worker import Role, Worker, WorkerUrl

P, D = Role.PREFILL, Role.DECODE


def host(cluster: str, address: str, connects: int, failed: int, flags: str = "healthy") -> str:
    """One host as Envoy 1.40 shows it."""
    figures = {"cx_active": 0, "cx_connect_fail": failed, "cx_total": connects, "rq_total": 7}
    named = {"hostname": "w:1", "health_flags": flags, "weight": 1, "region": "", "success_rate": -1}
    return "".join(f"{cluster}::{address}::{name}::{value}\n" for name, value in (figures | named).items())


def page(*hosts: str) -> bytes:
    clusters = "decode::observability_name::decode\ndecode::default_priority::max_connections::1024\n"
    return (clusters + "".join(hosts) + "ads::/x/ads.sock::cx_total::1\n").encode()


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_hosts_are_read_by_role_and_address(size: int) -> None:
    text = page(
        host("prefill", "10.0.0.1:1", 3, 1),
        host("decode", "[::1]:2", 0, 0, "/failed_outlier_check/failed_eds_health"),
        host("decode", "10.0.0.1:1", 30, 0, "/failed_eds_health"),
    )
    reading = HostPage()
    for at in range(0, len(text), size):
        reading.feed(text[at : at + size])
    assert reading.hosts() == {
        (P, "10.0.0.1:1"): Host(3, 1, ejected=False),
        (D, "[::1]:2"): Host(0, 0, ejected=True),
        (D, "10.0.0.1:1"): Host(30, 0, ejected=False),
    }


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

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.asked = asyncio.Event()

    async def clusters_as_text(self, feed: Callable[[bytes], None]) -> None:
        self.asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        feed(answer)


def worker(role: Role, endpoint: str | None) -> Worker:
    made = Worker(f"{role.value}-{endpoint}", WorkerUrl("http", "w", 1), role)
    made.endpoint = endpoint
    return made


async def test_workers_with_which_envoy_has_trouble_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    bad, good, elsewhere = worker(P, "10.0.0.1:1"), worker(P, "10.0.0.2:1"), worker(D, "10.0.0.1:1")
    admin = FakeAdmin(
        page(*(host("prefill", f"10.0.0.{n}:1", 5, 5 * (n == 1)) for n in (1, 2)), host("decode", "10.0.0.1:1", 0, 0)),
        page(*(host("prefill", f"10.0.0.{n}:1", 6, 6 * (n == 1)) for n in (1, 2)), host("decode", "10.0.0.1:1", 0, 0)),
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


@pytest.mark.parametrize("trouble", [aiohttp.ClientError("down"), TimeoutError(), b"decode::a:1::cx_total::many\n"])
async def test_an_envoy_that_does_not_tell_is_said_once(
    trouble: bytes | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    admin = FakeAdmin(trouble, trouble, page())
    watch = HostWatch(admin, [], lambda _: None, 60)  # type: ignore[arg-type]
    for _ in range(3):
        await watch.look()
    assert caplog.text.count("does not tell of its hosts") == 1


async def test_it_looks_on_until_it_is_stopped() -> None:
    admin = FakeAdmin(page())
    watch = HostWatch(admin, [], lambda _: None, 0.001)  # type: ignore[arg-type]
    watch.start()
    for _ in range(3):
        admin.asked.clear()
        async with asyncio.timeout(60):
            await admin.asked.wait()
    await watch.stop()
    assert "hosts" not in {task.get_name() for task in asyncio.all_tasks()}
