"""What real servers answered over gRPC (test_engines_recorded.py), transcoded: the same answer of both engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sglang_answers import events
from transcode_rig import SmallDetokenizer, SmallTokenizer, asked_of, reply

from extproc.engines.table import engine_of
from extproc.generation.events import Complete
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

RECORDED = json.loads((Path(__file__).parent / "data/rpc_answers.json").read_text())
PROMPT = Prepared("", tuple(range(5, 25)))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
both = pytest.mark.parametrize("runtime", ["sglang", "vllm"])


class Numbers(SmallTokenizer):
    """Any id's text is its number."""

    vocab_size = 4096

    def token(self, id: int) -> tuple[str, bytes]:  # noqa: A002
        return f" {id}", b" %d" % id

    def detokenizer(self, prompt_ids: Sequence[int], **_: bool) -> NumbersDetokenizer:  # noqa: ARG002
        return NumbersDetokenizer(skip_special=False)


class NumbersDetokenizer(SmallDetokenizer):
    def add(self, ids: Sequence[int]) -> str:
        return "".join(f" {one}" for one in ids)


def answer(runtime: str, case: str, path: str, body: dict[str, Any]) -> bytes:
    engine, recorded = engine_of(runtime), RECORDED[runtime][case]
    asked = asked_of(path, body)
    transcoder = Transcoder(asked, PROMPT, Numbers(), engine, id="an-id", model="m", created=0)
    prefill = engine.event(bytes.fromhex(recorded["prefill"][0]))
    assert isinstance(prefill, Complete)
    transcoder.prefilled(prefill)
    out = b"".join(transcoder.feed(reply([bytes.fromhex(message)])) for message in recorded["decode"])
    return out + transcoder.end(0)


@both
def test_a_whole_answer(runtime: str) -> None:
    said = json.loads(answer(runtime, "whole", "/v1/chat/completions", CHAT))
    assert said["choices"][0]["message"]["content"] == " 2256 821 1500"
    assert said["choices"][0]["finish_reason"] == "length"
    assert (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]) == (20, 3)


@both
def test_a_stream(runtime: str) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    said = events(answer(runtime, "streamed", "/v1/chat/completions", body))
    deltas = [one["choices"][0]["delta"]["content"] for one in said if one["choices"]]
    assert deltas == ["", " 2256", " 821", " 1500", ""]
    assert said[-2]["choices"][0]["finish_reason"] == "length"
    assert said[-1]["usage"]["total_tokens"] == 23


@both
def test_log_probabilities_of_both_legs(runtime: str) -> None:
    body = {"prompt": list(PROMPT.ids), "logprobs": 2, "echo": True, "max_tokens": 2}
    (choice,) = json.loads(answer(runtime, "logprobs", "/v1/completions", body))["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == [f" {token}" for token in (*PROMPT.ids, 2256, 821)]
    assert told["token_logprobs"][0] is None
    assert [round(value, 3) for value in told["token_logprobs"][-2:]] == [-4.895, -4.530]
    assert [list(row) for row in told["top_logprobs"][-2:]] == [[" 2256", " 1064"], [" 821", " 429"]]
    # vLLM's server counts the prompt's token among the two alternatives.
    assert list(told["top_logprobs"][1]) == [" 6", " 1181", *([" 3352"] if runtime == "sglang" else [])]
    assert choice["text"] == "".join(told["tokens"])
    assert [choice["text"][offset:].split()[0] for offset in told["text_offset"]] == choice["text"].split()


@both
def test_generate(runtime: str) -> None:
    body = {"input_ids": list(PROMPT.ids), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = json.loads(answer(runtime, "logprobs", "/generate", body))["meta_info"]
    assert [row[1] for row in meta["input_token_logprobs"]] == list(PROMPT.ids)
    assert [len(row or ()) for row in meta["input_top_logprobs"]] == [0, *(2 for _ in PROMPT.ids[1:])]
    assert [row[1] for row in meta["output_token_logprobs"]] == [2256, 821]
    assert meta["finish_reason"] == {"type": "length", "length": 2}
