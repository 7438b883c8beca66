"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

import orjson

from extproc.mock.api import Reply
from extproc.mock.prompts import chat_prompt, content_text
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
from extproc.mock.vllm.conversation import prompt_of
from extproc.mock.vllm.engine import Batch, Sequence
from extproc.mock.vllm.openai import OpenAiApi


class ChatApi(OpenAiApi):
    """``POST /v1/chat/completions``."""

    def __init__(self, context: Context, body: bodies.Chat) -> None:
        super().__init__(context, body)
        self._body = body
        self._id = f"chatcmpl-{context.base_id(body.request_id)}"
        self._begun = False
        self._batch: Batch | None = None

    def objection(self) -> Reply | None:
        """What the request's class refuses."""
        if self._body.top_logprobs and not self._body.logprobs:
            message = "when using `top_logprobs`, `logprobs` must be set to true."
            return refusal(RefusedError(message, "top_logprobs"))
        return super().objection()

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        checks.model(body.model, self.options)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        checks.budget(wanted, self.options, field)
        own = checks.cut(chat_prompt(body.messages, body.tools), body.truncate_prompt_tokens, wanted, self.options)
        prompt = prompt_of(self, own, [message.content for message in body.messages], echo=body.echo)
        checks.told_length(prompt, self.options)
        room = self.options.max_model_len - prompt.length
        batch = self.spread([prompt], [self._id], room if wanted is None else min(wanted, room))
        checks.logprobs(self._top if body.logprobs else None, self._prompt_top)
        for sequence in batch.sequences:
            sequence.reads_cache = self._prompt_top is None
        self._batch = batch
        return batch

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        first = batch.sequences[0]
        prompt, written = self.counts(batch)
        ids = self._body.return_token_ids
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self.created,
                "model": self.options.model,
                "choices": [self._choice(sequence) for sequence in batch.sequences],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage(
                    prompt, written, self.details(first, created_cache_tokens=first.created, multimodal_tokens=None)
                ),
                "prompt_logprobs": None if self._prompt_top is None else logprobs.of_prompt(first, self._prompt_top),
                "prompt_token_ids": first.ids_in if ids else None,
                "prompt_text": None,
                "kv_transfer_params": returned(batch),
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def grown(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        events = b"" if self._begun else self._opening(sequence)
        told = self.told.get(sequence.index, 0)
        self.told[sequence.index] = sequence.written
        body = self._body
        piece = "".join(sequence.text.pieces[told : sequence.written])
        over = sequence.finish is not None
        if not (piece or over or body.logprobs or body.return_token_ids):
            return events
        choice: dict[str, Any] = {
            "index": sequence.index,
            "delta": {"content": piece} if piece else {},
            "logprobs": logprobs.chat(sequence, told, self._top) if body.logprobs else None,
            "finish_reason": finish_reason(sequence),
        }
        if over:
            choice["stop_reason"] = stop_reason(sequence)
        choice["token_ids"] = sequence.text.ids[told : sequence.written] if body.return_token_ids else None
        last = {"system_fingerprint": FINGERPRINT} if over and not self.include_usage else {}
        return events + self.event(self._chunk([choice]), self._usage(sequence, sequence.written), **last)

    def failure(self, sequence: Sequence, status: int) -> bytes:
        """The events for a failure in a stream: it begins first."""
        return (b"" if self._begun else self._opening(sequence)) + super().failure(sequence, status)

    def closing(self, batch: Batch) -> bytes:
        """The event that sums up."""
        if not self.include_usage:
            return b""
        first = batch.sequences[0]
        total = short_usage(*self.counts(batch))
        if details := self.details(first, created_cache_tokens=first.created):
            total["prompt_tokens_details"] = details
        return self.event(self._chunk([]), total, system_fingerprint=FINGERPRINT)

    @property
    def _top(self) -> int:
        return self._body.top_logprobs or 0

    @property
    def _prompt_top(self) -> int | None:
        """How many logprobs of each position of the prompt are wanted; None: none."""
        body = self._body
        return self._top if body.prompt_logprobs is None and body.echo else body.prompt_logprobs

    @property
    def _role(self) -> str:
        return "assistant" if self._body.add_generation_prompt else self._body.messages[-1].role

    @property
    def _echoed(self) -> str:
        if not self._body.echo:
            return ""
        last = self._body.messages[-1]
        return content_text(last.content) if last.role == self._role else ""

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        body = self._body
        message = {
            "role": self._role,
            "content": self._echoed + sequence.so_far,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": sequence.index,
            "message": message,
            "logprobs": logprobs.chat(sequence, 0, self._top) if body.logprobs else None,
            "finish_reason": finish_reason(sequence),
            "stop_reason": stop_reason(sequence),
            "token_ids": sequence.ids if body.return_token_ids else None,
            "routed_experts": None,
        }

    def _opening(self, first: Sequence) -> bytes:
        """The first event of each choice."""
        self._begun = True
        events = b""
        prompt_ids = first.ids_in if self._body.return_token_ids else None
        for index in range(len(self._batch.sequences) if self._batch else 1):
            for delta in [{"role": self._role, "content": ""}, *([{"content": self._echoed}] if self._echoed else [])]:
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                more = {"prompt_token_ids": prompt_ids, "prompt_text": None} if "role" in delta else {}
                events += self.event(self._chunk([choice]), self._usage(first, 0), **more)
        return events

    def _usage(self, sequence: Sequence, written: int) -> dict[str, Any] | None:
        if not self.continuous_usage:
            return None
        return {**short_usage(sequence.prompt.length, written), "completion_tokens_details": None}

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.options.model,
            "choices": choices,
        }
