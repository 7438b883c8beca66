"""What a token costs on its way from a gRPC message to a client's event: ``python -m bench.transcode``.

One stream of a thousand tokens, each in a message of its own as vLLM sends them, through a real fast tokenizer; the
messages come one by one, or some together. Shown is the best of several rounds, in microseconds of CPU per message.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from extproc.apis.request import InferenceRequest
from extproc.apis.table import APIS
from extproc.engines.frames import frame
from extproc.engines.table import engine_of
from extproc.generation.parse import parse
from extproc.text import hf
from extproc.text.tokenizer import Prepared
from extproc.transcode.transcoder import Transcoder

TOKENS: Final = 1000
ROUNDS: Final = 15
TOGETHER: Final = (1, 4, 16)
_TEXT: Final = (
    "The gateway tokenises the prompt, hands the cache of keys and values over, and streams what comes back. "
    "Ein Strom läßt sich nicht zweimal durchqueren; 川は流れる 🌊.\n\ndef serve(request):\n    return answer(request)\n"
)
CHAT: Final = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT: Final = {"prompt": "hi", "stream": True, "max_tokens": TOKENS}
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, stop strings": ("/v1/chat/completions", CHAT | {"stop": ["\n\n\n", "<|never|>"]}),
    "chat, usage in each chunk": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat, log probabilities": ("/v1/chat/completions", CHAT | {"logprobs": True}),
    "chat, 5 alternatives": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
    "completions": ("/v1/completions", TEXT),
    "completions, 5 alternatives": ("/v1/completions", TEXT | {"logprobs": 5}),
    "generate": ("/generate", {"text": "hi", "stream": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transcode", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, help="a model's directory; without it, a tokenizer is trained here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = hf.load(given.model_path or _trained(Path(directory)))
    print(f"{'µs per message':28}" + "".join(f"{together:>6} together" for together in TOGETHER))
    for name, (path, body) in CASES.items():
        costs = [_cost(tokenizer, path, body, together) for together in TOGETHER]
        print(f"{name:28}" + "".join(f"{cost:>15.2f}" for cost in costs))


def _trained(directory: Path) -> Path:
    """A byte-level tokenizer, in a model's directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([_TEXT], trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet))
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (directory / "config.json").write_text("{}")
    return directory


def _cost(tokenizer: hf.HfTokenizer, path: str, body: dict[str, Any], together: int) -> float:
    asked = parse(InferenceRequest.read(APIS[path], orjson.dumps(body)))
    prepared = Prepared("hi", tuple(tokenizer.encode("hi", special=False)))
    messages = list(_messages(tokenizer, asked.top_logprobs))
    pieces = [b"".join(messages[start : start + together]) for start in range(0, TOKENS, together)]
    best = math.inf
    for _ in range(ROUNDS):
        transcoder = Transcoder(asked, prepared, tokenizer, engine_of("vllm"), id="chatcmpl-0123", model="m", created=0)
        begun = time.process_time()
        for piece in pieces:
            transcoder.feed(piece)
        best = min(best, time.process_time() - begun)
    return best / TOKENS * 1e6


def _messages(tokenizer: hf.HfTokenizer, alternatives: int | None) -> Iterator[bytes]:
    """Frames of one token each."""
    text = tokenizer.encode(_TEXT, special=False)
    for number in range(TOKENS):
        token = text[number % len(text)]
        chunk = pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=1, completion_tokens=1)
        if alternatives is not None:
            chunk.output_logprobs.token_ids.append(token)
            chunk.output_logprobs.token_logprobs.append(-0.1234567)
            if alternatives:
                others = [text[(number + other) % len(text)] for other in range(1, alternatives)]
                top = chunk.output_logprobs.top_logprobs.add()
                top.token_ids.extend([token, *others])
                top.values.extend([-0.1234567 - 0.7654321 * other for other in range(alternatives)])
        yield frame(pb.GenerateResponse(chunk=chunk).SerializeToString())


if __name__ == "__main__":
    main()
