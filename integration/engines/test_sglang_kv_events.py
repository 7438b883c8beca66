"""Real SGLang says where its KV events are, publishes them, and the gateway follows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import servers
import sglang_servers
from follower import Follower
from rig import post
from servers import Server
from sglang_servers import PAGE

from extproc.workers.kv_event_source import labels_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("sglang"), reason="not installed: make integration-engines"),
]


@pytest.fixture(scope="module")
def publisher() -> Iterator[Server]:
    """A server that publishes and replays."""
    server = sglang_servers.publishing()
    with servers.running(server):
        yield server


async def generated(client: aiohttp.ClientSession, server: Server, tokens: list[int]) -> Any:
    """What it says of an answer to these tokens."""
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}
    return json.loads(await post(client, server.url, "/generate", body))["meta_info"]


def unseen(count: int) -> list[int]:
    return [random.randrange(100, 400) for _ in range(count)]


async def test_what_it_holds_is_known_as_it_says_itself(publisher: Server, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{publisher.url}/server_info") as response:
        labels = labels_of((await response.json())["kv_events"])
    follower = Follower(publisher, labels)
    try:
        await follower.until(lambda: follower.whole)
        prompt = unseen(50)
        assert follower.held(prompt) == 0
        await generated(client, publisher, prompt)
        await follower.until(lambda: follower.held(prompt) == 50 // PAGE * PAGE)
        again = [*prompt[:22], *unseen(20)]
        known = follower.held(again)
        assert known == 20
        assert (await generated(client, publisher, again))["cached_tokens"] == known
        late = Follower(publisher, labels)
        await late.until(lambda: (late.held(prompt) or 0) == 50 // PAGE * PAGE)
        assert late.whole
        late.close()
        async with client.post(f"{publisher.url}/flush_cache") as response:
            assert response.status == 200
        await generated(client, publisher, unseen(1))
        await follower.until(lambda: follower.held(prompt) == 0)
        assert follower.stream.losses == 0
    finally:
        follower.close()
