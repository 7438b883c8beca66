"""How Envoy is told of the worker that a released request is for: by metadata, a header, or both."""

from __future__ import annotations

import pytest
from product import Product

from extproc.names import DESTINATION

pytestmark = pytest.mark.asyncio

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("destination", ["metadata", "header", "both"])
async def test_envoy_goes_by_any_form_and_fails_over(destination: str) -> None:
    async with Product(decodes=2, destination=destination) as product:
        for mock in product.decodes:
            answer = await product.post(PATH, CHAT, [(DESTINATION, "127.0.0.1:1")])
            assert (answer.status, answer.header("x-pd-decode")) == (200, mock.url)
            assert answer.header("x-pd-attempts") is None
        for leg in (leg for mock in product.decodes for leg in mock.legs):
            assert DESTINATION not in dict(leg.headers), "a filter takes it away"
        await product.decode.refuse()
        answers = [await product.post(PATH, CHAT) for _ in range(2)]
        assert {answer.header("x-pd-decode") for answer in answers} == {product.decodes[1].url}
        assert {answer.status for answer in answers} == {200}
        assert {answer.header("x-pd-attempts") for answer in answers} == {None}, "the list had another"
        await product.settled()


async def test_a_list_of_one_leaves_failing_over_to_another_attempt() -> None:
    async with Product(decodes=2, destination="header", destination_hosts=1) as product:
        await product.decode.refuse()
        answers = [await product.post(PATH, CHAT) for _ in range(2)]
        assert {(answer.status, answer.header("x-pd-decode")) for answer in answers} == {(200, product.decodes[1].url)}
        assert sorted(answer.header("x-pd-attempts") or "1" for answer in answers) == ["1", "2"]
        await product.settled()
