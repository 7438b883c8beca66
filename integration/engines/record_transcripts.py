"""Record what vLLM's OpenAI server and its gRPC server say of the same tokens: ``tests/data/transcode``.

Run by the Python of an installation of vLLM with smg-grpc-servicer, as ``setup.sh`` makes it::

    DIR/venv-vllm/bin/python integration/engines/record_transcripts.py --to tests/data/transcode

There is no model: the outputs of an engine are made up here, and go through vLLM's own output processor, once for the
code that writes the OpenAI server's answers, and once per leg for the code that writes the gRPC server's messages. The
vocabulary is small, and has all that makes text difficult: halves of characters, special tokens, parts of stop strings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

SPECIAL = ["<s>", "</s>", "<|end|>"]
WORDS = ["Hello", " world", " the", " river", " runs", "ing", " to", " END", "STOP", " STO", "PED", "\n\n", " a", " b"]
WORDS += ["é", " 你", "end", "<think>", "</think>"]
HALVES = [bytes.fromhex(half) for half in ("f09f", "8c8a", "20f09f8c", "8a21", "e4bd", "a0")]
TOKENS = [
    *(text.encode() for text in SPECIAL),
    *(bytes([byte]) for byte in range(256)),
    *(word.encode() for word in WORDS),
    *(half for half in HALVES if len(half) > 1),
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CACHED = 2  # tokens of the prompt that the prefill finds in its cache
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
SERVER = {
    "enable_force_include_usage": False,
    "enable_prompt_tokens_details": True,
    "parser_cls": None,
    "enable_auto_tools": False,
    "enable_log_outputs": False,
    "request_logger": None,
    "enable_per_request_metrics": False,
    "return_tokens_as_token_ids": False,
    "response_role": "assistant",
    "system_fingerprint": None,
    "default_sampling_params": {},
    "_include_reasoning_tokens_details": False,
}


def ids(*texts: str | bytes) -> list[int]:
    return [TOKENS.index(text.encode() if isinstance(text, str) else text) for text in texts]


def steps_of(*texts: str | bytes) -> list[list[int]]:
    """One token after the other."""
    return [[token] for token in ids(*texts)]


PROMPT_TEXT = "Hello world你"
PROMPT = ids("<s>", "Hello", " world", *HALVES[4:])
PLAIN = steps_of("Hello", " world", *HALVES[:2], " the", " river")
ENDED = steps_of("Hello", *HALVES[:2], "</s>")
STOPPED = steps_of(" the", " STO", "P", "PED", " river")
ALTERNATIVES = ids("%", "J", " the", "STOP", '"', " a")


@dataclass(frozen=True)
class Case:
    """A request, and what an engine makes of it.

    Attributes:
        steps: the tokens of each step.
        finish: why the engine ends it.
        reason: the token that it says ended it.
    """

    name: str
    path: str
    request: dict[str, Any]
    steps: Sequence[Sequence[int]]
    finish: str = "length"
    reason: int | None = None
    prompt: Sequence[int] = tuple(PROMPT)

    @property
    def stream(self) -> bool:
        return bool(self.request["stream"])


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these tokens; it only has to decode."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    names = [*SPECIAL, *("".join(characters[byte] for byte in token) for token in TOKENS[len(SPECIAL) :])]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1], additional_special_tokens=SPECIAL[2:]
    )


TOKENIZER = tokenizer()


def row(token: int, at: int, most: int) -> tuple[list[int], list[float], int]:
    """A token's log probability, those of the likeliest, and its rank; every second one is not among them."""
    others = [other for other in ALTERNATIVES if other != token]
    others = others[at % 3 :] + others[: at % 3]
    tops = [(other, -1.25 - 0.37 * number) for number, other in enumerate(others)]
    own = (token, -7.3 - at * 0.01) if at % 2 else (token, -0.5 - at * 0.03)
    listed = [own, *(tops if at % 2 else [own, *tops])[:most]]
    return [one for one, _ in listed], [value for _, value in listed], 9 if at % 2 else 1


