"""``/v1/messages``. A stream's head is sent at once; failures come as events."""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from extproc.mock.api import Reply, named_event
from extproc.mock.generation import Limits
from extproc.mock.prompts import chat_prompt
from extproc.mock.sglang import bodies
from extproc.mock.sglang.api import Api
from extproc.mock.sglang.batch import Sampling, Spread, one
from extproc.mock.sglang.engine import Batch, Mode, Sequence

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


def error_reply(status: int, kind: str, message: str) -> Reply:
    """An error in Anthropic's form."""
    return Reply.json(status, {"type": "error", "error": {"type": kind, "message": message}})


class MessagesApi(Api):
    """``POST /v1/messages``."""

    early_head = True

    def __init__(self, body: bodies.Messages, mode: Mode) -> None:
        super().__init__(mode)
        self._body = body
        self._id = f"msg_{uuid.uuid4().hex}"
        self._told = 0
        self._begun = False
        self._failed = False

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._body.stream)

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        limits = Limits(body.max_tokens, tuple(body.stop_sequences or ()))
        sampling = Sampling(limits, 1, 1.0 if body.temperature is None else body.temperature)
        spread = Spread(None, body.bootstrap_host, body.bootstrap_port, body.bootstrap_room, body.ranks)
        return one(chat_prompt(body.messages, body.tools, body.system), sampling, spread, None)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        sequence = batch.sequences[0]
        message = self._message([{"type": "text", "text": sequence.so_far}])
        usage = message.pop("usage")
        usage.update(input_tokens=sequence.prompt.length, output_tokens=sequence.written)
        return orjson.dumps({**message, "stop_reason": _stop_reason(sequence), "usage": usage})

    def refusal(self, message: str) -> Reply:
        """Where the engine refuses the request."""
        return error_reply(400, "BadRequestError", message)

    def stumble(self, message: str) -> Reply:  # noqa: ARG002 - the engine keeps it to itself here
        """Where the engine's front end trips over the request."""
        return error_reply(500, "api_error", "Internal server error")

    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed with ``status``; the engine hides the reason of a 5xx."""
        if status == 400:
            return self.refusal(message)
        return error_reply(status, _ERROR_TYPES.get(status, "api_error"), "Internal server error")

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""
        status = sequence.failure
        if status is not None:
            self._failed = True
            return self._error(_ERROR_TYPES.get(status, "api_error"), sequence.message)
        piece = "".join(sequence.text.pieces[self._told : sequence.written])
        self._told = sequence.written
        events = b""
        if piece:
            events = self._begin(sequence.prompt.length)
            if not self._begun:
                self._begun = True
                block = {"type": "text", "text": ""}
                events += named_event({"type": "content_block_start", "index": 0, "content_block": block})
            delta = {"type": "text_delta", "text": piece}
            events += named_event({"type": "content_block_delta", "index": 0, "delta": delta})
        return events

    def end(self, batch: Batch) -> bytes:
        """The events after the last step."""
        if self._failed:
            return b""
        sequence = batch.sequences[0]
        events = self._begin(sequence.prompt.length)
        if self._begun:
            events += named_event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": _stop_reason(sequence)}
        usage = {"output_tokens": sequence.written}
        events += named_event({"type": "message_delta", "delta": delta, "usage": usage})
        return events + named_event({"type": "message_stop"})

    def refusal_events(self, message: str) -> bytes:
        """Where the engine refuses after an early head."""
        return self._error("invalid_request_error", message)

    def _begin(self, prompt_tokens: int) -> bytes:
        if self._begun:
            return b""
        message = self._message([])
        message["usage"]["input_tokens"] = prompt_tokens
        return named_event({"type": "message_start", "message": message})

    def _error(self, kind: str, message: str) -> bytes:
        events = self._begin(0)
        if self._begun:
            events += named_event({"type": "content_block_stop", "index": 0})
        events += named_event({"type": "error", "error": {"type": kind, "message": message}})
        return events + named_event({"type": "message_stop"})

    def _message(self, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._body.model,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }


def _stop_reason(sequence: Sequence) -> str:
    return _STOP_REASONS.get(str((sequence.finish or {}).get("type")), "end_turn")
