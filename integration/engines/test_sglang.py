"""Real SGLang through the gateway answers as one aggregated SGLang does, and fails as the gateway promises.

The gateway is the real command with a real Envoy; the engines are real but for CUDA. All at temperature 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import rig
import servers
import sglang_servers
from record import CASES as MERGED
from record import CHAT, COMPLETION, COMPLETIONS, GREEDY, PAIR, USAGE, Body, generate
from rig import READY_SECONDS, loads_until, post, ready
from servers import Server
from sglang_answers import accumulated, without_run
from sglang_servers import BOOTSTRAP_PORT, Engines

from extproc.merge.sse import EventSplitter

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("sglang"), reason="not installed: make integration-engines"),
]
LONG_CHAT: Body = {**CHAT, "max_tokens": 3000}
LOSS = "Lost connection with prefill instance"  # in a decode's log


# -- the processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """The pair and the aggregated server."""
    started = sglang_servers.engines()
    with servers.running(*started.servers):
        yield started


@pytest.fixture(scope="module")
def gateway(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gateway's URL."""
    workers = ("--prefill", engines.prefill.url, str(BOOTSTRAP_PORT), "--decode", engines.decode.url)
    with rig.gateway(tmp_path_factory.mktemp("gateway"), *workers) as url:
        yield url


@pytest.fixture(autouse=True)
async def _ready(client: aiohttp.ClientSession, gateway: str) -> None:
    await ready(client, gateway)


async def in_flight(client: aiohttp.ClientSession, server: Server) -> int:
    """How many requests an engine has, in any of its queues."""
    async with client.get(f"{server.url}/v1/loads") as response:
        (load,) = (await response.json())["loads"]
    queues = sum(count for name, count in load["disaggregation"].items() if name.endswith("_reqs"))
    return int(load["num_running_reqs"] + load["num_waiting_reqs"] + queues)


async def seconds_until(client: aiohttp.ClientSession, server: Server, *, busy: bool) -> float:
    """How long it takes until an engine has work, or none."""
    started = time.monotonic()
    while (await in_flight(client, server) > 0) is not busy:
        assert time.monotonic() - started < 20, f"{server.name} is still {'idle' if busy else 'busy'}"
    return time.monotonic() - started


# -- answers as one server gives them ----------------------------------------------------------------------------------

CASES: dict[str, tuple[str, Body]] = {
    **MERGED,
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat_stream_usage": ("/v1/chat/completions", {**CHAT, **USAGE}),
    "chat_logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat_long_prompt": (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": "hello there, é\u2028\u0000 \\ " * 150}], "max_tokens": 30},
    ),
    "completions": ("/v1/completions", COMPLETION),
    "completions_stream": ("/v1/completions", {**COMPLETION, **USAGE}),
    "completions_list": ("/v1/completions", COMPLETIONS),
    "completions_list_stream": ("/v1/completions", {**COMPLETIONS, **USAGE}),
    "completions_tokens": ("/v1/completions", {**COMPLETION, "prompt": [455, 284, 1631]}),
    "completions_token_lists": ("/v1/completions", {**COMPLETION, "prompt": [[455, 284], [806, 604, 7]]}),
    "completions_logprobs": ("/v1/completions", {**COMPLETION, "logprobs": 2}),
    "generate": ("/generate", generate("def foo(")),
    "generate_stream": ("/generate", generate("def foo(", stream=True)),
    "generate_batch": ("/generate", generate(PAIR)),
    "generate_batch_stream": ("/generate", generate(PAIR, stream=True)),
    "generate_tokens": ("/generate", {"input_ids": [455, 284], "sampling_params": {"max_new_tokens": 3, **GREEDY}}),
    "generate_token_lists": (
        "/generate",
        {"input_ids": [[455, 284], [806]], "sampling_params": {"max_new_tokens": 3, **GREEDY}},
    ),
    "generate_sampling_per_prompt": (
        "/generate",
        {"text": PAIR, "sampling_params": [{"max_new_tokens": count, "n": 2, **GREEDY} for count in (2, 5)]},
    ),
    "generate_output_logprobs": ("/generate", generate("def foo(", return_logprob=True)),
}


