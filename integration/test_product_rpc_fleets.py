"""Fleets of gRPC workers through a real Envoy: data-parallel ranks, a restart, workers over HTTP beside."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from http_client import Reply
from product import soon
from rpc_strict import FLOWS, StrictProduct

from extproc.mock import Fault, Point, RpcMock, Rule, SglangMock
from extproc.mock.engine import Pace

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
STREAM = CHAT | {"stream": True}
OFTEN = {
    "health_check_interval_secs": 0.1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
}


def content(reply: Reply) -> str:
    """The text of a chat, streamed or not."""
    assert reply.status == 200, reply.body
    if reply.header("content-type") == "application/json":
        return str(reply.json["choices"][0]["message"]["content"])
    chunks = [json.loads(event) for event in reply.events[:-1]]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


@asynccontextmanager
async def clean(product: StrictProduct) -> AsyncIterator[StrictProduct]:
    """A started product, of whose requests nothing may be left at the end."""
    async with product:
        await product.forget()
        yield product
        await product.client.close()
        await product.settled()


async def forgotten(product: StrictProduct) -> None:
    """Have the workers forget what they were asked, once it is over."""
    for mock in product.mocks:
        await mock.idle()
    await product.forget()


# -- ranks ------------------------------------------------------------------------------------------------------------

RANKS = 2


@pytest.mark.parametrize("flow", FLOWS)
async def test_every_rank_serves_and_the_legs_meet(flow: str) -> None:
    async with clean(StrictProduct(flow, dp_size=RANKS, dp_aware=True, disable_retries=True)) as product:
        wanted = product.text(product.chat_ids("hello"), max_new_tokens=9)
        served = Counter[tuple[str | None, str | None]]()
        for number in range(4 * RANKS * RANKS):
            reply = await product.post(CHAT_PATH, STREAM if number % 3 else CHAT)
            assert content(reply) == wanted
            prefill, decode = reply.header("x-pd-prefill"), reply.header("x-pd-decode")
            served[prefill, decode] += 1
            (leg,) = product.prefill.legs
            assert prefill == f"{product.prefill.url}@{leg.rank}"
            (mock,) = [mock for mock in product.decodes if mock.legs]
            (own,) = mock.legs
            if product.engine == "vllm":
                assert own.kv == "transferred"
            if product.engine != "sglang":  # whose server follows the room
                assert decode == f"{mock.url}@{own.rank}"
            await forgotten(product)
        assert {prefill for prefill, _ in served} == {f"{product.prefill.url}@{rank}" for rank in range(RANKS)}
        decodes = {f"{mock.url}@{rank}" for mock in product.decodes for rank in range(RANKS)}
        assert {decode for _, decode in served} == decodes


@pytest.mark.parametrize("flow", FLOWS)
async def test_samples_and_lists_on_ranks(flow: str) -> None:
    async with clean(StrictProduct(flow, dp_size=RANKS, dp_aware=True, disable_retries=True)) as product:
        prompts = ["def foo(", "import os", "x"]
        body = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 9, "temperature": 0.7}
        reply = await product.post(COMPLETIONS_PATH, body)
        assert reply.status == 200, reply.body
        wanted = [product.text(product.ids(prompt), max_new_tokens=9) for prompt in prompts for _ in range(2)]
        assert [choice["text"] for choice in reply.json["choices"]] == wanted
        assert {f"{product.prefill.url}@{leg.rank}" for leg in product.prefill.legs} == {reply.header("x-pd-prefill")}


# -- a restart --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, RANKS])
async def test_a_mooncake_prefill_that_restarts_is_known_by_its_new_engine_id(ranks: int) -> None:
    product = StrictProduct("mooncake", dp_size=ranks, dp_aware=ranks > 1, disable_retries=True, **OFTEN)
    async with clean(product):
        wanted = product.text(product.chat_ids("hello"), max_new_tokens=9)
        first = product.prefill
        assert await told(product, wanted) == first.facts.engine_id
        await first.stop()
        await product.fleet(lambda workers: not any(w.usable for w in workers if str(w.url) == first.url))
        second = product.mock("prefill", port=first.port, bootstrap_port=first.bootstrap_port)
        await product._stack.enter_async_context(second)
        product.prefills[:] = [second]  # type: ignore[list-item]
        product.mocks[:] = [*product.prefills, *product.decodes]
        await product.fleet(lambda workers: all(worker.usable for worker in workers))
        assert second.facts.engine_id != first.facts.engine_id
        assert await told(product, wanted) == second.facts.engine_id


async def told(product: StrictProduct, wanted: str) -> str:
    """The engine id that a decode is told, without what names its rank; it gets the cache, and the answer is right."""
    reply = await product.post(CHAT_PATH, CHAT)
    assert content(reply) == wanted
    (leg,) = [leg for mock in product.decodes for leg in mock.legs]
    assert leg.kv == "transferred"
    name: str = json.loads(leg.message.kv_transfer_params_json)["remote_engine_id"]
    engine, marker, rank = name.partition("_dp")
    if marker:
        assert reply.header("x-pd-prefill") == f"{product.prefill.url}@{rank}"
    await forgotten(product)
    return engine


# -- workers over HTTP beside -----------------------------------------------------------------------------------------


class Mixed(StrictProduct):
    """SGLang's workers over gRPC, and a pair over HTTP that serves the same model."""

    def __init__(self, **settings: Any) -> None:
        self.http = SglangMock("prefill"), SglangMock("decode")
        super().__init__("sglang", **settings)

    async def _start(self) -> None:
        prefill, decode = self.http
        for mock in self.http:
            await mock.start()
        self._given["prefill"] = [self._start_option(self.prefill), f"{prefill.url} {prefill.bootstrap_port}"]
        self._given["decode"] = [*map(self._start_option, self.decodes), decode.url]
        await super()._start()

    async def _stop(self) -> None:
        await super()._stop()
        for mock in self.http:
            await mock.stop()

    async def usable(self, count: int) -> None:
        """Wait until so many workers are."""
        await self.fleet(lambda workers: sum(worker.usable for worker in workers) == count)


