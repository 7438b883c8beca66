"""Real vLLM through the gateway answers as one aggregated vLLM does, and the KV cache is really handed over.

The gateway is the real command with a real Envoy; the engines are real vLLM on the CPU, with NIXL and with Mooncake.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest
import servers
from rig import Body, loads_until, post
from vllm_answers import comparable, without_run
from vllm_cases import (
    CASES,
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    GENERATE_PATH,
    GREEDY,
    MESSAGES,
    MESSAGES_PATH,
    RESPONSES,
    RESPONSES_PATH,
    USAGE,
    generate,
)
from vllm_rig import Pair, fresh, hits, seconds_until_idle, unloaded
from vllm_servers import BLOCKS, VllmServer

from extproc.merge.sse import DONE, EventSplitter

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines"),
]


async def both(client: aiohttp.ClientSession, pair: Pair, aggregated: VllmServer, path: str, body: Body) -> list[str]:
    """What the gateway and the aggregated server answer."""
    return list(await asyncio.gather(post(client, pair.url, path, body), post(client, aggregated.url, path, body)))


# -- answers as one server gives them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
async def test_answers_as_one_server(
    name: str, pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    path, body = CASES[name]
    ours, single = await both(client, pair, aggregated, path, body)
    stream = body.get("stream", False)
    assert comparable(ours, stream=stream) == comparable(single, stream=stream)


@pytest.mark.parametrize("name", ["chat", "chat_stream_usage", "completion_echo_logprobs", "list_stream_usage"])
async def test_mooncake_one_after_the_other(
    name: str, in_turn: str, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    path, body = CASES[name]
    ours, single = [await post(client, url, path, body) for url in (in_turn, aggregated.url)]
    stream = body.get("stream", False)
    assert comparable(ours, stream=stream) == comparable(single, stream=stream)


def told(answer: str) -> Any:
    """A Messages or Responses answer, or what is left of its stream: the text, the kinds of events, and how it ends.

    How many tokens come in one event depends on how busy the server is.
    """
    if answer.startswith("{"):
        return _without_times(without_run(json.loads(answer)))
    chunks = [json.loads(event.data or b"") for event in EventSplitter().feed(answer.encode()) if event.data != DONE]
    deltas = [chunk["delta"] for chunk in chunks if isinstance(chunk.get("delta"), (str, dict))]
    text = "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
    last = next((chunk["response"] for chunk in chunks if chunk["type"] == "response.completed"), chunks[-2:])
    kinds = [kind for kind, _ in itertools.groupby(chunk["type"] for chunk in chunks)]
    return text, kinds, _without_times(without_run(last))


def _without_times(answer: Any) -> Any:
    if not isinstance(answer, dict):
        return answer
    # The decode worker did not compute the prompt, so it has written none of it to a cache.
    usage = {key: value for key, value in answer.get("usage", {}).items() if key != "input_tokens_details"}
    output = [{**item, "id": None} for item in answer.get("output", [])]
    return {key: value for key, value in answer.items() if key != "created_at"} | {"usage": usage, "output": output}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), [(MESSAGES_PATH, MESSAGES), (RESPONSES_PATH, RESPONSES)])
async def test_messages_and_responses(
    path: str, body: Body, pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    ours, single = await both(client, pair, aggregated, path, {**body, "stream": stream})
    assert told(ours) == told(single)


async def test_stored_responses(pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession) -> None:
    second = []
    for url in (pair.url, aggregated.url):
        first = json.loads(await post(client, url, RESPONSES_PATH, {**RESPONSES, "store": True}))
        async with client.get(f"{url}{RESPONSES_PATH}/{first['id']}") as response:
            assert response.status == 200
            assert await response.json() == first
        more = {**RESPONSES, "input": "and then?", "previous_response_id": first["id"]}
        second.append(json.loads(await post(client, url, RESPONSES_PATH, more)))
    ours, single = [{**answer, "previous_response_id": None} for answer in second]
    assert _without_times(without_run(ours)) == _without_times(without_run(single))


async def test_an_unknown_response(pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession) -> None:
    answers = []
    for url in (pair.url, aggregated.url):
        async with client.get(f"{url}{RESPONSES_PATH}/resp_nobody") as response:
            answers.append((response.status, (await response.json())["error"]["message"]))
    assert answers[0][0] == answers[1][0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {key: MESSAGES[key] for key in ("model", "messages")}),
        ("/tokenize", {"model": "tiny", "prompt": "def foo("}),
        ("/detokenize", {"model": "tiny", "tokens": [455, 284]}),
    ],
)
async def test_tokens(path: str, body: Body, pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession) -> None:
    ours, single = [json.loads(answer) for answer in await both(client, pair, aggregated, path, body)]
    assert {**ours, "max_model_len": None} == {**single, "max_model_len": None}


# -- the KV cache moves ------------------------------------------------------------------------------------------------


def chat(words: int = 60, **fields: Any) -> Body:
    return {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh(words)}], **fields}


async def prompt_tokens(client: aiohttp.ClientSession, url: str, path: str, body: Body) -> int:
    """How many tokens the request's prompt has."""
    if path == GENERATE_PATH:
        return len(body["token_ids"])
    prompt: Body = {"prompt": body["prompt"]} if path == COMPLETIONS_PATH else {"messages": body.get("messages")}
    if path == RESPONSES_PATH:
        prompt = {"messages": [{"role": "user", "content": body["input"]}]}
    return int(json.loads(await post(client, url, "/tokenize", {"model": "tiny", **prompt}))["count"])


