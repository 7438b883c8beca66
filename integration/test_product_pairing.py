"""Who is paired with whom, and by which names models are known: with real sockets and a real Envoy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from product import Product
from vllm_product import NIXL, VllmProduct
from vllm_requests import CHAT, names

from extproc.mock import SglangMock
from extproc.mock.sglang.engine import Layout
from extproc.mock.vllm.worker import VllmMock

PATH = "/v1/chat/completions"
SAMPLES = {**CHAT, "n": 2}
STREAM = {**CHAT, "stream": True}


class Layouts(Product):
    """One prefill and one decode worker of each layout, in this order."""

    def __init__(self, *layouts: Layout, decodes: tuple[Layout, ...] = (), **settings: Any) -> None:
        self._layouts = iter((*layouts, *(decodes or layouts)))
        super().__init__(len(layouts), len(decodes or layouts), **settings)

    def _mock(self, role: str) -> SglangMock:
        return SglangMock(role, layout=next(self._layouts))

    async def keys(self) -> list[str]:
        """What ``GET /workers`` shows."""
        return [worker["pd_pairing"] for worker in (await self.client.get("/workers")).json["workers"]]


SMALL, LARGE = Layout(page_size=1), Layout(page_size=64)
OTHER_KERNELS = Layout(attention_backend="fa3")


async def test_workers_whose_caches_differ_are_never_paired():
    """A decode would die of it."""
    async with Layouts(SMALL, LARGE) as product:
        assert await product.keys() == [
            f"sglang/mooncake/dtype=auto,page={page},attn=torch_native,model=float32" for page in (1, 64)
        ] * 2  # fmt: skip
        of_url = {mock.url: mock.layout for mock in product.mocks}
        for body in (CHAT, STREAM, SAMPLES) * 4:
            answer = await product.post(PATH, body)
            assert answer.status == 200
            assert of_url[answer.header("x-pd-prefill")] == of_url[answer.header("x-pd-decode")]
        assert all(mock.legs for mock in product.mocks)
        await product.settled()


async def test_nor_when_a_decode_refuses_connections():
    async with Layouts(SMALL, LARGE) as product:
        await product.decode.refuse()
        for body in (CHAT, STREAM, SAMPLES) * 2:
            answer = await product.post(PATH, body)
            assert (answer.status, answer.header("x-pd-decode")) == (200, product.decodes[1].url)
        await product.decode.accept()
        await product.settled()


async def test_without_a_pair_all_say_why_until_the_operator_says_otherwise():
    async with Layouts(SMALL, decodes=(OTHER_KERNELS,)) as product:
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "no_compatible_pd_pair", None)
        message = (
            "No prefill/decode pair shares a KV transfer protocol "
            '(mismatch on ["attention_backend"]; prefill: ["sglang/mooncake/dtype=auto,page=1,attn=torch_native,'
            'model=float32"], decode: ["sglang/mooncake/dtype=auto,page=1,attn=fa3,model=float32"])'
        )
        assert answer.json["error"]["message"] == message
        readiness = await product.client.get("/readiness")
        assert (readiness.status, readiness.json["reason"]) == (503, message)
        assert not product.prefill.legs
        await product.remove(product.decode)
        await product.add(product.decode, labels={"attention_backend": ""})
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        assert (await product.client.get("/readiness")).status == 200
        assert (await product.post(PATH, CHAT)).status == 200
        await product.settled()


@pytest.mark.parametrize("mode", ["off", "strict"])
async def test_the_mode_is_obeyed(mode):
    async with Layouts(SMALL, decodes=(OTHER_KERNELS,), pd_pairing_mode=mode) as product:
        assert (await product.post(PATH, CHAT)).status == (200 if mode == "off" else 503)
        same = SglangMock("decode", layout=SMALL)
        async with same:
            await product.add(same)
            await product.ready()
            answers = [await product.post(PATH, CHAT) for _ in range(4)]
            assert [answer.status for answer in answers] == [200] * 4
            served = {answer.header("x-pd-decode") for answer in answers}
            assert served == {same.url} | ({product.decode.url} if mode == "off" else set())
            await product.remove(same)


async def test_strictly_vllms_layout_must_be_registered():
    labels = {"attention_backend": "FLASH_ATTN", "model_dtype": "half"}
    async with VllmProduct(1, 1, pd_pairing_mode="strict") as product:
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code) == (503, "no_compatible_pd_pair")
        parts = '["attention_backend", "model_dtype"]'
        assert f'mismatch on {parts}; prefill: ["vllm/nixl/dtype=auto,page=16"]' in answer.json["error"]["message"]
        for mock in product.mocks:
            await product.remove(mock)
            await product.add(mock, labels=labels)
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        answer = await product.post(PATH, CHAT)
        assert names(answer) == ("nixl", "handed", product.prefill.url, product.decode.url)
        await product.settled()


@asynccontextmanager
async def upgrade(product: VllmProduct) -> AsyncIterator[dict[str | None, VllmMock]]:
    """A pair of each of two versions, by URL."""
    made = [
        VllmMock(role, connector=NIXL, model="tiny", version=version, load_failure_delay=0)
        for role in ("prefill", "decode")
        for version in ("0.31.0", "0.32.0")
    ]
    for mock in made:
        await mock.start()
        await product.add(mock)
    await product.fleet(lambda workers: len(workers) == 4 and all(worker.usable for worker in workers))
    try:
        yield {mock.url: mock for mock in made}
    finally:
        for mock in made:
            await product.remove(mock)
            await mock.stop()


async def test_a_rolling_upgrade_with_nixl():
    """Each decode would answer 500 to what a prefill of the other version has for it."""
    async with VllmProduct(0, 0, disable_retries=True) as product, upgrade(product) as mocks:
        for _ in range(6):
            answer = await product.post(PATH, CHAT)
            prefill, decode = mocks[answer.header("x-pd-prefill")], mocks[answer.header("x-pd-decode")]
            assert answer.status == 200
            assert prefill.engine.options.version == decode.engine.options.version
            assert decode.legs[-1].kv == "transferred"
        assert all(mock.legs for mock in mocks.values())


async def test_vllms_block_sizes_are_asked_for_and_may_be_taken_back():
    """With two of them a NIXL decode was seen answering nonsense, on a CPU."""
    async with VllmProduct(1, 0, wait=False) as product, VllmMock("decode", model="tiny", block_size=32) as decode:
        await product.add(decode)
        await product.ready()
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code) == (503, "no_compatible_pd_pair")
        assert 'mismatch on ["page_size"]' in answer.json["error"]["message"]
        workers = (await product.client.get("/workers")).json["workers"]
        assert {worker["pd_pairing"] for worker in workers} == {
            "vllm/nixl/dtype=auto,page=16",
            "vllm/nixl/dtype=auto,page=32",
        }
        assert all("fits (mismatch on" in worker["status_reason"] for worker in workers)
        await product.remove(decode)
        await product.add(decode, labels={"block_size": ""})
        await product.ready()
        assert (await product.post(PATH, CHAT)).status == 200
        await product.remove(decode)


async def test_near_decodes_serve_and_far_ones_help():
    async with Product(0, 0) as product:
        made = [(SglangMock(role), zone) for role in ("prefill", "decode") for zone in ("a", "b")]
        for mock, zone in made:
            await mock.start()
            await product.add(mock, labels={"topology.kubernetes.io/zone": zone})
        await product.fleet(lambda workers: len(workers) == 4 and all(worker.usable for worker in workers))
        zones = {mock.url: zone for mock, zone in made}
        for _ in range(6):
            answer = await product.post(PATH, CHAT)
            assert zones[answer.header("x-pd-prefill")] == zones[answer.header("x-pd-decode")]
        gone, other = made[2][0], made[3][0]
        await gone.refuse()
        for _ in range(4):
            answer = await product.post(PATH, CHAT)
            assert (answer.status, answer.header("x-pd-decode")) == (200, other.url)
            assert answer.header("x-pd-attempts") is None  # it was in Envoy's list
        await gone.accept()
        for mock, _ in made:
            await product.remove(mock)
            await mock.stop()


@pytest.mark.parametrize("body", [CHAT, STREAM, SAMPLES], ids=["whole", "stream", "samples"])
async def test_an_alias_is_the_model_to_workers_and_in_answers(body):
    """vLLM knows no other name than its own: it would answer 404."""
    async with VllmProduct(1, 1, model_alias=["gpt=tiny", "other=nobody"]) as product:
        answer = await product.post(PATH, {**body, "model": "gpt"})
        assert answer.status == 200
        assert b'"model":"tiny"' in answer.body
        assert b"gpt" not in answer.body
        legs = [leg for mock in product.mocks for leg in mock.legs]
        assert {leg.json["model"] for leg in legs} == {"tiny"}
        listing = (await product.client.get("/v1/models")).json["data"]
        assert [(entry["id"], entry.get("alias_of")) for entry in listing] == [("tiny", None), ("gpt", "tiny")]
        assert listing[0] | {"id": "gpt", "alias_of": "tiny"} == listing[1]
        for unknown in ("other", "gpt-4"):
            answer = await product.post(PATH, {**body, "model": unknown})
            assert (answer.status, answer.code) == (404, "model_not_found")
        await product.settled()
