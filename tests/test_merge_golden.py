"""Real answers of both legs, recorded from SGLang, merge to what the aggregated server answered to the same request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_answers import accumulated, events, without_run

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.merge.answer import JoinedAnswer, joined_answer

RECORDINGS = sorted((Path(__file__).parent / "data/sglang").glob("*.json"))


def recording(name: str) -> Any:
    return json.loads((Path(__file__).parent / f"data/sglang/{name}.json").read_text())


def request_of(recorded: Any) -> InferenceRequest:
    return InferenceRequest.read(APIS[recorded["path"]], json.dumps(recorded["request"]).encode())


def answer_of(recorded: Any) -> bytes:
    """Feed a recording's legs, each whole, one after the other."""
    answer = joined_answer(request_of(recorded))
    out = b""
    for sample, legs in enumerate(recorded["legs"]):
        out += answer.decode_data(sample, legs["decode"].encode())
        out += answer.prefill_done(sample, legs["prefill"].encode())
        out += answer.decode_done(sample)
    assert answer.complete
    return out


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_merged_equals_aggregated(path: Path) -> None:
    recorded = json.loads(path.read_text())
    merged = answer_of(recorded)
    if recorded["request"].get("stream"):
        assert accumulated(merged) == accumulated(recorded["aggregated"])
    else:
        assert without_run(json.loads(merged)) == without_run(json.loads(recorded["aggregated"]))


def test_recordings_are_there() -> None:
    assert len(RECORDINGS) >= 30


def test_a_merged_stream_has_one_id_and_one_created() -> None:
    chunks = events(answer_of(recording("chat_n2_stream_usage")))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1


def test_a_merged_body_has_the_first_samples_id() -> None:
    recorded = recording("chat_n2")
    merged = json.loads(answer_of(recorded))
    assert merged["id"] == json.loads(recorded["legs"][0]["decode"])["id"]


def test_numbers_stay_the_workers_bytes() -> None:
    recorded = recording("generate_logprobs")
    exact = b"-1.00000000000000000001e-7"
    recorded["legs"][0]["prefill"] = recorded["legs"][0]["prefill"].replace("-10.425992965698242", exact.decode())
    recorded["legs"][0]["decode"] = recorded["legs"][0]["decode"].replace(
        '"dp_rank":null', '"dp_rank":null,"big":123456789012345678901234567890'
    )
    merged = answer_of(recorded)
    assert exact in merged
    assert b'"big":123456789012345678901234567890' in merged


def feed_decode(answer: JoinedAnswer, recorded: Any, sample: int) -> bytes:
    return answer.decode_data(sample, recorded["legs"][sample]["decode"].encode())


def test_a_stream_of_samples_is_passed_on_at_once() -> None:
    recorded = recording("chat_n2_stream_usage")
    answer = joined_answer(request_of(recorded))
    first, rest = recorded["legs"][1]["decode"].split("\n\n", 1)
    assert (
        json.loads(answer.decode_data(1, f"{first}\n\n".encode()).removeprefix(b"data: "))["choices"][0]["index"] == 1
    )
    out = answer.decode_data(1, rest.encode())
    assert b'"finish_reason":"length"' in out
    assert b'"usage"' not in out
    assert b"[DONE]" not in out
    assert answer.decode_done(1) == b""
    assert not answer.complete
    out = feed_decode(answer, recorded, 0)
    assert answer.complete
    assert out.endswith(b"data: [DONE]\n\n")
    assert out.count(b'"usage":{"prompt_tokens":14,"total_tokens":20,"completion_tokens":6') == 1


def test_prompt_logprobs_hold_a_stream_until_the_prefill_answered() -> None:
    recorded = recording("generate_logprobs_stream")
    answer = joined_answer(request_of(recorded))
    assert answer.needs_prefill
    assert feed_decode(answer, recorded, 0) == b""
    assert answer.decode_done(0) == b""
    assert not answer.complete
    out = answer.prefill_done(0, recorded["legs"][0]["prefill"].encode())
    assert answer.complete
    assert len(events(out)) == 3
