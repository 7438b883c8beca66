"""Real gRPC servers through the gateway answer as one aggregated HTTP server of the same engine does.

The gateway is the real command with a real Envoy; it makes tokens of prompts, and texts of tokens. The engines are real
vLLM, with NIXL and with Mooncake, and real SGLang on the CPU. What gRPC does not tell: docs/grpc-answers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest
import sglang_answers
import vllm_answers
from record import CHAT as SGLANG_CHAT
from record import generate
from rig import Body, post
from rpc_pairs import RpcPair, in_flight, said_of_transfers, seconds_until
from servers import Server
from test_sglang import CASES as SGLANG_CASES
from vllm_cases import CHAT, CHAT_PATH, CHATS, COMPLETION, COMPLETION_CASES, COMPLETIONS_PATH, GREEDY, USAGE
from vllm_rig import fresh

pytestmark = pytest.mark.engines
REFUSED = {"chat_echo": "echo", "completion_beam": "use_beam_search"}
# Of SGLang's own API; the first is asked for beside what the others ask for.
SGLANG_REFUSED = {
    "generate_logprobs": "token_ids_logprob",
    "generate_logprobs_flat": "return_flat_raw_top_logprobs",
    "generate_logprobs_batch_mixed": "return_logprob",
}
# With no alternatives SGLang's completions tell nothing of an echoed prompt, vLLM's and ours do.
OTHERWISE = {"completions_echo_zero"}
VLLM_CASES = {
    **{name: (CHAT_PATH, body) for name, body in CHATS.items()},
    **{name: (COMPLETIONS_PATH, body) for name, body in COMPLETION_CASES.items()},
}


def wants(pair: RpcPair, engine: str) -> None:
    """Skip a test of another engine's."""
    if pair.engine != engine:
        pytest.skip("another engine's")


def unlike(ours: Any, theirs: Any, key: str = "") -> str:
    """Where two answers of vLLM differ in more than gRPC leaves untold; "" if nowhere.

    It does not tell ranks; cached tokens an HTTP server tells only if it is started so. Offsets count characters that
    are there, the engine's own also those it left out.
    """
    if key == "prompt_tokens_details" or (key == "rank" and ours is None):
        return ""
    if key == "text_offset":
        return "" if len(ours or ()) == len(theirs or ()) else key
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if alone := (ours.keys() ^ theirs.keys()) - {"prompt_tokens_details"}:
            return f"{key}: {sorted(alone)}"
        found = [unlike(value, theirs.get(name), str(name)) for name, value in ours.items()]
        return next((f"{key}/{one}" for one in found if one), "")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        found = [unlike(one, other, key) for one, other in zip(ours, theirs, strict=True)]
        return next((one for one in found if one), "")
    return "" if ours == theirs else f"{key}: {ours!r} is not {theirs!r}"


@pytest.mark.parametrize("name", [name for name in VLLM_CASES if name not in REFUSED.keys() | OTHERWISE])
async def test_vllm_answers_as_one_server(
    name: str, rpc_pair: RpcPair, single: Server, client: aiohttp.ClientSession
) -> None:
    wants(rpc_pair, "vllm")
    path, body = VLLM_CASES[name]
    answers = [await post(client, url, path, body) for url in (rpc_pair.url, single.url)]
    ours, theirs = [vllm_answers.comparable(answer, stream=body.get("stream", False)) for answer in answers]
    if name == "completion_echo_scoring":  # an echo alone has no completion tokens; vLLM counts the one that it makes
        made, counted = ours.pop("usage"), theirs.pop("usage")
        assert (made["completion_tokens"], counted["completion_tokens"]) == (0, 1)
        assert made["prompt_tokens"] == counted["prompt_tokens"]
    assert not unlike(ours, theirs)


@pytest.mark.parametrize("name", list(REFUSED))
async def test_what_vllm_cannot_be_told(name: str, rpc_pair: RpcPair, client: aiohttp.ClientSession) -> None:
    wants(rpc_pair, "vllm")
    path, body = VLLM_CASES[name]
    async with client.post(rpc_pair.url + path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "unsupported_parameter", REFUSED[name])


