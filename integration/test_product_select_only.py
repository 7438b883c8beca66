"""--mode select-only through a real Envoy: strict stand-ins for llm-d's sidecars send the legs to mock engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from llmd_sidecar import NAMES, LlmdSidecar
from product import Product, soon
from vllm_product import VllmProduct, of_all

from extproc.mock import Fault, Outcome, Point

pytestmark = pytest.mark.asyncio

PATH = "/v1/chat/completions"
ENGINES = ["vllm", "sglang"]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, **more}


class _Beside:
    """Gives each decode worker of a product a sidecar, whose URL is what the gateway knows."""

    decodes: list[Any]
    prefills: list[Any]

    def sidecars(self, connector: str, bootstrap_port: int = 8998) -> list[LlmdSidecar]:
        return [LlmdSidecar(mock.url, connector, {"127.0.0.1"}, bootstrap_port) for mock in self.decodes]


class VllmSelect(VllmProduct, _Beside):
    """vLLM workers with NIXL."""


class SglangSelect(Product, _Beside):
    """SGLang workers; the sidecars know one bootstrap port."""


@asynccontextmanager
async def fleet(engine: str, prefills: int = 1, **settings: Any) -> AsyncIterator[tuple[Any, list[LlmdSidecar]]]:
    """A gateway that knows the prefill workers, and the sidecars as decode workers."""
    kind = VllmSelect if engine == "vllm" else SglangSelect
    async with AsyncExitStack() as stack:
        product = kind(prefills, 2, mode="select-only", wait=False, decode=(), **settings)
        await stack.enter_async_context(product)
        port = product.prefill.bootstrap_port if engine == "sglang" else 8998
        sidecars = product.sidecars("nixlv2" if engine == "vllm" else "sglang", port)
        for mock, sidecar in zip(product.decodes, sidecars, strict=True):
            await stack.enter_async_context(sidecar)
            body = {"url": sidecar.url, "worker_type": "decode", **product._registration(mock)}
            answer = await product.client.post("/workers", body)
            assert answer.status == 202, answer.body
        await product.fleet(lambda workers: len(workers) == prefills + 2 and all(w.usable for w in workers))
        yield product, sidecars
        await product.records.until(lambda: product.gateway.alive == 0)
        await soon(lambda: product.load == {}, f"loads are left: {product.load}")
        assert not product.service._egress.open_legs, "no leg is ours"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
async def test_the_sidecar_runs_both_legs(engine: str, *, stream: bool) -> None:
    async with fleet(engine) as (product, sidecars):
        body = json.dumps(chat(stream=stream), indent=3).encode()
        for number in range(2):
            answer = await product.post(PATH, body, [("x-prefiller-host-port", "10.0.0.1:1"), (NAMES[1], "10.0.0.1:1")])
            assert answer.status == 200, answer.body
            assert answer.header("x-pd-prefill") == product.prefill.url
            assert answer.header("x-pd-decode") == sidecars[number].url
            assert (answer.header("x-pd-handoff"), answer.header("x-pd-kv")) == ("llm-d", "unknown")
        target = product.prefill.url.removeprefix("http://")
        assert [sidecar.named for sidecar in sidecars] == [[target], [target]]
        for sidecar in sidecars:
            assert sidecar.bodies == [body], "the client's bytes"
            assert {sidecar.headers[0][name] for name in NAMES} == {target}
            assert "x-gateway-destination-endpoint" not in sidecar.headers[0]
        prefills, decodes = of_all(product.prefills), of_all(product.decodes)
        assert (len(prefills), len(decodes)) == (2, 2)
        assert {leg.outcome for leg in decodes} == {Outcome.COMPLETED}
        if engine == "vllm":
            assert {leg.kv for leg in decodes} == {"transferred"}


@pytest.mark.parametrize("destination", ["header", "both"])
async def test_the_destination_can_be_a_header(destination: str) -> None:
    async with fleet("vllm", destination=destination) as (product, sidecars):
        answers = [await product.post(PATH, chat()) for _ in range(2)]
        assert [answer.header("x-pd-decode") for answer in answers] == [sidecar.url for sidecar in sidecars]
        assert {answer.status for answer in answers} == {200}


async def test_a_short_prompt_has_no_prefill() -> None:
    async with fleet("vllm", pd_min_prompt_tokens=100) as (product, sidecars):
        answer = await product.post(PATH, chat(), [(NAMES[0], "10.0.0.1:1")])
        assert (answer.status, answer.header("x-pd-kv")) == (200, "local")
        assert answer.header("x-pd-prefill") is None
        assert sidecars[0].named == [""]
        assert of_all(product.prefills) == []


async def test_a_sidecar_that_refuses_leads_to_the_next() -> None:
    async with fleet("vllm") as (product, sidecars):
        await sidecars[0].refuse()
        for _ in range(2):
            answer = await product.post(PATH, chat())
            assert (answer.status, answer.header("x-pd-decode")) == (200, sidecars[1].url)
        assert len(of_all(product.prefills)) == 2, "each request has had one prefill"
        await sidecars[0].listen()


async def test_a_prefills_failure_is_the_answer() -> None:
    """The sidecar passes it on. Whose it was nobody can tell: both are charged, and the one that fails all is out."""
    settings = {"cb_failure_threshold": 3, "disable_circuit_breaker": False}
    async with fleet("vllm", prefills=2, **settings) as (product, _):
        product.prefill.fail(Fault(status=500))
        statuses = [(await product.post(PATH, chat())).status for _ in range(16)]
        assert 500 in statuses
        assert statuses[-6:] == [200] * 6, "the breaker has it out"
        failing, healthy = (product.worker(mock) for mock in product.prefills)
        assert failing.breaker.shuts_out
        assert not healthy.breaker.shuts_out
        product.prefill.behave()


async def test_a_rejection_is_the_clients() -> None:
    async with fleet("vllm") as (product, _):
        answer = await product.post(PATH, chat(max_tokens=-5))
        assert answer.status == 400
        assert answer.code is None, "the engine's own"


@pytest.mark.parametrize("engine", ENGINES)
async def test_loads_end_with_the_answer_or_the_client(engine: str) -> None:
    async with fleet(engine) as (product, _):
        for mock in product.decodes:
            mock.fail(Fault(hang=Point.BEFORE_HEAD))
        exchange = await product.client.open(PATH, chat(stream=True))
        await soon(lambda: any(mock.live for mock in product.decodes), "the decode leg never came")
        counted = product.load
        assert counted[product.prefill.url] == 1
        assert sum(counted.values()) == 2
        exchange.close()
        await soon(lambda: product.load == {}, "loads are left")


async def test_many_at_once() -> None:
    async with fleet("vllm", prefills=2, policy="cache_aware") as (product, sidecars):
        answers = await asyncio.gather(*(product.post(PATH, chat(stream=n % 2 == 0)) for n in range(60)))
        assert {answer.status for answer in answers} == {200}
        assert sum(len(sidecar.named) for sidecar in sidecars) == 60


@pytest.mark.parametrize("engine", ENGINES)
async def test_health_generate_sends_both_legs_itself(engine: str) -> None:
    """Without a prefill named, the sidecar passes on what it is given: the decode leg of a handoff of ours."""
    async with fleet(engine) as (product, _):
        answer = await product.client.get("/health_generate")
        assert answer.status == 200, answer.body
        assert answer.json["prefill"] == product.prefill.url
