"""What the engine refuses about sampling, in its order and its words."""

from __future__ import annotations

from typing import Any

from extproc.mock.generation import Limits, Prompt
from extproc.mock.prompts import stops
from extproc.mock.vllm import bodies
from extproc.mock.vllm.api import RefusedError
from extproc.mock.vllm.engine import Options

MAX_LOGPROBS = 20
_TOO_LONG = (
    "This model's maximum context length is {limit} tokens. However, your prompt contains at least {length} input "
    "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
)


def before(body: bodies.Sampled) -> RefusedError | None:
    """What the request's class refuses, before anything else and without telling the prefill that it may let go."""
    options = body.stream_options
    if options is not None and options.model_fields_set and not body.stream:
        return RefusedError("Stream options can only be defined when `stream=True`.", "stream_options")
    wanted = body.prompt_logprobs
    if wanted is None:
        return None
    if body.stream and (wanted > 0 or wanted == -1):
        return RefusedError("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if wanted < -1:
        return RefusedError("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", wanted)
    return None


def model(name: str | None, options: Options) -> None:
    """Raise RefusedError for a model that is not served."""
    if name and name != options.model:
        message = f"The model `{name}` does not exist. Valid aliases: {options.model}."
        raise RefusedError(message, "model", kind="NotFoundError", status=404, plain=True)


def budget(max_tokens: int | None, options: Options, field: str) -> None:
    """Raise RefusedError for more tokens than the context has; ``field`` is the endpoint's name for ``max_tokens``."""
    limit = options.max_model_len
    if max_tokens is not None and max_tokens > limit:
        message = (
            f"{field}={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        )
        raise RefusedError(message, field, max_tokens)


def cut(prompt: Prompt, most: int | None, wanted: int | None, options: Options) -> Prompt:
    """The end of the prompt, as ``truncate_prompt_tokens`` says: -1 leaves room for a token where any are wanted.

    Source: vllm 0.32 renderers/params.py. Raises RefusedError for more tokens than the context has.
    """
    limit = options.max_model_len
    if most is None:
        return prompt
    if most > limit:
        message = f"truncate_prompt_tokens={most} cannot be greater than max_model_len = {limit}. "
        message += "Please request a smaller truncation size."
        raise RefusedError(message, "truncate_prompt_tokens", most)
    return prompt.end(most if most >= 0 else limit - bool(wanted))


def length(prompt: Prompt, options: Options) -> None:
    """Raise RefusedError for a text that exceeds the context."""
    limit = options.max_model_len
    if prompt.length > limit:
        raise RefusedError(_TOO_LONG.format(limit=limit, length=limit + 1), "input_tokens", limit + 1)


def told_length(prompt: Prompt, options: Options) -> None:
    """Raise RefusedError for token ids that exceed it, in the place of a conversation."""
    limit = options.max_model_len
    if prompt.length > limit:
        raise RefusedError(f"Input length ({prompt.length}) exceeds model's maximum context length ({limit}).")


def sampling(*, n: int, temperature: float, max_tokens: int | None, min_tokens: int, greedy_n: bool = False) -> None:
    """Raise RefusedError for sampling parameters out of range."""
    if n < 1:
        raise RefusedError(f"n must be at least 1, got {n}.")
    if temperature < 0:
        raise RefusedError(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2:
        raise RefusedError(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if max_tokens is not None and max_tokens < 1:
        raise RefusedError(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if min_tokens < 0:
        raise RefusedError(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if max_tokens is not None and min_tokens > max_tokens:
        raise RefusedError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    if n > 1 and temperature == 0 and not greedy_n:
        raise RefusedError(f"n must be 1 when using greedy sampling, got {n}.")


def logprobs(sample: int | None, prompt: int | None) -> None:
    """Raise RefusedError for more logprobs than the engine gives."""
    if sample is not None and sample > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {sample}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise RefusedError(message, "logprobs", sample)
    if prompt is not None and prompt > MAX_LOGPROBS:
        message = f"Requested prompt logprobs of {prompt}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise RefusedError(message, "prompt_logprobs", prompt)


def limits(body: Any, max_tokens: int | None, temperature: float, sample: int = 0) -> Limits:
    """The limits of one sample, from the fields that all endpoints name alike."""
    return Limits(
        max_tokens,
        stops(body.stop),
        frozenset(body.stop_token_ids or ()),
        body.ignore_eos,
        body.include_stop_str_in_output,
        0 if temperature == 0 and not sample else (body.seed or 0) + sample,
    )
