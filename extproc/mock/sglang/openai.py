"""``/v1/chat/completions`` and ``/v1/completions``. A stream's head waits for its first token."""

from __future__ import annotations

import time
from typing import Any

import orjson

from extproc.mock.api import DONE, event
from extproc.mock.engine import RequestError
from extproc.mock.generation import Limits, Prompt, alternatives, logprob, word
from extproc.mock.prompts import chat_prompt, prompts_of, stops
from extproc.mock.sglang import bodies, logprobs
from extproc.mock.sglang.api import Api, failure_event, metadata, usage
from extproc.mock.sglang.batch import Sampling, Spread, one, several
from extproc.mock.sglang.engine import Batch, LogprobOptions, Mode, Sequence


def spread(body: bodies.Chat | bodies.Completion) -> Spread:
    """The fields that may be lists."""
    return Spread(body.rid, body.bootstrap_host, body.bootstrap_port, body.bootstrap_room, body.ranks)


class _OpenAiApi(Api):
    """What both endpoints keep of a request."""

    def __init__(self, mode: Mode, options: bodies.StreamOptions | None) -> None:
        super().__init__(mode)
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._created = int(time.time())
        self._told: dict[int, int] = {}


class ChatApi(_OpenAiApi):
    """``POST /v1/chat/completions``."""

    def __init__(self, body: bodies.Chat, mode: Mode) -> None:
        super().__init__(mode, body.stream_options)
        self._body = body
        self._over: list[Sequence] = []

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return self._body.stream

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        if not body.messages:
            raise RequestError("Messages cannot be empty.")
        prompt = Prompt(ids=tuple(body.input_ids)) if body.input_ids else chat_prompt(body.messages, body.tools)
        limits = Limits(
            body.max_completion_tokens or body.max_tokens,
            stops(body.stop),
            frozenset(body.stop_token_ids or ()),
            body.ignore_eos,
            body.no_stop_trim,
            body.seed or 0,
        )
        temperature = 1.0 if body.temperature is None else body.temperature
        return one(prompt, Sampling(limits, body.n, temperature), spread(body), None)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        return orjson.dumps(
            {
                "id": batch.sequences[0].rid,
                "object": "chat.completion",
                "created": self._created,
                "model": self._body.model,
                "choices": [self._choice(sequence) for sequence in batch.sequences],
                "usage": usage(batch.sequences, batch.samples),
                "metadata": metadata(batch),
            }
        )

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""
        status = sequence.failure
        if status is not None:
            return failure_event(sequence, status)
        begun = self._told.get(sequence.index)
        events = self._event(sequence, {"role": "assistant", "content": ""}) if begun is None else b""
        told = begun or 0
        piece = "".join(sequence.text.pieces[told : sequence.written])
        if piece or (self._body.logprobs and told < sequence.written):
            events += self._event(sequence, {"content": piece}, told=told)
        self._told[sequence.index] = sequence.written
        if sequence.finish is not None:
            self._over.append(sequence)
        return events

    def end(self, batch: Batch) -> bytes:
        """The events after the last step."""
        events = b"".join(self._event(sequence, {}, last=True) for sequence in self._over)
        if self._include_usage:
            chunk = self._chunk(batch.sequences[0].rid, [])
            chunk["usage"] = usage(batch.sequences, batch.samples)
            events += event(chunk)
        return events + DONE

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        finish = sequence.finish or {}
        return {
            "index": sequence.index,
            "message": {"role": "assistant", "content": sequence.so_far, "reasoning_content": None},
            "logprobs": self._logprobs(sequence, 0),
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }

    def _event(
        self, sequence: Sequence, delta: dict[str, Any], *, told: int | None = None, last: bool = False
    ) -> bytes:
        finish = (sequence.finish if last else None) or {}
        choice = {
            "index": sequence.index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": None if told is None else self._logprobs(sequence, told),
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }
        chunk = self._chunk(sequence.rid, [choice])
        if told is not None and self._continuous_usage:
            chunk["usage"] = usage([sequence])
        return event(chunk)

    def _chunk(self, rid: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": rid,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _logprobs(self, sequence: Sequence, told: int) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        top = self._body.top_logprobs or 0
        return {
            "content": [
                {
                    **_token(token, logprob(token)),
                    "top_logprobs": [_token(other, value) for value, other in alternatives(token, top)],
                }
                for token in sequence.text.ids[told : sequence.written]
            ]
        }


def _token(token: int, value: float) -> dict[str, Any]:
    return {"token": word(token), "bytes": list(word(token).encode()), "logprob": value}


class CompletionApi(_OpenAiApi):
    """``POST /v1/completions``."""

    def __init__(self, body: bodies.Completion, mode: Mode) -> None:
        super().__init__(mode, body.stream_options)
        self._body = body

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return self._body.stream

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        if not body.prompt or (isinstance(body.prompt, list) and not any(body.prompt)):
            raise RequestError("Prompt cannot be empty")
        limits = Limits(
            body.max_tokens,
            stops(body.stop),
            frozenset(body.stop_token_ids or ()),
            body.ignore_eos,
            body.no_stop_trim,
            body.seed or 0,
        )
        sampling = Sampling(limits, body.n, body.temperature)
        options = self._options()
        prompts = prompts_of(body.prompt)
        if isinstance(prompts, Prompt):
            return one(prompts, sampling, spread(body), options)
        return several(prompts, lambda _: sampling, spread(body), lambda _: options)

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        answer = self._chunk(batch.sequences[0], [self._choice(sequence, 0) for sequence in batch.sequences])
        answer["usage"] = usage(batch.sequences, batch.samples)
        answer["metadata"] = metadata(batch)
        return orjson.dumps(answer)

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""
        status = sequence.failure
        if status is not None:
            return failure_event(sequence, status)
        chunk = self._chunk(sequence, [self._choice(sequence, self._told.get(sequence.index, 0))])
        chunk["usage"] = usage([sequence]) if self._continuous_usage else None
        self._told[sequence.index] = sequence.written
        return event(chunk)

    def end(self, batch: Batch) -> bytes:
        """The events after the last step."""
        if not self._include_usage:
            return DONE
        total = usage(batch.sequences, batch.samples)
        chunk = self._chunk(batch.sequences[0], [])
        chunk["usage"] = {key: value for key, value in total.items() if value is not None}
        return event(chunk) + DONE

    def _options(self) -> LogprobOptions | None:
        """The logprobs wanted: those of the prompt only with ``echo``."""
        body = self._body
        if body.logprobs is None:
            return None
        return LogprobOptions(0 if body.echo and body.logprobs else -1, body.logprobs, with_text=True)

    def _chunk(self, sequence: Sequence, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": sequence.rid,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _choice(self, sequence: Sequence, told: int) -> dict[str, Any]:
        body = self._body
        finish = sequence.finish or {}
        first = sequence.index not in self._told
        text = "".join(sequence.text.pieces[told : sequence.written])
        if body.echo and first:
            text = sequence.prompt.as_text + text
        choice: dict[str, Any] = {
            "index": sequence.index,
            "text": text,
            "logprobs": self._logprobs(sequence, told, first=first),
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }
        if body.return_token_ids:
            choice["token_ids"] = sequence.text.ids[told : sequence.written]
            if first:
                choice["prompt_token_ids"] = [token for token, _ in sequence.prompt.tokens()]
        return choice

    def _logprobs(self, sequence: Sequence, told: int, *, first: bool) -> dict[str, Any] | None:
        options = sequence.logprobs
        if options is None:
            return None
        rows = logprobs.prompt(sequence, options) if first and self.mode is not Mode.DECODE else []
        count = len(rows)
        rows += [
            logprobs.triple(logprob(token), token, options) for token in sequence.text.ids[told : sequence.written]
        ]
        tops = logprobs.top(rows, options, skip=1 if count else 0) if options.top else []
        return {
            "text_offset": [-1] * len(rows),
            "token_logprobs": [row[0] for row in rows],
            "tokens": [row[2] for row in rows],
            "top_logprobs": [top and {text: value for value, _, text in top} for top in tops],
        }
