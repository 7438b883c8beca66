"""cache_aware, the policy that is used unless another one is named, on a whole gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from product import Product, soon

from extproc.mock import Fault, Point

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    async with Product(prefills=3, decodes=2, policy="cache_aware", retry_initial_backoff_ms=1) as product:
        yield product


def said(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": f"{role} says something in turn {number}, at some length. " * 20}


def conversation(topic: str, turns: int = 1) -> dict[str, object]:
    messages = [{"role": "system", "content": f"You are asked about {topic}. " * 30}, said("user", 0)]
    for turn in range(1, turns):
        messages += [said("assistant", turn), said("user", turn)]
    return {"model": "tiny", "messages": messages}


async def prefill_of(product: Product, body: object) -> str:
    """The prefill that was chosen for a request, all of which is over: nothing is on its way to any."""
    answer = await product.post(PATH, body)
    assert answer.status == 200, answer.body
    await product.settled()
    return answer.header("x-pd-prefill")


def nobody_is_slow(product: Product) -> None:
    """Have prefills be known for no pace: on a busy machine one of them may have been slower than others by far."""
    for cache in product.gateway.placer._prefill._index.caches.values():
        cache.took = cache.done = 0.0


async def test_a_conversation_stays_and_several_are_spread(product: Product):
    first = {topic: await prefill_of(product, conversation(topic)) for topic in map(str, range(9))}
    assert min(Counter(first.values()).values()) >= 2
    assert len(set(first.values())) == 3
    for turns in (2, 3, 4):
        for topic, worker in first.items():
            assert await prefill_of(product, conversation(topic, turns)) == worker


@pytest.mark.parametrize("turns", [1, 3])
async def test_what_comes_together_goes_together(product: Product, turns):
    nobody_is_slow(product)
    body = conversation(f"together {turns}", turns)
    answers = await asyncio.gather(*(product.post(PATH, body) for _ in range(3)))
    assert len({answer.header("x-pd-prefill") for answer in answers}) == 1


async def test_nothing_is_learned_of_a_prefill_that_failed(product: Product):
    failing = product.prefills[0]
    index = product.gateway.placer._prefill._index
    held = len(index.cache(product.worker(failing)).kept)
    failing.fail(Fault(status=500))
    topics = range(100, 200)  # it may hold more than the others, which then get what is new until they hold as much
    for topic in topics:
        answer = await product.post(PATH, conversation(str(topic)))
        assert answer.header("x-pd-prefill") != failing.url  # of another one, or an error
        if len(failing.legs) >= 2:
            break
    assert failing.legs
    assert len(index.cache(product.worker(failing)).kept) == held


async def test_a_worker_that_comes_again_is_another_one(product: Product):
    topic = "coming again"
    worker = await prefill_of(product, conversation(topic, 6))
    mock = next(mock for mock in product.prefills if mock.url == worker)
    await product.remove(mock)
    other = await prefill_of(product, conversation(topic, 7))
    assert other != worker
    await product.add(mock)
    await product.ready()
    assert await prefill_of(product, conversation(topic, 8)) == other


async def test_decodes_are_chosen_by_what_is_in_their_care(product: Product):
    body = conversation("decodes", 3)
    await prefill_of(product, body)
    go_on = asyncio.Event()
    for mock in product.decodes:
        mock.fail(Fault(hang=Point.BEFORE_HEAD, until=go_on))
    asking = [asyncio.create_task(product.post(PATH, body)) for _ in range(8)]
    await soon(lambda: sum(len(mock.live) for mock in product.decodes) == 8, "not all are in their care")
    go_on.set()
    answers = await asyncio.gather(*asking)
    assert len({answer.header("x-pd-decode") for answer in answers}) == 2