async def fresh_requests(client: aiohttp.ClientSession, url: str) -> dict[str, Body]:
    """A request with an unseen prompt for each API."""
    ids = json.loads(await post(client, url, "/tokenize", {"model": "tiny", "prompt": fresh()}))["tokens"]
    return {
        CHAT_PATH: chat(),
        COMPLETIONS_PATH: {**COMPLETION, **GREEDY, "prompt": fresh()},
        MESSAGES_PATH: {**MESSAGES, "messages": [{"role": "user", "content": fresh()}]},
        RESPONSES_PATH: {**RESPONSES, "input": fresh()},
        GENERATE_PATH: {**generate(), "token_ids": ids},
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH, GENERATE_PATH])
async def test_the_decode_fetches_the_prompt(
    path: str, pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    body = (await fresh_requests(client, aggregated.url))[path] | {"stream": stream}
    before = await hits(client, pair.decode)
    async with client.post(pair.url + path, json=body) as response:
        ours = await response.text()
        assert response.status == 200, ours
        assert response.headers["x-pd-kv"] == "handed"
        assert response.headers["x-pd-handoff"] == pair.connector
    assert await hits(client, pair.decode) - before == await prompt_tokens(client, aggregated.url, path, body)
    if path in (CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH):
        single = await post(client, aggregated.url, path, body)
        assert comparable(ours, stream=stream) == comparable(single, stream=stream)
    assert await seconds_until_idle(client, pair.prefill, pair.decode) < 3


async def test_each_prompt_of_a_list_is_fetched(
    pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    body = {**COMPLETION, **GREEDY, "prompt": [fresh(10 + 20 * index) for index in range(4)]}
    before = await hits(client, pair.decode)
    ours, single = await both(client, pair, aggregated, COMPLETIONS_PATH, body)
    assert without_run(json.loads(ours)) == without_run(json.loads(single))
    assert await hits(client, pair.decode) - before == json.loads(ours)["usage"]["prompt_tokens"]


async def test_fifty_prompts_at_concurrency_eight(
    pair: Pair, aggregated: VllmServer, client: aiohttp.ClientSession
) -> None:
    limit = asyncio.Semaphore(8)

    async def ask(url: str, body: Body) -> Any:
        async with limit:
            return comparable(await post(client, url, CHAT_PATH, body), stream=bool(body.get("stream")))

    bodies = [chat(1 + number * 37 % 150, **(USAGE if number % 2 else {})) for number in range(50)]
    before = await hits(client, pair.decode)
    ours = await asyncio.gather(*(ask(pair.url, body) for body in bodies))
    fetched = await hits(client, pair.decode) - before
    single = await asyncio.gather(*(ask(aggregated.url, body) for body in bodies))
    assert ours == single
    usages = [answer["usage"] if "usage" in answer else answer[None]["usage"] for answer in single]
    assert fetched == sum(usage["prompt_tokens"] for usage in usages)
    assert await seconds_until_idle(client, pair.prefill, pair.decode) < 3


async def test_what_is_known_of_an_engines_load(pair: Pair, client: aiohttp.ClientSession) -> None:
    """A vLLM renews its figures when it steps only, and so they are old ones when it has just become idle."""
    long = asyncio.create_task(post(client, pair.url, CHAT_PATH, {**CHAT, **GREEDY, "max_tokens": 1500}))
    # Both, since the engine's figure may be of a request before this one.
    one = {"num_running_reqs": 1, "gateway_reqs": 1}.items()
    busy = await loads_until(client, pair.url, pair.decode.url, lambda load: one <= load.items())
    assert busy["num_waiting_reqs"] == 0
    assert 0 < busy["token_usage"] < 1
    assert busy["max_total_num_tokens"] == BLOCKS * 32
    assert busy["gateway_reqs"] == 1
    long.cancel()
    await unloaded(client, pair.url, pair.decode)
