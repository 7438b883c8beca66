"""``/inference/v1/generate``: tokens in, tokens out."""

from __future__ import annotations

from typing import Any

import orjson

from extproc.mock.api import event
from extproc.mock.generation import Prompt
from extproc.mock.vllm import bodies, checks, logprobs
from extproc.mock.vllm.api import Api, Context, RefusedError, finish_reason, returned, stop_reason, usage
from extproc.mock.vllm.engine import Batch, Sequence


class GenerateApi(Api):
    """``POST /inference/v1/generate``."""

    frees_when_refused = False

    def __init__(self, context: Context, body: bodies.Generate) -> None:
        super().__init__(context, body)
        self._body = body
        self._id = f"generate-tokens-{context.base_id(body.request_id)}"
        self._told: dict[int, int] = {}

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._body.stream)

    def batch(self) -> Batch:
        """The sequences asked for."""
        body, options = self._body, self.options
        params = body.sampling_params
        checks.model(body.model, options)
        prompt = Prompt(ids=tuple(body.token_ids))
        if prompt.length > options.max_model_len:
            raise RefusedError(
                f"The decoder prompt (length {prompt.length}) is longer than the maximum model length of "
                f"{options.max_model_len}. Make sure that `max_model_len` is no smaller than the number of text tokens."
            )
        room = options.max_model_len - prompt.length
        cap = room if params.max_tokens is None else min(params.max_tokens, room)
        temperature = params.temperature
        checks.sampling(n=params.n, temperature=temperature, max_tokens=cap, min_tokens=params.min_tokens)
        checks.logprobs(params.logprobs, params.prompt_logprobs)
        sequences = []
        for sample in range(params.n):
            limits = checks.limits(params, cap, temperature, sample)
            child = sample if params.n > 1 else None
            sequence = self.sequence(prompt, limits, self._id, sample, child=child)
            sequence.min_tokens = params.min_tokens
            sequence.reads_cache = params.prompt_logprobs is None
            sequences.append(sequence)
        return Batch(sequences, params.n, single=params.n == 1)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        first = batch.sequences[0]
        wanted = self._body.sampling_params.prompt_logprobs
        return orjson.dumps(
            {
                "request_id": self._id,
                "model": self.options.model,
                "created": self.created,
                "usage": self._usage(batch),
                "prompt_logprobs": None if wanted is None else logprobs.of_prompt(first, wanted),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": first.ids_in if self._body.return_token_ids else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": returned(batch),
                "ec_transfer_params": None,
                "output_mode": self._body.output_mode,
                "choices": [self._choice(sequence, 0) for sequence in batch.sequences],
            }
        )

    def grown(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        told = self._told.get(sequence.index, 0)
        self._told[sequence.index] = sequence.written
        chunk: dict[str, Any] = {"request_id": self._id, "usage": None}
        if not told and self._body.return_token_ids:
            chunk["prompt_token_ids"] = sequence.ids_in
        return event({**chunk, "output_mode": self._body.output_mode, "choices": [self._choice(sequence, told)]})

    def closing(self, batch: Batch) -> bytes:
        """The event that sums up."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return b""
        total = self._usage(batch)
        return event({"request_id": self._id, "usage": total, "output_mode": self._body.output_mode, "choices": []})

    def _usage(self, batch: Batch) -> dict[str, Any]:
        first = batch.sequences[0]
        details: dict[str, Any] | None = None
        if self.options.prompt_tokens_details:
            details = {"cached_tokens": first.cached, "created_cache_tokens": None, "multimodal_tokens": None}
        return usage(first.prompt.length, sum(sequence.written for sequence in batch.sequences), details)

    def _choice(self, sequence: Sequence, told: int) -> dict[str, Any]:
        top = self._body.sampling_params.logprobs
        over = sequence.finish is not None
        choice: dict[str, Any] = {
            "index": sequence.index,
            "finish_reason": finish_reason(sequence),
            "stop_reason": stop_reason(sequence),
            "token_ids": sequence.text.ids[told : sequence.written],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": sequence.written}] if over else None,
        }
        if self._body.output_mode == "text":
            choice["text"] = "".join(sequence.text.pieces[told : sequence.written])
            choice["logprobs"] = None if top is None else logprobs.chat(sequence, told, top)
        else:
            choice["logprobs"] = None if top is None else logprobs.generate(sequence, told, top)
        return choice
