"""What clients can do about who serves them, through a real Envoy: sessions that stay, and workers that are named."""

from __future__ import annotations

import asyncio

import pytest
from http_client import Reply
from product import Product

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
KEY = "x-smg-routing-key"
TARGET = "x-smg-target-worker"


async def ask(product: Product, *headers: tuple[str, str], **fields: object) -> tuple[str, str]:
    """Who served: prefill, decode."""
    answer = await product.post("/v1/chat/completions", CHAT | fields, headers)
    return served(answer)


def served(answer: Reply) -> tuple[str, str]:
    assert answer.status == 200, answer.body
    prefill, decode = answer.header("x-pd-prefill"), answer.header("x-pd-decode")
    assert prefill is not None
    assert decode is not None
    return prefill, decode


async def test_a_session_stays_with_its_pair_whatever_else_comes_and_who_goes() -> None:
    async with Product(prefills=2, decodes=3, routing_key_override=True, response_headers=True) as product:
        home = await ask(product, (KEY, "mine"))
        others = {await ask(product) for _ in range(6)}
        assert len(others) > 1
        assert {await ask(product, (KEY, "mine")) for _ in range(4)} == {home}
        assert {await ask(product, (KEY, "mine"), n=2) for _ in range(2)} == {home}  # put together by the sidecar
        turns = {await ask(product, rid=rid) for rid in ("conv_t1", "conv_t2", "conv_t3_r1")}
        assert len(turns) == 1
        bystander = next(mock for mock in product.decodes if mock.url not in (home[1], next(iter(turns))[1]))
        await product.remove(bystander)
        assert await ask(product, (KEY, "mine")) == home
        await product.remove(next(mock for mock in product.decodes if mock.url == home[1]))
        prefill, decode = await ask(product, (KEY, "mine"))
        assert prefill == home[0]
        assert decode != home[1]
        assert {await ask(product, (KEY, "mine")) for _ in range(3)} == {(prefill, decode)}
        await product.settled()


async def test_a_session_with_many_requests_at_once_is_spread_and_holds_nothing_afterwards() -> None:
    all_have_come = asyncio.Event()
    async with Product(prefills=1, decodes=3, routing_key_override=True) as product:
        for mock in product.decodes:
            mock.fail(Fault(until=all_have_come))
        asking = [asyncio.create_task(ask(product, (KEY, "mine"))) for _ in range(6)]
        for mock in product.decodes:
            await mock.received(2)
        assert [len(mock.legs) for mock in product.decodes] == [2, 2, 2]
        all_have_come.set()
        await asyncio.gather(*asking)
        for mock in product.decodes:
            mock.behave()
        await product.settled()
        assert len({await ask(product, (KEY, "mine")) for _ in range(6)}) == 1


async def test_a_client_names_workers_and_they_are_told_nothing_of_it() -> None:
    async with Product(prefills=2, decodes=3, policy="consistent_hashing") as product:
        for prefill, decode in zip(product.prefills, product.decodes[1:], strict=True):
            named = f"{prefill.url}, {decode.url}"
            assert await ask(product, (TARGET, named), (KEY, "k")) == (prefill.url, decode.url)
        assert await ask(product, (TARGET, "1")) == (product.prefills[1].url, product.decodes[1].url)
        legs = [leg for mock in product.mocks for leg in mock.legs]
        assert {leg.header(TARGET) for leg in legs} == {None}
        assert "k" in {leg.header(KEY) for leg in legs}
        await product.settled()


async def test_one_that_is_named_and_not_there_is_stood_for_by_whose_the_key_is() -> None:
    async with Product(prefills=2, decodes=3, policy="consistent_hashing") as product:
        home = await ask(product, (KEY, "mine"))
        assert {await ask(product, (KEY, "mine")) for _ in range(3)} == {home}
        named = next(mock for mock in product.decodes if mock.url != home[1])
        assert (await ask(product, (KEY, "mine"), (TARGET, named.url)))[1] == named.url
        await product.remove(named)
        for target in (named.url, "99", "http://nobody.test:1"):
            assert await ask(product, (KEY, "mine"), (TARGET, target)) == home
        await product.settled()
