"""vLLM's answers made comparable: streams accumulated, and what differs between any two runs left out."""

from __future__ import annotations

import json
import math
from typing import Any

from sglang_answers import events

# What differs between any two runs of one request, or any two servers.
RUN = {"id", "request_id", "created", "system_fingerprint"}


def without_run(value: Any) -> Any:
    """``value`` without what differs between runs; floats rounded, as batches differ in their last digits."""
    if isinstance(value, dict):
        return {key: without_run(one) for key, one in value.items() if key not in RUN}
    if isinstance(value, list):
        return [without_run(one) for one in value]
    return round(value, 3) if isinstance(value, float) and math.isfinite(value) else value


def chunks(stream: bytes | str) -> list[Any]:
    """A stream's chunks."""
    return [without_run(chunk) for chunk in events(stream)]


def accumulated(stream: bytes | str) -> dict[int | None, Any]:
    """What a client has at the end of a stream, by choice (None: what has none), however it was cut into chunks.

    Texts and lists are joined. Of anything else the last value counts, but that a null takes nothing back.
    """
    states: dict[int | None, Any] = {}
    for chunk in chunks(stream):
        choices = chunk.pop("choices")
        choice = choices[0] if choices else {"index": None}
        _add(states.setdefault(choice["index"], {}), chunk | choice)
    return states


def _add(state: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        old = state.get(key)
        if old is None or (isinstance(value, dict) and key == "usage"):
            state[key] = value
        elif isinstance(value, dict):
            _add(old, value)
        elif isinstance(value, list) or key in {"content", "text"}:
            state[key] = old + value
        elif value is not None:
            state[key] = value


def comparable(answer: bytes | str, *, stream: bool) -> Any:
    """What two answers to one request have in common."""
    return accumulated(answer) if stream else without_run(json.loads(answer))
