"""Data-parallel ranks of real engines: what docs/sglang-facts.md and docs/vllm-facts.md say of them, and --dp-aware."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import rig
import servers
import sglang_servers
import vllm_servers
from record import CHAT, COMPLETION
from servers import Server
from sglang_servers import RANKED_BOOTSTRAP_PORT, RANKS

from extproc.workers.client import WorkerClient
from extproc.workers.rank_count import rank_count
from extproc.workers.worker import Role, Worker, WorkerUrl

pytestmark = pytest.mark.engines
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
APIS: dict[str, dict[str, Any]] = {
    CHATS: CHAT,
    COMPLETIONS: COMPLETION,
    "/generate": {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 6, "temperature": 0}},
    "/v1/messages": {**CHAT, "max_tokens": 6},
    "/v1/responses": {"model": "tiny", "input": "Once upon a time", "max_output_tokens": 6, "temperature": 0},
}
WAITS = 5.0  # seconds after which a leg counts as one that waits

# -- SGLang -----------------------------------------------------------------------------------------------------------

sglang = pytest.mark.skipif(not servers.installed("sglang"), reason="not installed: make integration-engines")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode server of two ranks."""
    started = sglang_servers.ranked()
    with servers.running(*started):
        yield started


async def leg(client: aiohttp.ClientSession, server: Server, room: int, **ranks: int) -> tuple[int, str]:
    """A leg's status and text; 0: it waits."""
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": RANKED_BOOTSTRAP_PORT, "bootstrap_room": room}
    try:
        async with asyncio.timeout(WAITS), client.post(server.url + CHATS, json={**CHAT, **place, **ranks}) as answer:
            return answer.status, await answer.text()
    except TimeoutError:
        return 0, ""


def room_of(rank: int) -> int:
    """A room that implies a rank."""
    return random.getrandbits(60) * RANKS + rank


def batches(server: Server, kind: str) -> set[int]:
    """Which ranks have run a batch of a kind, by the server's log."""
    log = server.log.read_text(errors="replace")
    return {rank for rank in range(RANKS) if f"DP{rank}] {kind} batch" in log}


@sglang
async def test_with_dp_aware_every_rank_serves(
    pair: tuple[Server, Server], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    workers = ("--prefill", pair[0].url, str(RANKED_BOOTSTRAP_PORT), "--decode", pair[1].url)
    # The default policy would keep to the rank that has the prompt.
    with rig.gateway(tmp_path, "--dp-aware", "--policy", "round_robin", *workers) as url:
        await rig.ready(client, url)
        deadline = time.monotonic() + rig.READY_SECONDS
        while True:
            async with client.get(f"{url}/workers") as answer:
                shown = (await answer.json())["workers"]
            if len(shown) == 2 * RANKS and all(worker["is_healthy"] for worker in shown):
                break
            assert time.monotonic() < deadline, shown
            await asyncio.sleep(0.1)
        for path, body in APIS.items():
            for stream in (False, True):
                named = set()
                for _ in range(2 * RANKS):
                    async with client.post(url + path, json={**body, "stream": stream}) as answer:
                        assert answer.status == 200, await answer.text()
                        assert "x-pd-attempts" not in answer.headers
                        await answer.read()
                        named |= {answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]}
                assert named == {f"{server.url}@{rank}" for server in pair for rank in range(RANKS)}
    assert batches(pair[0], "Prefill") == set(range(RANKS))


@sglang
async def test_what_a_pair_takes_for_ranks(pair: tuple[Server, Server], client: aiohttp.ClientSession) -> None:
    prefill, decode = pair

    async def statuses(room: int, first: dict[str, int], second: dict[str, int]) -> list[tuple[int, str]]:
        return await asyncio.gather(leg(client, prefill, room, **first), leg(client, decode, room, **second))

    for p in range(RANKS):
        for d in range(RANKS):
            both = {"routed_dp_rank": p, "disagg_prefill_dp_rank": p}
            found = await statuses(room_of(1 - p), both, {"routed_dp_rank": d, "disagg_prefill_dp_rank": p})
            assert [status for status, _ in found] == [200, 200], found  # in a room that implies the other one
    found = await statuses(room_of(1), {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}, {"routed_dp_rank": 0})
    assert [status for status, _ in found] == [200, 200], found  # the decode goes by the room
    found = await statuses(room_of(1), {"routed_dp_rank": 1}, {"disagg_prefill_dp_rank": 1})
    assert [status for status, _ in found] == [500, 0], found
    assert "follow_bootstrap_room conflict: dispatched to dp_rank 0" in found[0][1]
    status, text = await leg(client, prefill, room_of(0), routed_dp_rank=RANKS)
    assert (status, f"routed_dp_rank={RANKS} out of range [0, {RANKS})" in text) == (400, True)


# -- vLLM -------------------------------------------------------------------------------------------------------------

vllm = pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A vLLM server of two ranks."""
    started = vllm_servers.ranked()
    with servers.running(started):
        yield started


@vllm
async def test_vllm_tells_how_many_ranks_it_has_by_a_refusal(server: Server, client: aiohttp.ClientSession) -> None:
    worker = Worker("w", WorkerUrl.parse(server.url), Role.DECODE)
    async with WorkerClient() as asking:

        async def post(path: str, body: object, headers: Any) -> Any:
            return await asking.post(worker, path, body, within=30, ip="127.0.0.1", headers=headers)

        assert await rank_count(post, "tiny") == 2
    for rank, status in (("1", 200), ("2", 400), ("x", 200)):
        for path, body in ((CHATS, CHAT), (COMPLETIONS, COMPLETION)):
            async with client.post(server.url + path, json=body, headers={"X-data-parallel-rank": rank}) as answer:
                assert answer.status == status, await answer.text()
    responses = {"model": "tiny", "input": "x", "max_output_tokens": 2}
    async with client.post(
        f"{server.url}/v1/responses", json=responses, headers={"X-data-parallel-rank": "2"}
    ) as answer:
        assert answer.status == 200  # it is not read
