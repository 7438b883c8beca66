"""``/v1/chat/completions`` and ``/v1/completions``: how the engine words its answers, byte for byte but for ids."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import orjson

from extproc.mock.generation import Limits, Prompt, alternatives, logprob, word
from extproc.mock.sglang import bodies
from extproc.mock.sglang.batch import Sampling
from extproc.mock.sglang.engine import Batch, Sequence

DONE = b"data: [DONE]\n\n"


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """The engine's ``ErrorResponse``."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def error_event(message: str, kind: str, status: int) -> bytes:
    """An error inside a stream."""
    return b"data: " + orjson.dumps({"error": error_body(message, kind, status)}) + b"\n\n"


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    """The ``stop`` field as a tuple."""
    if not value:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def usage(sequences: Seq[Sequence], samples: int) -> dict[str, Any]:
    """The ``usage`` object over all sequences; a prompt counts once, whatever its samples."""
    prompt = sum(sequence.prompt.length for sequence in sequences[::samples])
    written = sum(sequence.written for sequence in sequences)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "completion_tokens": written,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def written_text(sequence: Sequence) -> str:
    """What has been written so far."""
    return "".join(sequence.text.pieces[: sequence.written])


class Api(Protocol):
    """How one OpenAI endpoint words its answers; one object per request."""

    include_usage: bool

    def answer(self, batch: Batch) -> bytes:
        """The whole answer as JSON."""
        ...

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        ...

    def end(self, batch: Batch) -> bytes:
        """The events after all sequences have ended, without ``[DONE]``."""
        ...


class ChatApi:
    """``/v1/chat/completions``."""

    def __init__(self, body: bodies.Chat) -> None:
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._continuous = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._body = body
        self._created = int(time.time())
        self._told: dict[int, int] = {}
        self._finished: list[Sequence] = []

    @staticmethod
    def prompt(body: bodies.Chat) -> Prompt:
        """What the chat template would make of the messages."""
        if body.input_ids is not None:
            return Prompt(ids=tuple(body.input_ids))
        return chat_prompt(body.messages, body.tools)

    @staticmethod
    def sampling(body: bodies.Chat) -> Sampling:
        """The engine's sampling parameters."""
        limits = Limits(
            body.max_completion_tokens or body.max_tokens,
            stops(body.stop),
            frozenset(body.stop_token_ids or ()),
            body.ignore_eos,
            body.no_stop_trim,
            body.seed or 0,
        )
        return Sampling(limits, body.n, 1.0 if body.temperature is None else body.temperature)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer as JSON."""
        return orjson.dumps(
            {
                "id": batch.sequences[0].rid,
                "object": "chat.completion",
                "created": self._created,
                "model": self._body.model,
                "choices": [self._choice(sequence) for sequence in batch.sequences],
                "usage": usage(batch.sequences, batch.samples),
                "metadata": {"weight_version": "default"},
            }
        )

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        finish = sequence.finish or {}
        return {
            "index": sequence.index,
            "message": {"role": "assistant", "content": written_text(sequence), "reasoning_content": None},
            "logprobs": self._logprobs(sequence, 0) if self._body.logprobs else None,
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        begun = self._told.get(sequence.index)
        events = b"" if begun is not None else self._event(sequence, {"role": "assistant", "content": ""})
        told = begun or 0
        piece = "".join(sequence.text.pieces[told : sequence.written])
        if piece or (self._body.logprobs and told < sequence.written):
            logprobs = self._logprobs(sequence, told) if self._body.logprobs else None
            events += self._event(sequence, {"content": piece}, logprobs, usage_so_far=self._continuous)
        self._told[sequence.index] = sequence.written
        if sequence.finish is not None:
            self._finished.append(sequence)
        return events

    def end(self, batch: Batch) -> bytes:
        """The events after all sequences have ended, without ``[DONE]``."""
        events = b"".join(self._event(sequence, {}, finish=sequence.finish) for sequence in self._finished)
        if self.include_usage:
            chunk = self._chunk(batch.sequences[0].rid, [])
            chunk["usage"] = usage(batch.sequences, batch.samples)
            events += b"data: " + orjson.dumps(chunk) + b"\n\n"
        return events

    def _chunk(self, rid: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": rid,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _event(
        self,
        sequence: Sequence,
        delta: dict[str, Any],
        logprobs: Any = None,
        finish: dict[str, object] | None = None,
        *,
        usage_so_far: bool = False,
    ) -> bytes:
        choice = {
            "index": sequence.index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": logprobs,
            "finish_reason": finish and finish.get("type"),
            "matched_stop": finish and finish.get("matched"),
        }
        chunk = self._chunk(sequence.rid, [choice])
        if usage_so_far:
            chunk["usage"] = usage([sequence], 1)
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any]:
        top = self._body.top_logprobs or 0
        return {"content": [_chat_logprob(token, top) for token in sequence.text.ids[start : sequence.written]]}


def chat_prompt(messages: list[bodies.Message], tools: list[Any] | None) -> Prompt:
    """What the mock's chat template makes of a conversation."""
    parts = [f"<{entry.role}>{content_text(entry.content)}" for entry in messages]
    if tools:
        parts.insert(0, orjson.dumps(tools).decode())
    return Prompt("".join(parts) + "<assistant>")


def content_text(content: Any) -> str:
    """A message's content as text; parts that are no text stand for themselves."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return " ".join(str(part["text"]) for part in content)
    return orjson.dumps(content).decode()


def _chat_logprob(token: int, top: int) -> dict[str, Any]:
    return {
        "token": word(token),
        "bytes": list(word(token).encode()),
        "logprob": logprob(token),
        "top_logprobs": [
            {"token": word(other), "bytes": list(word(other).encode()), "logprob": value}
            for value, other in alternatives(token, top)
        ],
    }
