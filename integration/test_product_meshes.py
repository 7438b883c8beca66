"""What Envoy runs of each snippet in envoy/snippets/, run by Envoy, with the service beside it and mock workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from mesh_product import InMesh, VllmInMesh
from product import soon

from extproc.dataplane.snippets import SNIPPETS
from extproc.mock import Fault, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CASES = [(engine, snippet) for snippet in SNIPPETS for engine in ("sglang", "vllm")]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=CASES, ids=[f"{engine} {snippet}" for engine, snippet in CASES]
)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[InMesh]:
    engine, snippet = request.param
    kind = InMesh if engine == "sglang" else VllmInMesh
    async with kind(1, 2, snippet=snippet) as product:
        yield product


async def test_a_whole_answer(product: InMesh):
    answer = await product.post(PATH, CHAT)
    assert answer.status == 200, answer.body
    prefill, decode = product.legs
    assert answer.json["choices"][0]["message"]["content"]
    assert answer.header("x-pd-prefill") == product.prefill.url
    assert answer.header("x-pd-decode") in {mock.url for mock in product.decodes}
    await product.records.until(lambda: bool(product.records.all))
    (record,) = product.records.all
    assert record.kv in ("handed", "peer")
    assert prefill.path == decode.path == PATH


async def test_a_stream_is_counted_until_its_last_byte(product: InMesh):
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=10))
    stream = await product.client.open(PATH, {**CHAT, "stream": True})
    await stream.until(b"data: ")
    await soon(lambda: product.prefill.url not in product.load, "the prefill's load counts on")
    assert sum(product.load.values()) == 1
    assert not product.records.all
    go_on.set()
    answer = await stream.whole()
    assert answer.events[-1] == "[DONE]"
    assert len(answer.events) > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_are_put_together(product: InMesh, stream):
    answer = await product.post(PATH, {**CHAT, "n": 2, "stream": stream})
    assert answer.status == 200, answer.body
    if stream:
        assert answer.events[-1] == "[DONE]"
        assert {json.loads(event)["choices"][0]["index"] for event in answer.events[:-1]} == {0, 1}
    else:
        assert {choice["index"] for choice in answer.json["choices"]} == {0, 1}


async def test_a_long_prompt(product: InMesh):
    prompt = "x" * 300_000
    answer = await product.post(PATH, {**CHAT, "messages": [{"role": "user", "content": prompt}]})
    assert answer.status == 200, answer.body
    for leg in product.legs:
        assert leg.json["messages"][0]["content"] == prompt


async def test_what_one_prefill_worker_answers(product: InMesh):
    over_vllm = isinstance(product, VllmInMesh)
    path, body = ("/tokenize", {"prompt": "a b"}) if over_vllm else ("/rerank", {"query": "a", "documents": ["b"]})
    answer = await product.post(path, body)
    assert answer.status == 200, answer.body
    assert answer.header("x-pd-prefill") == product.prefill.url
    assert answer.header("x-pd-decode") is None


async def test_a_failed_prefill_is_the_clients_error(product: InMesh):
    product.prefill.fail(Fault(status=400))
    answer = await product.post(PATH, CHAT)
    assert answer.status == 400


async def test_a_client_that_leaves_ends_both_legs(product: InMesh):
    for mock in product.mocks:
        mock.fail(Fault(delay_token=0.05, tokens=2000))
    stream = await product.client.open(PATH, {**CHAT, "stream": True})
    await stream.until(b"data: ")
    stream.close()
    async with asyncio.timeout(30):
        for mock in product.mocks:
            await mock.idle()


async def test_clients_steer_nothing(product: InMesh):
    other = product.prefill.url.removeprefix("http://")
    headers = [("x-gateway-destination-endpoint", other), ("x-pd-cluster", "prefill"), ("x-pd-late", "1")]
    answer = await product.post(PATH, CHAT, headers)
    assert answer.status == 200, answer.body
    _, decode = product.legs
    assert decode.header("x-pd-cluster") is decode.header("x-pd-late") is None
    assert decode.header("x-gateway-destination-endpoint") != other


async def test_a_worker_that_refuses_is_skipped(product: InMesh):
    """Envoy goes on to the next one of the list, with the whole body."""
    await product.decodes[0].refuse()
    prompt = "x" * 300_000
    for _ in range(2):  # each of them is the first choice once
        answer = await product.post(PATH, {**CHAT, "messages": [{"role": "user", "content": prompt}]})
        assert answer.status == 200, answer.body
        if product.snippet != "inference-pool":  # where nobody tells the service who it was
            assert answer.header("x-pd-decode") == product.decodes[1].url
    assert len(product.decodes[1].legs) == 2
