"""Real vLLM behind the gateway: refusals, clients that leave, fields that could kill an engine, and a killed prefill.

After each of them no request is left and no cache block held: NIXL's lease is 30 s, Mooncake's 480 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest
import servers
import vllm_servers
from rig import Body, post
from vllm_answers import comparable
from vllm_cases import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    GENERATE_PATH,
    GREEDY,
    LIST,
    MESSAGES,
    MESSAGES_PATH,
    RESPONSES,
    RESPONSES_PATH,
    generate,
)
from vllm_rig import (
    Pair,
    decoding,
    fresh,
    held,
    loaded,
    register,
    seconds_until_idle,
    taken_in,
    unloaded,
    used,
    workers,
)
from vllm_servers import BLOCK_SIZE, VllmServer

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines"),
]
AT_ONCE = 3.0  # seconds, far below the leases
NIXL_LEASE = 40.0  # with time to notice
SPARE = 3  # blocks that Mooncake's prefill may keep for what a decode might have asked for, one for each leg


@pytest.fixture(autouse=True)
async def _nothing_left(pair: Pair, client: aiohttp.ClientSession) -> AsyncIterator[None]:
    mooncake = pair.connector == "mooncake"
    _, blocks = await held(client, pair.prefill) if mooncake else (0, 0)
    yield
    assert await seconds_until_idle(client, pair.decode) < AT_ONCE
    assert await seconds_until_idle(client, pair.prefill, blocks=blocks, spare=SPARE if mooncake else 0) < AT_ONCE
    assert pair.prefill.running
    assert pair.decode.running


# -- what an engine must not see --------------------------------------------------------------------------------------

STALE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "gone",
    "remote_block_ids": [[1, 2, 3]],
    "remote_request_id": "gone",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_bootstrap_addr": "http://127.0.0.1:1",
    "transfer_id": "xfer-gone",
    "tp_size": 1,
}
STEERING: dict[str, Body] = {
    "incomplete": {"kv_transfer_params": {"do_remote_prefill": True}},  # which kills a decode
    "blocks_only": {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]}},
    "stale": {"kv_transfer_params": STALE},
    "as_prefill": {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    "prompt": {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}},
    "null": {"kv_transfer_params": None},
    "no_object": {"kv_transfer_params": [1]},
    "bootstrap": {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 5},
}


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize("name", STEERING)
async def test_a_clients_transfer_fields_reach_no_engine(
    name: str, path: str, pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    body = {**CHAT, **GREEDY} if path == CHAT_PATH else {**COMPLETION, **GREEDY}
    ours = await post(client, pair.url, path, body | STEERING[name])
    single = await post(client, aggregated.url, path, body)
    assert comparable(ours, stream=False) == comparable(single, stream=False)


# -- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Body]] = {
    "temperature": (CHAT_PATH, {**CHAT, "temperature": -5}),
    "temperature_stream": (CHAT_PATH, {**CHAT, "temperature": -5, "stream": True}),
    "temperature_n2": (CHAT_PATH, {**CHAT, "temperature": -5, "n": 2}),
    "greedy_n2": (CHAT_PATH, {**CHAT, **GREEDY, "n": 2}),
    "five_stops": (CHAT_PATH, {**CHAT, **GREEDY, "stop": list("abcde")}),
    "top_logprobs_alone": (CHAT_PATH, {**CHAT, **GREEDY, "top_logprobs": 2}),
    "stream_options_alone": (CHAT_PATH, {**CHAT, **GREEDY, "stream_options": {"include_usage": True}}),
    "min_above_max": (COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "min_tokens": 9}),
    "too_many_tokens": (COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "max_tokens": 1_000_000}),
    "no_tokens": (COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "max_tokens": -1}),
    "suffix": (COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "suffix": "x"}),
    "list_suffix": (COMPLETIONS_PATH, {**LIST, **GREEDY, "suffix": "x"}),
    "list_too_many_tokens": (COMPLETIONS_PATH, {**LIST, **GREEDY, "max_tokens": 1_000_000}),
    "messages_no_tokens": (MESSAGES_PATH, {**MESSAGES, "max_tokens": 0}),
    "responses_unknown": (RESPONSES_PATH, {**RESPONSES, "previous_response_id": "resp_nobody"}),
    "responses_temperature": (RESPONSES_PATH, {**RESPONSES, "temperature": -5}),
    "responses_too_many_tokens": (RESPONSES_PATH, {**RESPONSES, "max_output_tokens": 1_000_000}),
    "generate_min_above_max": (GENERATE_PATH, generate(min_tokens=9)),
}


async def leases_over(pair: Pair, client: aiohttp.ClientSession) -> None:
    """Wait for NIXL's: a prefill of the same list that is done just as it is ended keeps its blocks for as long."""
    if pair.connector == "nixl":
        await seconds_until_idle(client, pair.prefill, patience=NIXL_LEASE)