def essence(answer: str) -> Any:
    """What SGLang's answer in OpenAI's form has in common with the one made here, whose other members are vLLM's."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    tokens: dict[int, list[Any]] = {}
    usage: Any = None
    for chunk in [json.loads(answer)] if answer.startswith("{") else sglang_answers.events(answer):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            texts[index] = texts.get(index, "") + (part.get("content") or "")
            ends[index] = choice["finish_reason"] or ends.get(index)
            tokens.setdefault(index, []).extend(_logprobs(choice.get("logprobs")))
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")} if usage else None
    return texts, ends, tokens, counts


def _logprobs(found: Any) -> list[Any]:
    """Each token and its log probability."""
    if not found:
        return []
    if "content" in found:
        rows = [(entry["token"], entry["logprob"]) for entry in found["content"]]
    else:
        rows = list(zip(found["tokens"], found["token_logprobs"], strict=True))
    return [(token, None if value is None else round(value, 3)) for token, value in rows]


@pytest.mark.parametrize(
    "name", [name for name, (path, _) in SGLANG_CASES.items() if path != "/generate" and name not in OTHERWISE]
)
async def test_sglang_says_what_one_server_says(
    name: str, rpc_pair: RpcPair, single: Server, client: aiohttp.ClientSession
) -> None:
    wants(rpc_pair, "sglang")
    path, body = SGLANG_CASES[name]
    ours, theirs = [await post(client, url, path, body) for url in (rpc_pair.url, single.url)]
    assert essence(ours) == essence(theirs)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (path, _) in SGLANG_CASES.items()
        if path == "/generate" and name not in OTHERWISE | (SGLANG_REFUSED.keys() - {"generate_logprobs"})
    ],
)
async def test_sglangs_own_api_answers_as_one_server(
    name: str, rpc_pair: RpcPair, single: Server, client: aiohttp.ClientSession
) -> None:
    wants(rpc_pair, "sglang")
    path, body = SGLANG_CASES[name]
    body = {key: value for key, value in body.items() if key != "token_ids_logprob"}
    answers = [await post(client, url, path, body) for url in (rpc_pair.url, single.url)]
    if body.get("stream"):
        ours, theirs = [sglang_answers.accumulated(answer) for answer in answers]
    else:
        ours, theirs = [sglang_answers.without_run(json.loads(answer)) for answer in answers]
    assert ours == theirs


@pytest.mark.parametrize("name", list(SGLANG_REFUSED))
async def test_what_sglang_cannot_be_told(name: str, rpc_pair: RpcPair, client: aiohttp.ClientSession) -> None:
    wants(rpc_pair, "sglang")
    path, body = SGLANG_CASES[name]
    if name != "generate_logprobs":
        body = {key: value for key, value in body.items() if key != "token_ids_logprob"}
    async with client.post(rpc_pair.url + path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "unsupported_parameter", SGLANG_REFUSED[name])


# -- what holds for each pair -----------------------------------------------------------------------------------------


def chat(words: int = 60, **fields: Any) -> Body:
    """A request with an unseen prompt."""
    return {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh(words)}], **fields}


def text_of(answer: str) -> str:
    """The first choice's text, streamed or not."""
    if answer.startswith("{"):
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    chunks = sglang_answers.events(answer)
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_long_prompt_is_prefilled_and_handed_over(
    rpc_pair: RpcPair, single: Server, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    body = chat(300, stream=stream, max_tokens=24)
    async with client.post(rpc_pair.url + CHAT_PATH, json=body) as response:
        ours = await response.text()
        assert response.status == 200, ours
        assert response.headers["x-pd-kv"] == "handed"
    theirs = text_of(await post(client, single.url, CHAT_PATH, body))
    assert text_of(ours) == theirs != ""
    for server in (rpc_pair.prefill, rpc_pair.decode):
        await seconds_until(server, rpc_pair.engine, busy=False)


async def test_many_at_once(rpc_pair: RpcPair, single: Server, client: aiohttp.ClientSession) -> None:
    def body(number: int) -> Body:
        content = f"{number} " * (1 + number * 7 % 40)
        return {**CHAT, **GREEDY, "messages": [{"role": "user", "content": content}], "max_tokens": 5, **USAGE}

    async def ask(base: str, number: int) -> str:
        return text_of(await post(client, base, CHAT_PATH, body(number)))

    ours = await asyncio.gather(*(ask(rpc_pair.url, number) for number in range(24)))
    theirs = [await ask(single.url, number) for number in range(24)]
    assert ours == theirs


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stop_string_ends_the_text_and_the_work(
    rpc_pair: RpcPair, single: Server, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    whole = text_of(await post(client, single.url, CHAT_PATH, {**CHAT, **GREEDY, "max_tokens": 12}))
    stop = whole[len(whole) // 2 :][:3]
    assert stop
    body = {**CHAT, **GREEDY, "max_tokens": 1500, "stop": [stop, "nowhere"], "stream": stream}
    answers = [await post(client, url, CHAT_PATH, body) for url in (rpc_pair.url, single.url)]
    assert text_of(answers[0]) == text_of(answers[1]) == whole[: whole.index(stop)]
    assert await seconds_until(rpc_pair.decode, rpc_pair.engine, busy=False) < 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {**SGLANG_CHAT, "max_tokens": 1900}),
        (CHAT_PATH, {**SGLANG_CHAT, "max_tokens": 1900, "temperature": 1, "n": 2}),
        (COMPLETIONS_PATH, {**COMPLETION, **GREEDY, "prompt": ["def foo(", "import os"], "max_tokens": 1900}),
        ("/generate", generate("x", tokens=1900)),
    ],
    ids=["chat", "chat_n2", "completions_list", "generate"],
)
async def test_a_client_that_leaves_ends_the_work(
    path: str, body: Body, rpc_pair: RpcPair, client: aiohttp.ClientSession, *, stream: bool
) -> None:
    request = asyncio.create_task(post(client, rpc_pair.url, path, {**body, "stream": stream}))
    await seconds_until(rpc_pair.decode, rpc_pair.engine, busy=True)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    for server in (rpc_pair.decode, rpc_pair.prefill):
        assert await seconds_until(server, rpc_pair.engine, busy=False) < 2


async def test_a_prompt_that_is_too_long_is_refused_before_any_leg(
    rpc_pair: RpcPair, client: aiohttp.ClientSession
) -> None:
    body = {**COMPLETION, "prompt": [7] * 5000}
    async with client.post(rpc_pair.url + COMPLETIONS_PATH, json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "context_length_exceeded"
    assert await in_flight(rpc_pair.prefill, rpc_pair.engine) == 0


async def test_the_decode_fetches_what_was_prefilled(rpc_pair: RpcPair, client: aiohttp.ClientSession) -> None:
    wants(rpc_pair, "vllm")
    _, said = await said_of_transfers(rpc_pair)
    for _ in range(3):
        await post(client, rpc_pair.url, CHAT_PATH, chat())
    assert (await said_of_transfers(rpc_pair, said))[0] == 3
