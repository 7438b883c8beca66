"""The egress listener of a real Envoy: where the service's legs go, and what it hears when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dataplane_rig import (
    Rig,
    Unreachable,
    Worker,
    answer,
    garbage,
    hang_up,
    leg_headers,
    make_certificates,
    never,
    unreachable,
)

from extproc.names import NAMING
from extproc.workers.endpoints import Endpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("rig"), max_payload_bytes=30_000_000, connect_timeout=10, ca_file=None)
    await rig.start()
    yield rig
    await rig.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(rig: Rig) -> AsyncIterator[dict[str, Worker | Unreachable]]:
    with unreachable(refuses=True) as dead:
        yield {
            "a": await rig.worker(),
            "b": await rig.worker(),
            "hangs_up": await rig.worker(hang_up),
            "garbage": await rig.worker(garbage),
            "dead": dead,
        }


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(rig: Rig, workers: dict[str, Any]) -> dict[str, Any]:
    """One worker of every kind, known to Envoy in both roles; ``dead`` refuses."""
    await rig.know(*(worker.endpoint for worker in workers.values()))
    return workers


@pytest.mark.parametrize("cluster", ["prefill", "decode"])
async def test_a_leg_reaches_the_worker_it_names(rig: Rig, fleet: dict[str, Any], cluster: str) -> None:
    reply = await rig.leg(fleet["b"].address, b"{}", cluster)
    assert (reply.status, reply.body.decode()) == (200, fleet["b"].address)
    assert reply.headers["x-pd-upstream"] == fleet["b"].address
    assert "x-pd-local-reply" not in reply.headers


async def test_a_leg_goes_to_its_own_role_only(rig: Rig, fleet: dict[str, Any]) -> None:
    await rig.know(fleet["a"].endpoint, prefill=(fleet["b"].endpoint,))
    assert (await rig.leg(fleet["a"].address, cluster="decode")).status == 200
    assert (await rig.leg(fleet["a"].address, cluster="prefill")).headers["x-pd-local-reply"] == "UH"


async def test_what_a_worker_is_sent(rig: Rig, fleet: dict[str, Any]) -> None:
    headers = {"x-request-id": "mine", "x-forwarded-for": "203.0.113.9", "x-envoy-external-address": "203.0.113.9"}
    await rig.leg(fleet["a"].address, headers=headers)
    request = fleet["a"].requests[-1]
    assert request.names == {"host", "content-length", "x-request-id", "x-forwarded-for", "x-forwarded-proto"}
    assert request.header("host") == fleet["a"].address
    assert request.header("x-request-id") == "mine"
    assert request.header("x-forwarded-for") == "203.0.113.9"


@pytest.mark.parametrize(
    ("to", "flags"),
    [
        (["dead"], "UF"),
        (["dead", "dead"], "UF"),
        (["dead", None], "UF"),
        ([None], "UH"),
        ([], "UH"),
        (["hangs_up"], "UC"),
        (["dead", "hangs_up"], "UC"),
        (["garbage"], "UPE"),
        (["dead"] * 9, "URX,UF"),  # one more than the retries allow
    ],
)
async def test_envoys_own_answers_say_why(rig: Rig, fleet: dict[str, Any], to: list[str | None], flags: str) -> None:
    reply = await rig.leg(",".join(fleet[name].address if name else "127.0.0.1:1" for name in to))
    assert reply.headers["x-pd-local-reply"] == flags
    assert reply.status >= 500


async def test_without_a_ca_no_tls_worker_is_trusted(rig: Rig, tmp_path: Path) -> None:
    worker = await rig.worker(tls=make_certificates(tmp_path))
    await rig.know(Endpoint("127.0.0.1", worker.port, "worker.test", tls=True))
    assert (await rig.leg(worker.address)).headers["x-pd-local-reply"] == "UF"
    assert worker.requests == []


async def test_a_role_that_does_not_exist(rig: Rig, fleet: dict[str, Any]) -> None:
    reply = await rig.leg(fleet["a"].address, cluster="encode")
    assert (reply.status, reply.headers["x-pd-local-reply"]) == (404, "NR")


async def test_a_leg_without_destination_goes_nowhere(rig: Rig, fleet: dict[str, Any]) -> None:
    connection = await rig.egress()
    headers = leg_headers(fleet["a"].address, b"")
    del headers["x-gateway-destination-endpoint"]
    reply = await connection.streams[connection.send(headers)].done
    assert (reply.status, reply.headers["x-pd-local-reply"]) == (503, "UH")


async def test_a_workers_answer_passes_unchanged(rig: Rig) -> None:
    headers = "retry-after: 7\r\nx-pd-local-reply: UF\r\nx-pd-error-code: fake\r\nx-pd-upstream: 9.9.9.9:9\r\n"
    headers += "".join(f"{name}: 9\r\n" for name in NAMING)
    worker = await rig.worker(answer(b"busy", "503 Service Unavailable", headers))
    await rig.know(worker.endpoint)
    reply = await rig.leg(worker.address)
    assert (reply.status, reply.body) == (503, b"busy")
    del reply.headers["date"]
    assert reply.headers == {"retry-after": "7", "content-length": "4", "x-pd-upstream": worker.address}


async def test_a_worker_that_cannot_be_connected_to_is_passed_over(rig: Rig, fleet: dict[str, Any]) -> None:
    reply = await rig.leg(f"{fleet['dead'].address},127.0.0.1:1,{fleet['b'].address}")
    assert reply.headers["x-pd-upstream"] == fleet["b"].address


async def test_a_body_of_20_mb_is_sent_again_whole(rig: Rig, fleet: dict[str, Any]) -> None:
    body = bytes(range(256)) * 78_125
    reply = await rig.leg(f"{fleet['dead'].address},{fleet['b'].address}", body)
    assert reply.status == 200
    assert fleet["b"].requests[-1].body == body


async def test_an_answer_that_breaks_off_resets_the_leg_and_no_other(rig: Rig, fleet: dict[str, Any]) -> None:
    async def behave(_: object, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello")
        await writer.drain()
        writer.transport.abort()
        return False

    worker = await rig.worker(behave)
    await rig.know(worker.endpoint, fleet["a"].endpoint)
    with pytest.raises(ConnectionResetError, match="stream reset"):
        await rig.leg(worker.address)
    assert (await rig.leg(fleet["a"].address)).status == 200


async def test_a_cancelled_leg_ends_at_the_worker_at_once(rig: Rig) -> None:
    worker = await rig.worker(never)
    await rig.know(worker.endpoint)
    connection = await rig.egress()
    stream = connection.send(leg_headers(worker.address, b"{}"), b"{}")
    await worker.arrived.wait()
    connection.cancel(stream)
    async with asyncio.timeout(60):
        await worker.closed_early.wait()


async def test_a_storm_of_cancellations_costs_no_other_leg(rig: Rig, fleet: dict[str, Any]) -> None:
    """By default Envoy closes the connection after 250 early resets, and its HTTP/2 library after 1000."""
    worker = await rig.worker(never)
    await rig.know(worker.endpoint, fleet["a"].endpoint)
    connection = await rig.egress()
    kept = connection.send(leg_headers(worker.address, b"{}"), b"{}")
    for _ in range(30):
        streams = [connection.send(leg_headers(worker.address, b"{}"), b"{}") for _ in range(50)]
        assert (await rig.leg(fleet["a"].address)).status == 200
        for stream in streams:
            connection.cancel(stream)
    assert (await rig.leg(fleet["a"].address)).status == 200
    assert not connection.lost.is_set()
    assert not connection.streams[kept].done.done()
    connection.cancel(kept)


async def test_a_leg_with_a_forbidden_header_costs_no_other_leg(rig: Rig, fleet: dict[str, Any]) -> None:
    connection = await rig.egress()
    with pytest.raises(ConnectionResetError, match="stream reset"):
        await rig.leg(fleet["a"].address, headers={"connection": "close"})
    assert (await rig.leg(fleet["a"].address)).status == 200
    assert not connection.lost.is_set()


async def test_as_many_headers_as_clients_may_send_and_some_more(rig: Rig, fleet: dict[str, Any]) -> None:
    headers = {f"x-{number}": "v" * 600 for number in range(100)}
    assert (await rig.leg(fleet["a"].address, headers=headers)).status == 200


async def test_thousands_of_legs_at_once(rig: Rig) -> None:
    """Far more than Envoy's default limits of streams and requests."""
    everybody_is_here = asyncio.Event()

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        if len(worker.requests) == 1200:
            everybody_is_here.set()
        await everybody_is_here.wait()
        return await answer(b"ok")(request, writer)

    worker = await rig.worker(behave)
    await rig.know(worker.endpoint)
    replies = await asyncio.gather(*(rig.leg(worker.address, patience=60) for _ in range(1200)))
    assert {reply.status for reply in replies} == {200}
