"""Real vLLM publishes its KV events, and the gateway follows them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import aiohttp
import pytest
import servers
import vllm_servers
from follower import Follower
from rig import post
from vllm_cases import COMPLETION, COMPLETIONS_PATH, GREEDY
from vllm_rig import counted, fresh
from vllm_servers import VllmServer

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines"),
]
BLOCK = 32  # tokens; see vllm_servers.COMMON


@pytest.fixture(scope="module")
def publisher() -> Iterator[VllmServer]:
    """A server that publishes and replays; its registration's labels say where."""
    server = vllm_servers.publishing()
    with servers.running(server):
        yield server


async def tokens_of(client: aiohttp.ClientSession, server: VllmServer, words: int) -> list[int]:
    """Token ids that the server has not seen."""
    async with client.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": fresh(words)}) as response:
        return list((await response.json())["tokens"])


async def test_what_it_holds_is_known_as_it_says_itself(publisher: VllmServer, client: aiohttp.ClientSession) -> None:
    follower = Follower(publisher, publisher.registration["labels"])
    try:
        await follower.until(lambda: follower.whole)
        prompt = await tokens_of(client, publisher, 120)
        blocks = len(prompt) // BLOCK
        assert blocks > 3
        assert follower.held(prompt) == 0
        await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": prompt})
        await follower.until(lambda: follower.held(prompt) == blocks * BLOCK)
        # Another prompt with the same beginning: what the engine finds in its cache is what was known of it.
        again = [*prompt[: 2 * BLOCK + 5], *reversed(prompt)]
        known = follower.held(again)
        assert known == 2 * BLOCK
        before = (await counted(client, publisher))["vllm:prefix_cache_hits_total"]
        await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": again})
        assert (await counted(client, publisher))["vllm:prefix_cache_hits_total"] - before == known
        assert follower.stream.losses == 0
    finally:
        follower.close()


async def test_what_it_has_held_before_is_replayed(publisher: VllmServer, client: aiohttp.ClientSession) -> None:
    prompt = await tokens_of(client, publisher, 120)
    await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": prompt})
    labels = publisher.registration["labels"]
    late, deaf = Follower(publisher, labels), Follower(publisher, labels, replay=False)
    try:
        await late.until(lambda: late.held(prompt) == len(prompt) // BLOCK * BLOCK)
        assert late.whole
        assert deaf.held(prompt) is None, "nobody has told it"
        assert not deaf.whole
    finally:
        late.close()
        deaf.close()


async def test_blocks_that_leave_the_cache_are_known_to(publisher: VllmServer, client: aiohttp.ClientSession) -> None:
    """The cache has room for PUBLISHED_BLOCKS blocks, and so for few prompts."""
    follower = Follower(publisher, publisher.registration["labels"])
    try:
        first = await tokens_of(client, publisher, 300)
        await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": first})
        await follower.until(lambda: (follower.held(first) or 0) > 0)
        deadline = time.monotonic() + 60
        while follower.held(first):
            other = await tokens_of(client, publisher, 300)
            await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": other})
            assert time.monotonic() < deadline
        assert follower.blocks <= vllm_servers.PUBLISHED_BLOCKS
        assert follower.blocks > 10
        await post(client, publisher.url, "/reset_prefix_cache", {})
        # It is announced with the engine's next step.
        await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": "x"})
        await follower.until(lambda: not follower.blocks)
    finally:
        follower.close()
