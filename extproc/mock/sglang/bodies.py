"""Request bodies: the fields that the mock reads, with the engine's types and defaults; others are ignored, as there.

Validation is pydantic's, as in the engine, so the errors say the same.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, StrictInt, field_validator

from extproc.mock.sglang.engine import Ranks


class Ranked(BaseModel):
    """The fields by which a router chooses data-parallel ranks."""

    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None

    @property
    def ranks(self) -> Ranks:
        """What they say."""
        return Ranks(self.routed_dp_rank, self.data_parallel_rank, self.disagg_prefill_dp_rank)


class Routed(Ranked):
    """The fields a router adds."""

    bootstrap_host: list[str] | str | None = None
    bootstrap_port: list[int | None] | int | None = None
    bootstrap_room: list[int] | int | None = None


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


class Chat(Routed):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    model: str = "default"
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    rid: list[str] | str | None = None
    priority: int | None = None


class Completion(Routed):
    """``POST /v1/completions``."""

    model: str = "default"
    prompt: list[StrictInt] | list[list[StrictInt]] | str | list[str]
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    ignore_eos: bool = False
    no_stop_trim: bool = False
    return_token_ids: bool = False
    rid: list[str] | str | None = None
    priority: int | None = None

    @field_validator("max_tokens")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("max_tokens must be positive")
        return value


class Generate(Ranked):
    """``POST /generate``."""

    rid: list[str] | str | None = None
    text: list[str] | str | None = None
    input_ids: list[list[int]] | list[int] | None = None
    sampling_params: list[dict[str, Any]] | dict[str, Any] | None = None
    return_logprob: list[bool] | bool | None = None
    logprob_start_len: list[int] | int | None = None
    top_logprobs_num: list[int] | int | None = None
    token_ids_logprob: list[list[int]] | list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    bootstrap_host: list[str | None] | str | None = None
    bootstrap_port: list[int | None] | int | None = None
    bootstrap_room: list[int | None] | int | None = None
    priority: int | None = None
    return_prompt_token_ids: bool = False


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
    rid: str | None = None


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
    temperature: float | None = None
    request_id: str | None = None
    metadata: dict[str, Any] | None = None


class Rerank(BaseModel):
    """``POST /v1/rerank``."""

    query: Any
    documents: list[Any]
    instruct: str | None = None
    top_n: int | None = None
    return_documents: bool = True

    @field_validator("top_n")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("Value error, parameter top_n should be larger than 0.")
        return value


class Abort(BaseModel):
    """``POST /abort_request``."""

    rid: str | None = Field(default=None)
    abort_all: bool = False


class Profile(BaseModel):
    """``POST /start_profile``: ``managers/io_struct.py``, ProfileReq."""

    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None
    merge_profiles: bool = False
    profile_prefix: str | None = None
    profile_stages: list[str] | None = None
    detailed_annotations: bool = False
