"""Short prompts that run on a decode worker alone."""

from __future__ import annotations

from typing import Any

import pytest
from product import Product
from vllm_product import WAYS, VllmProduct, of_all

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio

PATH = "/v1/chat/completions"


def chat(words: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello " * words}], **more}


@pytest.mark.parametrize("way", ["nixl", "mooncake", "passthrough"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_short_prompt_has_no_prefill_leg(way: str, *, stream: bool) -> None:
    async with VllmProduct(decodes=2, way=WAYS[way], pd_min_prompt_tokens=100) as product:
        short = await product.post(PATH, chat(1, stream=stream))
        assert (short.status, short.header("x-pd-kv")) == (200, "local")
        assert short.header("x-pd-prefill") is short.header("x-pd-handoff") is None
        assert of_all(product.prefills) == []
        (leg,) = of_all(product.decodes)
        assert leg.kv == "recomputed", "the engine computes it"
        assert "kv_transfer_params" not in leg.json
        long = await product.post(PATH, chat(200, stream=stream))
        assert (long.status, long.header("x-pd-kv")) == (200, product.way.kv)
        assert len(of_all(product.prefills)) == 1
        await product.settled()
        assert [record.kv for record in product.records.all] == ["local", product.way.kv]
        assert "--pd-min-prompt-tokens" in product.records.all[0].note
        assert not product.records.all[1].note


async def test_its_worker_fails_and_another_one_serves() -> None:
    async with VllmProduct(decodes=2, pd_min_prompt_tokens=100) as product:
        product.decode.fail(Fault(status=500))
        answers = [await product.post(PATH, chat(1)) for _ in range(2)]
        assert {(answer.status, answer.header("x-pd-decode")) for answer in answers} == {(200, product.decodes[1].url)}
        assert {answer.header("x-pd-kv") for answer in answers} == {"local"}
        await product.settled()


async def test_sglang_has_a_prefill_leg_for_every_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async with Product(decodes=1, pd_min_prompt_tokens=100) as product:
        answer = await product.post(PATH, chat(1))
        assert (answer.status, answer.header("x-pd-handoff")) == (200, "sglang")
        assert len(product.legs) == 2
        await product.settled()
    named = [record.__dict__["worker"] for record in caplog.records if record.name == "extproc.lone_decodes"]
    assert named == [product.decode.url]
