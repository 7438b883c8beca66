"""Real vLLM publishes its KV events, and the gateway follows them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
import servers
import vllm_servers
import zmq
from rig import post
from vllm_cases import COMPLETION, COMPLETIONS_PATH, GREEDY
from vllm_rig import counted, fresh
from vllm_servers import VllmServer

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.policies.event_prefixes import EventPrefixes
from extproc.workers.kv_event_source import Source
from extproc.workers.kv_event_stream import Stream
from extproc.workers.worker import Role, Worker, WorkerUrl

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


class _Sink:
    def __init__(self, prefixes: EventPrefixes, worker: Worker) -> None:
        self._prefixes = prefixes
        self._worker = worker
        prefixes.begin(worker)

    def apply(self, events: Any) -> None:
        self._prefixes.apply(self._worker, events)

    def lose(self) -> None:
        self._prefixes.lose(self._worker)

    def restart(self) -> None:
        self._prefixes.restart(self._worker)


class Follower:
    """Follows one server; ``replay``: also what was published before."""

    def __init__(self, server: VllmServer, *, replay: bool = True) -> None:
        self.worker = Worker("w", WorkerUrl.parse(server.url), Role.PREFILL)
        self.prefixes = EventPrefixes(100_000)
        labels = server.registration["labels"]
        source = Source(labels["kv_events"], labels["kv_events_replay"] if replay else "")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stream = Stream(self._context, source, _Sink(self.prefixes, self.worker), "w")

    def held(self, tokens: list[int]) -> int | None:
        body = json.dumps({"model": "tiny", "prompt": tokens}).encode()
        found = self.prefixes.overlaps(InferenceRequest.read(APIS[COMPLETIONS_PATH], body), [self.worker])
        assert found is not None
        return found.get(self.worker)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self.stream.close()
        self._context.destroy(0)


async def tokens_of(client: aiohttp.ClientSession, server: VllmServer, words: int) -> list[int]:
    """Token ids that the server has not seen."""
    async with client.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": fresh(words)}) as response:
        return list((await response.json())["tokens"])


async def test_what_it_holds_is_known_as_it_says_itself(publisher: VllmServer, client: aiohttp.ClientSession) -> None:
    follower = Follower(publisher)
    try:
        await follower.until(lambda: follower.prefixes.is_whole(follower.worker))
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
    late, deaf = Follower(publisher), Follower(publisher, replay=False)
    try:
        await late.until(lambda: late.held(prompt) == len(prompt) // BLOCK * BLOCK)
        assert late.prefixes.is_whole(late.worker)
        assert deaf.held(prompt) is None, "nobody has told it"
        assert not deaf.prefixes.is_whole(deaf.worker)
    finally:
        late.close()
        deaf.close()


async def test_blocks_that_leave_the_cache_are_known_to(publisher: VllmServer, client: aiohttp.ClientSession) -> None:
    """The cache has room for PUBLISHED_BLOCKS blocks, and so for few prompts."""
    follower = Follower(publisher)
    try:
        first = await tokens_of(client, publisher, 300)
        await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": first})
        await follower.until(lambda: (follower.held(first) or 0) > 0)
        deadline = time.monotonic() + 60
        while follower.held(first):
            other = await tokens_of(client, publisher, 300)
            await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": other})
            assert time.monotonic() < deadline
        assert follower.prefixes.blocks(follower.worker) <= vllm_servers.PUBLISHED_BLOCKS
        assert follower.prefixes.blocks(follower.worker) > 10
        await post(client, publisher.url, "/reset_prefix_cache", {})
        # It is announced with the engine's next step.
        await post(client, publisher.url, COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": "x"})
        await follower.until(lambda: not follower.prefixes.blocks(follower.worker))
    finally:
        follower.close()
