"""``/v1/messages``: a chat completion in other words, of the same kind of id."""

from __future__ import annotations

from typing import Any

import orjson

from extproc.mock.api import Reply, named_event
from extproc.mock.engine import RequestError
from extproc.mock.generation import Limits
from extproc.mock.prompts import chat_prompt
from extproc.mock.vllm import bodies, checks
from extproc.mock.vllm.api import Api, Context, RefusedError, error
from extproc.mock.vllm.conversation import prompt_of
from extproc.mock.vllm.engine import Batch, Sequence

_FIELD = (
    "{name}\n  Field required [type=missing, input_value={{given}}, input_type=dict]\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/missing"
)
_STUMBLE = "2 validation errors for ChatCompletionStreamResponse\n" + "\n".join(
    _FIELD.format(name=name) for name in ("model", "choices")
)
_STOP_REASONS = {"length": "max_tokens"}


def error_reply(problem: RequestError) -> Reply:
    """A refusal in Anthropic's form."""
    refused = problem if isinstance(problem, RefusedError) else RefusedError(str(problem))
    return Reply.json(refused.status, _error(refused.kind, str(refused)))


class MessagesApi(Api):
    """``POST /v1/messages``."""

    def __init__(self, context: Context, body: bodies.Messages) -> None:
        super().__init__(context, body)
        self._body = body
        self._id = f"chatcmpl-{context.base_id(None)}"
        self._told = 0
        self._begun = False
        self._block = False

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._body.stream)

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        checks.model(body.model, self.options)
        checks.budget(body.max_tokens, self.options, "max_completion_tokens")
        own = chat_prompt(body.messages, body.tools, body.system)
        prompt = prompt_of(self, own, [message.content for message in body.messages])
        checks.told_length(prompt, self.options)
        temperature = 1.0 if body.temperature is None else body.temperature
        cap = min(body.max_tokens, self.options.max_model_len - prompt.length)
        checks.sampling(n=1, temperature=temperature, max_tokens=cap, min_tokens=0)
        return Batch([self.sequence(prompt, Limits(cap, tuple(body.stop_sequences or ())), self._id)])

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        sequence = batch.sequences[0]
        message = self._message([{"type": "text", "text": sequence.so_far}])
        message.update(_ending(sequence))
        message["usage"] = self._usage(sequence)
        if sequence.returned is not None:
            message["kv_transfer_params"] = sequence.returned
        return orjson.dumps(message)

    def refused(self, problem: RequestError) -> Reply:
        """Where the engine refuses the request."""
        return error_reply(problem)

    def stumble(self, message: str) -> Reply:
        """Where the engine's front end trips over the request."""
        return self.failed(500, message)

    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed with ``status``."""
        return Reply.json(status, _error("InternalServerError", message))

    def failure(self, sequence: Sequence, status: int) -> bytes:
        """The events for a failure in a stream: the engine trips over its own chat completion's error."""
        given = str(error(sequence.message, "InternalServerError", status))
        problem = _STUMBLE.format(given=f"{given[:25]}...{given[-24:]}")
        begun = b"" if self._begun else self._opening(sequence)
        return begun + named_event(_error("internal_error", problem))

    def grown(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        piece = "".join(sequence.text.pieces[self._told : sequence.written])
        self._told = sequence.written
        events = b"" if self._begun else self._opening(sequence)
        self._begun = True
        if piece:
            if not self._block:
                self._block = True
                block = {"type": "text", "text": ""}
                events += named_event({"type": "content_block_start", "content_block": block, "index": 0})
            delta = {"type": "text_delta", "text": piece}
            events += named_event({"type": "content_block_delta", "delta": delta, "index": 0})
        return events

    def end(self, batch: Batch) -> bytes:
        """The events after the last step."""
        if self.broken:
            return b""
        sequence = batch.sequences[0]
        events = named_event({"type": "content_block_stop", "index": 0}) if self._block else b""
        delta = {"stop_sequence": None, **_ending(sequence)}
        delta = {"stop_reason": delta["stop_reason"], "stop_sequence": delta["stop_sequence"]}
        events += named_event({"type": "message_delta", "delta": delta, "usage": self._usage(sequence)})
        return events + named_event({"type": "message_stop"})

    def _opening(self, sequence: Sequence) -> bytes:
        message = self._message([])
        message.update(stop_reason=None, stop_sequence=None)
        message["usage"] = {"input_tokens": sequence.prompt.length, "output_tokens": 0}
        return named_event({"type": "message_start", "message": message})

    def _usage(self, sequence: Sequence) -> dict[str, Any]:
        prompt, written = sequence.prompt.length, sequence.written
        if not self.options.prompt_tokens_details:
            return {"input_tokens": prompt, "output_tokens": written}
        return {
            "input_tokens": max(prompt - sequence.cached - sequence.created, 0),
            "output_tokens": written,
            "cache_creation_input_tokens": sequence.created,
            "cache_read_input_tokens": sequence.cached,
        }

    def _message(self, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.options.model,
        }


def _ending(sequence: Sequence) -> dict[str, Any]:
    finish = sequence.finish or {}
    matched = finish.get("matched")
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS.get(str(finish.get("type")), "end_turn")}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
