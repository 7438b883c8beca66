"""An Envoy that shows every answer's body, in full duplex, as endpoint pickers are shown them: it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from http2_client import Http2Client
from product import Product, soon

from extproc.dataplane import clusters, ext_proc, routes
from extproc.mock import Fault, Point
from extproc.names import METADATA_NAMESPACE, SERVED

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def showing() -> Iterator[None]:
    """Have both filters show bodies."""
    mode = partial(ext_proc.ProcessingMode)

    def shown(**fields: Any) -> ext_proc.ProcessingMode:
        full = ext_proc.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
        return mode(**{**fields, "response_body_mode": full})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ext_proc, "ProcessingMode", shown)
        yield


@pytest.fixture(scope="module")
def telling() -> Iterator[None]:
    """Have Envoy say in metadata alone who served, as Istio has it do."""
    policy, options = clusters.OverrideHost, ext_proc.MetadataOptions
    key = MetadataKey(key=METADATA_NAMESPACE, path=[MetadataKeyPathSegment(key=SERVED)])
    forwarded = ext_proc.MetadataOptionsMetadataNamespaces(untyped=[METADATA_NAMESPACE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "OverrideHost", partial(policy, selected_host_key=key))
        patch.setattr(ext_proc, "MetadataOptions", partial(options, forwarding_namespaces=forwarded))
        patch.setattr(routes, "UPSTREAM", "x-another")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["plain", "late"])
async def running(request: pytest.FixtureRequest, showing: None) -> AsyncIterator[Product]:  # noqa: ARG001
    """Endpoint pickers have no second filter for late answers."""
    async with Product(retry_released=request.param) as product:
        yield product


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("samples", [1, 2], ids=["direct", "relayed"])
async def test_answers_are_whole(product: Product, samples: int, *, stream: bool) -> None:
    for mock in product.decodes:
        mock.fail(Fault(tokens=500))
    answer = await product.post(PATH, {**CHAT, "n": samples, "stream": stream})
    assert answer.status == 200
    assert answer.header("x-pd-decode")
    if stream:
        assert answer.events[-1] == "[DONE]"
        assert len(answer.events) >= 500 * samples
    else:
        assert len(answer.json["choices"]) == samples


async def test_a_large_answer(product: Product) -> None:
    for mock in product.decodes:
        mock.fail(Fault(tokens=20_000))
    answer = await product.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 20_000}})
    assert answer.status == 200
    assert len(answer.body) > 100_000


async def test_tokens_come_as_they_are_made(product: Product) -> None:
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY))
    exchange = await product.client.open(PATH, {**CHAT, "stream": True})
    assert (await exchange.piece()).startswith(b"data: ")
    exchange.close()


async def test_a_workers_error_is_passed_on(product: Product) -> None:
    for mock in product.decodes:
        mock.fail(Fault(status=418, body="teapot"))
    answer = await product.post(PATH, CHAT)
    assert (answer.status, answer.body) == (418, b"teapot")


async def test_a_prefill_that_fails_is_told_with_a_status(product: Product) -> None:
    product.prefill.fail(Fault(status=500))
    answer = await product.post(PATH, CHAT)
    assert answer.status == 502
    assert answer.code == "prefill_failed"


async def test_a_stream_is_cut_when_its_prefill_breaks(product: Product, http2: Http2Client) -> None:
    for mock in product.decodes:
        mock.fail(Fault(delay_token=0.02, tokens=2000))
    it_flows = asyncio.Event()
    product.prefill.fail(Fault(until=it_flows, drop=Point.MID_BODY))
    stream = http2.post(PATH, {**CHAT, "stream": True})
    await stream.until(b"data: ")
    it_flows.set()
    assert b"[DONE]" not in await stream.cut()


async def test_a_client_that_leaves(product: Product) -> None:
    for mock in product.decodes:
        mock.fail(Fault(delay_token=0.02, tokens=2000))
    exchange = await product.client.open(PATH, {**CHAT, "stream": True})
    assert await exchange.piece()
    exchange.close()
    await soon(lambda: not any(mock.live for mock in product.mocks), "a leg goes on")


async def test_who_served_after_a_failover_is_said_in_metadata(telling: None) -> None:  # noqa: ARG001
    async with Product(disable_retries=True) as product:
        await product.decode.refuse()
        answers = [await product.post(PATH, CHAT) for _ in range(2)]
        assert {(answer.status, answer.header("x-pd-decode")) for answer in answers} == {(200, product.decodes[1].url)}
        await product.settled()
