"""gRPC workers beside HTTP ones, behind a real Envoy: known and watched; never a part of a pair with one over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from product import Product, soon

from extproc.mock import RpcMock
from extproc.mock.vllm.worker import NIXL
from tests.tokenizers_made import directory

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"}
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
OFTEN = {
    "health_check_interval_secs": 0.1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "load_monitor_interval": 1,
}


class Mixed(Product):
    """SGLang workers over HTTP, of ``--prefill`` and ``--decode``, and one of TokenSpeed's over gRPC among them."""

    def __init__(self, tokenizer: Path) -> None:
        self.rpc = RpcMock("tokenspeed", "decode", tokenizer=tokenizer)
        super().__init__(prefills=1, decodes=1, wait=False, **OFTEN)

    async def _start(self) -> None:
        await self.rpc.start()
        self._given["decode"] = [self.rpc.url, *(mock.url for mock in self.decodes)]
        await super()._start()

    async def _stop(self) -> None:
        await super()._stop()
        await self.rpc.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def product(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mixed]:
    async with Mixed(directory(tmp_path_factory.mktemp("tiny"))) as made:
        http = (made.prefill.url, made.decode.url)
        await made.fleet(lambda workers: sum(worker.usable for worker in workers if worker.base_url in http) == 2)
        yield made


async def shown(product: Mixed, url: str) -> dict[str, Any]:
    listed = (await product.client.get("/workers")).json["workers"]
    return next(worker for worker in listed if worker["url"] == url)


async def until_shown(product: Mixed, url: str, status: str) -> dict[str, Any]:
    await product.fleet(
        lambda workers: any(worker.base_url == url and worker.status.value == status for worker in workers)
    )
    return await shown(product, url)


async def test_one_without_a_partner_is_ready_and_gets_no_requests(product: Mixed) -> None:
    found = await until_shown(product, product.rpc.url, "ready")
    assert (found["connection_mode"], found["runtime_type"], found["model_id"]) == ("grpc", "tokenspeed", "tiny")
    await soon(lambda: product.service.text.texts.of("tiny") is not None, "its tokenizer is not loaded")
    reason = (await shown(product, product.rpc.url))["status_reason"]
    assert 'no usable prefill worker fits (mismatch on ["connection_mode"]' in reason
    answers = await asyncio.gather(*(product.post("/v1/chat/completions", BODY) for _ in range(8)))
    assert {answer.status for answer in answers} == {200}
    assert len(product.decode.legs) == 8
    assert {call.method for call in product.rpc.calls} <= ASKED


async def test_its_tokenizer_is_had_from_it_and_shown(product: Mixed) -> None:
    await soon(lambda: product.service.text.texts.of("tiny") is not None, "its tokenizer is not loaded")
    (listed,) = (await product.client.get("/v1/tokenizers")).json["tokenizers"]
    assert (listed["name"], listed["source"]) == ("tiny", f"{product.rpc.url} GetTokenizer")
    status = (await product.client.get("/v1/tokenizers/tiny/status")).json
    assert (status["id"], status["status"]) == (listed["id"], "completed")
    await product.post("/v1/tokenize", {"prompt": "hello"})  # the model is served over HTTP as well: a worker is asked
    assert len(await product.prefill.received(1, "/tokenize")) == 1


async def test_its_load_is_shown_beside_the_others(product: Mixed) -> None:
    product.rpc.facts.waiting = 7

    worker = next(worker for worker in product.service.registry if worker.base_url == product.rpc.url)
    await soon(lambda: worker.engine_load is not None and worker.engine_load.waiting == 7, "its load is not asked for")
    loads = (await product.client.get("/get_loads")).json["loads"]
    assert {entry.get("num_waiting_reqs") for entry in loads if entry["worker"] == product.rpc.url} == {7}


async def test_one_comes_dies_returns_as_another_and_leaves(product: Mixed) -> None:
    mock = RpcMock("vllm", "prefill", connector=NIXL, engine_id="first")
    await mock.start()
    answer = await product.client.post("/workers", {"url": mock.url, "worker_type": "prefill"})
    assert answer.status == 202, answer.body
    found = await until_shown(product, mock.url, "ready")
    assert (found["kv_engine_id"], found["pd_pairing"]) == ("first", "vllm/nixl/dtype=auto,page=32,model=torch.float32")
    await mock.stop()
    assert "Connection refused" in (await until_shown(product, mock.url, "not_ready"))["status_reason"]
    mock.facts.engine_id = "second"
    await mock.start()
    assert (await until_shown(product, mock.url, "ready"))["kv_engine_id"] == "second"
    assert (await product.client.delete(f"/workers/{found['id']}")).status == 202
    await soon(lambda: len(product.service._client.rpc) == 1, "the channel of a worker that left is open")
    assert (await product.post("/v1/chat/completions", BODY)).status == 200
    await mock.stop()
