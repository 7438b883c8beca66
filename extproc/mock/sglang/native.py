"""``/generate``. A stream's head is sent at once, before the request is even checked; failures come as events."""

from __future__ import annotations

import time
from typing import Any

import orjson

from extproc.mock.api import DONE, STUMBLE, Reply, event
from extproc.mock.engine import RequestError
from extproc.mock.generation import Limits, Prompt
from extproc.mock.prompts import stops
from extproc.mock.sglang import bodies, logprobs
from extproc.mock.sglang.api import Api, error, weight_versions
from extproc.mock.sglang.batch import Sampling, Spread, one, several
from extproc.mock.sglang.engine import Batch, LogprobOptions, Mode, Sequence

_DEFAULT_NEW_TOKENS = 128
_SAMPLING_PARAMS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)


class GenerateApi(Api):
    """``POST /generate``."""

    early_head = True
    stops_at_failure = False

    def __init__(self, body: bodies.Generate, mode: Mode) -> None:
        super().__init__(mode)
        self._body = body
        self._in_list = False
        self._told: set[int] = set()

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return self._body.stream

    def objection(self) -> Reply | None:
        """What the engine refuses before anything else, also in a stream: unknown sampling parameters."""
        given = self._body.sampling_params
        for values in given if isinstance(given, list) else [given or {}]:
            for name in values:
                if name not in _SAMPLING_PARAMS:
                    known = ", ".join(f"`{entry}`" for entry in _SAMPLING_PARAMS)
                    return Reply.json(400, {"error": f"unknown field `{name}`, expected one of {known}"})
        return None

    def batch(self) -> Batch:
        """The sequences asked for."""
        body = self._body
        spread = Spread(body.rid, body.bootstrap_host, body.bootstrap_port, body.bootstrap_room, body.ranks)
        prompts = self._prompts()
        if isinstance(prompts, Prompt):
            batch = one(prompts, self._sampling(0), spread, self._options(0))
        else:
            batch = several(prompts, self._sampling, spread, self._options)
        self._in_list = not batch.single
        return batch

    def answer(self, batch: Batch) -> bytes:
        """The whole answer."""
        outputs = [self._output(sequence) for sequence in batch.sequences]
        return orjson.dumps(outputs if self._in_list else outputs[0])

    def refusal(self, message: str) -> Reply:
        """Where the engine refuses the request."""
        return Reply.json(400, {"error": {"message": message}})

    def stumble(self, message: str) -> Reply:  # noqa: ARG002 - the engine keeps it to itself here
        """Where the engine's front end trips over the request."""
        return STUMBLE

    def failed(self, status: int, message: str) -> Reply:
        """Where a sequence has failed with ``status``."""
        if status == 400:
            return self.refusal(message)
        return Reply.json(status, error(message, str(status), status))

    def step(self, sequence: Sequence) -> bytes:
        """The events for a sequence that has grown by a token, ended or failed."""
        output = self._output(sequence)
        if self._in_list:
            output["index"] = sequence.index
        return event(output)

    def end(self, batch: Batch) -> bytes:  # noqa: ARG002 - nothing is summed up
        """The events after the last step."""
        return DONE

    def refusal_events(self, message: str) -> bytes:
        """Where the engine refuses after an early head."""
        problem = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
        return event({"error": problem}) + DONE

    def _prompts(self) -> Prompt | list[Prompt]:
        text, ids = self._body.text, self._body.input_ids
        if isinstance(text, str):
            return Prompt(text)
        if text is not None:
            return [Prompt(entry) for entry in text]
        if ids is None:
            raise RequestError("Either text, input_ids or input_embeds should be provided.")
        if not ids:
            raise RequestError("input_ids cannot be empty.")
        if isinstance(ids[0], int):
            return Prompt(ids=tuple(entry for entry in ids if isinstance(entry, int)))
        return [Prompt(ids=tuple(entry)) for entry in ids if isinstance(entry, list)]

    def _sampling(self, number: int) -> Sampling:
        given = self._body.sampling_params
        values = (given[number] if isinstance(given, list) else given) or {}
        limits = Limits(
            values.get("max_new_tokens", _DEFAULT_NEW_TOKENS),
            stops(values.get("stop")),
            frozenset(values.get("stop_token_ids") or ()),
            bool(values.get("ignore_eos")),
            bool(values.get("no_stop_trim")),
            values.get("sampling_seed") or 0,
        )
        return Sampling(limits, values.get("n", 1), values.get("temperature", 1.0))

    def _options(self, number: int) -> LogprobOptions | None:
        def item(value: Any, default: int) -> int:
            entry = value[number] if isinstance(value, list) else value
            return default if entry is None else entry

        body = self._body
        if not item(body.return_logprob, 0):
            return None
        chosen: Any = body.token_ids_logprob or None
        if chosen and isinstance(chosen[0], list):
            chosen = chosen[number]
        return LogprobOptions(
            item(body.logprob_start_len, -1),
            item(body.top_logprobs_num, 0),
            None if chosen is None else tuple(chosen),
            body.return_text_in_logprobs,
        )

    def _output(self, sequence: Sequence) -> dict[str, Any]:
        over = sequence.finish is not None
        info: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": sequence.finish,
            "prompt_tokens": sequence.prompt.length,
            "weight_version": "default",
            "num_retractions": 0,
        }
        if sequence.logprobs is not None:
            info.update(logprobs.meta(sequence, sequence.logprobs, self.mode))
        info.update(reasoning_tokens=0, completion_tokens=sequence.written, cached_tokens=0)
        if over:
            info["weight_versions"] = weight_versions(sequence)
        info.update(cached_tokens_details=None, dp_rank=None)
        if over:
            info["e2e_latency"] = time.time() - sequence.begun
        if sequence.index not in self._told:
            self._told.add(sequence.index)
            info["response_sent_to_client_ts"] = time.time()
        output = {"text": sequence.so_far, "output_ids": sequence.ids, "meta_info": info}
        if self._body.return_prompt_token_ids:
            output["prompt_token_ids"] = [token for token, _ in sequence.prompt.tokens()]
        return output