def rows(tokens: Sequence[int], start: int, most: int) -> tuple[list[Any], ...]:
    return tuple(map(list, zip(*(row(token, start + at, most) for at, token in enumerate(tokens)), strict=True)))


def output_logprobs(tokens: Sequence[int], start: int, most: int) -> LogprobsLists:
    numbers, values, ranks = rows(tokens, start, most)
    return LogprobsLists(np.array(numbers), np.array(values, dtype=np.float32), np.array(ranks))


def prompt_logprobs(prompt: Sequence[int], most: int) -> LogprobsTensors:
    numbers, values, ranks = rows(prompt[1:], 4, most)
    return LogprobsTensors(torch.tensor(numbers), torch.tensor(values, dtype=torch.float32), torch.tensor(ranks))


class PrefillStats:
    def __init__(self, cached: int) -> None:
        self.num_cached_tokens = cached
        self.num_cache_creation_tokens = None


def outputs(case: Case, params: SamplingParams, steps: Sequence[Sequence[int]], finish: str, cached: int) -> list[Any]:
    """What vLLM's output processor makes of an engine's steps."""
    processor = OutputProcessor(TOKENIZER, log_stats=False)
    prompt = list(case.prompt)
    request = EngineCoreRequest("r", prompt, None, params, None, time.time(), None, None, None, external_req_id="r")
    queue = RequestOutputCollector(params.output_kind, "r")
    processor.add_request(request, PROMPT_TEXT, queue=queue)
    found, made = [], 0
    for number, step in enumerate(steps):
        is_first, is_last = number == 0, number == len(steps) - 1
        said = EngineCoreOutput(
            "r",
            list(step),
            new_logprobs=None if params.logprobs is None else output_logprobs(step, made, params.logprobs),
            new_prompt_logprobs_tensors=prompt_logprobs(prompt, params.prompt_logprobs)
            if is_first and params.prompt_logprobs is not None
            else None,
            finish_reason=FINISH[finish] if is_last else None,
            stop_reason=case.reason if is_last and finish == "stop" else None,
            prefill_stats=PrefillStats(cached) if is_first else None,
        )
        made += len(step)
        processed = processor.process_outputs([said])
        got = queue.get_nowait()
        if got is not None:
            found.append(got)
        if processed.reqs_to_abort or (got is not None and got.finished):
            break
    return found


def serving(kind: type) -> Any:
    """A server's answering part, without the server."""
    made = object.__new__(kind)
    for name, value in SERVER.items():
        setattr(made, name, value)
    return made


