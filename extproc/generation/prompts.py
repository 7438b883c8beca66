"""Prompts that are not a chat: texts, or token ids, one or several."""

from __future__ import annotations

from typing import Any

from extproc.errors import GatewayError
from extproc.generation import values
from extproc.generation.asked import Prompt
from extproc.generation.values import LARGEST_ID


def prompts_of(value: Any, name: str) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts of a field that may hold a text, token ids, or a list of either; and whether it holds a list.

    Raises GatewayError.
    """
    if isinstance(value, str):
        return (_text(value, name),), False
    if not isinstance(value, list):
        values.wrong(name, "a string, a list of token ids, or a list of these")
    if not value:
        raise GatewayError("invalid_value", f"`{name}` must not be empty", param=name)
    first = value[0]
    if isinstance(first, str):
        return tuple(_text(item, name) for item in value), True
    if isinstance(first, list):
        return tuple(ids_of(item, name) for item in value), True
    return (ids_of(value, name),), False


def ids_of(value: Any, name: str) -> tuple[int, ...]:
    """A prompt of token ids. (Checked in C: 2 ms for 50,000.) Raises GatewayError."""
    if not isinstance(value, list):
        values.wrong(name, "made of lists of token ids throughout")
    if not value:
        raise GatewayError("invalid_value", f"`{name}` must not have an empty prompt", param=name)
    if set(map(type, value)) != {int}:
        value = [values.integer(item, name) for item in value]
    if min(value) < 0 or max(value) > LARGEST_ID:
        values.wrong(name, f"made of token ids of 0 to {LARGEST_ID}")
    return tuple(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        values.wrong(name, "made of strings throughout")
    if not value:
        raise GatewayError("invalid_value", f"`{name}` must not have an empty prompt", param=name)
    return value
