"""``/v1/completions``."""

from __future__ import annotations

from typing import Any

import orjson

from extproc.mock.api import Reply
from extproc.mock.generation import Prompt
from extproc.mock.prompts import prompts_of
from extproc.mock.vllm import bodies, checks, logprobs
from extproc.mock.vllm.api import (
    FINGERPRINT,
    Context,
    RefusedError,
    finish_reason,
    refusal,
    returned,
    short_usage,
    stop_reason,
    usage,
)
from extproc.mock.vllm.engine import Batch, Sequence
from extproc.mock.vllm.openai import OpenAiApi

_NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
_STREAMED_BEAMS = "Streaming is not currently supported with beam search"


class CompletionApi(OpenAiApi):
    """``POST /v1/completions``."""

    def __init__(self, context: Context, body: bodies.Completion) -> None:
        super().__init__(context, body)
        self._body = body
        self._id = f"cmpl-{context.base_id(body.request_id)}"
        self._wanted = 16 if body.max_tokens is None else body.max_tokens
        self._only_echo = bool(body.echo) and self._wanted == 0
        self._logprobs: dict[int, logprobs.CompletionLogprobs] = {}

    def objection(self) -> Reply | None:
        """What the request's class refuses."""
        wanted = self._body.logprobs
        if wanted is not None and wanted < -1:
            return refusal(RefusedError("`logprobs` must be a positive value or -1.", "logprobs", wanted))
        if self._body.prompt is None or self._body.prompt == "":
            return refusal(RefusedError(_NO_PROMPT, "prompt"))
        return super().objection()

    def batch(self) -> Batch:
        """The sequences asked for."""
        body, options = self._body, self.options
        if body.stream and body.use_beam_search:
            raise RefusedError(_STREAMED_BEAMS)
        checks.model(body.model, options)
        if not body.prompt:
            raise RefusedError("You must pass at least one prompt")
        read = prompts_of(body.prompt)
        whole = [read] if isinstance(read, Prompt) else read
        prompts = [checks.cut(prompt, body.truncate_prompt_tokens, self._wanted, options) for prompt in whole]
        for prompt in prompts:
            checks.budget(self._wanted, options, "max_tokens")
            checks.length(prompt, options)
        limit = min(self._wanted, options.max_model_len - max(prompt.length for prompt in prompts))
        ids = [f"{self._id}-{number}" for number in range(len(prompts))]
        batch = self.spread(prompts, ids, 1 if self._only_echo else limit)
        checks.logprobs(body.logprobs, self._prompt_top)
        for sequence in batch.sequences:
            sequence.reads_cache = self._prompt_top is None
        return batch

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        prompt, written = self.counts(batch)
        last = batch.sequences[-1]
        details = self.details(last, created_cache_tokens=None, multimodal_tokens=None)
        return orjson.dumps(
            {
                **self._chunk([self._choice(sequence) for sequence in batch.sequences]),
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage(prompt, written, details),
                "kv_transfer_params": returned(batch),
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def grown(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        body = self._body
        told = self.told.get(sequence.index)
        self.told[sequence.index] = sequence.written
        text = self._text(sequence, told or 0)
        choice = {
            "index": sequence.index,
            "text": (sequence.prompt.as_text if body.echo and told is None and not body.return_token_ids else "")
            + text,
            "logprobs": self._logprobs_of(sequence, told),
            "finish_reason": finish_reason(sequence),
            "stop_reason": stop_reason(sequence),
            "prompt_token_ids": sequence.ids_in if told is None and (body.echo or body.return_token_ids) else None,
            "token_ids": sequence.text.ids[told or 0 : sequence.written] if body.return_token_ids else None,
        }
        count = short_usage(sequence.prompt.length, sequence.written) if self.continuous_usage else None
        last = sequence.finish is not None and not self.include_usage
        return self.event(self._chunk([choice]), count, **({"system_fingerprint": FINGERPRINT} if last else {}))

    def closing(self, batch: Batch) -> bytes:
        """The event that sums up."""
        if not self.include_usage:
            return b""
        total = short_usage(*self.counts(batch))
        if details := self.details(batch.sequences[0]):
            total["prompt_tokens_details"] = details
        return self.event(self._chunk([]), total, system_fingerprint=FINGERPRINT)

    @property
    def _prompt_top(self) -> int | None:
        """How many logprobs of each position of the prompt are wanted; None: none."""
        body = self._body
        return body.logprobs if body.prompt_logprobs is None and body.echo else body.prompt_logprobs

    def _text(self, sequence: Sequence, told: int) -> str:
        return "" if self._only_echo else "".join(sequence.text.pieces[told : sequence.written])

    def _logprobs_of(self, sequence: Sequence, told: int | None) -> dict[str, Any] | None:
        body = self._body
        if body.logprobs is None:
            return None
        known = self._logprobs.setdefault(sequence.index, logprobs.CompletionLogprobs(body.logprobs))
        echoed = bool(body.echo) and told is None
        return known.piece(sequence, told or 0, prompt=echoed, text=not self._only_echo)

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        body = self._body
        ids = body.return_token_ids
        return {
            "index": sequence.index,
            "text": (sequence.prompt.as_text if body.echo and not ids else "") + self._text(sequence, 0),
            "logprobs": self._logprobs_of(sequence, None),
            "finish_reason": finish_reason(sequence),
            "stop_reason": stop_reason(sequence),
            "token_ids": sequence.ids if ids else None,
            "prompt_logprobs": None if self._prompt_top is None else logprobs.of_prompt(sequence, self._prompt_top),
            "prompt_token_ids": sequence.ids_in if ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self.created,
            "model": self.options.model,
            "choices": choices,
        }
