"""Record what real SGLang answers: the aggregated server's one answer and what both legs of every sample hold.

Each case becomes one file of tests/data/sglang, bodies as text: {"path", "request", "aggregated", "legs": [{"prefill",
"decode"}, ...]}. With ``n`` samples there are ``n`` pairs of legs, each asked for one sample. Run it against a pair and
an aggregated server that are up (``sglang_servers.py``); the merge tests replay the files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp

Body = dict[str, Any]

GREEDY: Body = {"temperature": 0, "ignore_eos": True}
CHAT: Body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3, **GREEDY}
COMPLETION: Body = {"model": "tiny", "prompt": "def foo(", "max_tokens": 3, **GREEDY}
COMPLETIONS: Body = {**COMPLETION, "prompt": ["def foo(", "import os"]}
USAGE: Body = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS: Body = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
INPUT_LOGPROBS: Body = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 9],
    "return_text_in_logprobs": True,
}


def generate(text: str | list[str], tokens: int = 3, n: int = 1, **fields: Any) -> Body:
    """A native /generate body."""
    sampling = {"max_new_tokens": tokens, **GREEDY} | ({"n": n} if n > 1 else {})
    return {"text": text, "sampling_params": sampling, **fields}


PAIR = ["def foo(", "import os"]
CASES: dict[str, tuple[str, Body]] = {
    "chat_n2": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "chat_n2_stream": ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    "chat_n2_stream_usage": ("/v1/chat/completions", {**CHAT, "n": 2, **USAGE}),
    "chat_n2_stream_continuous": ("/v1/chat/completions", {**CHAT, "n": 2, **CONTINUOUS}),
    "chat_n2_logprobs": ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "completions_n2": ("/v1/completions", {**COMPLETION, "n": 2}),
    "completions_n2_stream_usage": ("/v1/completions", {**COMPLETION, "n": 2, **USAGE}),
    "completions_n2_echo": ("/v1/completions", {**COMPLETION, "n": 2, "echo": True, "logprobs": 2}),
    "completions_n2_echo_stream": ("/v1/completions", {**COMPLETION, "n": 2, "echo": True, "logprobs": 2, **USAGE}),
    "completions_list_n2": ("/v1/completions", {**COMPLETIONS, "n": 2}),
    "completions_list_n2_stream_usage": ("/v1/completions", {**COMPLETIONS, "n": 2, **USAGE}),
    "completions_echo": ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 2}),
    "completions_echo_zero": ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 0}),
    "completions_echo_one": ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 1}),
    "completions_echo_stream": ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 1, "stream": True}),
    "completions_list_echo": ("/v1/completions", {**COMPLETIONS, "echo": True, "logprobs": 1}),
    "completions_list_echo_stream": ("/v1/completions", {**COMPLETIONS, "echo": True, "logprobs": 1, "stream": True}),
    "generate_n2": ("/generate", generate("def foo(", n=2)),
    "generate_n2_stream": ("/generate", generate("def foo(", n=2, stream=True)),
    "generate_n2_logprobs": ("/generate", generate("def foo(", n=2, **INPUT_LOGPROBS)),
    "generate_n2_logprobs_stream": ("/generate", generate("def foo(", n=2, stream=True, **INPUT_LOGPROBS)),
    "generate_batch_n2": ("/generate", generate(PAIR, n=2)),
    "generate_batch_n2_stream": ("/generate", generate(PAIR, n=2, stream=True)),
    "generate_logprobs": ("/generate", generate("def foo(", **INPUT_LOGPROBS)),
    "generate_logprobs_start2": ("/generate", generate("def foo(", return_logprob=True, logprob_start_len=2)),
    "generate_logprobs_max0": ("/generate", generate("def foo(", tokens=0, **INPUT_LOGPROBS)),
    "generate_logprobs_stream": ("/generate", generate("def foo(", stream=True, **INPUT_LOGPROBS)),
    "generate_logprobs_flat": ("/generate", generate("def foo(", return_flat_raw_top_logprobs=True, **INPUT_LOGPROBS)),
    "generate_logprobs_batch": ("/generate", generate(PAIR, **INPUT_LOGPROBS)),
    "generate_logprobs_batch_mixed": (
        "/generate",
        generate(PAIR, return_logprob=[True, False], logprob_start_len=[0, -1]),
    ),
    "generate_logprobs_batch_stream": ("/generate", generate(PAIR, stream=True, **INPUT_LOGPROBS)),
}


def single_sample(body: Body) -> tuple[int, Body]:
    """How many samples the body asks for, and the body that asks for one."""
    if "sampling_params" in body:
        sampling = {**body["sampling_params"]}
        return sampling.pop("n", 1), {**body, "sampling_params": sampling}
    return body.get("n", 1), {key: value for key, value in body.items() if key != "n"}


def handoff(body: Body, bootstrap_port: int) -> Body:
    """The bootstrap fields for one pair of legs: lists for a batch."""
    prompt = body.get("prompt", body.get("text"))
    room = random.getrandbits(62)
    if not isinstance(prompt, list):
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": room}
    size = len(prompt)
    return {
        "bootstrap_host": ["127.0.0.1"] * size,
        "bootstrap_port": [bootstrap_port] * size,
        "bootstrap_room": [room + item for item in range(size)],
    }


async def ask(session: aiohttp.ClientSession, url: str, body: Body) -> str:
    """POST and return the body; raise for a status that is not 2xx."""
    async with session.post(url, json=body) as response:
        text = await response.text()
        if not response.ok:
            raise RuntimeError(f"{url}: {response.status} {text}")
        return text


async def record(session: aiohttp.ClientSession, options: argparse.Namespace, path: str, body: Body) -> Body:
    """One case's file content."""
    for base in (options.prefill, options.decode, options.aggregated):
        async with session.post(f"{base}/flush_cache"):
            pass
    aggregated = await ask(session, options.aggregated + path, body)
    samples, one = single_sample(body)
    legs = []
    for _ in range(samples):
        fields = handoff(one, options.bootstrap_port)
        whole = {key: value for key, value in one.items() if key != "stream_options"} | {"stream": False}
        prefill, decode = await asyncio.gather(
            ask(session, options.prefill + path, whole | fields), ask(session, options.decode + path, one | fields)
        )
        legs.append({"prefill": prefill, "decode": decode})
    return {"path": path, "request": body, "aggregated": aggregated, "legs": legs}


async def main() -> None:
    """Record every case, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", default="http://127.0.0.1:31301")
    parser.add_argument("--bootstrap-port", type=int, default=31598)
    parser.add_argument("--decode", default="http://127.0.0.1:31311")
    parser.add_argument("--aggregated", default="http://127.0.0.1:31321")
    parser.add_argument("--to", type=Path, default=Path(__file__).parents[2] / "tests/data/sglang")
    parser.add_argument("names", nargs="*", help="cases; all when none is named")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    async with aiohttp.ClientSession() as session:
        for name in options.names or CASES:
            recorded = await record(session, options, *CASES[name])
            (options.to / f"{name}.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