async def one_by_one(items: Sequence[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def answer(case: Case, request: Any, name: str, found: list[Any]) -> str:
    """What the OpenAI server says."""
    metadata = RequestResponseMetadata(request_id=name)
    if case.path == CHAT:
        server = serving(OpenAIServingChat)
        if case.stream:
            chunks = server.chat_completion_stream_generator(
                request, one_by_one(found), name, "m", request.messages, TOKENIZER, metadata
            )
            return "".join([chunk async for chunk in chunks])
        whole = await server.chat_completion_full_generator(
            request, one_by_one(found), name, "m", request.messages, TOKENIZER, metadata
        )
    else:
        server = serving(OpenAIServingCompletion)
        if case.stream:
            prompts = [{"type": "token", "prompt_token_ids": list(case.prompt), "prompt": PROMPT_TEXT}]
            numbered = one_by_one([(0, one) for one in found])
            chunks = server.completion_stream_generator(
                request, prompts, numbered, name, 0, "m", 1, TOKENIZER, metadata
            )
            return "".join([chunk async for chunk in chunks])
        whole = server.request_output_to_completion_response(found[-1:], request, name, 0, "m", TOKENIZER, metadata)
    return json.dumps(whole.model_dump(), separators=(",", ":"), ensure_ascii=False)


def more(most: int | None, path: str) -> int | None:
    """The gRPC server counts the token itself among its alternatives, completions do not."""
    return most + 1 if most and path == COMPLETIONS else most


def decode_params(case: Case, asked: SamplingParams) -> SamplingParams:
    """As the gRPC server makes them: see ``_sampling_params_from_proto``."""
    return SamplingParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        stop=asked.stop or None,
        stop_token_ids=asked.stop_token_ids or None,
        ignore_eos=asked.ignore_eos,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        skip_special_tokens=asked.skip_special_tokens,
        logprobs=more(asked.logprobs, case.path),
        detokenize=bool(asked.stop),
        output_kind=RequestOutputKind.DELTA if case.stream else RequestOutputKind.FINAL_ONLY,
    )


def prefill_params(asked: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=more(asked.prompt_logprobs, COMPLETIONS),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def messages(params: SamplingParams, found: list[Any], *, stream: bool) -> Iterator[str]:
    """The gRPC server's messages, as its ``Generate`` sends them."""
    how: dict[str, Any] = {"num_logprobs": params.logprobs, "num_prompt_logprobs": params.prompt_logprobs}
    for number, output in enumerate(found):
        own = how | {"completion": output.outputs[0]}
        if stream:
            said = VllmEngineServicer._chunk_response(output, is_first_chunk=number == 0, **own)
            yield said.SerializeToString().hex()
        if output.finished:
            yield VllmEngineServicer._complete_response(output, **own).SerializeToString().hex()


def recorded(case: Case) -> dict[str, Any]:
    """One entry of the file."""
    name = ("chatcmpl-" if case.path == CHAT else "cmpl-") + "1"
    request = (ChatCompletionRequest if case.path == CHAT else CompletionRequest)(**case.request)
    asked = request.to_sampling_params(case.request["max_tokens"], {})
    decode, prefill = decode_params(case, asked), prefill_params(asked)
    found = outputs(case, asked, case.steps, case.finish, CACHED)
    decoded = outputs(case, decode, case.steps, case.finish, len(case.prompt))
    prefilled = outputs(case, prefill, case.steps[:1], "length", CACHED)
    return {
        "name": case.name,
        "path": case.path,
        "request": case.request,
        "prompt": {"text": PROMPT_TEXT, "ids": list(case.prompt)},
        "id": name,
        "prefill": list(messages(prefill, prefilled, stream=False)),
        "decode": list(messages(decode, decoded, stream=case.stream)),
        "answer": asyncio.run(answer(case, request, name, found)),
    }


def both(
    name: str, path: str, body: dict[str, Any], *what: Any, options: Any = None, **more_of_it: Any
) -> Iterator[Case]:
    """The same, streamed and not; ``prompt_logprobs`` are not told in a stream."""
    yield Case(name, path, body | {"stream": False}, *what, **more_of_it)
    if not body.get("prompt_logprobs"):
        streamed = {"stream": True, "stream_options": {"include_usage": True} if options is None else options}
        yield Case(f"{name}_stream", path, body | streamed, *what, **more_of_it)


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def common_cases(path: str, base: dict[str, Any], logprobs: dict[str, Any]) -> Iterator[Case]:
    """What both APIs have."""
    api = "chat" if path == CHAT else "completions"
    none = {key: 0 if key == "top_logprobs" or path == COMPLETIONS else value for key, value in logprobs.items()}

    def case(name: str, steps: Any, *how: Any, options: Any = None, **fields: Any) -> Iterator[Case]:
        return both(f"{api}_{name}", path, {**base, "max_tokens": 16, **fields}, steps, *how, options=options)

    yield from case("plain", PLAIN)
    yield from case("continuous", PLAIN, options=CONTINUOUS)
    yield from case("no_usage", PLAIN, options={})
    yield from case("one_token", steps_of("Hello"))
    yield from case("eos", ENDED, "stop")
    yield from case("eos_shown", ENDED, "stop", skip_special_tokens=False)
    yield from case("eos_included", ENDED, "stop", skip_special_tokens=False, include_stop_str_in_output=True)
    yield from case("only_eos", steps_of("</s>"), "stop", **logprobs)
    ended = steps_of(" the", " river", " END")
    yield from case("stop_token", ended, "stop", ended[-1][0], stop_token_ids=ended[-1])
    yield from case("stop_string", STOPPED, "stop", stop=["STOP", "xyz"])
    yield from case("stop_string_included", STOPPED, "stop", stop=["STOP"], include_stop_str_in_output=True)
    many = [ids(" the", " STO"), ids("P", "PED", " river"), ids(" a")]
    yield from case("stop_string_many", many, stop=["STOP"], **logprobs)
    early = steps_of(" the", " STO", "P", "PED", " river", "STOP", " a")
    yield from case("stop_string_early", early, stop=["STO"], min_tokens=4)
    yield from case("stop_string_never", STOPPED, stop=["STOPS"])
    yield from case("logprobs", PLAIN, **logprobs)
    yield from case("logprobs_eos", ENDED, "stop", **logprobs)
    yield from case("logprobs_stop_string", STOPPED, "stop", **logprobs, stop=["STOP"])
    yield from case("logprobs_none", PLAIN, **none)
    yield from case("logprobs_ids", PLAIN, **logprobs, return_tokens_as_token_ids=True)
    yield from case("ids", ENDED, "stop", return_token_ids=True)
    yield from case("ids_logprobs", ENDED, "stop", options=CONTINUOUS, return_token_ids=True, **logprobs)
    together = [ids("Hello", " world"), ids(HALVES[0]), ids(HALVES[1], " the", "</s>")]
    yield from case("many", together, "stop", **logprobs, return_token_ids=True)
    yield from case("prompt_logprobs", PLAIN, prompt_logprobs=2)
    yield from case("prompt_logprobs_zero", PLAIN, prompt_logprobs=0)


def echo_cases() -> Iterator[Case]:
    """What only completions have."""

    def case(
        name: str, steps: Any, *how: Any, prompt: Sequence[int] = tuple(PROMPT[1:]), **fields: Any
    ) -> Iterator[Case]:
        body = {"prompt": PROMPT_TEXT, "model": "m", "max_tokens": 16, "echo": True, **fields}
        return both(f"completions_echo{name}", COMPLETIONS, body, steps, *how, prompt=prompt)

    yield from case("", PLAIN)
    yield from case("_ids", PLAIN, return_token_ids=True)
    yield from case("_logprobs", PLAIN, logprobs=2)
    yield from case("_logprobs_zero", ENDED, "stop", logprobs=0)
    yield from case("_logprobs_ids", PLAIN, logprobs=2, return_token_ids=True)
    yield from case("_logprobs_as_ids", PLAIN, logprobs=1, return_tokens_as_token_ids=True)
    yield from case("_bos_logprobs", PLAIN, logprobs=2, prompt=tuple(PROMPT))
    yield from case("_alone", steps_of("Hello"), max_tokens=0)
    yield from case("_alone_logprobs", steps_of("Hello"), max_tokens=0, logprobs=2)
    yield from case("_stop_string", STOPPED, stop=["STOP"], logprobs=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    to: Path = parser.parse_args().to
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
    completions = {"prompt": PROMPT_TEXT, "model": "m"}
    cases = [
        *common_cases(CHAT, chat, {"logprobs": True, "top_logprobs": 2}),
        *common_cases(COMPLETIONS, completions, {"logprobs": 2}),
        *echo_cases(),
    ]
    lines = ",\n".join(json.dumps(recorded(case), ensure_ascii=False) for case in cases)
    (to / "vllm-0.32.0.json").write_text(f"[\n{lines}\n]\n")
    vocabulary = {"special": len(SPECIAL), "tokens": [token.hex() for token in TOKENS]}
    (to / "vocabulary.json").write_text(json.dumps(vocabulary) + "\n")


if __name__ == "__main__":
    main()
