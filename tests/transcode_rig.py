"""A tokenizer small enough to be read, and what a Transcoder needs around it.

``data/transcode/vocabulary.json`` is the vocabulary: special tokens, then the bytes, then words and halves of
characters. It is byte-level, so a text is its tokens' bytes put together.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated.vllm_engine_pb2 import InputLogProbs, InputTokenLogProb

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.engines.engine import Engine
from extproc.engines.frames import frame
from extproc.engines.rows import prompt_logprobs_of
from extproc.engines.table import engine_of
from extproc.generation.asked import Asked, ChatPrompt
from extproc.generation.events import Complete, Usage
from extproc.generation.parse import parse
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

DATA = Path(__file__).parent / "data/transcode"
VOCABULARY = json.loads((DATA / "vocabulary.json").read_text())
TOKENS = [bytes.fromhex(token) for token in VOCABULARY["tokens"]]
SPECIAL = range(VOCABULARY["special"])
BOS, EOS, END = SPECIAL


class SmallDetokenizer:
    def __init__(self, *, skip_special: bool) -> None:
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Sequence[int]) -> str:
        kept = [one for one in ids if not (self._skip_special and one in SPECIAL)]
        return self._decoder.decode(b"".join([TOKENS[one] for one in kept if one < len(TOKENS)]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class SmallTokenizer:
    eos_ids = frozenset({EOS, END})
    vocab_size = len(TOKENS)
    context = 4096
    is_byte_level = True

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [BOS] * special + ids(*(bytes([byte]) for byte in text.encode()))

    def chat(self, prompt: ChatPrompt) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in prompt.messages)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, spaces_between: bool = True) -> str:
        whole = self.detokenizer((), skip_special=skip_special, spaces_between=spaces_between)
        return whole.add(ids) + whole.end()

    def token(self, id: int) -> tuple[str, bytes]:  # noqa: A002
        return TOKENS[id].decode(errors="replace"), TOKENS[id]

    def detokenizer(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002
        *,
        skip_special: bool = True,
        spaces_between: bool = True,  # noqa: ARG002
    ) -> SmallDetokenizer:
        return SmallDetokenizer(skip_special=skip_special)


TOKENIZER = SmallTokenizer()


def ids(*texts: str | bytes) -> list[int]:
    """The tokens that are written so."""
    return [TOKENS.index(text.encode() if isinstance(text, str) else text) for text in texts]


def asked_of(path: str, body: dict[str, Any]) -> Asked:
    return parse(InferenceRequest.read(APIS[path], json.dumps(body).encode()))


def transcoder_of(
    asked: Asked,
    prompt: Prepared = Prepared("Hello world", tuple(ids("Hello", " world"))),  # noqa: B008 - a constant
    engine: Engine | None = None,
    **more: Any,
) -> Transcoder:
    told: dict[str, Any] = {"id": "an-id", "model": "m", "created": 1700000000, **more}
    return Transcoder(asked, prompt, TOKENIZER, engine or engine_of("vllm"), **told)


def reply(messages: Sequence[Any]) -> bytes:
    """The body of a gRPC reply, of messages of protobuf or serialised ones."""
    return b"".join(frame(one if isinstance(one, bytes) else one.SerializeToString()) for one in messages)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """``data`` in pieces, none of them empty."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges) if stop > start]


def logprobs_of(tokens: Sequence[int], alternatives: int = 0) -> vllm_pb.OutputLogProbs:
    """As vLLM's server tells them: the token itself is the first of the alternatives."""
    said = vllm_pb.OutputLogProbs(token_ids=tokens, token_logprobs=[-float(token) / 8 for token in tokens])
    for token in tokens if alternatives else ():
        others = [(token + step) % len(TOKENS) for step in range(1, alternatives)]
        said.top_logprobs.add(token_ids=[token, *others], values=[-token / 8, *(-50.0 - step for step in others)])
    return said


def chunk(tokens: Sequence[int], alternatives: int | None = None) -> vllm_pb.GenerateResponse:
    """A message of vLLM's stream."""
    return vllm_pb.GenerateResponse(
        chunk=vllm_pb.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=2,
            completion_tokens=len(tokens),
            cached_tokens=2,
            output_logprobs=None if alternatives is None else logprobs_of(tokens, alternatives),
        )
    )


def complete(
    tokens: Sequence[int], finish: str = "length", alternatives: int | None = None, **more: Any
) -> vllm_pb.GenerateResponse:
    """The message that ends a sequence."""
    return vllm_pb.GenerateResponse(
        complete=vllm_pb.GenerateComplete(
            output_ids=tokens,
            finish_reason=finish,
            prompt_tokens=2,
            completion_tokens=len(tokens),
            cached_tokens=2,
            output_logprobs=None if alternatives is None else logprobs_of(tokens, alternatives),
            **more,
        )
    )


def stream_of(
    steps: Sequence[Sequence[int]], finish: str = "length", alternatives: int | None = None, **more: Any
) -> list[vllm_pb.GenerateResponse]:
    """A stream's messages, the last tokens repeated at its end."""
    return [
        *(chunk(step, alternatives) for step in steps),
        complete(steps[-1] if steps else (), finish, alternatives, **more),
    ]


def prefill_of(prompt: Sequence[int], *, cached: int = 1, logprobs: bool = False) -> Complete:
    """What a prefill says of ``prompt``: the logprob of its token N is -N/8."""
    values = [InputTokenLogProb() if not at else InputTokenLogProb(value=-one / 8) for at, one in enumerate(prompt)]
    said = InputLogProbs(
        token_ids=prompt,
        token_logprobs=values,
        top_logprobs=[vllm_pb.TopLogProbs(token_ids=[one], values=[-one / 8]) for one in prompt],
    )
    return Complete(
        (0,), "length", None, None, Usage(len(prompt), 1, cached), prompt_logprobs_of(said) if logprobs else None
    )