@pytest.mark.parametrize("name", REFUSED)
async def test_the_engines_refusal_reaches_the_client(
    name: str, pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    path, body = REFUSED[name]
    answers = []
    for url in (pair.url, aggregated.url):
        async with client.post(url + path, json=body) as response:
            answers.append((response.status, await response.json()))
    assert answers[0] == answers[1]
    assert 400 <= answers[0][0] < 500
    if name.startswith("list"):
        await leases_over(pair, client)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
async def test_what_only_a_decode_would_refuse(path: str, pair: Pair, client: aiohttp.ClientSession) -> None:
    """A prefill leg is not streamed, so it would be taken, and the decode's class would refuse without freeing it."""
    body = {**(CHAT if path == CHAT_PATH else COMPLETION), **GREEDY, "prompt_logprobs": 1, "stream": True}
    async with client.post(pair.url + path, json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "list"])
async def test_a_prefill_that_refuses_holds_nothing(
    api: str, pair: Pair, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    """The prompt fits the decode worker and not the prefill worker, so that with both legs out the decode waits."""
    path, body = CHAT_PATH, {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh(330)}]}
    if api == "list":
        path, body = COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": [fresh(20), fresh(330), fresh(20)]}
    async with client.post(pair.url + path, json={**body, "stream": stream}) as response:
        assert response.status == 400, await response.text()
        assert "maximum context length" in (await response.json())["error"]["message"]
    if api == "list":
        await leases_over(pair, client)
        if pair.connector == "mooncake" and not stream:  # by chance, the other prompts' blocks stay: docs/vllm-facts.md
            await asyncio.sleep(AT_ONCE)  # for the prefill to be told of what it keeps
            await fresh_decode(client, pair)


# -- clients that leave -----------------------------------------------------------------------------------------------

# Each prompt has more blocks than may be left.
LONG: Body = {"messages": [{"role": "user", "content": fresh(100)}]}
MANY_TOKENS = 1400  # for seconds of work
LEFT: dict[str, tuple[str, Body]] = {
    "chat": (CHAT_PATH, {**CHAT, **GREEDY, **LONG, "max_tokens": MANY_TOKENS}),
    "chat_n2": (CHAT_PATH, {**CHAT, **LONG, "temperature": 1, "ignore_eos": True, "n": 2, "max_tokens": MANY_TOKENS}),
    "list": (
        COMPLETIONS_PATH,
        {**LIST, **GREEDY, "prompt": [fresh(100) for _ in range(SPARE)], "max_tokens": MANY_TOKENS},
    ),
    "messages": (MESSAGES_PATH, {**MESSAGES, **LONG, "max_tokens": MANY_TOKENS}),
    "responses": (
        RESPONSES_PATH,
        {**RESPONSES, "input": fresh(100), "max_output_tokens": MANY_TOKENS, "ignore_eos": True},
    ),
}


@contextlib.asynccontextmanager
async def frozen(server: VllmServer) -> AsyncIterator[None]:
    """The server does nothing meanwhile."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


async def past_their_prefills(client: aiohttp.ClientSession, pair: Pair, *requests: asyncio.Task[str]) -> None:
    """Wait until every leg that these requests have out is a decode's."""
    deadline = time.monotonic() + 60
    while True:
        done = sum(request.done() for request in requests)
        loads = {url: worker["load"] for url, worker in (await workers(client, pair.url)).items()}
        if not loads[pair.prefill.url] and done + loads[pair.decode.url] >= len(requests):
            return
        assert time.monotonic() < deadline, loads
        await asyncio.sleep(0.01)


