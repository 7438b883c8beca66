"""SGLang's answers made comparable: streams accumulated, and what differs between any two runs left out."""

from __future__ import annotations

import json
import math
from typing import Any

from extproc.merge.sse import DONE, EventSplitter

# What differs between any two runs of one request.
RUN = {
    "id",
    "created",
    "e2e_latency",
    "response_sent_to_client_ts",
    # The aggregated server reads the prompt once more, as a warm-up, before it samples it n times.
    "cached_tokens",
    "cached_tokens_details",
}


def without_run(value: Any) -> Any:
    """``value`` without what differs between runs; floats rounded, as batches differ in their last digits."""
    if isinstance(value, dict):
        return {key: without_run(one) for key, one in value.items() if key not in RUN}
    if isinstance(value, list):
        return [without_run(one) for one in value]
    return round(value, 3) if isinstance(value, float) and math.isfinite(value) else value


def events(stream: bytes | str) -> list[Any]:
    """The JSON of a stream's events; the last one must be [DONE], and no other."""
    found = EventSplitter().feed(stream if isinstance(stream, bytes) else stream.encode())
    assert [event.data for event in found].index(DONE) == len(found) - 1
    return [json.loads(event.data or b"") for event in found[:-1]]


def accumulated(stream: bytes | str) -> Any:
    """What a client has at the end of a stream, by choice (or item), however it was cut into chunks.

    Texts and logprobs of OpenAI chunks are joined; of ``/generate``, whose chunks are cumulative, the last one counts.
    """
    choices: dict[int, Any] = {}
    once: list[Any] = []
    for chunk in events(stream):
        if "choices" not in chunk:
            choices[chunk.get("index", 0)] = without_run(chunk)
            continue
        if not chunk["choices"]:
            once.append(without_run(chunk))
        for choice in chunk["choices"]:
            state = choices.setdefault(choice["index"], {})
            _add(state, without_run(choice | choice.pop("delta", {})))
    return {"choices": choices, "once": once}


def _add(state: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        old = state.get(key)
        if old is None:
            state[key] = value
        elif isinstance(value, dict):
            _add(old, value)
        elif isinstance(value, list) or (isinstance(value, str) and key in {"content", "text", "reasoning_content"}):
            state[key] = old + value
