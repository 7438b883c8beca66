"""``--pd-bootstrap-timeout-secs``: legs that never meet, with a real Envoy between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from product import Product

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 5  # seconds; legs that do meet must have done so by then, however busy the machine is
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(prefills=2, decodes=1, pd_bootstrap_timeout_secs=LIMIT) as product:
        yield product


async def test_where_no_pair_meets_the_client_has_a_504_that_says_who_and_where(product: Product) -> None:
    for mock in product.prefills:
        mock.fail(Fault(delay_first_token=60))
    kinds = ({}, {"stream": True}, {"n": 2})
    answers = await asyncio.gather(*(product.post(PATH, CHAT | more) for more in kinds))
    rooms = {str(leg.json["bootstrap_room"]) for mock in product.prefills for leg in mock.legs}
    for answer in answers:
        assert (answer.status, answer.code) == (504, "pd_bootstrap_timeout")
        message = json.loads(answer.body)["error"]["message"]
        assert product.decodes[0].url in message
        assert any(mock.url in message for mock in product.prefills)
        assert any(f"in room {room}: not within {LIMIT} s" in message for room in rooms)
    await product.settled()


async def test_another_prefill_is_tried_first(product: Product) -> None:
    slow, other = product.prefills
    slow.fail(Fault(delay_first_token=60))
    answers = [await product.post(PATH, CHAT) for _ in range(2)]  # one of them goes to the slow one at first
    assert [answer.status for answer in answers] == [200, 200]
    assert (len(slow.legs), len(other.legs)) == (1, 2)
    await product.settled()
