"""A vLLM prefill/decode pair behind the gateway answers as one aggregated server would, and hands its KV cache over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from http_client import Client
from vllm_product import WAYS, VllmProduct, params
from vllm_requests import ONE, STREAMS, VARIANTS, cases, names, same, streamed

from extproc.mock import Record
from extproc.mock.vllm.worker import VllmMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[VllmProduct]:
    async with VllmProduct(way=WAYS[request.param]) as product:
        yield product


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated() -> AsyncIterator[Client]:
    async with VllmMock("aggregated", model="tiny", prompt_tokens_details=False, prefix_caching=False) as mock:
        client = Client(mock.host, mock.port)
        yield client
        await client.close()


# -- one sequence -----------------------------------------------------------------------------------------------------


@cases(ONE | VARIANTS)
async def test_one_pair_of_legs(product: VllmProduct, aggregated: Client, question, stream):
    answer = await same(product, aggregated, question, stream=stream)
    assert names(answer) == (product.way.handoff, product.way.kv, product.prefill.url, product.decode.url)
    await product.settled()
    see_handoff(product, *product.legs)
    (record,) = product.records.all
    assert (record.kv, record.note, record.attempts) == (product.way.kv, "", 1)


@STREAMS
@pytest.mark.parametrize("question", ONE.values(), ids=ONE)
async def test_what_the_legs_are_asked_for(product: VllmProduct, question, stream):
    path, body = streamed(question) if stream else question
    await product.post(path, {**body, "user": "someone"}, [("x-request-id", "mine"), ("authorization", "Bearer k")])
    prefill, decode = product.legs
    for leg in (prefill, decode):
        assert (leg.path, leg.header("x-request-id")) == (path, "mine")
        assert leg.header("authorization") == "Bearer k"
        assert leg.json["user"] == "someone"
    assert decode.json.get("stream") == body.get("stream")
    assert prefill.json.get("stream", False) is False
    caps = prefill.json.get("sampling_params", prefill.json)
    caps = {key: value for key, value in caps.items() if key.startswith("max_")}
    assert set(caps.values()) == {1}
    assert decode.json.get("max_tokens") == body.get("max_tokens")


def see_handoff(product: VllmProduct, prefill: Record, decode: Record) -> None:
    """See that the two are the legs of one handoff, and that the KV cache got across."""
    to_prefill, to_decode = params(prefill), params(decode)
    if product.way.handoff == "nixl":
        assert to_prefill == ASKED
        assert to_decode["remote_engine_id"] == product.prefill.engine_id
        assert to_decode["remote_port"] == product.prefill.side_channel_port
    elif product.way.handoff == "mooncake":
        assert to_prefill == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": to_decode["transfer_id"],
        }
        assert to_decode["remote_engine_id"] == product.prefill.engine_id
        assert to_decode["remote_bootstrap_addr"] == product.prefill.bootstrap_url
    else:
        assert to_prefill is to_decode is None
    assert decode.kv == ("recomputed" if product.way.handoff == "passthrough" else "transferred")
    assert prefill.ended is not None
    assert decode.received is not None
    if product.way.in_turn:
        assert prefill.ended <= decode.received
