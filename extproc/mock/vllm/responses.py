"""``/v1/responses``, and the responses that are kept (``VLLM_ENABLE_RESPONSES_API_STORE``)."""

from __future__ import annotations

from typing import Any

import orjson

from extproc.mock.api import Reply, named_event
from extproc.mock.engine import InternalError
from extproc.mock.generation import Limits, Prompt
from extproc.mock.prompts import content_text, stops
from extproc.mock.vllm import bodies, checks
from extproc.mock.vllm.api import Api, Context, RefusedError, error
from extproc.mock.vllm.conversation import prompt_of
from extproc.mock.vllm.engine import Batch, Sequence, new_id

_INVALID = "invalid_request_error"
_BACKGROUND = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)
_TOO_LONG = "The engine prompt length {length} exceeds the max_model_len {limit}. Please reduce prompt."
_NULL = (
    "1 validation error for ResponsesResponse\ntruncation\n  Input should be 'auto' or 'disabled' "
    "[type=literal_error, input_value=None, input_type=NoneType]"
)


class Store:
    """Responses that clients may ask for again."""

    def __init__(self) -> None:
        self._responses: dict[str, dict[str, Any]] = {}

    def keep(self, response: dict[str, Any]) -> None:
        """Remember a response."""
        self._responses[response["id"]] = response

    def known(self, name: str) -> bool:
        """Whether there is a response of that id."""
        return name in self._responses

    def get(self, name: str) -> Reply:
        """The answer to ``GET /v1/responses/{name}``."""
        response = self._responses.get(name)
        return not_found(name) if response is None else Reply.json(200, response)

    def cancel(self, name: str) -> Reply:
        """The answer to ``POST /v1/responses/{name}/cancel``: none runs in the background here."""
        if name not in self._responses:
            return not_found(name)
        message = "Cannot cancel a synchronous response."
        return Reply.json(400, error(message, _INVALID, 400, "response_id"))


def not_found(name: str) -> Reply:
    """The answer about a response that nobody knows."""
    return Reply.json(404, error(f"Response with id '{name}' not found.", _INVALID, 404, "response_id"))


class ResponsesApi(Api):
    """``POST /v1/responses``."""

    reads_rank = False

    def __init__(self, context: Context, body: bodies.Responses, store: Store) -> None:
        super().__init__(context, body)
        self._body = body
        self._store = store
        self._id = body.request_id or f"resp_{new_id()}"
        self._item_id = f"msg_{new_id()}"
        self._number = 0
        self._told = 0
        self._item_open = False

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._body.stream)

    @property
    def _kept(self) -> bool:
        return bool(self._body.store) and self.options.store

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        checks.model(body.model, self.options)
        if body.background and body.store and not self.options.store:
            raise RefusedError(_BACKGROUND, "background", kind=_INVALID, plain=True)
        previous = body.previous_response_id
        if previous is not None and not self._store.known(previous):
            message = f"Response with id '{previous}' not found."
            raise RefusedError(message, "response_id", kind=_INVALID, status=404, plain=True)
        checks.budget(body.max_output_tokens, self.options, "max_output_tokens")
        prompt = self._prompt()
        if body.truncation is None and not body.stream:  # seen by the engine when it words the answer
            raise RefusedError(_NULL, plain=True)
        room = self.options.max_model_len - prompt.length
        if room <= 0:
            message = _TOO_LONG.format(length=prompt.length, limit=self.options.max_model_len)
            raise RefusedError(message, "input", kind=_INVALID, plain=True)
        cap = room if body.max_output_tokens is None else min(body.max_output_tokens, room)
        checks.sampling(n=1, temperature=self._temperature, max_tokens=cap, min_tokens=0)
        limits = Limits(cap, stops(body.stop), ignore_eos=body.ignore_eos, seed=body.seed or 0)
        return Batch([self.sequence(prompt, limits, f"{self._id}_0")])

    def _prompt(self) -> Prompt:
        body = self._body
        contents = [body.input] if isinstance(body.input, str) else [_content(item) for item in body.input]
        text = "".join(content_text(content) for content in contents)
        most = None if body.truncation == "disabled" else -1
        own = Prompt(f"{body.previous_response_id or ''}{body.instructions or ''}<user>{text}<assistant>")
        before = [text for text in (body.previous_response_id, body.instructions) if text]
        own = checks.cut(own, most, body.max_output_tokens, self.options)
        return prompt_of(self, own, before + contents)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        return orjson.dumps(self._final(batch.sequences[0]))

    def grown(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token or ended."""
        if self._body.truncation is None:
            raise InternalError(_NULL)
        events = b""
        piece = "".join(sequence.text.pieces[self._told : sequence.written])
        self._told = sequence.written
        if not piece:
            return events
        if not self._item_open:
            self._item_open = True
            events += self._event("output_item.added", output_index=0, item=self._item(None))
            events += self._event("content_part.added", **self._place, part={**_text_part(""), "logprobs": []})
        return events + self._event("output_text.delta", **self._place, delta=piece, logprobs=[])

    def failure(self, sequence: Sequence, status: int) -> bytes:  # noqa: ARG002 - it trips over its own error event
        """A failure in a stream breaks it off: the error is no event of this API, and the engine checks that."""
        raise InternalError(sequence.message)

    def end(self, batch: Batch) -> bytes:
        """The events after the last step; there is no ``[DONE]``."""
        sequence = batch.sequences[0]
        events = b""
        if self._item_open:
            text = sequence.so_far
            events += self._event("output_text.done", **self._place, text=text, logprobs=[])
            events += self._event("content_part.done", **self._place, part=_text_part(text))
            events += self._event("output_item.done", output_index=0, item=self._item(text))
        final = self._final(sequence)
        if self._body.stream:
            final["kv_transfer_params"] = None
        return events + self._event("completed", response=final)

    @property
    def _temperature(self) -> float:
        return 1.0 if self._body.temperature is None else self._body.temperature

    @property
    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def opening(self) -> bytes:
        """The events that do not wait for the first token."""
        return b"".join(
            self._event(kind, response=self._response("in_progress")) for kind in ("created", "in_progress")
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event in the order of the SDK's models: by name."""
        fields.update(type=f"response.{kind}", sequence_number=self._number)
        self._number += 1
        return named_event(dict(sorted(fields.items())))

    def _item(self, text: str | None) -> dict[str, Any]:
        """The output message; ``text`` None: it has only begun."""
        return {
            "id": self._item_id,
            "content": [] if text is None else [_text_part(text)],
            "role": "assistant",
            "status": "in_progress" if text is None else "completed",
            "type": "message",
            "phase": None,
        }

    def _final(self, sequence: Sequence) -> dict[str, Any]:
        prompt, written = sequence.prompt.length, sequence.written
        capped = (sequence.finish or {}).get("type") == "length"
        response = self._response("incomplete" if capped else "completed")
        if sequence.so_far:
            response["output"] = [self._item(sequence.so_far)]
        response["kv_transfer_params"] = sequence.returned
        response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": sequence.cached,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": written,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + written,
        }
        if self._kept:
            self._store.keep(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self.options.model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "temperature": self._temperature,
            "tool_choice": "none" if not body.tools else "auto",
            "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": bool(body.background),
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _content(item: Any) -> Any:
    return item.get("content") if isinstance(item, dict) else str(item)
