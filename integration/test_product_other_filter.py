"""Behind somebody else's ext_proc filter: every byte of a body comes through, whatever that filter's mode."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from other_filter import DUPLEX, MARK, OtherFilter, with_filter
from product import Product

from extproc.dataplane import process
from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.mock import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
MODES = [
    ("NONE", "NONE"),
    ("BUFFERED", "NONE"),
    ("STREAMED", "NONE"),
    (DUPLEX, "NONE"),
    ("NONE", DUPLEX),
    (DUPLEX, DUPLEX),
]
CASES = [
    *[({}, size) for size in (0, 65_535, 65_536, 65_537, 1 << 20, 20 << 20)],
    *[({"stream": True}, size) for size in (0, 65_537, 1 << 20)],
    *[({"n": 2}, size) for size in (0, 65_537, 1 << 20)],
]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def modes(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The other filter's, for bodies of requests and of answers."""
    found: tuple[str, str] = request.param
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(modes: tuple[str, str]) -> AsyncIterator[Product]:
    other = OtherFilter(*modes)
    port = other.start()
    patch = pytest.MonkeyPatch()
    patch.setattr(process, "bootstrap_yaml", lambda config: with_filter(bootstrap_yaml(config), port, *modes))
    try:
        async with Product(decodes=1) as product:
            yield product
    finally:
        patch.undo()
        other.stop()


def chat(size: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "user": "x" * size, **more}


@pytest.mark.parametrize(("more", "size"), CASES)
async def test_bodies_reach_both_legs_whole(product: Product, more: dict[str, Any], size: int) -> None:
    answer = await product.post(PATH, chat(size, **more))
    assert answer.status == 200
    if "stream" in more:
        assert answer.events[-1] == "[DONE]"
    for mock in product.mocks:
        for leg in mock.legs:
            assert leg.json["user"] == "x" * size
            assert leg.named[MARK] == "seen"


async def test_answers_come_whole(product: Product) -> None:
    product.decode.fail(Fault(tokens=20_000))
    answer = await product.post(PATH, chat(1, max_tokens=20_000))
    assert answer.json["usage"]["completion_tokens"] == 20_000
    product.decode.fail(Fault(tokens=5_000))
    streamed = await product.post(PATH, chat(1, stream=True, max_tokens=5_000))
    assert streamed.events[-1] == "[DONE]"
    assert sum(json.loads(event)["choices"] != [] for event in streamed.events[:-1]) >= 5_000


async def test_other_paths_pass(product: Product) -> None:
    assert (await product.client.get("/v1/models")).json["data"][0]["id"] == "tiny"
    assert (await product.post("/rerank", {"query": "q", "documents": ["d"]})).status == 200
