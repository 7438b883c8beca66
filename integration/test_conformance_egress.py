"""The egress client through a real Envoy's egress listener, to a worker behind it."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conformance_rig import PATIENCE
from transport_rig import TransportEnvoy, Worker

from extproc.transport.egress import EgressClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from extproc.transport.interface import Header, Lost

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


def post(path: str, size: int) -> tuple[Header, ...]:
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":authority", b"worker"),
        (b":path", path.encode()),
        (b"content-length", b"%d" % size),
    )


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransportEnvoy]:
    yield from TransportEnvoy(tmp_path_factory.mktemp("envoy")).run()


@pytest.fixture
async def worker(envoy: TransportEnvoy) -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.start(envoy.worker)
    yield worker
    await worker.stop()
    Path(envoy.worker).unlink(missing_ok=True)  # noqa: ASYNC240


@pytest.fixture
async def egress(envoy: TransportEnvoy) -> AsyncIterator[EgressClient]:
    client = EgressClient(str(envoy.egress))
    client.start()
    yield client
    await client.stop()
    assert client.open_legs == 0
    await envoy.until_statistic("http.egress.downstream_cx_active", 0)


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_537, 1 << 20, 20_000_000])
async def test_a_body_arrives_unchanged(worker: Worker, egress: EgressClient, size: int) -> None:
    assert not worker.left.is_set()
    receiver = Receiver()
    egress.send(post("/sha", size), _BODY[:size], receiver)
    assert await receiver.end() == "done"
    assert (receiver.status, receiver.body.decode()) == (200, hashlib.sha256(_BODY[:size]).hexdigest())


async def test_a_large_answer_arrives_also_when_it_has_to_pause(worker: Worker, egress: EgressClient) -> None:
    assert not worker.left.is_set()
    receiver = Receiver()
    leg = egress.send(post("/big", 8), b"20000000", receiver)
    for goal in (1, 5_000_000, 12_000_000):
        await receiver.until(lambda goal=goal: len(receiver.body) >= goal)
        leg.pause()
        await asyncio.sleep(0)
        leg.resume()
    assert await receiver.end() == "done"
    assert len(receiver.body) == 20_000_000


async def test_more_legs_than_envoy_allows_streams(worker: Worker, egress: EgressClient) -> None:
    """The listener allows 100: the rest waits its turn."""
    assert not worker.left.is_set()
    receivers = [Receiver() for _ in range(350)]
    for receiver in receivers:
        egress.send(post("/sha", 1000), _BODY[:1000], receiver)
    assert [await receiver.end() for receiver in receivers] == ["done"] * 350
    assert {receiver.status for receiver in receivers} == {200}


async def test_cancel_reaches_the_worker(worker: Worker, egress: EgressClient) -> None:
    receiver = Receiver()
    leg = egress.send(post("/hang", 1), b"x", receiver)
    await worker.waiting.wait()
    leg.cancel()
    await worker.left.wait()
    assert not receiver.ends


async def test_the_first_bytes_do_not_wait_for_the_last(worker: Worker, egress: EgressClient) -> None:
    receiver = Receiver()
    egress.send(post("/stream", 1), b"x", receiver)
    await receiver.until(lambda: receiver.body == b"first")
    worker.release.set()
    assert await receiver.end() == "done"
    assert receiver.body == b"firstlast"


async def test_without_a_worker_envoy_answers(egress: EgressClient) -> None:
    receiver = Receiver()
    egress.send(post("/sha", 1), b"x", receiver)
    assert await receiver.end() == "done"
    assert receiver.status == 503
