"""How loaded workers are: what their engines and Envoy say of it, and what becomes of it when they do not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from http_client import PATIENCE
from product import Product, soon
from vllm_product import VllmProduct

from extproc.exchange.orders import OrderReceiver
from extproc.mock import Fault, Point
from extproc.transport.egress import EgressClient
from extproc.workers.load import EngineLoad
from extproc.workers.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 100}]}
INTERVAL = 0.05


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(decodes=1, load_monitor_interval=INTERVAL) as product:
        yield product


def said(worker: Worker) -> EngineLoad:
    """What its engine has said; nothing at all counts as a load of nobody."""
    return worker.engine_load or EngineLoad(0, [])


async def page(product: Product) -> list[str]:
    """The lines of the metrics page."""
    url = f"http://127.0.0.1:{product.service.metrics_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return (await response.text()).splitlines()


async def entries(product: Product) -> dict[str, dict[str, Any]]:
    """What ``/get_loads`` has of each role."""
    answer = (await product.client.get("/get_loads")).json
    return {entry["worker_type"]: entry for entry in answer["loads"]}


# What was said is forgotten after three intervals without a newer answer. A busy machine may take as long for one: so
# what is shown of it is asked for until it is there.


async def until_told(product: Product, role: str, **figures: int) -> None:
    """Wait until ``/get_loads`` has these of a role."""
    async with asyncio.timeout(PATIENCE):
        while not (await entries(product))[role].items() >= figures.items():
            pass


async def until_on_page(product: Product, line: str) -> None:
    """Wait until the metrics page has this line."""
    async with asyncio.timeout(PATIENCE):
        while line not in await page(product):
            pass


async def test_what_the_engines_run_and_keep_waiting(product: Product):
    prefill, decode = product.worker(product.prefill), product.worker(product.decode)
    await soon(lambda: said(prefill).running == said(decode).running == 0, "the engines say nothing")
    product.prefill.fail(Fault(delay_first_token=60))
    exchange = await product.client.open(PATH, CHAT)
    await soon(lambda: said(prefill).running == 1, "the prefill does not run it")
    await soon(lambda: said(decode).waiting == 1, "the decode does not wait for the cache")
    assert said(decode).running == 0
    assert prefill.tokens == decode.tokens == len(json.dumps(CHAT)) // 4
    await until_told(product, "prefill", num_running_reqs=1, gateway_reqs=1, max_running_requests=2048)
    await until_told(product, "decode", num_waiting_reqs=1, decode_queue_reqs=1, gateway_reqs=1)
    named = f'role="decode",worker="{product.decode.url}"'
    await until_on_page(product, f'pd_engine_waiting_requests{{{named},dp_rank="0"}} 1')
    assert f"pd_worker_prompt_tokens{{{named}}} {decode.tokens}" in await page(product)
    exchange.close()
    await product.settled()
    await soon(lambda: said(prefill).running == 0 and said(decode).waiting == 0, "the engines' loads are old ones")


async def test_what_envoy_has_under_way_for_others(product: Product):
    """Another sidecar that sends through the same Envoy."""
    prefill = product.worker(product.prefill)
    await soon(lambda: prefill.envoy_active == 0, "Envoy says nothing")
    other = EgressClient(str(product.directory / "egress.sock"))
    other.start()
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": product.prefill.bootstrap_port, "bootstrap_room": 7}
    body = json.dumps(CHAT | where).encode()
    assert prefill.endpoint is not None
    leg = other.send(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", b"worker"),
            (b":path", PATH.encode()),
            (b"x-pd-cluster", b"prefill"),
            (b"x-gateway-destination-endpoint", prefill.endpoint.encode()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        body,
        OrderReceiver(),
    )
    await soon(lambda: prefill.envoy_active == 1, "Envoy does not count it")
    assert prefill.load == 0
    await until_told(product, "prefill", gateway_reqs=0, envoy_reqs=1)
    await until_on_page(product, f'pd_worker_envoy_requests{{role="prefill",worker="{product.prefill.url}"}} 1')
    leg.cancel()
    await soon(lambda: prefill.envoy_active == 0, "it counts on")
    await other.stop()


async def test_an_engine_that_is_gone_has_no_load(product: Product):
    decode = product.worker(product.decode)
    await soon(lambda: decode.engine_load is not None, "the engine says nothing")
    await product.decode.refuse()
    await soon(lambda: decode.engine_load is None, "what it said counts for ever")
    assert "num_running_reqs" not in (await entries(product))["decode"]
    assert not any(line.startswith("pd_engine_") and product.decode.url in line for line in await page(product))
    await product.decode.accept()
    await soon(lambda: decode.engine_load is not None, "it is not asked any more")


async def test_nobody_is_asked_when_that_is_off():
    async with Product(decodes=1, load_monitor_interval=INTERVAL, disable_load_monitoring=True) as product:
        assert (await product.post(PATH, CHAT)).status == 200
        assert product.worker(product.prefill).engine_load is None
        assert product.worker(product.prefill).envoy_active is None
        assert not any("loads" in record.path for mock in product.mocks for record in mock.requests)


async def test_vllm():
    async with VllmProduct(load_monitor_interval=INTERVAL) as product:
        decode = product.worker(product.decode)
        await soon(lambda: said(decode).running == 0, "the engine says nothing")
        product.decode.fail(Fault(hang=Point.MID_BODY, after_chunks=2))
        exchange = await product.client.open(PATH, {**CHAT, "stream": True})
        await exchange.piece()
        await soon(lambda: said(decode).running == 1, "the decode does not run it")
        usage = said(decode).kv_usage
        assert usage is not None
        assert usage > 0
        blocks = product.decode.engine.blocks
        assert said(decode).max_tokens == blocks.count * blocks.size
        assert said(decode).max_running is None, "vLLM does not say it"
        asked = Counter(record.path for record in product.decode.requests if "metrics" in record.path)
        assert set(asked) == {"/metrics", "/metrics/"}
        assert asked["/metrics"] == 1, "the whole page is for finding out how the cache is laid out"
        exchange.close()
        await product.settled()