async def test_both_tell_how_their_cache_is_laid_out(gateway: str, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{gateway}/workers") as answer:
        workers = (await answer.json())["workers"]
    assert [worker["pd_pairing"] for worker in workers] == [
        "sglang/mooncake/dtype=auto,page=1,attn=torch_native,model=float32"
    ] * 2


@pytest.mark.parametrize("name", CASES)
async def test_answers_as_one_server(name: str, gateway: str, engines: Engines, client: aiohttp.ClientSession) -> None:
    path, body = CASES[name]
    ours, single = await asyncio.gather(
        post(client, gateway, path, body), post(client, engines.aggregated.url, path, body)
    )
    if body.get("stream"):
        assert accumulated(ours) == accumulated(single)
    else:
        assert without_run(json.loads(ours)) == without_run(json.loads(single))


@pytest.mark.parametrize("rid", ["mine", ["mine", "yours"]], ids=["string", "list"])
async def test_a_clients_rids_come_back(
    rid: Any, gateway: str, engines: Engines, client: aiohttp.ClientSession
) -> None:
    body = generate(PAIR, rid=rid)
    ours, single = [json.loads(await post(client, url, "/generate", body)) for url in (gateway, engines.aggregated.url)]
    assert [item["meta_info"]["id"] for item in ours] == [item["meta_info"]["id"] for item in single]


MESSAGES: Body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": CHAT["messages"]}
RESPONSES: Body = {"model": "tiny", "max_output_tokens": 6, "temperature": 0, "input": "hello there", "store": False}


async def test_messages(gateway: str, engines: Engines, client: aiohttp.ClientSession) -> None:
    ours, single = [
        json.loads(await post(client, url, "/v1/messages", MESSAGES)) for url in (gateway, engines.aggregated.url)
    ]
    assert without_run(ours) == without_run(single)
    assert ours["content"][0]["text"]


async def test_messages_streamed(gateway: str, engines: Engines, client: aiohttp.ClientSession) -> None:
    def told(stream: str) -> tuple[str, Any]:
        chunks = [json.loads(event.data or b"") for event in EventSplitter().feed(stream.encode())]
        text = "".join(chunk["delta"]["text"] for chunk in chunks if chunk["type"] == "content_block_delta")
        return text, chunks[-2:]

    body = {**MESSAGES, "stream": True}
    ours, single = [told(await post(client, url, "/v1/messages", body)) for url in (gateway, engines.aggregated.url)]
    assert ours == single
    assert ours[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(gateway: str, engines: Engines, client: aiohttp.ClientSession, *, stream: bool) -> None:
    def told(answer: str) -> Any:
        if stream:
            last = EventSplitter().feed(answer.encode())[-1]
            return told_by(json.loads(last.data or b"")["response"])
        return told_by(json.loads(answer))

    def told_by(response: Any) -> Any:
        assert response["output"][0]["content"][0]["text"]
        return without_run({key: value for key, value in response.items() if key != "created_at"})

    body = {**RESPONSES, "stream": stream}
    ours, single = [told(await post(client, url, "/v1/responses", body)) for url in (gateway, engines.aggregated.url)]
    assert ours == single


async def test_count_tokens(gateway: str, engines: Engines, client: aiohttp.ClientSession) -> None:
    body = {key: value for key, value in MESSAGES.items() if key in ("model", "messages")}
    path = "/v1/messages/count_tokens"
    assert await post(client, gateway, path, body) == await post(client, engines.aggregated.url, path, body)


async def test_samples_at_a_temperature_differ(gateway: str, client: aiohttp.ClientSession) -> None:
    body = {**CHAT, "n": 3, "temperature": 1, "seed": 7, "max_tokens": 12}
    choices = json.loads(await post(client, gateway, "/v1/chat/completions", body))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) > 1


async def test_many_at_once(gateway: str, engines: Engines, client: aiohttp.ClientSession) -> None:
    def body(number: int) -> Body:
        content = f"{number} " * (1 + number * 7 % 40)
        return {
            **CHAT,
            "messages": [{"role": "user", "content": content}],
            "n": 1 + number % 2,
            "max_tokens": 5,
            **USAGE,
        }

    async def ask(base: str, number: int) -> Any:
        return accumulated(await post(client, base, "/v1/chat/completions", body(number)))

    for base in (gateway, engines.aggregated.url):
        await ask(base, 0)
    ours = await asyncio.gather(*(ask(gateway, number) for number in range(24)))
    single = await asyncio.gather(*(ask(engines.aggregated.url, number) for number in range(24)))
    assert ours == single
    assert await in_flight(client, engines.prefill) == await in_flight(client, engines.decode) == 0


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "temperature": -5}),
        ("/v1/chat/completions", {**CHAT, "temperature": -5, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "temperature": -5, "n": 2}),
        ("/v1/completions", {**COMPLETION, "max_tokens": 1_000_000}),
        ("/generate", generate("x", return_logprob=True, logprob_start_len=99)),
    ],
)
async def test_the_engines_refusal_reaches_the_client(
    path: str, body: Body, gateway: str, engines: Engines, client: aiohttp.ClientSession
) -> None:
    answers = []
    for base in (gateway, engines.aggregated.url):
        async with client.post(base + path, json=body) as response:
            answers.append((response.status, await response.json()))
    assert answers[0] == answers[1]
    assert answers[0][0] == 400
    await seconds_until(client, engines.decode, busy=False)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", LONG_CHAT),
        ("/v1/chat/completions", {**LONG_CHAT, "n": 2}),
        ("/v1/completions", {**COMPLETIONS, "max_tokens": 3000}),
        ("/generate", generate("x", tokens=3000)),
    ],
    ids=["chat", "chat_n2", "completions_list", "generate"],
)
async def test_a_client_that_leaves_ends_the_work(
    path: str, body: Body, gateway: str, engines: Engines, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    request = asyncio.create_task(post(client, gateway, path, {**body, "stream": stream}))
    await seconds_until(client, engines.decode, busy=True)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert await seconds_until(client, engines.decode, busy=False) < 1
    assert await seconds_until(client, engines.prefill, busy=False) < 1


async def test_a_client_that_leaves_during_a_prefill_frees_the_decode(
    gateway: str, engines: Engines, client: aiohttp.ClientSession
) -> None:
    engines.prefill.signal(signal.SIGSTOP)
    try:
        request = asyncio.create_task(post(client, gateway, "/v1/chat/completions", LONG_CHAT))
        await seconds_until(client, engines.decode, busy=True)
        request.cancel()
        assert await seconds_until(client, engines.decode, busy=False) < 1
    finally:
        engines.prefill.signal(signal.SIGCONT)
    await seconds_until(client, engines.prefill, busy=False)


async def test_what_is_known_of_an_engines_load(gateway: str, engines: Engines, client: aiohttp.ClientSession) -> None:
    idle = await loads_until(client, gateway, engines.decode.url, lambda load: load.get("num_total_reqs") == 0)
    async with client.get(f"{engines.decode.url}/v1/loads") as response:
        (said,) = (await response.json())["loads"]
    for limit in ("max_total_num_tokens", "max_running_requests"):
        assert idle[limit] == said[limit] > 0
    request = asyncio.create_task(post(client, gateway, "/v1/chat/completions", LONG_CHAT))
    busy = await loads_until(client, gateway, engines.decode.url, lambda load: load.get("num_running_reqs") == 1)
    assert busy["gateway_reqs"] == 1
    assert busy["token_usage"] > 0
    await loads_until(client, gateway, engines.decode.url, lambda load: load.get("envoy_reqs") == 1)
    request.cancel()
    await loads_until(client, gateway, engines.decode.url, lambda load: load.get("num_total_reqs") == 0)


@pytest.mark.parametrize(("n", "stream"), [(1, False), (1, True), (2, True)])
async def test_a_prefill_killed_under_a_request(
    n: int, gateway: str, engines: Engines, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    """The engine would keep the client waiting for seconds; the gateway tells it at once and frees the decode."""
    engines.prefill.signal(signal.SIGSTOP)
    body = {**CHAT, "n": n, "stream": stream}
    request = asyncio.create_task(client.post(f"{gateway}/v1/chat/completions", json=body))
    await seconds_until(client, engines.decode, busy=True)
    losses = engines.decode.log.read_text().count(LOSS)
    engines.prefill.stop()
    killed = time.monotonic()
    response = await request
    assert time.monotonic() - killed < 1
    assert response.status in (502, 503)
    assert (await response.json())["error"]["code"] in ("prefill_connection_lost", "prefill_unreachable")
    assert await seconds_until(client, engines.decode, busy=False) < 1

    started = time.monotonic()
    async with client.post(f"{gateway}/v1/chat/completions", json=CHAT) as refused:
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] in ("prefill_unreachable", "no_available_workers")
    assert time.monotonic() - started < 1

    await noticed(engines.decode, losses + 1)
    engines.prefill.start()
    await asyncio.to_thread(engines.prefill.wait_ready)
    await ready(client, gateway)
    assert json.loads(await post(client, gateway, "/v1/chat/completions", {**CHAT, "n": n}))["choices"]


async def noticed(decode: Server, losses: int) -> None:
    """Wait until the decode knows that its prefill is gone, which takes two heartbeats.

    Were the prefill back before, the decode would go on with the old one's ports, and every request would wait.
    """
    started = time.monotonic()
    while decode.log.read_text().count(LOSS) < losses:
        assert time.monotonic() - started < READY_SECONDS
        await asyncio.sleep(0.1)
