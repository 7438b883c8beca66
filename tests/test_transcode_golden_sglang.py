"""What SGLang's gRPC server would say of recorded sequences becomes what its HTTP server said: ``/generate``.

The recordings (``data/sglang``) are of an aggregated 0.5.23. Their tokens and log probabilities are put into the
messages that smg-grpc-servicer 0.14.1 makes of them, one token each; of several sequences the answers are merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sglang_answers import events, without_run
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from transcode_rig import SmallDetokenizer, SmallTokenizer, reply

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.engines.table import engine_of
from extproc.generation.events import Complete
from extproc.generation.parse import parse
from extproc.merge.sequences import sequences_answer
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

ENGINE = engine_of("sglang")
# gRPC workers serve neither chosen token ids, nor flat arrays, nor log probabilities of some prompts only.
NOT_SERVED = {"generate_logprobs_flat", "generate_logprobs_batch_mixed"}
PATHS = sorted(Path(__file__).parent.glob("data/sglang/generate_*.json"))
RECORDED = {path.stem: json.loads(path.read_text()) for path in PATHS if path.stem not in NOT_SERVED}
HALF = b"\xc3"  # what was recorded as U+FFFD, and held back until the next token


def texts(value: Any) -> Iterator[tuple[int, str]]:
    """Tokens and their texts, wherever log probabilities show both."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[2], str):
        yield value[1], value[2]
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts(one)


def items(recorded: Any) -> list[Any]:
    """The recorded answer, sequence by sequence: of a stream, what each one had become at its end."""
    if recorded["request"].get("stream"):
        last = {chunk.get("index", 0): chunk for chunk in events(recorded["aggregated"])}
        return [last[index] for index in sorted(last)]
    answer = json.loads(recorded["aggregated"])
    return answer if isinstance(answer, list) else [answer]


TEXTS = dict(texts([items(recorded) for recorded in RECORDED.values()]))
BYTES = {token: HALF if text == "\ufffd" else text.encode() for token, text in TEXTS.items()}


class RecordedDetokenizer(SmallDetokenizer):
    def add(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([BYTES[one] for one in ids]))


class RecordedTokenizer(SmallTokenizer):
    eos_ids = frozenset()
    vocab_size = 4096

    def token(self, id: int) -> tuple[str, bytes]:  # noqa: A002
        return TEXTS[id], BYTES[id]

    def detokenizer(self, prompt_ids: Sequence[int], **_: bool) -> RecordedDetokenizer:  # noqa: ARG002
        return RecordedDetokenizer(skip_special=False)


def top(row: Any) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[one[0] for one in row or []], token_ids=[one[1] for one in row or []])


def output_logprobs(meta: Any, tokens: slice) -> pb.OutputLogProbs | None:
    if "output_token_logprobs" not in meta:
        return None
    rows = meta["output_token_logprobs"][tokens]
    tops = meta.get("output_top_logprobs", [])[tokens]
    return pb.OutputLogProbs(
        token_logprobs=[row[0] for row in rows], token_ids=[row[1] for row in rows], top_logprobs=map(top, tops)
    )


def input_logprobs(meta: Any) -> pb.InputLogProbs | None:
    rows = meta.get("input_token_logprobs")
    if not rows:
        return None
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb() if row[0] is None else pb.InputTokenLogProb(value=row[0]) for row in rows
        ],
        token_ids=[row[1] for row in rows],
        top_logprobs=map(top, meta.get("input_top_logprobs", [])),
    )


def ending(item: Any, tokens: slice, **more: Any) -> pb.GenerateResponse:
    meta = item["meta_info"]
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=item["output_ids"][tokens],
            finish_reason=meta["finish_reason"]["type"],
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=len(item["output_ids"]),
            output_logprobs=output_logprobs(meta, tokens),
            **more,
        )
    )


def decode_replies(item: Any, *, stream: bool) -> list[bytes]:
    """The decode's reply in pieces: a message each, but that the two that end a stream come together."""
    if not stream:
        return [reply([ending(item, slice(None))])]
    chunks = [
        pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=[token],
                prompt_tokens=item["meta_info"]["prompt_tokens"],
                completion_tokens=at + 1,
                output_logprobs=output_logprobs(item["meta_info"], slice(at, at + 1)),
            )
        )
        for at, token in enumerate(item["output_ids"])
    ]
    last = ending(item, slice(-1, None))
    return [*(reply([chunk]) for chunk in chunks[:-1]), reply([chunks[-1], last])]


def told(answer: Any) -> Any:
    """What gRPC can tell of a recorded answer."""
    if isinstance(answer, list):
        return [told(one) for one in answer]
    meta = answer["meta_info"]
    kept = {key: value for key, value in meta.items() if not key.endswith("_token_ids_logprobs")}
    if not meta["completion_tokens"]:
        kept["output_top_logprobs"] = []  # those of a token that is not told
    return without_run(answer | {"meta_info": kept})


@pytest.mark.parametrize("name", RECORDED)
def test_it_answers_as_sglangs_own_server(name: str) -> None:
    recorded = RECORDED[name]
    body = {key: value for key, value in recorded["request"].items() if key != "token_ids_logprob"}
    request = InferenceRequest.read(APIS["/generate"], json.dumps(body).encode())
    asked, found = parse(request), items(recorded)
    joined = sequences_answer(request, len(found), asked.samples, batched=asked.batched)
    out = b""
    for part, item in enumerate(found):
        prompt = Prepared("", tuple(range(item["meta_info"]["prompt_tokens"])))
        transcoder = Transcoder(
            asked, prompt, RecordedTokenizer(), ENGINE, id="an-id", model="m", created=0, now=lambda: 1.0
        )
        prefill = ENGINE.event(
            ending(item, slice(0, 1), input_logprobs=input_logprobs(item["meta_info"])).SerializeToString()
        )
        assert isinstance(prefill, Complete)
        transcoder.prefilled(prefill)
        for piece in decode_replies(item, stream=asked.stream):
            out += joined.decode_data(part, transcoder.feed(piece))
        out += joined.decode_data(part, transcoder.end(0)) + joined.decode_done(part)
    assert joined.complete
    if not asked.stream:
        assert told(without_run(json.loads(out))) == told(json.loads(recorded["aggregated"]))
        assert keys(json.loads(out)) == keys(json.loads(recorded["aggregated"]))
        return
    in_order = [
        sorted(events(stream), key=lambda chunk: chunk.get("index", 0)) for stream in (out, recorded["aggregated"])
    ]
    assert [told(chunk) for chunk in in_order[0]] == [told(chunk) for chunk in in_order[1]]


def keys(answer: Any) -> Any:
    """The names of all members, those of chosen token ids left out."""
    if isinstance(answer, list):
        return [keys(one) for one in answer]
    return set(answer), {key for key in answer["meta_info"] if not key.endswith("_token_ids_logprobs")}
