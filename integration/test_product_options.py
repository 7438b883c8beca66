"""Options of the request path that are off, or otherwise, by default."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from product import Product

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
BODIES = pytest.mark.parametrize("body", [CHAT, {**CHAT, "n": 2}], ids=["direct", "relayed"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    options = {"response_headers": False, "trust_client_control_fields": True, "request_id_headers": ("x-my-id",)}
    async with Product(policy="random", **options) as product:
        yield product


@BODIES
async def test_no_response_headers(product: Product, body):
    answer = await product.post("/v1/chat/completions", body)
    assert answer.status == 200
    names = {name for name, _ in answer.headers}
    assert not [name for name in names if name.startswith("x-pd-")]
    assert "server-timing" not in names
    assert "x-request-id" in names


@BODIES
async def test_the_error_code_stays(product: Product, body):
    product.prefill.fail(Fault(status=500))
    answer = await product.post("/v1/chat/completions", body)
    assert (answer.status, answer.code) == (502, "prefill_failed")


@BODIES
async def test_another_header_for_the_request_id(product: Product, body):
    answer = await product.post("/v1/chat/completions", body, [("x-my-id", "mine"), ("x-request-id", "other")])
    assert answer.header("x-request-id") == "mine"
    legs = [leg for mock in product.mocks for leg in mock.legs]
    assert {leg.header("x-request-id") for leg in legs} == {"mine"}
    assert {leg.header("x-my-id") for leg in legs} == {"mine"}


@BODIES
async def test_a_trusted_client_may_choose_ranks_but_not_the_handoff(product: Product, body):
    chosen = {"routed_dp_rank": 0, "kv_transfer_params": {"a": 1}, "bootstrap_host": "10.0.0.1", "bootstrap_room": 5}
    answer = await product.post("/v1/chat/completions", {**body, **chosen})
    assert answer.status == 200
    for mock in product.mocks:
        for leg in mock.legs:
            assert leg.json["routed_dp_rank"] == 0
            assert leg.json["kv_transfer_params"] == {"a": 1}
            assert leg.json["bootstrap_host"] == "127.0.0.1"
            assert leg.json["bootstrap_room"] != 5


async def test_the_random_policy_uses_every_worker(product: Product):
    for _ in range(40):
        await product.post("/v1/chat/completions", CHAT)
    assert all(mock.legs for mock in product.decodes)
