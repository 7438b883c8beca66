"""One client request for generated text, whatever the API, and one sequence of it, ready for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.apis.table import Api
from extproc.generation.sampling import Sampling

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat template is rendered with.

    Attributes:
        messages: as the client sent them, checked to be objects with a role; content that is not text is refused.
        tools: what the template may show; none of them is ever called (``tool_choice`` "none").
        template_kwargs: ``chat_template_kwargs``, ``reasoning_effort`` and the like.
        add_generation_prompt: end with the header of an assistant's message.
        continue_final_message: leave the last message open instead.
        chat_template: the client's own; None for the model's.
        documents: for templates that know them.
        add_special_tokens: have the tokenizer add its special tokens to what the template made.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client wants, engine-neutral.

    Attributes:
        api: which API's answer it wants.
        model: as the client names it; None where it names none.
        prompts: of Completions and ``/generate``, one or several; empty for chat.
        chat: of Chat Completions; None for the others.
        sampling: of every sequence, except where ``samplings`` says otherwise.
        stream: the answer is to be a stream of events.
        samples: how many answers to each prompt.
        batched: the prompt was a list of prompts, even if of one (``/generate`` answers a list with a list).
        samplings: of ``/generate``: one per prompt; empty where all have ``sampling``.
        top_logprobs: how many alternatives are told per generated token; 0: only the token's own log probability; None:
            none are asked for.
        prompt_logprobs: the same of the prompt's tokens.
        logprob_start: of ``/generate``: the first prompt token whose log probability is told.
        echo: the answer begins with the prompt (Completions); with ``sampling.max_tokens`` 0 it is nothing else,
            although an engine may generate a token all the same.
        include_usage: a stream ends with the usage.
        continuous_usage: every chunk of a stream has one.
        return_token_ids: token ids are told, those of the prompt too.
        tokens_as_ids: ``return_tokens_as_token_ids``: a token's text in the log probabilities is ``token_id:N``.
        text_in_logprobs: ``return_text_in_logprobs`` of ``/generate``.
        special: raw prompts get the special tokens that the tokenizer adds (a BOS).
        rids: the client's names for the sequences; empty where it gives none.
    """

    api: Api
    model: str | None
    sampling: Sampling
    prompts: tuple[Prompt, ...] = ()
    chat: ChatPrompt | None = None
    stream: bool = False
    samples: int = 1
    batched: bool = False
    samplings: tuple[Sampling, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start: int | None = None
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    text_in_logprobs: bool = False
    special: bool = True
    rids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence, ready for an engine.

    Attributes:
        ids: the prompt's token ids.
        sampling: with the model's defaults filled in, the seed that of this sample.
        name: what the engine's name for the request begins with; every attempt has its own end.
        stream, top_logprobs, prompt_logprobs, logprob_start: as in :class:`Asked`.
        packed: ``ids`` as protobuf has them (varints one after the other), made once for all legs that share the
            prompt; empty to have them made.
    """

    ids: Sequence[int]
    sampling: Sampling
    name: str
    stream: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start: int | None = None
    packed: bytes = b""