async def leave(request: asyncio.Task[str]) -> None:
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", LEFT)
async def test_a_client_that_leaves_while_tokens_come(
    name: str, pair: Pair, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    path, body = LEFT[name]
    request = asyncio.create_task(post(client, pair.url, path, {**body, "stream": stream}))
    await past_their_prefills(client, pair, request)
    await decoding(client, pair.decode)
    await leave(request)


@pytest.mark.parametrize("name", ["chat", "list", "responses"])
async def test_a_client_that_leaves_during_the_prefill(name: str, pair: Pair, client: aiohttp.ClientSession) -> None:
    path, body = LEFT[name]
    async with frozen(pair.prefill):
        request = asyncio.create_task(post(client, pair.url, path, body))
        await loaded(client, pair.url, pair.prefill)
        if pair.connector == "mooncake":  # one that leaves in the step that takes it in may leave blocks there
            await taken_in(client, pair.decode, SPARE if name == "list" else 1)
        await leave(request)
        if pair.connector == "nixl":  # Mooncake's prefill legs are let finish
            await unloaded(client, pair.url, pair.prefill)


@pytest.mark.parametrize("name", ["chat", "list", "responses"])
async def test_a_client_that_leaves_before_the_decode_has_fetched(
    name: str, pair: Pair, client: aiohttp.ClientSession
) -> None:
    """Streamed with Mooncake: a request that is not, cancelled in the step that admits it, can leave blocks there."""
    path, body = LEFT[name]
    async with frozen(pair.decode):
        request = asyncio.create_task(post(client, pair.url, path, {**body, "stream": pair.connector == "mooncake"}))
        await loaded(client, pair.url, pair.decode)
        await unloaded(client, pair.url, pair.prefill)
        await leave(request)


async def test_clients_that_leave_as_their_prefills_end(pair: Pair, client: aiohttp.ClientSession) -> None:
    """A NIXL prefill that is done as it is ended keeps its prompt for the lease, with or without a gateway.

    Nothing is kept of a request that has got to its decode. See docs/vllm-facts.md, "Who frees what".
    """
    if pair.connector != "nixl":
        pytest.skip("a Mooncake prefill is let finish")
    path, body = LEFT["chat"]
    for moment in range(12):
        body = {**body, "messages": [{"role": "user", "content": fresh(100)}]}
        async with client.post(f"{pair.prefill.url}/tokenize", json={"messages": body["messages"]}) as response:
            blocks = math.ceil((await response.json())["count"] / BLOCK_SIZE)
        request = asyncio.create_task(post(client, pair.url, path, body))
        await asyncio.sleep(0.03 * moment)  # a prefill takes 0.1 to 0.4 s here
        handed = (await workers(client, pair.url))[pair.decode.url]["load"] > 0
        await leave(request)
        assert await seconds_until_idle(client, pair.prefill, spare=0 if handed else blocks) < AT_ONCE
        await leases_over(pair, client)


async def test_many_clients_that_leave_are_in_nobodys_way(
    pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    """A Mooncake prefill that was asked in vain 20 times would serve nobody any more: see docs/vllm-facts.md.

    All have got to the decode when they leave: where a prefill is done as it is ended, NIXL may keep blocks.
    """
    path, body = LEFT["chat"]
    for _ in range(3):
        requests = [asyncio.create_task(post(client, pair.url, path, body)) for _ in range(8)]
        await past_their_prefills(client, pair, *requests)
        await decoding(client, pair.decode)
        await asyncio.sleep(1.5)  # for the gateway to be sure that the decode has them
        await asyncio.gather(*map(leave, requests))
        assert await seconds_until_idle(client, pair.decode) < AT_ONCE
    await asyncio.sleep(AT_ONCE)
    question = {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh(60)}]}
    answers = [await post(client, url, path, question) for url in (pair.url, aggregated.url)]
    assert comparable(answers[0], stream=False) == comparable(answers[1], stream=False)


