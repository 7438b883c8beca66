"""Legs through a real Envoy's egress listener, and straight to the worker: the same is seen of either way."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conformance_rig import PATIENCE
from transport_rig import TransportEnvoy, Worker

from extproc.names import CLUSTER, DESTINATION
from extproc.transport.egress import EgressClient
from extproc.upstream.egress import DirectEgress
from extproc.upstream.tls import WorkerTls
from extproc.workers.endpoints import PREFILL_CLUSTER, Endpoint, Snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from extproc.transport.interface import Header, Leg, Lost

_BODY = random.Random(1).randbytes(20_000_000)


class Receiver:
    """A ``LegReceiver`` that notes what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.ends: list[str | Lost] = []
        self.changed = asyncio.Event()

    def head(self, status: int, headers: Sequence[Header]) -> None:  # noqa: ARG002
        self.status = status

    def data(self, chunk: bytes) -> None:
        self.body += chunk
        self.changed.set()

    def trailers(self, headers: Sequence[Header]) -> None:
        pass

    def done(self) -> None:
        self.ends.append("done")
        self.changed.set()

    def lost(self, reason: Lost, detail: str) -> None:  # noqa: ARG002
        self.ends.append(reason)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def end(self) -> str | Lost:
        """How the leg ended."""
        await self.until(lambda: bool(self.ends))
        (end,) = self.ends
        return end


class Way:
    """An egress with a worker at its end, and how that is named."""

    def __init__(self, egress: EgressClient | DirectEgress, *named: Header) -> None:
        self._egress = egress
        self._named = named

    def send(self, path: str, body: bytes, receiver: Receiver) -> Leg:
        """POST ``body``."""
        headers = (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", b"worker"),
            (b":path", path.encode()),
            *self._named,
            (b"content-length", b"%d" % len(body)),
        )
        return self._egress.send(headers, body, receiver)


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransportEnvoy]:
    yield from TransportEnvoy(tmp_path_factory.mktemp("envoy")).run()


@pytest.fixture(params=["envoy", "direct"])
async def way(request: pytest.FixtureRequest, envoy: TransportEnvoy, worker: Worker) -> AsyncIterator[Way]:
    async with by_envoy(envoy, worker) if request.param == "envoy" else straight(worker) as way:
        yield way


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    yield worker
    await worker.stop()


@asynccontextmanager
async def by_envoy(envoy: TransportEnvoy, worker: Worker | None) -> AsyncIterator[Way]:
    if worker is not None:
        await worker.start(envoy.worker)
    client = EgressClient(str(envoy.egress))
    client.start()
    yield Way(client)
    await client.stop()
    assert client.open_legs == 0
    await envoy.until_statistic("http.egress.downstream_cx_active", 0)
    Path(envoy.worker).unlink(missing_ok=True)  # noqa: ASYNC240


@asynccontextmanager
async def straight(worker: Worker | None) -> AsyncIterator[Way]:
    port = 1 if worker is None else await worker.start(None)
    egress = DirectEgress(WorkerTls(None))
    egress.publish(Snapshot(prefill=(Endpoint("127.0.0.1", port, "worker"),)))
    egress.start()
    address = b"127.0.0.1:%d" % port
    yield Way(egress, (CLUSTER.encode(), PREFILL_CLUSTER.encode()), (DESTINATION.encode(), address))
    await egress.stop()
    assert egress.open_legs == egress.connections == 0


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_537, 1 << 20, 20_000_000])
async def test_a_body_arrives_unchanged(way: Way, size: int) -> None:
    receiver = Receiver()
    way.send("/sha", _BODY[:size], receiver)
    assert await receiver.end() == "done"
    assert (receiver.status, receiver.body.decode()) == (200, hashlib.sha256(_BODY[:size]).hexdigest())


async def test_a_large_answer_arrives_also_when_it_has_to_pause(way: Way) -> None:
    receiver = Receiver()
    leg = way.send("/big", b"20000000", receiver)
    for goal in (1, 5_000_000, 12_000_000):
        await receiver.until(lambda goal=goal: len(receiver.body) >= goal)
        leg.pause()
        await asyncio.sleep(0)
        leg.resume()
    assert await receiver.end() == "done"
    assert len(receiver.body) == 20_000_000


async def test_more_legs_than_envoy_allows_streams(way: Way) -> None:
    """The listener allows 100: the rest waits its turn. Straight to the worker each has a connection."""
    receivers = [Receiver() for _ in range(350)]
    for receiver in receivers:
        way.send("/sha", _BODY[:1000], receiver)
    assert [await receiver.end() for receiver in receivers] == ["done"] * 350
    assert {receiver.status for receiver in receivers} == {200}


async def test_cancel_reaches_the_worker(worker: Worker, way: Way) -> None:
    receiver = Receiver()
    leg = way.send("/hang", b"x", receiver)
    await worker.waiting.wait()
    leg.cancel()
    await worker.left.wait()
    assert not receiver.ends


async def test_the_first_bytes_do_not_wait_for_the_last(worker: Worker, way: Way) -> None:
    receiver = Receiver()
    way.send("/stream", b"x", receiver)
    await receiver.until(lambda: receiver.body == b"first")
    worker.release.set()
    assert await receiver.end() == "done"
    assert receiver.body == b"firstlast"


@pytest.mark.parametrize("kind", ["envoy", "direct"])
async def test_without_a_worker_there_is_an_answer_too(envoy: TransportEnvoy, kind: str) -> None:
    async with by_envoy(envoy, None) if kind == "envoy" else straight(None) as way:
        receiver = Receiver()
        way.send("/sha", b"x", receiver)
        assert await receiver.end() == "done"
        assert receiver.status == 503
