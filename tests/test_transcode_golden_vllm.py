"""What vLLM 0.32's gRPC server says becomes what its OpenAI server says of the same tokens.

``data/transcode/vllm-0.32.0.json`` was recorded from vLLM's own code: the outputs of an engine, by hand, went through
its output processor once for the OpenAI server (``answer``), and once per leg for smg-grpc-servicer 0.14.1.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_answers import events
from transcode_rig import DATA, asked_of, reply, transcoder_of

from extproc.engines.table import engine_of
from extproc.generation.events import Complete
from extproc.text.tokenizer import Prepared

RECORDED = json.loads((DATA / "vllm-0.32.0.json").read_text())
NAMES = [recorded["name"] for recorded in RECORDED]
ENGINE = engine_of("vllm")
# An echo alone has no completion tokens, though an engine makes one.
OWN_USAGE = ("echo_alone",)
# Here an offset is one into the text, whatever a token is called, and whether it is part of the text.
OWN_OFFSETS = ("as_ids", "logprobs_ids", "bos")


def answer_of(recorded: Any, *, pieces: bool) -> bytes:
    """The transcoded answer; ``pieces``: each message comes alone, but for the two that end a stream."""
    prompt = Prepared(recorded["prompt"]["text"], tuple(recorded["prompt"]["ids"]))
    transcoder = transcoder_of(asked_of(recorded["path"], recorded["request"]), prompt, id=recorded["id"])
    prefill = ENGINE.event(bytes.fromhex(recorded["prefill"][-1]))
    assert isinstance(prefill, Complete)
    transcoder.prefilled(prefill)
    messages = [bytes.fromhex(message) for message in recorded["decode"]]
    parts = [*([message] for message in messages[:-2]), messages[-2:]] if pieces else [messages]
    out = b"".join(transcoder.feed(reply(part)) for part in parts) + transcoder.end(0)
    assert transcoder.complete
    assert transcoder.failed is None
    return out


def comparable(value: Any, name: str) -> Any:
    """``value`` without what differs: when it was made, ranks, which gRPC does not tell, and halves of characters."""
    if isinstance(value, list):
        return [comparable(one, name) for one in value]
    if not isinstance(value, dict):
        return value
    left_out = {"created", "rank", "bytes"}
    if any(own in name for own in OWN_OFFSETS):
        left_out.add("text_offset")
    if any(own in name for own in OWN_USAGE):
        left_out |= {"completion_tokens", "total_tokens"}
    kept = {key: comparable(one, name) for key, one in value.items() if key not in left_out}
    if "cached_tokens" in kept:
        kept = {key: one for key, one in kept.items() if one is not None}
    return kept


def says_something(chunk: Any) -> bool:
    """vLLM sends chunks that say nothing where text is held back."""
    for choice in chunk["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        return bool(
            delta["content"] or "role" in delta or choice["finish_reason"] or choice["logprobs"] or choice["token_ids"]
            or "usage" in chunk
        )  # fmt: skip
    return True


def chunks(stream: bytes | str, name: str) -> list[Any]:
    return [comparable(chunk, name) for chunk in events(stream) if says_something(chunk)]


def joined(found: list[Any]) -> list[Any]:
    """The same whatever the text was cut into."""
    texts = [
        "".join(str((choice.get("delta") or {"content": choice.get("text")})["content"]) for choice in chunk["choices"])
        for chunk in found
    ]
    last = [chunk for chunk in found if any(choice["finish_reason"] for choice in chunk["choices"])]
    for choice in last[0]["choices"]:
        choice["delta"] = choice["text"] = None
    return ["".join(texts), last, [chunk for chunk in found if not chunk["choices"]]]


def raw_bytes(value: Any) -> list[int]:
    """All bytes of the tokens of chat's log probabilities, in order."""
    if isinstance(value, list):
        return [byte for one in value for byte in raw_bytes(one)]
    if not isinstance(value, dict):
        return []
    own = value.get("bytes") if "top_logprobs" in value else None
    return [*(own or []), *(byte for key, one in value.items() if key != "top_logprobs" for byte in raw_bytes(one))]


@pytest.mark.parametrize("recorded", RECORDED, ids=NAMES)
def test_it_answers_as_vllms_own_server(recorded: Any) -> None:
    name, expected = recorded["name"], recorded["answer"]
    answer = answer_of(recorded, pieces=True)
    if not recorded["request"]["stream"]:
        assert comparable(json.loads(answer), name) == comparable(json.loads(expected), name)
        return
    found, wanted = chunks(answer, name), chunks(expected, name)
    if "stop_string" in name:  # vLLM holds back as many characters as the longest stop string has
        found, wanted = joined(found), joined(wanted)
    assert found == wanted


@pytest.mark.parametrize(
    "recorded", [one for one in RECORDED if "chat_logprobs" in one["name"]], ids=lambda one: one["name"]
)
def test_the_bytes_of_all_tokens_are_those_of_vllms(recorded: Any) -> None:
    whole = [
        [json.loads(text)] if not recorded["request"]["stream"] else events(text)
        for text in (answer_of(recorded, pieces=True), recorded["answer"])
    ]
    assert raw_bytes(whole[0]) == raw_bytes(whole[1])
    assert raw_bytes(whole[0])
