"""The SGLang mock beside answers recorded from a real prefill, decode and aggregated worker: the same but for values.

``data/mock/sglang-0.5.23.json`` holds requests (without the fields that lead to a room), and each worker's status,
header names and body.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from extproc.mock import SglangMock
from tests.mock_client import ask

CASES = json.loads((Path(__file__).parent / "data" / "mock" / "sglang-0.5.23.json").read_text())
Shape = Any


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
async def test_shape_is_the_engines(case: dict[str, Any]) -> None:
    async with SglangMock("prefill") as prefill, SglangMock("decode") as decode, SglangMock("regular") as regular:
        port = prefill.bootstrap_port
        paired = {**case["request"], "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 5}
        answers = await asyncio.gather(
            ask(prefill, case["path"], paired),
            ask(decode, case["path"], paired),
            ask(regular, case["path"], case["request"]),
        )
    for role, answer in zip(("prefill", "decode", "regular"), answers, strict=True):
        expected = case["answers"][role]
        assert answer.status == expected["status"]
        assert list(answer.headers) == expected["headers"]
        assert body_shape(answer.body.decode()) == body_shape(expected["body"])


def body_shape(body: str) -> Shape:
    """A body without its values; of a stream, the kinds of events for each index in their order, repetitions once."""
    if not body.startswith(("data: ", "event: ")):
        return shape(json.loads(body))
    streams: dict[Any, list[Shape]] = {}
    for event in body.strip().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        parsed = data if data == "[DONE]" else json.loads(data)
        entry = [name, parsed if data == "[DONE]" else shape(parsed)]
        stream = streams.setdefault(_index(parsed), [])
        if entry not in stream[-1:]:
            stream.append(entry)
    return streams


def _index(data: Any) -> Any:
    if not isinstance(data, dict):
        return None
    if data.get("choices"):
        return data["choices"][0]["index"]
    return data.get("index")


def shape(value: Any, name: str = "") -> Shape:
    """Keys in their order, types at the ends; a list's items once each."""
    if name == "cached_tokens_details":
        return "a dict where something was cached"
    if isinstance(value, dict):
        if name == "top_logprobs":
            return {"token": "float"}
        return [(key, shape(entry, key)) for key, entry in value.items()]
    if isinstance(value, list):
        kinds: list[Shape] = []
        for entry in value:
            kind = shape(entry, name)
            if kind not in kinds:
                kinds.append(kind)
        return kinds
    return type(value).__name__


def test_shapes_tell_answers_apart() -> None:
    stream = 'data: {"index":0,"a":1}\n\ndata: {"index":0,"a":2}\n\ndata: [DONE]\n\n'
    assert body_shape(stream) != body_shape(stream.replace('"a":2', '"a":null'))
    assert body_shape(stream) == body_shape(stream.replace('"a":2', '"a":3'))
    assert body_shape('{"a":1,"b":2}') != body_shape('{"b":1,"a":2}')