# -- a killed prefill -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Asked:
    """One request and what came of it.

    Attributes:
        received: how many bytes of a 200's body.
        error: why there is no whole answer; else empty.
    """

    body: Body
    answer: str = ""
    received: int = 0
    prefill: str = ""
    error: str = ""


async def ask(client: aiohttp.ClientSession, url: str, body: Body) -> Asked:
    """POST a chat, and take whatever happens."""
    asked = Asked(body)
    try:
        async with client.post(url + CHAT_PATH, json=body) as response:
            asked.prefill = response.headers.get("x-pd-prefill", "")
            async for piece in response.content.iter_any():
                asked.answer += piece.decode()
                asked.received += len(piece) if response.ok else 0
            if not response.ok or '"error"' in asked.answer:
                asked.error = str(response.status)
    except aiohttp.ClientError as error:
        asked.error = repr(error)
    return asked


async def killed_under_load(client: aiohttp.ClientSession, pair: Pair, requests: int = 60) -> list[Asked]:
    """Six clients, every other request streamed; the prefill worker is killed when a third of them is answered."""
    asked: list[Asked] = []
    numbers = itertools.count()
    enough = asyncio.Event()

    async def one_client() -> None:
        while (number := next(numbers)) < requests:
            words = 5 + number * 37 % 120
            body = {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh(words)}], "stream": number % 2 > 0}
            asked.append(await ask(client, pair.url, body))
            if len(asked) == requests // 3:
                enough.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(one_client())
        await enough.wait()
        pair.prefill.stop()
    return asked


async def restarted(client: aiohttp.ClientSession, pair: Pair, server: VllmServer) -> None:
    """Start a stopped server again, and wait until the gateway uses it."""
    server.start()
    await asyncio.to_thread(server.wait_ready)
    await used(client, pair.url, server)


async def fresh_decode(client: aiohttp.ClientSession, pair: Pair) -> None:
    """With Mooncake: what waited for a dead prefill is gone from the decode, but its blocks stay 480 s at any rate."""
    if pair.connector == "mooncake":
        pair.decode.stop()
        await restarted(client, pair, pair.decode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prefill_killed_before_the_decode_has_fetched(
    pair: Pair, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    """The prefill leg has ended well, so that nothing of the request tells that the worker is gone."""
    body = {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh()}], "stream": stream}
    await post(client, pair.url, CHAT_PATH, {**CHAT, **GREEDY})  # a decode that never met it is told by the bootstrap
    async with frozen(pair.decode):
        request = asyncio.create_task(ask(client, pair.url, body))
        await loaded(client, pair.url, pair.decode)
        await unloaded(client, pair.url, pair.prefill)
        pair.prefill.stop()
    try:
        async with asyncio.timeout(30):  # Mooncake: to find it gone, and to see that no token comes
            asked = await request
        assert asked.error
    finally:
        await restarted(client, pair, pair.prefill)
        await fresh_decode(client, pair)
    assert not (await ask(client, pair.url, body)).error


async def test_a_prefill_killed_under_load(pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession) -> None:
    """No request fails of which nothing had been answered, none waits, none is answered wrongly."""

    async def right(asked: list[Asked]) -> None:
        for one in asked:
            if one.error:
                assert one.received, one
                continue
            single = await post(client, aggregated.url, CHAT_PATH, one.body)
            stream = one.body["stream"]
            assert comparable(one.answer, stream=stream) == comparable(single, stream=stream)

    other = vllm_servers.prefill(pair.connector, "other-prefill")
    with servers.running(other):
        worker_id = await register(client, pair.url, other)
        try:
            asked = await killed_under_load(client, pair)
            assert {one.prefill for one in asked} >= {pair.prefill.url, other.url}
            await right(asked)

            await restarted(client, pair, pair.prefill)
            again = [
                await ask(client, pair.url, {**CHAT, **GREEDY, "messages": one.body["messages"], "stream": False})
                for one in asked[:6]
            ]
            assert {one.prefill for one in again} == {pair.prefill.url, other.url}
            assert not [one for one in again if one.error]
            await right(again)
        finally:
            async with client.delete(f"{pair.url}/workers/{worker_id}"):
                pass
    await fresh_decode(client, pair)
