"""Engines that say that they have too much: who is spared, what clients hear, and how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from product import Product, soon
from vllm_product import VllmProduct

from extproc.mock import Fault, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 100}]}
INTERVAL = 1.0  # what is older than a few of these counts no more, however busy the machine is


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(load_monitor_interval=INTERVAL, worker_overload_waiting_requests=2) as product:
        yield product


async def test_an_engine_with_a_queue_is_spared(product: Product) -> None:
    """By ``/v1/loads``: a decode whose prefill takes its time has requests that wait."""
    product.prefill.fail(Fault(delay_first_token=60))
    exchanges = []
    for number in range(3):  # in turn, whatever the connections do
        exchanges.append(await product.client.open(PATH, CHAT))
        await soon(lambda count=number + 1: sum(len(mock.legs) for mock in product.decodes) == count, "no leg came")
    await soon(lambda: any(product.worker(mock).overloaded for mock in product.decodes), "nobody is overloaded")
    product.prefill.behave()
    exchanges.pop(1).close()  # the one of the other worker
    busy, spare = sorted(product.decodes, key=lambda mock: not product.worker(mock).overloaded)
    await spare.idle()
    for _ in range(4):
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.header("x-pd-decode")) == (200, spare.url)
    shown = (await product.client.get(f"/workers/{product.worker(busy).id}")).json
    assert shown["status_reason"] == "overloaded: 2 requests wait (limit 2)"
    url = f"http://127.0.0.1:{product.service.metrics_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as page:
        assert f'pd_worker_overloaded{{role="decode",worker="{busy.url}"}} 1' in await page.text()
    for exchange in exchanges:
        exchange.close()
    await product.settled()
    await soon(lambda: not product.worker(busy).overloaded, "it is overloaded for ever")
    assert {(await product.post(PATH, CHAT)).header("x-pd-decode") for _ in range(4)} == {busy.url, spare.url}


async def test_the_last_one_is_used_all_the_same() -> None:
    async with VllmProduct(
        options={"blocks": 20}, load_monitor_interval=INTERVAL, worker_overload_token_usage=0.3
    ) as product:
        decode = product.worker(product.decode)
        product.decode.fail(Fault(hang=Point.MID_BODY, after_chunks=2))
        exchange = await product.client.open(PATH, {**CHAT, "stream": True})
        await exchange.piece()
        await soon(lambda: decode.overloaded, "a cache that is nearly full is not noticed")
        assert decode.overloaded.endswith("(limit 30%)")
        product.decode.behave()
        answer = await product.post(PATH, {**CHAT, "messages": [{"role": "user", "content": "hi"}]})
        assert (answer.status, answer.header("x-pd-decode")) == (200, product.decode.url)
        exchange.close()
        await product.settled()


async def test_or_the_client_is_turned_away() -> None:
    async with Product(
        decodes=1, load_monitor_interval=INTERVAL, worker_overload_waiting_requests=1, worker_overload_shed=True
    ) as product:
        decode = product.worker(product.decode)
        product.prefill.fail(Fault(delay_first_token=60))
        exchange = await product.client.open(PATH, CHAT)
        await soon(lambda: decode.overloaded, "nobody is overloaded")
        legs = len(product.prefill.legs)
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.header("x-pd-error-code")) == (503, "worker_overload_protection_shed")
        assert answer.header("retry-after") == "1"
        assert "decode workers" in answer.json["error"]["message"]
        assert len(product.prefill.legs) == legs, "a leg was sent"
        assert (await product.client.get("/readiness")).status == 200
        exchange.close()
        product.prefill.behave()
        await product.settled()
        await soon(lambda: not decode.overloaded, "it is overloaded for ever")
        assert (await product.post(PATH, CHAT)).status == 200
