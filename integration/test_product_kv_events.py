"""Engines that publish KV events, and what the gateway knows of their caches by that."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from product import soon
from vllm_product import VllmProduct

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.mock.vllm.worker import VllmMock
from extproc.workers.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/completions"


class PublishingProduct(VllmProduct):
    """Its engines publish, and their registrations say where."""

    def __init__(self, **settings: Any) -> None:
        options = {"prefix_caching": True, "kv_events": True, "dev_mode": True}
        super().__init__(2, 2, options=options, kv_event_source="auto", **settings)

    def _registration(self, mock: VllmMock) -> dict[str, object]:  # type: ignore[override]
        assert mock.publisher is not None
        return super()._registration(mock) | {"labels": mock.publisher.labels}

    def held(self, tokens: list[int]) -> Mapping[Worker, int]:
        """How many tokens of a prompt each worker is known to hold."""
        request = InferenceRequest.read(APIS[PATH], json.dumps({"model": "tiny", "prompt": tokens}).encode())
        assert self.service.prefixes is not None
        return self.service.prefixes.overlaps(request, list(self.service.registry)) or {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[PublishingProduct]:
    async with PublishingProduct() as product:
        yield product


def body(tokens: list[int]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": tokens, "max_tokens": 4}


async def test_what_workers_hold_is_known_block_by_block(product: PublishingProduct) -> None:
    workers = list(product.service.registry)
    await soon(lambda: product.held([1]) == dict.fromkeys(workers, 0), "not all are followed from their beginning")
    prompt = [*range(100, 200)]
    answer = await product.post(PATH, body(prompt))
    assert answer.status == 200, answer.body
    served = {answer.header("x-pd-prefill"), answer.header("x-pd-decode")}
    expected = {worker: 96 if worker.name in served else 0 for worker in workers}
    await soon(lambda: product.held(prompt) == expected, "what they hold is not known")
    assert product.held([*prompt[:40], *prompt]) == {w: 32 if w.name in served else 0 for w in workers}
    assert set(product.held(prompt[50:]).values()) == {0}
    url = f"http://127.0.0.1:{product.service.metrics_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as page:
        text = await page.text()
    for worker in workers:
        named = f'{{role="{worker.role.value}",worker="{worker.name}"}}'
        assert f"pd_kv_events_blocks{named} {6 if worker.name in served else 0}" in text
        assert f"pd_kv_events_whole{named} 1" in text


async def test_an_emptied_cache_is_known_to_be_empty(product: PublishingProduct) -> None:
    prompt = [*range(1000, 1100)]
    assert (await product.post(PATH, body(prompt))).status == 200
    await soon(lambda: any(product.held(prompt).values()), "what they hold is not known")
    await product.settled()
    assert (await product.client.post("/flush_cache", {})).status == 200
    await soon(lambda: not any(product.held(prompt).values()), "they are thought to hold it")
    assert len(product.held(prompt)) == 4


async def test_of_an_engine_that_restarts_nothing_old_is_believed(product: PublishingProduct) -> None:
    prompt = [*range(2000, 2100)]
    for _ in range(2):
        assert (await product.post(PATH, body(prompt))).status == 200
    prefill = product.worker(product.prefill)
    await soon(lambda: product.held(prompt).get(prefill) == 96, "what it holds is not known")
    await product.settled()
    product.prefill.crash()
    await soon(lambda: not product.held(prompt).get(prefill), "a dead engine is thought to hold something")
    again = await product.restart(product.prefill)
    assert again.publisher is not None
    change = {"labels": again.publisher.labels}
    assert (await product.client.patch(f"/workers/{prefill.id}", change)).status == 202
    await soon(lambda: product.held(prompt).get(prefill) == 0, "it is not followed any more")


async def test_text_is_left_to_guessing(product: PublishingProduct) -> None:
    text = InferenceRequest.read(APIS[PATH], b'{"model": "tiny", "prompt": "some text"}')
    assert product.service.prefixes is not None
    assert product.service.prefixes.overlaps(text, list(product.service.registry)) is None
