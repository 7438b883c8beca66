"""Workers that come, go and move while a real Envoy runs; TLS; IPv6."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from dataplane_rig import Rig, answer, make_certificates

from extproc.dataplane.ads import AdsServer, EndpointsRejectedError
from extproc.workers.endpoints import Endpoint, Snapshot

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rig")


@pytest.fixture(scope="module")
def tls(directory: Path) -> ssl.SSLContext:
    return make_certificates(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(directory: Path, tls: ssl.SSLContext) -> AsyncIterator[Rig]:
    assert tls
    rig = Rig(directory, ca_file=str(directory / "ca.pem"), upstream_idle_timeout=60)
    await rig.start()
    yield rig
    await rig.stop()


# Coming and going


async def test_a_worker_is_known_when_publish_returns_and_gone_when_it_is_removed(rig: Rig) -> None:
    worker = await rig.worker()
    for _ in range(20):
        await rig.know(worker.endpoint)
        assert (await rig.post(worker.address)).status == 200
        await rig.know()
        assert (await rig.post(worker.address)).error[1] == "no_available_workers"


async def test_a_request_under_way_outlives_its_workers_removal(rig: Rig) -> None:
    removed = asyncio.Event()

    async def behave(request, writer):  # type: ignore[no-untyped-def]
        await removed.wait()
        return await answer(b"done")(request, writer)

    worker = await rig.worker(behave)
    await rig.know(worker.endpoint)
    under_way = asyncio.create_task(rig.post(worker.address))
    await worker.arrived.wait()
    await rig.know()
    removed.set()
    assert (await under_way).body == b"done"


async def test_other_workers_keep_their_connections(rig: Rig) -> None:
    stays, goes = await rig.worker(), await rig.worker()
    await rig.know(stays.endpoint, goes.endpoint)
    await rig.post(stays.address)
    await rig.know(stays.endpoint)
    await rig.post(stays.address)
    assert stays.connections == 1


async def test_the_same_address_twice(rig: Rig) -> None:
    worker = await rig.worker()
    twin = Endpoint(worker.endpoint.ip, worker.endpoint.port, "twin")
    await rig.know(worker.endpoint, twin)
    assert (await rig.post(worker.address)).status == 200
    assert worker.requests[-1].header("host") == worker.address


async def test_a_worker_that_changes_its_name(rig: Rig) -> None:
    worker = await rig.worker()
    for name in ("old", "new"):
        await rig.know(Endpoint("127.0.0.1", worker.port, name))
        await rig.post(worker.address)
        assert worker.requests[-1].header("host") == f"{name}:{worker.port}"


async def test_an_address_that_is_none_is_refused_and_the_next_list_taken(rig: Rig) -> None:
    worker = await rig.worker()
    with pytest.raises(EndpointsRejectedError, match=r"malformed IP address: worker\.test"):
        await rig.know(worker.endpoint, Endpoint("worker.test", 1, "worker.test"))
    await rig.know(worker.endpoint)
    assert (await rig.post(worker.address)).status == 200


async def test_endpoints_survive_the_sidecars_restart_and_follow_the_new_one(rig: Rig) -> None:
    old, new = await rig.worker(), await rig.worker()
    await rig.know(old.endpoint)
    await rig.ads.stop()
    assert (await rig.post(old.address)).status == 200
    rig.ads = AdsServer(rig.config.ads)
    await rig.ads.publish(Snapshot(decode=(new.endpoint,)))
    await rig.ads.start()
    async with asyncio.timeout(60):
        while (await rig.post(new.address)).status != 200:  # noqa: ASYNC110  # Envoy decides when it comes back
            await asyncio.sleep(0.05)
    assert rig.ads.connected == 1
    assert (await rig.post(old.address)).status == 503


async def test_an_idle_connection_is_kept_for_a_while(rig: Rig) -> None:
    worker = await rig.worker()
    await rig.know(worker.endpoint)
    await rig.post(worker.address)
    await rig.post(worker.address)
    assert worker.connections == 1
    assert not worker.closed.is_set()


async def test_an_idle_connection_is_closed_before_the_worker_would(tmp_path: Path) -> None:
    rig = Rig(tmp_path, upstream_idle_timeout=0.3)
    await rig.start()
    worker = await rig.worker()
    await rig.know(worker.endpoint)
    assert (await rig.post(worker.address)).status == 200
    async with asyncio.timeout(60):
        await worker.closed.wait()
    await rig.stop()


# IPv6


async def test_an_ipv6_worker(rig: Rig) -> None:
    worker = await rig.worker(host="::1")
    await rig.know(worker.endpoint)
    reply = await rig.post(worker.address)
    assert reply.headers["x-pd-upstream"] == worker.address == f"[::1]:{worker.port}"
    assert worker.requests[-1].header("host") == worker.address
    assert (await rig.leg(worker.address)).headers["x-pd-upstream"] == worker.address


# TLS


async def test_a_tls_worker_is_named_and_verified(rig: Rig, tls: ssl.SSLContext) -> None:
    worker = await rig.worker(tls=tls)
    await rig.know(Endpoint("127.0.0.1", worker.port, "worker.test", tls=True))
    for reply in (await rig.post(worker.address), await rig.leg(worker.address)):
        assert reply.status == 200
    assert set(worker.server_names) == {"worker.test"}
    assert worker.requests[-1].header("host") == "worker.test"


@pytest.mark.parametrize("name", ["other.test", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_not_trusted(rig: Rig, tls: ssl.SSLContext, name: str) -> None:
    worker = await rig.worker(tls=tls)
    await rig.know(Endpoint("127.0.0.1", worker.port, name, tls=True))
    assert (await rig.post(worker.address)).error[1] == "decode_unreachable"
    assert worker.requests == []


async def test_a_certificate_of_another_ca_is_not_trusted(rig: Rig, tmp_path: Path, tls: ssl.SSLContext) -> None:
    stranger = await rig.worker(tls=make_certificates(tmp_path))
    good = await rig.worker(tls=tls)
    await rig.know(*(Endpoint("127.0.0.1", each.port, "worker.test", tls=True) for each in (stranger, good)))
    assert (await rig.post(stranger.address)).error[1] == "decode_unreachable"
    assert (await rig.post(f"{stranger.address},{good.address}")).headers["x-pd-upstream"] == good.address
    assert stranger.requests == []


async def test_nothing_is_sent_in_the_clear_to_a_tls_worker(rig: Rig) -> None:
    plain = await rig.worker()
    await rig.know(Endpoint("127.0.0.1", plain.port, "worker.test", tls=True))
    assert (await rig.post(plain.address)).error[1] == "decode_unreachable"
    assert plain.requests == []


async def test_plain_and_tls_workers_side_by_side(rig: Rig, tls: ssl.SSLContext) -> None:
    plain, secure = await rig.worker(), await rig.worker(tls=tls)
    await rig.know(plain.endpoint, Endpoint("127.0.0.1", secure.port, "worker.test", tls=True))
    for worker in (plain, secure):
        assert (await rig.post(worker.address)).headers["x-pd-upstream"] == worker.address
