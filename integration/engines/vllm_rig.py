"""What the tests of real vLLM know of its servers, through their own metrics and the gateway's list of workers."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from rig import Body
from servers import MODEL
from vllm_servers import BLOCKS, VllmServer

_numbers = itertools.count(int(time.time()))


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker behind a gateway.

    Attributes:
        connector: a key of vllm_servers.CONNECTORS.
        url: the gateway's.
    """

    connector: str
    prefill: VllmServer
    decode: VllmServer
    url: str


def fresh(words: int = 60) -> str:
    """A prompt that no server has seen the beginning of: no prefix of it is in a cache."""
    number = next(_numbers)
    return f"{number}: " + " ".join(f"w{(index * 7919 + number) % 1000}" for index in range(words))


async def counted(client: aiohttp.ClientSession, server: VllmServer) -> dict[str, float]:
    """The server's metrics, summed over their labels."""
    async with client.get(f"{server.url}/metrics") as response:
        text = await response.text()
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def hits(client: aiohttp.ClientSession, server: VllmServer) -> float:
    """Tokens whose KV cache the server has fetched."""
    return (await counted(client, server))["vllm:external_prefix_cache_hits_total"]


async def held(client: aiohttp.ClientSession, server: VllmServer) -> tuple[int, int]:
    """The requests a server has, in any of its queues, and the cache blocks it cannot use for others.

    The gauges are refreshed when the engine steps, so it is made to.
    """
    step: Body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    async with client.post(f"{server.url}/v1/completions", json=step) as response:
        assert response.status == 200, await response.text()
    found = await counted(client, server)
    requests = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
    return int(requests), round(found["vllm:kv_cache_usage_perc"] * (BLOCKS - 1))


async def taken_in(client: aiohttp.ClientSession, server: VllmServer, requests: int) -> None:
    """Wait until the server's engine has so many requests."""
    deadline = time.monotonic() + 20
    while (await held(client, server))[0] < requests:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def decoding(client: aiohttp.ClientSession, server: VllmServer) -> None:
    """Wait until the server computes tokens."""
    deadline = time.monotonic() + 20
    while not (await counted(client, server))["vllm:num_requests_running"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def seconds_until_idle(
    client: aiohttp.ClientSession, *servers: VllmServer, blocks: int = 0, spare: int = 0, patience: float = 20
) -> float:
    """How long it takes until no server has requests, nor blocks that are not free but for ``blocks`` each.

    Of ``blocks`` there may be ``spare`` more, or any number less.
    """
    started = time.monotonic()
    kept = range(blocks + spare + 1) if spare else (blocks,)
    for server in servers:
        while (now := await held(client, server))[0] or now[1] not in kept:
            assert time.monotonic() - started < patience, f"{server.name} still has (requests, blocks) {now}"
            await asyncio.sleep(0.05)
    return time.monotonic() - started


async def workers(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The gateway's workers by their URL."""
    async with client.get(f"{url}/workers") as response:
        return {worker["url"]: worker for worker in (await response.json())["workers"]}


async def known(client: aiohttp.ClientSession, url: str, *servers: VllmServer) -> None:
    """Register those of the servers that the gateway does not know, and wait until all are used."""
    registered = await workers(client, url)
    for server in servers:
        if server.url not in registered:
            await register(client, url, server)
        await used(client, url, server)


async def register(client: aiohttp.ClientSession, url: str, server: VllmServer) -> str:
    """Register a server with the gateway and wait until it is used; its id."""
    async with client.post(f"{url}/workers", json=server.registration) as response:
        assert response.status == 202, await response.text()
        worker_id = str((await response.json())["worker_id"])
    await used(client, url, server)
    return worker_id


async def used(client: aiohttp.ClientSession, url: str, server: VllmServer) -> None:
    """Wait until the gateway gives the server requests."""
    await _until(client, url, server, lambda worker: worker["is_healthy"])


async def loaded(client: aiohttp.ClientSession, url: str, server: VllmServer) -> None:
    """Wait until the gateway has sent the server a leg that is not over."""
    await _until(client, url, server, lambda worker: worker["load"] > 0)


async def unloaded(client: aiohttp.ClientSession, url: str, server: VllmServer) -> None:
    """Wait until all legs that the gateway has sent the server are over."""
    await _until(client, url, server, lambda worker: worker["load"] == 0)


async def _until(
    client: aiohttp.ClientSession, url: str, server: VllmServer, condition: Callable[[dict[str, Any]], bool]
) -> None:
    deadline = time.monotonic() + 60
    while not condition(worker := (await workers(client, url))[server.url]):
        assert time.monotonic() < deadline, worker
        await asyncio.sleep(0.01)
