"""Requests of every API of a vLLM server, and answers made comparable."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Final

import pytest
from http_client import Client, Reply
from vllm_product import VllmProduct

TEXT = "The quick brown fox \N{FOX FACE} jumps over the lazy dog and then some more"
OTHER = "a prompt of other blocks than the first one has"
IDS, OTHER_IDS = list(range(11, 40)), [7, 8, 9]
MODEL = {"model": "tiny"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": TEXT}]}
COMPLETION = {**MODEL, "prompt": TEXT, "max_tokens": 6}

Question = tuple[str, dict[str, Any]]

ONE: dict[str, Question] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", COMPLETION),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 9}),
    "responses": ("/v1/responses", {**MODEL, "input": TEXT}),
    "generate": ("/inference/v1/generate", {**MODEL, "token_ids": IDS, "sampling_params": {"max_tokens": 7}}),
}
VARIANTS: dict[str, Question] = {
    "chat, limits": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 3, "max_completion_tokens": 9, "min_tokens": 5, "stop": ["qqq"], "temperature": 0},
    ),
    "chat, stop": ("/v1/chat/completions", {**CHAT, "stop": [" "], "max_tokens": 9}),
    "chat, logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat, tools": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    "completions, ids": ("/v1/completions", {**COMPLETION, "prompt": IDS}),
    "completions, list of one": ("/v1/completions", {**COMPLETION, "prompt": [TEXT]}),
    "completions, logprobs": ("/v1/completions", {**COMPLETION, "logprobs": 2}),
    "completions, echo": ("/v1/completions", {**COMPLETION, "echo": True}),
    "responses, items": ("/v1/responses", {**MODEL, "input": [{"role": "user", "content": TEXT}]}),
    "generate, logprobs": (
        "/inference/v1/generate",
        {**MODEL, "token_ids": IDS, "sampling_params": {"max_tokens": 4, "logprobs": 1}},
    ),
}
# Each prompt is served by a pair of legs of its own.
LISTS: dict[str, Question] = {
    "texts": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER, TEXT]}),
    "ids": ("/v1/completions", {**COMPLETION, "prompt": [IDS, OTHER_IDS]}),
    "logprobs": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER], "logprobs": 1}),
    "echo": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER], "echo": True}),
}
# What the prefill legs say of the prompt becomes part of the answer.
OF_PROMPT: dict[str, Question] = {
    "chat": ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 2}),
    "completions": ("/v1/completions", {**COMPLETION, "prompt_logprobs": 1}),
    "echo, logprobs": ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 2}),
    "list, echo, logprobs": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER], "echo": True, "logprobs": 1}),
    "list": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER], "prompt_logprobs": 1}),
    "generate": (
        "/inference/v1/generate",
        {**MODEL, "token_ids": IDS, "sampling_params": {"max_tokens": 4, "prompt_logprobs": 1}},
    ),
}
# The decode computes the prompt: no handoff can serve these.
DECODE_ALONE: dict[str, Question] = {
    "chat, n=2": ("/v1/chat/completions", {**CHAT, "n": 2, "seed": 41, "temperature": 1}),
    "completions, n=2": ("/v1/completions", {**COMPLETION, "n": 2, "seed": 41, "temperature": 1}),
    "completions, list, n=2": (
        "/v1/completions",
        {**COMPLETION, "prompt": [TEXT, OTHER], "n": 2, "seed": 41, "temperature": 1},
    ),
    "completions, best_of": ("/v1/completions", {**COMPLETION, "best_of": 3}),
    "chat, beams": ("/v1/chat/completions", {**CHAT, "use_beam_search": True, "n": 2, "temperature": 0}),
    "generate, n=2": (
        "/inference/v1/generate",
        {**MODEL, "token_ids": IDS, "sampling_params": {"max_tokens": 7, "n": 2, "seed": 3}},
    ),
    "chat, truncated": ("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": -1}),
    "completions, truncated": ("/v1/completions", {**COMPLETION, "truncate_prompt_tokens": -1}),
}
PREFILL_ALONE: dict[str, Question] = {
    "chat": ("/v1/chat/completions", {**CHAT, "max_tokens": 1}),
    "chat, completion tokens": ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1, "max_tokens": 50}),
    "chat, logprobs": ("/v1/chat/completions", {**CHAT, "max_tokens": 1, "prompt_logprobs": 1}),
    "completions": ("/v1/completions", {**COMPLETION, "max_tokens": 1}),
    "scoring": ("/v1/completions", {**COMPLETION, "max_tokens": 0, "echo": True, "logprobs": 1}),
    "scoring, list": ("/v1/completions", {**COMPLETION, "prompt": [TEXT, OTHER], "max_tokens": 1, "logprobs": 1}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 1}),
}
ABOUT_TOKENS: dict[str, Question] = {
    "count_tokens": ("/v1/messages/count_tokens", CHAT),
    "tokenize": ("/tokenize", {**MODEL, "prompt": TEXT, "return_token_strs": True}),
    "tokenize, chat": ("/tokenize", CHAT),
    "detokenize": ("/detokenize", {**MODEL, "tokens": IDS}),
}
# One of each way to be asked.
KINDS: dict[str, Question] = {
    **ONE,
    **{f"{name} stream": (path, {**body, "stream": True}) for name, (path, body) in ONE.items()},
    "list": LISTS["texts"],
    "list stream": (LISTS["texts"][0], {**LISTS["texts"][1], "stream": True}),
    "logprobs": OF_PROMPT["completions"],
}
KIND = pytest.mark.parametrize("kind", KINDS)
FEW = pytest.mark.parametrize("kind", ["chat", "messages stream", "list", "logprobs"])
# What no two answers have in common.
PASSING: Final = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "request_id"}
    | {"e2e_latency", "response_sent_to_client_ts"}
)
LOOSE: Final = PASSING | {
    "cached_tokens"
}  # a decode that Mooncake hands a cache to while the prefill works counts all of it


def streamed(question: Question) -> Question:
    """The same as a stream."""
    path, body = question
    return path, {**body, "stream": True}


def lasting(value: Any, passing: AbstractSet[str] = PASSING) -> Any:
    """A JSON value without what no two answers have in common, ``passing``."""
    if isinstance(value, dict):
        return {key: lasting(item, passing) for key, item in value.items() if key not in passing}
    return [lasting(item, passing) for item in value] if isinstance(value, list) else value


def told(reply: Reply, passing: AbstractSet[str] = PASSING) -> dict[int | None, list[str]]:
    """What a stream says of each choice in order, and, under None, what it says of all. Choices may be interleaved."""
    streams: defaultdict[int | None, list[str]] = defaultdict(list)
    for event in reply.body.decode().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        if not data.startswith("{"):
            streams[None].append(event)
            continue
        chunk = json.loads(data)
        index = chunk["choices"][0]["index"] if chunk.get("choices") else chunk.get("index")
        streams[index].append(name + json.dumps(lasting(chunk, passing), sort_keys=True))
    return dict(streams)


def answer_of(reply: Reply, passing: AbstractSet[str] = PASSING) -> Any:
    """What an answer says, streamed or not, without what no two answers have in common."""
    streams = (reply.header("content-type") or "").startswith("text/event-stream")
    return told(reply, passing) if streams else lasting(reply.json, passing)


def parts_of(kind: str) -> int:
    """How many pairs of legs serve one of ``KINDS``."""
    prompt = KINDS[kind][1].get("prompt")
    return len(prompt) if isinstance(prompt, list) else 1


def each_with(name: str, cases: Iterable[str], main: str) -> Any:
    """Parameters ``kind`` and ``name``: every kind with the case ``main``, and two kinds with every other case."""
    others = [(kind, case) for case in cases if case != main for kind in ("chat stream", "list")]
    return pytest.mark.parametrize(("kind", name), [*((kind, main) for kind in KINDS), *others])


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])


def cases(questions: dict[str, Question]) -> Any:
    """Parameters ``question`` and ``stream``."""
    return lambda test: STREAMS(pytest.mark.parametrize("question", questions.values(), ids=questions)(test))


async def same(product: VllmProduct, aggregated: Client, question: Question, *, stream: bool = False) -> Reply:
    """Ask both, and see that they say the same; the gateway's answer.

    A decode that Mooncake hands the cache to while the prefill works counts all of it as found in its own cache.
    """
    passing = PASSING if product.way.in_turn else LOOSE
    if stream:
        question = streamed(question)
    answer = await product.post(*question)
    expected = await aggregated.post(*question)
    assert expected.status == 200, expected.body
    assert answer.status == 200, answer.body
    assert answer.header("content-type") == expected.header("content-type")
    assert answer_of(answer, passing) == answer_of(expected, passing)
    return answer


def names(answer: Reply) -> tuple[str | None, ...]:
    """What the headers say: handoff, KV cache, and the workers that served."""
    return tuple(answer.header(f"x-pd-{name}") for name in ("handoff", "kv", "prefill", "decode"))
