"""A request as a client sends it, and what the client sees of the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import orjson


class Act(NamedTuple):
    """A request worth showing.

    Attributes:
        title: for people.
        path: of the API.
        body: JSON.
    """

    title: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Seen:
    """What a client saw of one request. Times are ``time.time()`` seconds."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)  # aiohttp's: names in any case
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    body: bytes = b""
    events: int = 0

    @property
    def text(self) -> str:
        """The body as it is, for an answer that is not what was hoped for."""
        return self.body.decode(errors="replace")


class Choice(NamedTuple):
    """One of an answer's texts, and why it ended."""

    text: str
    finish: str | None


class Answer(NamedTuple):
    """What an answer says, however it was sent; two servers that do the same say the same.

    Attributes:
        choices: by their indexes.
        usage: prompt and completion tokens; empty where it is not told.
    """

    choices: list[Choice]
    usage: dict[str, int]


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Seen:
    """Send a request and read the whole answer. Raises aiohttp.ClientError."""
    seen = Seen(sent=time.time())
    async with client.post(url, json=body) as answer:
        seen.status, seen.headers = answer.status, answer.headers
        async for chunk in answer.content.iter_any():
            seen.first = seen.first or time.time()
            seen.last = time.time()
            seen.body += chunk
            seen.events += chunk.count(b"data: ")
    return seen


def read(seen: Seen) -> Answer:
    """What an answer of chat or completions says; nothing where it failed or has no end."""
    texts: dict[int, str] = {}
    finishes: dict[int, str | None] = {}
    usage: dict[str, int] = {}
    for part in _parts(seen):
        for choice in part.get("choices", ()):
            index = choice["index"]
            message = choice.get("message") or choice.get("delta") or {}
            texts[index] = texts.get(index, "") + (choice.get("text") or message.get("content") or "")
            finishes[index] = choice.get("finish_reason") or finishes.get(index)
        told = part.get("usage") or {}
        usage |= {name: told[name] for name in ("prompt_tokens", "completion_tokens") if name in told}
    return Answer([Choice(texts[index], finishes[index]) for index in sorted(texts)], usage)


def _parts(seen: Seen) -> Iterator[dict[str, Any]]:
    if seen.status != 200:
        return
    if not seen.headers.get("Content-Type", "").startswith("text/event-stream"):
        yield orjson.loads(seen.body)
    elif seen.body.rstrip().endswith(b"data: [DONE]"):
        for line in seen.body.splitlines():
            if line.startswith(b"data: {"):
                yield orjson.loads(line[6:])
