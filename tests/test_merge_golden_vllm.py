"""Real answers of both legs, recorded from vLLM 0.32 with NIXL, merge to what the aggregated server answered."""

from __future__ import annotations

import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from sglang_answers import events
from vllm_answers import chunks, comparable

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.merge.answer import JoinedAnswer, joined_answer
from extproc.merge.parts import Joint, joint_of

RECORDINGS = sorted((Path(__file__).parent / "data/merge_vllm").glob("*.json"))


def recording(name: str) -> Any:
    return json.loads((Path(__file__).parent / f"data/merge_vllm/{name}.json").read_text())


def request_of(recorded: Any) -> tuple[InferenceRequest, Joint]:
    request = InferenceRequest.read(APIS[recorded["path"]], json.dumps(recorded["request"]).encode())
    return request, joint_of(request, "vllm")


def answer_of(recorded: Any, order: int = 1) -> bytes:
    """Feed a recording's legs, each whole, one after the other."""
    answer = joined_answer(*request_of(recorded))
    out = b""
    for part, legs in list(enumerate(recorded["legs"]))[::order]:
        out += answer.prefill_done(part, legs["prefill"].encode())
        out += answer.decode_data(part, legs["decode"].encode())
        out += answer.decode_done(part)
    assert answer.complete
    return out


@pytest.mark.parametrize("order", [1, -1], ids=["in_order", "reversed"])
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_merged_equals_aggregated(path: Path, order: int) -> None:
    recorded = json.loads(path.read_text())
    merged = answer_of(recorded, order)
    stream = recorded["request"].get("stream", False)
    assert comparable(merged, stream=stream) == comparable(recorded["aggregated"], stream=stream)


@pytest.mark.parametrize(
    "name", ["one_echo_logprobs_stream", "one_echo_logprobs_unicode_stream", "chat_prompt_logprobs_zero_stream"]
)
def test_an_echo_comes_chunk_by_chunk_as_aggregated(name: str) -> None:
    recorded = recording(name)
    assert chunks(answer_of(recorded)) == chunks(recorded["aggregated"])


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_there_is_a_part_for_each_pair_of_legs(path: Path) -> None:
    recorded = json.loads(path.read_text())
    _, joint = request_of(recorded)
    assert joint.parts == len(recorded["legs"])


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_where_the_cache_is_stays_untold(path: Path) -> None:
    merged = answer_of(json.loads(path.read_text()))
    for secret in (b"remote_block_ids", b"remote_engine_id", b"remote_host", b"do_remote"):
        assert secret not in merged


def test_recordings_are_there() -> None:
    assert len(RECORDINGS) >= 30


def test_a_merged_stream_has_one_id_and_one_created() -> None:
    chunks = events(answer_of(recording("list_stream_usage")))
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("name", ["list", "list_echo_logprobs", "list_stream_usage", "list_echo_logprobs_stream"])
def test_the_id_is_the_requests_whichever_prompt_is_answered_first(name: str, order: tuple[int, ...]) -> None:
    recorded = recording(name)
    answer = joined_answer(*request_of(recorded))
    out = b""
    for part in [part for part in order if part < len(recorded["legs"])]:
        named = f'"id":"cmpl-one-1-{part}"' if part else '"id":"cmpl-one-1"'
        prefill, decode = (re.sub('"id":"[^"]*"', named, recorded["legs"][part][leg]) for leg in ("prefill", "decode"))
        out += answer.prefill_done(part, prefill.encode())
        out += answer.decode_data(part, decode.encode())
        out += answer.decode_done(part)
    assert answer.complete
    whole = events(out) if recorded["request"].get("stream") else [json.loads(out)]
    assert {one["id"] for one in whole} == {"cmpl-one-1"}


def feed_decode(answer: JoinedAnswer, recorded: Any, part: int) -> bytes:
    """Feed a part's whole decode stream."""
    return answer.decode_data(part, recorded["legs"][part]["decode"].encode())


def test_a_stream_of_prompts_is_passed_on_at_once_and_ends_with_the_last_one() -> None:
    recorded = recording("list_stream_usage")
    answer = joined_answer(*request_of(recorded))
    out = feed_decode(answer, recorded, 1)
    assert b'"index":1' in out
    assert b"prompt_tokens" not in out
    assert b"[DONE]" not in out
    feed_decode(answer, recorded, 2)
    assert not answer.complete
    out = feed_decode(answer, recorded, 0)
    assert answer.complete
    assert out.endswith(b"data: [DONE]\n\n")
    usages = [json.loads(leg["decode"].split("data: ")[-2])["usage"] for leg in recorded["legs"]]
    assert events(out)[-1]["usage"]["total_tokens"] == sum(usage["total_tokens"] for usage in usages)


def test_an_echo_holds_a_stream_until_the_prefill_answered() -> None:
    recorded = recording("one_echo_logprobs_stream")
    answer = joined_answer(*request_of(recorded))
    assert answer.needs_prefill
    assert feed_decode(answer, recorded, 0) == b""
    assert not answer.complete
    out = answer.prefill_done(0, recorded["legs"][0]["prefill"].encode())
    assert answer.complete
    assert events(out)[0]["choices"][0]["text"].startswith(recorded["request"]["prompt"])


def test_numbers_stay_the_workers_bytes() -> None:
    recorded = recording("chat_prompt_logprobs")
    known = json.loads(recorded["legs"][0]["prefill"])["prompt_logprobs"][1]
    number = str(next(iter(known.values()))["logprob"])
    exact = "-1.00000000000000000001e-7"
    recorded["legs"][0]["prefill"] = recorded["legs"][0]["prefill"].replace(number, exact)
    assert exact.encode() in answer_of(recorded)
