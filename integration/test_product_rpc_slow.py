"""Clients that read slowly, of gRPC workers behind a real Envoy: the engines are made to wait, and nothing piles up."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
from http2_client import Http2Client
from http_client import Exchange
from product import soon
from rpc_engine import Leg
from rpc_product import RpcProduct

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 1000,
    "stream": True,
}
# What a sequence may take in Envoy, and here, while nobody reads it, with what the kernel's sockets hold left aside.
MOST_EACH = 2.5 * (1 << 20)
# Of one sample Envoy runs the call itself, of two it fetches the answer from the gateway: how many of how many readers.
COURSES = {"direct": (1, 12), "relayed": (2, 4)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RpcProduct]:
    async with RpcProduct("sglang", tmp_path_factory.mktemp("model") / "tiny", sse_keepalive_secs=0) as made:
        yield made


def resident(process: int | str) -> int:
    """Bytes of a process's memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def until_still(count: Callable[[], int]) -> None:
    """Wait until a count does not change any more."""
    async with asyncio.timeout(120):
        last, same = -1, 0
        while same < 8:
            await asyncio.sleep(0.1)
            same = same + 1 if count() == last else 0
            last = count()


class Crowd(Protocol):
    """Clients that ask, and do not read until they are told to."""

    async def ask(self, readers: int, body: dict[str, Any]) -> None: ...

    async def read(self, until: Callable[[], bool]) -> None: ...

    async def leave(self) -> None: ...


class OverHttp1:
    """A connection each."""

    def __init__(self, product: RpcProduct) -> None:
        self._client = product.client
        self._asked: list[Exchange] = []

    async def ask(self, readers: int, body: dict[str, Any]) -> None:
        for _ in range(readers):
            exchange = await self._client.open("/v1/chat/completions", body, buffer=1 << 12)
            exchange._writer.transport.pause_reading()
            exchange._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            self._asked.append(exchange)

    async def read(self, until: Callable[[], bool]) -> None:
        async def one(exchange: Exchange) -> None:
            exchange._writer.transport.resume_reading()
            while not until():
                await exchange.piece()

        # Any of them: with so little room, TCP may take its time to notice that there is some again.
        reading = [asyncio.create_task(one(exchange)) for exchange in self._asked]
        async with asyncio.timeout(60):
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        assert until()

    async def leave(self) -> None:
        for exchange in self._asked:
            exchange.reset()


class OverHttp2:
    """One connection for all, which is not read."""

    by_hand = False

    def __init__(self, product: RpcProduct) -> None:
        self._product = product

    async def ask(self, readers: int, body: dict[str, Any]) -> None:
        host, port = self._product.client.host, self._product.client.port
        self._client = await Http2Client.connect(host, port, by_hand=self.by_hand)
        self._asked = [self._client.post("/v1/chat/completions", body) for _ in range(readers)]
        await self._asked[-1].head()
        self._stop()

    def _stop(self) -> None:
        self._client._transport.pause_reading()

    async def read(self, until: Callable[[], bool]) -> None:
        self._client._transport.resume_reading()
        async with asyncio.timeout(60):
            while not until():
                await self._asked[0].progress()

    async def leave(self) -> None:
        await self._client.close()


class OverHttp2Streams(OverHttp2):
    """One connection for all, which is read; but none of the streams is."""

    by_hand = True

    def _stop(self) -> None:
        """They have not begun to."""

    async def read(self, until: Callable[[], bool]) -> None:
        self._asked[0].read()
        async with asyncio.timeout(60):
            while not until():
                await self._asked[0].progress()


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("crowded", [OverHttp1, OverHttp2, OverHttp2Streams])
async def test_readers_that_do_not_read(product: RpcProduct, crowded: Callable[..., Crowd], course: str) -> None:
    samples, readers = COURSES[course]
    ids = product.ids("The quick brown fox jumps over the lazy dog, again and again; ") * 8

    async def flood(leg: Leg) -> None:
        said = 0
        while True:
            said += len(ids)
            await leg.chunk(ids, said)

    for mock in product.decodes:
        mock.behave = flood
    await product.post("/v1/chat/completions", BODY | {"stop": ["quick"]})  # everybody is warm
    product.prefill.legs.clear()
    for mock in product.decodes:
        mock.legs.clear()
    envoy, own = resident(product.envoy.pid), resident("self")

    def legs() -> list[Leg]:
        return [leg for mock in product.decodes for leg in mock.legs]

    def written() -> int:
        return sum(leg.written for leg in legs())

    crowd = crowded(product)
    await crowd.ask(readers, BODY | {"n": samples})
    await soon(lambda: len(legs()) == readers * samples, "not all have come")
    await until_still(written)
    assert not any(leg.ended.is_set() for leg in legs())
    assert resident(product.envoy.pid) - envoy < readers * samples * MOST_EACH
    assert resident("self") - own < readers * samples * MOST_EACH
    others = await asyncio.wait_for(product.client.get("/v1/models"), 60)
    assert others.status == 200
    before = written()
    await crowd.read(lambda: written() > before)
    await crowd.leave()
