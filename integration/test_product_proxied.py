"""--egress http://HOST:PORT: legs go through a listener of another Envoy, as in a mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio
from product import Product, soon
from rpc_product import TEXT, RpcProduct, nothing_left

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.process import EnvoyProcess
from extproc.mock import Fault, Outcome, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def mesh() -> AsyncIterator[dict[str, str]]:
    """An Envoy that learns of the workers as ours does; the settings of a Product that sends through it."""
    with TemporaryDirectory(prefix="pd-mesh-") as folder:
        at = f"unix:{folder}"
        ads = f"{at}/ads.sock"
        config = DataplaneConfig(
            extproc=f"{at}/none.sock",
            ads=ads,
            control=f"{at}/none.sock",
            egress="127.0.0.1:0",
            client_host="127.0.0.1",
            client_port=0,
            admin_port=0,
            concurrency=1,
        )
        envoy = EnvoyProcess(config, log_level="error")
        await envoy.start()
        try:
            host, port = (await envoy.admin.listeners())["egress"]
            yield {"egress": f"http://{host}:{port}", "ads_address": ads}
        finally:
            await envoy.stop(0)


@asynccontextmanager
async def proxied(kind: type[Product], *arguments: Any, **settings: Any) -> AsyncIterator[Any]:
    """A Product whose legs go that way."""
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(mesh())
        product = await stack.enter_async_context(kind(*arguments, **way, **settings))
        ads = product.service._ads
        await soon(lambda: ads.connected == 2, "the mesh's Envoy asks for no endpoints")
        await ads.publish(ads._snapshot)
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with proxied(Product, disable_retries=True) as product:
        yield product


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
async def test_answers(product: Product, samples: int, *, stream: bool) -> None:
    answer = await product.post(PATH, {**CHAT, "n": samples, "stream": stream})
    assert answer.status == 200
    assert answer.header("x-pd-prefill") == product.prefill.url
    legs = product.prefill.legs
    assert len(legs) == samples
    for leg in legs:
        headers = dict(leg.headers)
        assert headers["host"] == product.prefill.url.removeprefix("http://")
        assert not {name for name in headers if name.startswith(("x-pd-", "x-gateway-", "x-envoy-"))}


FAILURES = {
    "500": (Fault(status=500), 502, "prefill_failed"),
    "400": (Fault(status=400, body="no"), 400, "prefill_rejected"),
    "reset before its head": (Fault(status=200, drop=Point.BEFORE_HEAD), 502, "prefill_connection_lost"),
    "reset in its body": (Fault(status=200, drop=Point.MID_BODY), 502, "prefill_connection_lost"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_failures_have_their_codes(product: Product, failure: str) -> None:
    fault, status, code = FAILURES[failure]
    product.prefill.fail(fault)
    answer = await product.post(PATH, CHAT)
    assert (answer.status, answer.code) == (status, code)


async def test_a_worker_that_refuses(product: Product) -> None:
    await product.prefill.refuse()
    answer = await product.post(PATH, CHAT)
    assert (answer.status, answer.code) == (503, "prefill_unreachable")


async def test_a_relayed_decode_fails_over_and_who_answered_is_known(product: Product) -> None:
    await product.decode.refuse()
    answers = [await product.post(PATH, {**CHAT, "n": 2}) for _ in range(2)]
    assert {(answer.status, answer.header("x-pd-decode")) for answer in answers} == {(200, product.decodes[1].url)}


async def test_a_client_that_leaves_ends_the_leg(product: Product) -> None:
    product.prefill.fail(Fault(status=200, hang=Point.BEFORE_HEAD))
    exchange = await product.client.open(PATH, CHAT)
    await product.prefill.received(1)
    exchange.close()
    await soon(lambda: not product.prefill.live, "the prefill goes on")
    assert product.prefill.legs[0].outcome is Outcome.CLIENT_CLOSED


async def test_a_proxy_that_is_gone_is_no_workers_fault() -> None:
    async with Product(egress="http://127.0.0.1:1", disable_retries=True) as product:
        answer = await product.post(PATH, CHAT)
        assert (answer.status, answer.code) == (503, "egress_unavailable")
        assert answer.header("retry-after")
        await product.records.until(lambda: product.gateway.alive == 0)


@pytest.mark.parametrize("samples", [1, 2])
async def test_grpc_workers(tmp_path: Path, samples: int) -> None:
    async with proxied(RpcProduct, "sglang", tmp_path / "tiny") as product:
        answer = await product.post(PATH, {**CHAT, "n": samples, "max_tokens": 50})
        assert answer.status == 200, answer.body
        assert {choice["message"]["content"] for choice in answer.json["choices"]} == {TEXT}
        await nothing_left(product)
