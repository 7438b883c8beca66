"""From request fields to prompts, the same whatever the engine: its chat template, its ``prompt`` field, its stops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import orjson

from extproc.mock.generation import Prompt


class Message(Protocol):
    """A message of a conversation."""

    role: str
    content: Any


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    """The ``stop`` field as a tuple."""
    if not value:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def chat_prompt(messages: Iterable[Message], tools: list[Any] | None = None, system: Any = None) -> Prompt:
    """What the mock's chat template makes of a conversation."""
    parts = [f"<{entry.role}>{content_text(entry.content)}" for entry in messages]
    if system:
        parts.insert(0, f"<system>{content_text(system)}")
    if tools:
        parts.insert(0, orjson.dumps(tools).decode())
    parts.append("<assistant>")
    return Prompt("".join(parts))


def content_text(content: Any) -> str:
    """A message's content as text; parts that are no text stand for themselves."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return " ".join(str(part["text"]) for part in content)
    return orjson.dumps(content).decode()


def prompts_of(value: str | list[str] | list[int] | list[list[int]]) -> Prompt | list[Prompt]:
    """The ``prompt`` field of the completions endpoint."""
    if isinstance(value, str):
        return Prompt(value)
    if all(isinstance(entry, int) for entry in value):
        return Prompt(ids=tuple(entry for entry in value if isinstance(entry, int)))
    return [
        Prompt(entry) if isinstance(entry, str) else Prompt(ids=tuple(entry))
        for entry in value
        if not isinstance(entry, int)
    ]
