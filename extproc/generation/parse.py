"""A client's request, read for workers that take token ids: every field mapped, without effect, or refused by its name.

Source: see fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from extproc.apis import table
from extproc.apis.request import InferenceRequest
from extproc.apis.table import Api
from extproc.errors import GatewayError
from extproc.generation import fields as rules
from extproc.generation import values
from extproc.generation.asked import Asked
from extproc.generation.chat import chat_limit, chat_logprobs, chat_prompt
from extproc.generation.native import native
from extproc.generation.prompts import prompts_of
from extproc.generation.sampling_fields import openai_sampling
from extproc.generation.values import Fields

DEFAULT_LIMIT: Final = 16  # tokens of a completion, by OpenAI's and both engines' rule


def parse(request: InferenceRequest) -> Asked:
    """What ``request`` asks for.

    Raises:
        GatewayError: ``not_implemented`` for an API that gRPC workers do not serve yet; ``unsupported_parameter``,
            ``invalid_type`` or ``invalid_value`` for a field, which ``param`` names; ``invalid_json``.
    """
    read = _READERS.get(request.api)
    if read is None:
        raise GatewayError("not_implemented", f"{request.api.path} is not yet supported over gRPC workers")
    try:
        members = orjson.loads(request.body.raw)
    except orjson.JSONDecodeError as error:  # a number beyond all numbers, which was not looked at before
        raise GatewayError("invalid_json", f"the body is not JSON: {error}") from None
    return read(request, Fields(members))


def serves(api: Api) -> bool:
    """Whether gRPC workers serve an API."""
    return api in _READERS


def _chat(request: InferenceRequest, fields: Fields) -> Asked:
    rules.CHAT.check(fields)
    include, continuous = _stream_options(fields, stream=request.stream)
    return Asked(
        request.api,
        request.model,
        openai_sampling(fields, chat_limit(fields)),
        chat=chat_prompt(fields),
        stream=request.stream,
        samples=request.samples,
        top_logprobs=chat_logprobs(fields),
        prompt_logprobs=_prompt_logprobs(fields, stream=request.stream),
        include_usage=include,
        continuous_usage=continuous,
        return_token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        rids=fields.texts("rid"),
    )


def _completions(request: InferenceRequest, fields: Fields) -> Asked:
    rules.COMPLETIONS.check(fields)
    prompts, batched = prompts_of(fields.get("prompt"), "prompt")
    include, continuous = _stream_options(fields, stream=request.stream)
    echo = fields.boolean("echo")
    best_of = fields.count("best_of")
    if best_of is not None and best_of > request.samples:
        values.refuse("best_of", "more sequences than `n` are not made to choose from over gRPC workers")
    logprobs = _logprobs(fields)
    prompt_logprobs = _prompt_logprobs(fields, stream=request.stream)
    return Asked(
        request.api,
        request.model,
        openai_sampling(fields, _limit(fields, echo=echo)),
        prompts=prompts,
        batched=batched,
        stream=request.stream,
        samples=request.samples,
        top_logprobs=logprobs,
        prompt_logprobs=logprobs if prompt_logprobs is None and echo else prompt_logprobs,
        echo=echo,
        include_usage=include,
        continuous_usage=continuous,
        return_token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        special=fields.boolean("add_special_tokens", default=True),
        rids=fields.texts("rid"),
    )


def _limit(fields: Fields, *, echo: bool) -> int:
    found = fields.count("max_tokens")
    if found is None:
        return DEFAULT_LIMIT
    if found == 0 and not echo:
        values.wrong("max_tokens", "at least 1, unless the prompt is to be echoed")
    return found


def _logprobs(fields: Fields) -> int | None:
    found = fields.count("logprobs", least=-1)
    if found == -1:
        values.refuse("logprobs", "-1, for all of the vocabulary: the engines' gRPC services do not send as many")
    return found


def _prompt_logprobs(fields: Fields, *, stream: bool) -> int | None:
    found = fields.count("prompt_logprobs", least=-1)
    if found == -1:
        values.refuse("prompt_logprobs", "-1: the engines' gRPC services do not send as many")
    if found and stream:
        raise GatewayError("invalid_value", "`prompt_logprobs` are not told in a stream", param="prompt_logprobs")
    return found


def _stream_options(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether every chunk has one."""
    options: Mapping[str, Any] | None = fields.mapping("stream_options")
    if not options:
        return False, False
    if not stream:
        raise GatewayError("invalid_value", "`stream_options` need `stream` to be true", param="stream_options")
    read = Fields(options, "stream_options")
    include = read.boolean("include_usage")
    return include, include and read.boolean("continuous_usage_stats")


_READERS: Final[Mapping[Api, Callable[[InferenceRequest, Fields], Asked]]] = {
    table.CHAT: _chat,
    table.COMPLETIONS: _completions,
    table.GENERATE: native,
}
