"""Clients of gRPC workers' streams, kept by comments whatever the prompt: their answers Envoy fetches from us."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from product import soon
from rpc_engine import Leg, fails, never
from rpc_product import TEXT, RpcProduct

from extproc.mock.vllm.worker import NIXL

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
STREAM = CHAT | {"stream": True}
PATH = "/v1/chat/completions"
COMMENT = b": keep-alive\n\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sglang", "vllm"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RpcProduct]:
    connector = NIXL if request.param == "vllm" else ""
    options = {"sse_keepalive_secs": 0.2, "retry_initial_backoff_ms": 10}
    async with RpcProduct(request.param, tmp_path_factory.mktemp("m") / "tiny", connector=connector, **options) as made:
        yield made


async def test_comments_while_a_short_prompt_waits(product: RpcProduct) -> None:
    go_on = asyncio.Event()

    async def waits(leg: Leg) -> None:
        await go_on.wait()
        await leg.engine.default(leg)

    for mock in product.mocks:
        mock.behave = waits  # type: ignore[attr-defined]
    exchange = await product.client.open(PATH, STREAM)
    reply = await exchange.head()
    assert (reply.status, reply.header("content-type")) == (200, "text/event-stream; charset=utf-8")
    assert reply.header("x-pd-prefill") == product.prefill.url
    await exchange.until(2 * COMMENT)
    go_on.set()
    whole = await exchange.whole()
    chunks = [json.loads(event) for event in whole.events if event.startswith("{")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == TEXT
    assert whole.events[-1] == "[DONE]"


async def test_another_attempt_behind_a_comment(product: RpcProduct) -> None:
    go_on = asyncio.Event()

    async def fails_late(leg: Leg) -> None:
        await go_on.wait()
        for mock in product.decodes:
            mock.behave = mock.default
        await leg.context.abort(grpc.StatusCode.INTERNAL, "no")

    for mock in product.decodes:
        mock.behave = fails_late
    exchange = await product.client.open(PATH, STREAM)
    await exchange.until(COMMENT)
    go_on.set()
    assert (await exchange.whole()).events[-1] == "[DONE]"
    await product.records.until(lambda: bool(product.records.all))
    (record,) = product.records.all
    assert record.attempts == 2


async def test_an_error_before_a_comment_has_a_status_and_behind_it_is_an_event(
    product: RpcProduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def fails_late(leg: Leg) -> None:
        await go_on.wait()
        await fails(grpc.StatusCode.INVALID_ARGUMENT, "too odd")(leg)

    product.prefill.behave = fails(grpc.StatusCode.INVALID_ARGUMENT, "too odd")
    for mock in product.decodes:
        mock.behave = never
    with monkeypatch.context() as patch:
        patch.setattr(product.gateway, "config", replace(product.gateway.config, keep_alive=60))
        assert (await product.post(PATH, STREAM)).status == 400
    product.prefill.behave = fails_late
    exchange = await product.client.open(PATH, STREAM)
    await exchange.until(COMMENT)
    go_on.set()
    whole = await exchange.whole()
    assert whole.status == 200
    assert json.loads(whole.events[-1])["error"]["code"] == "prefill_rejected"


@pytest.mark.parametrize("commented", [False, True])
async def test_who_leaves_while_nothing_is_said_ends_the_work(product: RpcProduct, commented: bool) -> None:  # noqa: FBT001
    for mock in product.mocks:
        mock.behave = never  # type: ignore[attr-defined]
    exchange = await product.client.open(PATH, STREAM)
    prefill = await product.prefill.arrived()
    if commented:
        await exchange.until(COMMENT)
    exchange.reset()
    async with asyncio.timeout(60):
        await prefill.ended.wait()
    await soon(lambda: product.gateway.alive == 0, "the request goes on")
    assert not product.gateway.fetched
