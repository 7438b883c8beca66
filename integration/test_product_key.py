"""With ``--api-key``: who may ask, and what the workers are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from product import Product

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "s3cret-key"
GOOD = [("authorization", f"Bearer {KEY}")]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
WRONG = [[], [("authorization", "Bearer wrong")], [("authorization", KEY)], [("authorization", f"Basic {KEY}")]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(decodes=1, api_key=KEY) as product:
        yield product


@pytest.mark.parametrize("headers", WRONG, ids=["none", "wrong", "no scheme", "other scheme"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/chat/completions", {**CHAT, "n": 2}), ("/rerank", {}), ("/workers", {})],
)
async def test_who_does_not_bear_the_key_is_refused(product: Product, path, body, headers):
    answer = await product.post(path, body, headers)
    assert (answer.status, answer.code) == (401, "unauthorized")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert KEY.encode() not in answer.body
    assert not [leg for mock in product.mocks for leg in mock.legs]


@pytest.mark.parametrize("body", [CHAT, {**CHAT, "n": 2}], ids=["direct", "relayed"])
async def test_the_key_opens_and_is_shown_to_the_workers_given_at_start(product: Product, body):
    answer = await product.post("/v1/chat/completions", body, GOOD)
    assert answer.status == 200
    for mock in product.mocks:
        assert {leg.header("authorization") for leg in mock.legs} == {f"Bearer {KEY}"}
        assert all(sum(name == "authorization" for name, _ in leg.headers) == 1 for leg in mock.legs)


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
async def test_the_schemes_case_does_not_matter(product: Product, scheme):
    """RFC 9110 §11.1; the control API takes either as well."""
    headers = [("authorization", f"{scheme} {KEY}")]
    assert (await product.client.get("/workers", headers)).status == 200
    assert (await product.post("/v1/chat/completions", CHAT, headers)).status == 200


@pytest.mark.parametrize("path", ["/liveness", "/health", "/readiness"])
async def test_probes_need_no_key(product: Product, path):
    assert (await product.client.get(path)).status == 200


@pytest.mark.parametrize("path", ["/workers", "/v1/models", "/get_loads", "/server_info"])
async def test_the_rest_of_the_control_api_needs_it(product: Product, path):
    assert (await product.client.get(path)).status == 401
    assert (await product.client.get(path, GOOD)).status == 200


async def test_the_key_is_never_told(product: Product):
    for path in ("/workers", "/server_info", "/get_loads"):
        assert KEY.encode() not in (await product.client.get(path, GOOD)).body


async def test_a_worker_added_later_is_shown_what_was_registered_for_it(product: Product):
    """Not the gateway's own key: who may add workers need not be who may have it."""
    registered = {"url": "http://127.0.0.1:1", "worker_type": "decode"}
    answer = await product.post("/workers", registered, GOOD)
    assert answer.status == 202
    worker = next(worker for worker in product.service.registry if worker.url.port == 1)
    assert worker.api_key is None
    await product.client.delete(f"/workers/{answer.json['worker_id']}", GOOD)
    await product.fleet(lambda workers: worker not in workers)
