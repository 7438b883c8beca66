"""The show with real vLLM: the same requests through the gateway and to one server alone, side by side."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from extproc.demo import engines
from extproc.demo.asking import Act, Answer, Seen, ask, read
from extproc.demo.engines import Server, Servers
from extproc.demo.mocks import invitation
from extproc.demo.page import Page
from extproc.demo.stage import Fleet, ShowError, Stage

_MODEL: Final = "tiny"
_GREEDY: Final = {"model": _MODEL, "max_tokens": 24, "temperature": 0}
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_SETTLED_SECONDS: Final = 10.0  # for a transfer to show in the metrics


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# Different beginnings: what a worker has in its cache it does not fetch.
_ACTS: Final = (
    Act(
        "A chat completion",
        _CHAT,
        {**_GREEDY, "messages": _messages("What is a prefill worker, and why is it not the one that decodes? " * 2)},
    ),
    Act(
        "A chat completion, streamed",
        _CHAT,
        {
            **_GREEDY,
            "messages": _messages("Which way does a KV cache take from one machine to another? " * 2),
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    Act(
        "Two prompts in one request",
        _COMPLETIONS,
        {
            **_GREEDY,
            "prompt": [
                "def prefill(prompt, cache): # computes keys and values for all tokens of a prompt at once " * 2,
                "class Decode: # reads the keys and values of the tokens before, writes one token after another " * 2,
            ],
        },
    ),
)
_WARM_UP: Final = {**_GREEDY, "prompt": "The first request to an engine is a slow one, so this one is not shown. " * 2}


class Counters(NamedTuple):
    """What a decode worker has fetched since it started."""

    tokens: int  # vllm:external_prefix_cache_hits_total
    transfers: int  # vllm:nixl_bytes_transferred_count
    data: int  # bytes: vllm:nixl_bytes_transferred_sum


class RealShow:
    """A prefill and a decode vLLM behind the gateway, and an aggregated one beside it."""

    def __init__(self, recipe: Path, directory: Path) -> None:
        self._recipe = recipe
        self._directory = directory
        self._page = Page()
        self._servers: Servers

    @asynccontextmanager
    async def workers(self) -> AsyncIterator[Fleet]:
        """See Show. The gateway is told of them when it runs."""
        await engines.install(self._recipe, self._directory, self._page)
        async with engines.running(self._recipe, self._directory, self._page) as self._servers:
            yield Fleet()

    async def perform(self, stage: Stage) -> list[str]:
        """See Show."""
        page, (prefill, decode, aggregated) = self._page, self._servers
        page.heading("Envoy, the ext_proc service and three vLLM servers are running.")
        page.fleet(stage.url, [prefill.url], [decode.url])
        page.line(f"\n  beside them, to compare with: aggregated {aggregated.url}\n")
        for server in (prefill, decode):
            await self._register(stage, server)
        await stage.ready()
        for url in (stage.url, aggregated.url):
            await ask(stage.client, url + _COMPLETIONS, _WARM_UP)
        before = start = await _settled(stage.client, decode, Counters(0, 0, 0))
        problems = []
        for act in _ACTS:
            ours = await ask(stage.client, stage.url + act.path, act.body)
            after = await _settled(stage.client, decode, before)
            alone = await ask(stage.client, aggregated.url + act.path, act.body)
            fetched = after.tokens - before.tokens
            wrong = differences(ours, alone, fetched)
            self._show(act, stage.url, ours, alone, fetched, equal=_equal(ours, alone))
            problems += [f"{act.title}: {problem}" for problem in wrong]
            before = after
        self._moved(decode, start, before)
        if before.data <= start.data:
            problems.append("no bytes were transferred between the workers")
        return problems

    def invite(self, stage: Stage) -> None:
        """See Show."""
        self._page.heading("Serving until Ctrl-C, which also ends the servers. Try:")
        self._page.line(invitation(stage, _MODEL))

    async def _register(self, stage: Stage, server: Server) -> None:
        body = server.registration
        self._page.request(f"{stage.url}/workers", body)
        async with stage.client.post(f"{stage.url}/workers", json=body) as answer:
            if answer.status != 202:
                raise ShowError(f"{server.name} could not be registered: {answer.status} {await answer.text()}")

    def _show(self, act: Act, url: str, ours: Seen, alone: Seen, fetched: int, *, equal: bool) -> None:
        page = self._page
        page.heading(act.title)
        page.request(url + act.path, act.body)
        page.beside("", "through the gateway", "the aggregated server alone")
        answers = read(ours), read(alone)
        page.beside("status", str(ours.status), str(alone.status))
        for number in range(max(len(answer.choices) for answer in answers)):
            page.beside(f"text {number + 1}", *(_text(answer, number) for answer in answers))
            page.beside("ended by", *(_finish(answer, number) for answer in answers))
        page.beside("tokens", *(_usage(answer) for answer in answers))
        page.beside("first byte", *(f"{(seen.first - seen.sent) * 1000:.1f} ms" for seen in (ours, alone)))
        page.beside("last byte", *(f"{(seen.last - seen.sent) * 1000:.1f} ms" for seen in (ours, alone)))
        for seen in (ours, alone):
            if seen.status != 200:
                page.beside("", seen.text)
        prompt = answers[0].usage.get("prompt_tokens", 0)
        page.beside("KV cache", f"{fetched} of the prompt's {prompt} tokens fetched by decode from prefill")
        for name, value in ours.headers.items():
            if name.lower().startswith("x-pd-") or name.lower() == "server-timing":
                page.beside(name, value)
        page.line(f"\n  {'The answers are equal.' if equal else 'THE ANSWERS DIFFER.'}")

    def _moved(self, decode: Server, before: Counters, after: Counters) -> None:
        page = self._page
        page.heading(f"What the decode worker counted ({decode.url}/metrics)")
        page.line(f"  {'':<42}{'before':>12}{'after':>12}")
        for name, old, new in (
            ("vllm:external_prefix_cache_hits_total", before.tokens, after.tokens),
            ("vllm:nixl_bytes_transferred_count", before.transfers, after.transfers),
            ("vllm:nixl_bytes_transferred_sum", before.data, after.data),
        ):
            page.line(f"  {name:<42}{old:>12}{new:>12}")


def _equal(ours: Seen, alone: Seen) -> bool:
    return ours.status == alone.status == 200 and read(ours) == read(alone)


def differences(ours: Seen, alone: Seen, fetched: int) -> list[str]:
    """What is wrong with an answer through the gateway, beside that of one server; ``fetched`` in tokens."""
    answer = read(ours)
    if not answer.choices:
        return [f"no answer: {ours.status} {ours.text}"]
    problems = []
    if not _equal(ours, alone):
        problems.append("the answers differ")
    if ours.headers.get("x-pd-kv") != "handed" or fetched < answer.usage.get("prompt_tokens", 1):
        problems.append("the KV cache was not fetched from the prefill worker")
    return problems


def _text(answer: Answer, number: int) -> str:
    """As a literal: what a model of random weights writes would tear the page."""
    return repr(answer.choices[number].text) if number < len(answer.choices) else "(none)"


def _finish(answer: Answer, number: int) -> str:
    return str(answer.choices[number].finish) if number < len(answer.choices) else "(none)"


def _usage(answer: Answer) -> str:
    return ", ".join(f"{name.partition('_')[0]} {count}" for name, count in answer.usage.items()) or "(none)"


async def _settled(client: aiohttp.ClientSession, server: Server, before: Counters) -> Counters:
    """The counters once they have risen above ``before`` and rest; as they are when they do not rise."""
    deadline = time.monotonic() + _SETTLED_SECONDS
    last = before
    while time.monotonic() < deadline:
        now = await _counters(client, server)
        if now == last and now.tokens > before.tokens and now.data > before.data:
            break
        last = now
        await asyncio.sleep(0.2)
    return last


async def _counters(client: aiohttp.ClientSession, server: Server) -> Counters:
    async with client.get(f"{server.url}/metrics") as response:
        text = await response.text()
    sums = dict.fromkeys(("external_prefix_cache_hits_total", "nixl_bytes_transferred_count",
                          "nixl_bytes_transferred_sum"), 0.0)  # fmt: skip
    for name, value in re.findall(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        if name in sums:
            sums[name] += float(value)
    return Counters(*map(int, sums.values()))
