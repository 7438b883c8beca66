"""What real servers answered, read: vLLM 0.32 (NIXL) and SGLang 0.5.23 with smg-grpc-servicer 0.14.1, of a tiny model.

The prompt was 20 token ids, 5 to 24, at temperature 0: whole (3 tokens), streamed, and with log probabilities of 2
alternatives, of the prompt too (2 tokens). Each answer is the messages of both legs, in hexadecimal.
"""

import json
from pathlib import Path

import pytest

from extproc.engines.frames import frame
from extproc.engines.table import engine_of
from extproc.generation.asked import Generation
from extproc.generation.events import Complete, Tokens
from extproc.generation.sampling import Sampling
from extproc.handoff.grpc_rooms import sglang_rooms
from extproc.handoff.grpc_vllm import nixl
from extproc.handoff.handoff import Kv, Plan

RECORDED = json.loads((Path(__file__).parent / "data/rpc_answers.json").read_text())
IDS = [2256, 821, 1500]
PROMPT = list(range(5, 25))
both = pytest.mark.parametrize("runtime", ["sglang", "vllm"])


def events(runtime, case, leg):
    return [engine_of(runtime).event(bytes.fromhex(message)) for message in RECORDED[runtime][case][leg]]


def body(runtime, case, leg="prefill"):
    return b"".join(frame(bytes.fromhex(message)) for message in RECORDED[runtime][case][leg])


@both
def test_a_whole_answer_is_one_message(runtime):
    (found,) = events(runtime, "whole", "decode")
    assert isinstance(found, Complete)
    assert (list(found.ids), found.finish, found.matched) == (IDS, "length", None)
    assert (found.usage.prompt, found.usage.completion) == (20, 3)


@both
def test_a_stream_is_deltas_and_its_end_repeats_the_last(runtime):
    *tokens, last = events(runtime, "streamed", "decode")
    assert all(isinstance(event, Tokens) for event in tokens)
    assert [list(event.ids) for event in tokens] == [[token] for token in IDS]
    assert isinstance(last, Complete)
    assert list(last.ids) == IDS[-1:]
    counts = [event.usage.completion for event in (*tokens, last)]
    assert counts == ([1, 2, 3, 3] if runtime == "sglang" else [1, 1, 1, 1])


@both
@pytest.mark.parametrize("case", ["whole", "streamed", "logprobs"])
def test_a_prefill_answers_with_one_message_that_is_an_end(runtime, case):
    handoff = sglang_rooms() if runtime == "sglang" else nixl()
    (found,) = events(runtime, case, "prefill")
    assert isinstance(found, Complete)
    assert (list(found.ids), found.usage.prompt) == (IDS[:1], 20)
    assert not handoff.failed(body(runtime, case))


@both
def test_log_probabilities(runtime):
    (found,) = events(runtime, "logprobs", "decode")
    assert found.prompt_logprobs is None
    assert list(found.logprobs.ids) == IDS[:2]
    assert [round(value, 3) for value in found.logprobs.values] == [-4.895, -4.530]
    assert [list(ids) for ids, _ in found.logprobs.tops] == [[2256, 1064], [821, 429]]


@both
def test_log_probabilities_of_the_prompt_are_the_prefills(runtime):
    (found,) = events(runtime, "logprobs", "prefill")
    rows = found.prompt_logprobs
    assert list(rows.ids) == PROMPT
    assert (rows.values[0], round(rows.values[1], 3)) == (None, -8.733)
    assert len(rows.tops) == len(PROMPT)
    assert not rows.tops[0][0]
    # vLLM's server counts the token itself among the alternatives.
    assert list(rows.tops[1][0]) == ([1181, 3352] if runtime == "sglang" else [6, 1181])


def test_what_nixl_told_is_handed_on_letter_by_letter():
    (found,) = events("vllm", "whole", "prefill")
    generation = Generation(PROMPT, Sampling(), "r")
    handed = nixl().handed(generation, Plan(b"", b"", names=("n",)), body("vllm", "whole"))
    assert handed.kv is Kv.HANDED
    assert handed.params == found.kv_params
    assert {"remote_engine_id", "remote_block_ids", "transfer_mode"} <= json.loads(handed.params).keys()
