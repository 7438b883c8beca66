"""Request bodies: the fields that the mock reads, with the engine's types and defaults; others are ignored, as there.

Validation is pydantic's, as in the engine, so the errors say the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Message(BaseModel):
    """A chat message; what is not text only counts as part of the prompt."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class Routed(BaseModel):
    """The fields that concern the hand-off and the request's way."""

    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    priority: int = 0


class Sampled(Routed):
    """What chat and completions have in common."""

    model: str | None = None
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = []
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool = False
    request_id: str = ""


class Chat(Sampled):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    echo: bool = False
    add_generation_prompt: bool = True


class Completion(Sampled):
    """``POST /v1/completions``."""

    prompt: list[StrictInt] | list[list[StrictInt]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16


class Messages(Routed):
    """``POST /v1/messages``."""

    model: str
    messages: list[Message]
    max_tokens: int
    system: Any = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    tools: list[Any] | None = None

    @field_validator("max_tokens")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("max_tokens must be positive")
        return value


class CountTokens(BaseModel):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[Message]
    system: Any = None
    tools: list[Any] | None = None


class Responses(Routed):
    """``POST /v1/responses``."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    store: bool | None = True
    background: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = []
    ignore_eos: bool = False
    seed: int | None = None
    tools: list[Any] = Field(default_factory=list)
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    request_id: str = ""
    user: str | None = None


class SamplingParams(BaseModel):
    """``sampling_params`` of ``/inference/v1/generate``."""

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    temperature: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Generate(Routed):
    """``POST /inference/v1/generate``."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    output_mode: str = "tokens"
    return_token_ids: bool | None = None


class TokenizeText(BaseModel):
    """``POST /tokenize`` with a text."""

    prompt: str
    model: str | None = None
    return_token_strs: bool | None = False


class TokenizeChat(BaseModel):
    """``POST /tokenize`` with a conversation."""

    messages: list[Message]
    model: str | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = False


class Detokenize(BaseModel):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class StartProfile(BaseModel):
    """``POST /start_profile``: ``entrypoints/serve/profile/api_router.py``."""

    model_config = ConfigDict(extra="ignore", strict=True)

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None
