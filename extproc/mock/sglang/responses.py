"""``/v1/responses``. A stream's head and first two events are sent at once; failures come as ``response.failed``."""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson

from extproc.mock.api import Reply, named_event
from extproc.mock.generation import Limits, Prompt
from extproc.mock.prompts import content_text
from extproc.mock.sglang import bodies
from extproc.mock.sglang.api import Api
from extproc.mock.sglang.batch import Sampling, Spread, one
from extproc.mock.sglang.engine import Batch, Mode, Sequence

_STATUS = {"length": "incomplete", "abort": "failed"}


class ResponsesApi(Api):
    """``POST /v1/responses``."""

    early_head = True
    stream_headers = (("cache-control", "no-cache"),)

    def __init__(self, body: bodies.Responses, mode: Mode) -> None:
        super().__init__(mode)
        self._body = body
        self._id = body.request_id or f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = 0
        self._told = 0
        self._item_open = False

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._body.stream)

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        sampling = Sampling(Limits(body.max_output_tokens), 1, 0.7 if body.temperature is None else body.temperature)
        spread = Spread(self._id, body.bootstrap_host, body.bootstrap_port, body.bootstrap_room, body.ranks)
        text = body.input if isinstance(body.input, str) else "".join(_item_text(item) for item in body.input)
        return one(Prompt(f"{body.instructions or ''}<user>{text}<assistant>"), sampling, spread, None)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        return orjson.dumps(self._final(batch.sequences[0]))

    def refusal(self, message: str) -> Reply:
        """Where the engine refuses the request."""
        problem = {"message": message, "type": "invalid_request_error", "param": None, "code": 400}
        return Reply.json(400, {"error": problem})

    def stumble(self, message: str) -> Reply:
        """Where the engine's front end trips over the request."""
        return self.refusal(message)

    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed: a 400 whatever the status, which the engine puts into the text."""
        return self.refusal(message if status == 400 else f"{status}: {message}")

    def opening(self) -> bytes:
        """The events that go out with an early head."""
        events = b""
        for kind in ("response.created", "response.in_progress"):
            events += self._lifecycle(kind, self._response("in_progress"))
        return events

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""
        piece = "".join(sequence.text.pieces[self._told : sequence.written])
        self._told = sequence.written
        if not piece:
            return b""
        events = b""
        if not self._item_open:
            self._item_open = True
            events = self._event("output_item.added", output_index=0, item=self._item(None))
            events += self._event("content_part.added", **self._place, part=_text_part(""))
        return events + self._event("output_text.delta", **self._place, delta=piece, logprobs=[])

    def end(self, batch: Batch) -> bytes:
        """The events after the last step; there is no ``[DONE]``."""
        sequence = batch.sequences[0]
        events = b""
        if self._item_open:
            text = sequence.so_far
            events = self._event("output_text.done", **self._place, text=text, logprobs=[])
            events += self._event("content_part.done", **self._place, part=_text_part(text))
            events += self._event("output_item.done", output_index=0, item=self._item(text))
        final = self._final(sequence)
        return events + self._lifecycle(f"response.{final['status']}", final)

    def refusal_events(self, message: str) -> bytes:
        """Where the engine refuses after an early head."""
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": message}
        return self._lifecycle("response.failed", response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event in the order of the SDK's models: by name."""
        fields.update(type=f"response.{kind}", sequence_number=self._next())
        return named_event(dict(sorted(fields.items())))

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> bytes:
        return named_event({"type": kind, "response": response, "sequence_number": self._next()})

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _item(self, text: str | None) -> dict[str, Any]:
        """The output message; ``text`` None: it has only begun."""
        return {
            "id": self._item_id,
            "content": [] if text is None else [_text_part(text)],
            "role": "assistant",
            "status": "in_progress" if text is None else "completed",
            "type": "message",
            "phase": "final_answer",
        }

    def _final(self, sequence: Sequence) -> dict[str, Any]:
        kind = str((sequence.finish or {}).get("type"))
        response = self._response(_STATUS.get(kind, "completed"))
        text = sequence.so_far
        response["output"] = [self._item(text)] if text else []
        response["text"] = {"format": {"type": "text"}} if text else None
        response["usage"] = {
            "input_tokens": sequence.prompt.length,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sequence.written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sequence.prompt.length + sequence.written,
        }
        if kind == "abort":
            response["error"] = {"code": "server_error", "message": sequence.message}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": body.model,
            "output": [],
            "status": status,
            "usage": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": True,
            "temperature": body.temperature,
            "text": None,
            "top_p": None,
            "truncation": "disabled",
            "user": None,
            "metadata": body.metadata or {},
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _item_text(item: Any) -> str:
    return content_text(item.get("content")) if isinstance(item, dict) else str(item)
