"""Mooncake streams whose head is out when their prefill dies: those that wait for its cache end, others go on."""

from __future__ import annotations

import asyncio

import pytest
from http_client import CutError
from product import soon
from vllm_product import WAYS, VllmProduct
from vllm_requests import CHAT, MODEL, TEXT, Question, streamed

from extproc.dataplane import access_log
from extproc.exchange import progress
from extproc.mock import Fault
from extproc.mock.vllm.mooncake import Mooncake

QUESTIONS: dict[str, Question] = {
    "chat": streamed(("/v1/chat/completions", CHAT)),
    "responses": streamed(("/v1/responses", {**MODEL, "input": TEXT})),
    "list": streamed(("/v1/completions", {**MODEL, "prompt": [TEXT, "Another one"]})),
}
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(progress, "FIRST_TOKEN_SECONDS", 0.5)


def fleet(way: str, **settings: object) -> VllmProduct:
    """One pair whose prefill is found gone as soon as it is looked at."""
    return VllmProduct(
        way=WAYS[way], health_check_interval_secs=1, health_failure_threshold=1, disable_retries=True, **settings
    )


def deafen(product: VllmProduct) -> None:
    """No decode gets a cache any more."""
    connector = product.prefill.engine.connector
    assert isinstance(connector, Mooncake)
    connector.deaf = True


@pytest.mark.parametrize(
    ("kind", "way", "transport"),
    [
        *((kind, way, "ngh2") for kind in QUESTIONS for way in ("mooncake", "mooncake in turn")),
        ("chat", "mooncake", "grpcio"),
    ],
)
async def test_a_stream_that_waits_for_a_dead_prefill_ends(kind: str, way: str, transport: str) -> None:
    async with fleet(way, grpc_transport=transport) as product, asyncio.timeout(PATIENCE):
        assert (await product.post(*QUESTIONS[kind])).status == 200  # the decode knows the way, and asks nobody for it
        await product.records.until(lambda: product.gateway.alive == 0)
        product.records.all.clear()
        deafen(product)
        exchange = await product.client.open(*QUESTIONS[kind])
        decode = product.worker(product.decode)
        prefill = product.worker(product.prefill)
        await soon(lambda: decode.load > 0 and prefill.load == 0, "the prefill leg does not end")
        if kind != "list":
            assert (await exchange.head()).status == 200
        product.prefill.crash()
        if kind == "list":  # its answer is made here, and nothing of it was out
            assert (await exchange.whole()).status == 502
        else:
            with pytest.raises(CutError):
                await exchange.whole()
        exchange.close()
        await product.records.until(lambda: product.gateway.alive == 0)
        (record,) = product.records.all
        assert record.code == "prefill_connection_lost"
        assert product.gateway.progress.watched == 0
        assert decode.load == 0


@pytest.mark.parametrize("kind", QUESTIONS)
async def test_a_stream_that_flows_outlives_its_prefill(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_TOKEN_SECONDS", 1.5)  # on a busy machine a token may be late by a second
    async with fleet("mooncake") as product, asyncio.timeout(PATIENCE):
        expected = await product.post(*QUESTIONS[kind])
        product.decode.fail(Fault(delay_token=0.25))
        exchange = await product.client.open(*QUESTIONS[kind])
        await exchange.until(b'"delta"' if kind != "list" else b'"text"')
        product.prefill.crash()
        answer = await exchange.whole()
        assert (answer.status, len(answer.events)) == (200, len(expected.events))
        product.decode.behave()
        await soon(lambda: not product.worker(product.prefill).usable, "nobody has noticed")