async def test_a_model_with_pairs_of_both_kinds() -> None:
    async with clean(Mixed(disable_retries=True)) as product:
        kinds = Counter[str]()
        for number in range(12):
            reply = await product.post(CHAT_PATH, STREAM if number % 2 else CHAT)
            assert content(reply)
            schemes = {str(reply.header(name)).partition(":")[0] for name in ("x-pd-prefill", "x-pd-decode")}
            (kind,) = schemes  # never one of each
            kinds[kind] += 1
        assert kinds["grpc"] > 0 < kinds["http"]
        for path, body in (
            ("/v1/messages", CHAT),  # an API that is not served over gRPC
            (CHAT_PATH, CHAT | {"cache_salt": "x"}),  # a field that cannot be told
        ):
            for _ in range(4):
                reply = await product.post(path, body)
                assert (reply.status, reply.header("x-pd-prefill")) == (200, product.http[0].url), reply.body


async def test_workers_over_http_that_are_gone_for_now_are_another_matter_than_none() -> None:
    async with clean(Mixed(disable_retries=True, **OFTEN)) as product:
        for mock in product.http:
            await mock.stop()
        await product.usable(3)
        for path, body in (("/v1/messages", CHAT), (CHAT_PATH, CHAT | {"cache_salt": "x"})):
            reply = await product.post(path, body)
            assert (reply.status, reply.code) == (503, "no_available_workers"), reply.body
        assert content(await product.post(CHAT_PATH, CHAT)) == product.text(product.chat_ids("hello"), max_new_tokens=9)
        for mock in product.http:
            worker = product.worker(mock)
            await product.client.delete(f"/workers/{worker.id}")
        await soon(lambda: len(list(product.service.registry)) == 3, "they are registered still")
        reply = await product.post("/v1/messages", CHAT)
        assert (reply.status, reply.code) == (501, "not_implemented")
        reply = await product.post(CHAT_PATH, CHAT | {"cache_salt": "x"})
        assert (reply.status, reply.code) == (400, "unsupported_parameter")


# -- servers that speak no gRPC ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_whose_port_another_server_has_taken_is_not_waited_for(role: str, stream: bool) -> None:  # noqa: FBT001
    async with clean(StrictProduct("sglang", disable_retries=True)) as product:
        victims: list[RpcMock] = [product.prefill] if role == "prefill" else product.decodes  # type: ignore[list-item, assignment]
        ports = [mock.port for mock in victims]
        for mock in victims:
            await mock.stop()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """HTTP/1.1 and nothing else, which ends no connection by itself."""
            while await reader.read(1 << 16):
                writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nno")
            writer.close()

        servers = [await asyncio.start_server(speak, "127.0.0.1", port) for port in ports]
        async with asyncio.timeout(30):
            reply = await product.post(CHAT_PATH, STREAM if stream else CHAT)
        assert reply.status in (502, 503), reply.body
        assert reply.code in (f"{role}_connection_lost", f"{role}_unreachable")
        for server in servers:
            server.close()
            await server.wait_closed()
        for mock in victims:
            await mock.start()
        await product.ready()


# -- connections that break -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", FLOWS)
async def test_a_relayed_stream_whose_decodes_connection_breaks_ends_with_an_event(flow: str) -> None:
    async with clean(StrictProduct(flow, disable_retries=True, relay_grpc_streams=True)) as product:
        assert content(await product.post(CHAT_PATH, STREAM)) == product.text(
            product.chat_ids("hello"), max_new_tokens=9
        )
        for mock in product.decodes:
            mock.pace = Pace(token=0.05)
            mock.fail(Rule(Fault(drop=Point.MID_BODY, after_chunks=3), body_contains=b"\n2chatcmpl-"))
        for _ in range(3):
            reply = await product.post(CHAT_PATH, STREAM)
            assert json.loads(reply.events[-1])["error"]["code"] == "decode_connection_lost"
            assert reply.status == 200
        await product.records.until(lambda: len(product.records.all) == 4)
        assert [record.code for record in product.records.all[1:]] == ["decode_connection_lost"] * 3


async def test_a_connection_that_breaks_before_the_first_token_leads_to_another_attempt() -> None:
    async with clean(StrictProduct("sglang", relay_grpc_streams=True, retry_initial_backoff_ms=10)) as product:
        product.decodes[0].fail(Rule(Fault(drop=Point.AFTER_HEAD), body_contains=b"\n2chatcmpl-"))
        wanted = product.text(product.chat_ids("hello"), max_new_tokens=9)
        for _ in range(4):
            assert content(await product.post(CHAT_PATH, STREAM)) == wanted
