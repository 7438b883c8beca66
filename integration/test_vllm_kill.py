"""A worker's process is killed under a steady load: no request fails whose answer had not begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from http_client import Client
from product import Product, soon
from vllm_processes import Load, MockProcess
from vllm_product import MOONCAKE, NIXL
from vllm_requests import (
    ABOUT_TOKENS,
    CHAT,
    COMPLETION,
    LISTS,
    LOOSE,
    MODEL,
    ONE,
    PREFILL_ALONE,
    TEXT,
    Question,
    answer_of,
    streamed,
)

from extproc.mock import SglangMock
from extproc.mock.vllm.engine import INTERNAL_ERROR
from extproc.mock.vllm.worker import VllmMock

CLIENTS = 16
BAD = ("wrong", "error", "cut", "hollow")
PACE = ("--first-token-delay-ms", "30", "--token-delay-ms", "2")
VLLM: dict[str, Question] = {
    **ONE,
    **{f"{name} stream": streamed(ONE[name]) for name in ("chat", "completions", "messages")},
    "list": LISTS["texts"],
    "list stream": streamed(LISTS["texts"]),
    # one prefill alone answers these
    "one token": PREFILL_ALONE["chat"],
    "one token, completions": PREFILL_ALONE["completions"],
    "tokenize": ABOUT_TOKENS["tokenize"],
    "count_tokens": ABOUT_TOKENS["count_tokens"],
}
SGLANG: dict[str, Question] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": streamed(("/v1/chat/completions", CHAT)),
    "completions": ("/v1/completions", COMPLETION),
    "samples": ("/v1/chat/completions", {**CHAT, "n": 2, "seed": 4}),
    "generate": ("/generate", {"text": TEXT}),
    "generate stream": ("/generate", {"text": TEXT, "stream": True}),
    "responses": ("/v1/responses", {**MODEL, "input": TEXT}),
}
FLEETS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "nixl": ("vllm", ("--kv-connector", NIXL), {"kv_connector": NIXL}),
    "mooncake": ("vllm", ("--kv-connector", MOONCAKE), {"kv_connector": MOONCAKE}),
    "sglang": ("sglang", (), {}),
}
# vLLM sends a stream's head when it takes a request in. What dies after that takes an answer with it that says nothing
# yet. Of the requests under way these can be a few: a decode's first token takes milliseconds.
EARLY_HEADS = {"nixl": 4, "mooncake": 4, "sglang": 0}
# A prefill with NIXL that dies between its answer and the decode's reading: the engine says so in the stream. SGLang's
# /generate sends a stream's head at once, which is held for the prefill's fate for 30 ms and no longer: what a busy
# prefill then takes along is cut.
UNREAD = {"nixl": 4, "mooncake": 0, "sglang": 4}
# Its Messages stumble over that event, and pass on what they stumbled over.
ENGINES_WORD = {
    "messages stream": "validation errors for ChatCompletionStreamResponse",
    "generate stream": "the answer was cut after b''",
}
# A decode whose head has got as far as Envoy as it dies: Envoy has nothing to pass on and answers by itself.
ON_ITS_WAY = 2
ENVOYS_OWN = "the decode worker closed the connection before it answered"
FLEET = pytest.mark.parametrize("fleet", FLEETS)


async def expected(engine: str, questions: dict[str, Question]) -> dict[str, Any]:
    """What one aggregated server answers."""
    vllm = {"prompt_tokens_details": False, "model": "tiny"}
    async with VllmMock("aggregated", **vllm) if engine == "vllm" else SglangMock("regular") as mock:
        client = Client(mock.host, mock.port)
        found = {name: answer_of(await client.post(*question), LOOSE) for name, question in questions.items()}
        await client.close()
        return found


class Fleet:
    """Two prefill and two decode workers, each a process, behind a gateway in this one, under load."""

    def __init__(self, product: Product, prefills: list[MockProcess], decodes: list[MockProcess], load: Load) -> None:
        self.product = product
        self.prefills = prefills
        self.decodes = decodes
        self.load = load

    async def settled(self) -> None:
        """See that nothing is left, here or on the workers that are left."""
        product = self.product
        await product.records.until(lambda: product.gateway.alive == 0)
        await soon(lambda: product.load == {}, f"legs count on workers: {product.load}")
        await soon(lambda: not product.service._egress.open_legs, "legs are left")
        assert product.gateway.handoffs.live == 0
        assert not product.gateway.late

    async def gives_back(self, mocks: list[MockProcess]) -> None:
        """See that vLLM workers hold no blocks."""
        for mock in mocks:
            await mock.idle()
            assert await mock.metric("vllm:kv_cache_usage_perc") == 0


@asynccontextmanager
async def loaded(name: str) -> AsyncIterator[Fleet]:
    """The fleet, with requests under way."""
    engine, options, fields = FLEETS[name]
    questions = VLLM if engine == "vllm" else SGLANG
    details = ("--no-prompt-tokens-details",) if engine == "vllm" else ()
    right = await expected(engine, questions)
    async with AsyncExitStack() as stack:
        roles = ("prefill", "prefill", "decode", "decode")
        mocks = [MockProcess(engine, role, *PACE, *options, *details) for role in roles]
        await asyncio.gather(*[stack.enter_async_context(mock) for mock in mocks])
        product = await stack.enter_async_context(
            Product(0, 0, health_check_interval_secs=1, health_failure_threshold=3)
        )
        for mock in mocks:
            port = {} if mock.bootstrap_port is None else {"bootstrap_port": mock.bootstrap_port}
            answer = await product.client.post(
                "/workers", {"url": mock.url, "worker_type": mock.role, **fields, **port}
            )
            assert answer.status == 202, answer.body
        await product.fleet(lambda workers: len(workers) == 4 and all(worker.usable for worker in workers))
        load = Load(product.client, questions, right, CLIENTS)
        try:
            await load.more(3 * CLIENTS)
            yield Fleet(product, mocks[:2], mocks[2:], load)
        finally:
            await load.stop()


@FLEET
async def test_a_prefill_is_killed(fleet):
    async with loaded(fleet) as workers:
        load = workers.load
        assert not load.of(*BAD)
        await workers.prefills[0].kill()
        await load.more(10 * CLIENTS)
        await load.stop()
        assert not load.of("error", "wrong", "cut")
        unread = load.of("hollow")
        assert len(unread) <= UNREAD[fleet]
        assert all(ENGINES_WORD.get(end.question, INTERNAL_ERROR) in end.said for end in unread), unread
        assert any(end.attempts > 1 for end in load.ends)
        await workers.settled()
        if fleet != "sglang":
            await workers.gives_back([workers.prefills[1], *workers.decodes])


@FLEET
async def test_a_decode_is_killed(fleet):
    async with loaded(fleet) as workers:
        load = workers.load
        assert not load.of(*BAD)
        await workers.decodes[0].withhold("/v1/responses")  # of which no streams are asked for
        await workers.decodes[0].kill()
        await load.more(10 * CLIENTS)
        await load.stop()
        assert not load.of("wrong")
        assert len(load.of(*BAD)) <= CLIENTS  # what was under way
        assert all(end.question.endswith("stream") for end in load.of(*BAD))
        assert len(load.of("hollow")) <= EARLY_HEADS[fleet]
        assert len(load.of("error")) <= ON_ITS_WAY
        assert all(ENVOYS_OWN in end.said for end in load.of("error"))
        assert any(end.attempts > 1 for end in load.ends)
        await workers.settled()
        if fleet != "sglang":
            await workers.gives_back([workers.decodes[1]])
