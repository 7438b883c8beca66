"""What an engine says of one sequence, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Top = tuple[Sequence[int], Sequence[float]]


class Logprobs(NamedTuple):
    """Log probabilities, one row per token.

    Attributes:
        values: of the tokens themselves.
        ids: the tokens.
        tops: alternatives, as the engine orders them: their ids and values; empty where none are asked for.
    """

    values: Sequence[float]
    ids: Sequence[int]
    tops: Sequence[Top] = ()


class PromptLogprobs(NamedTuple):
    """The same of the prompt's tokens; the first one's is None, since nothing stands before it."""

    values: Sequence[float | None]
    ids: Sequence[int]
    tops: Sequence[Top] = ()


class Usage(NamedTuple):
    """Counts of tokens.

    Attributes:
        completion: what the engine says; vLLM counts only this message's in a stream, so that there the ids count.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


class Tokens(NamedTuple):
    """Some more tokens of a stream."""

    ids: Sequence[int]
    logprobs: Logprobs | None
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Complete(NamedTuple):
    """The end of a sequence.

    Attributes:
        ids: all of the sequence where it was not streamed. Of a stream all three engines repeat the last
            :class:`Tokens` here, ids and log probabilities: they count only if there has been none.
        finish: "stop", "length", "abort" or "error".
        matched: the token or the string that ended it, if one did; not what only the tokenizer calls an end.
        kv_params: what tells a decode where the KV cache is (raw JSON); of vLLM's prefills.
    """

    ids: Sequence[int]
    finish: str
    matched: int | str | None
    logprobs: Logprobs | None
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    kv_params: bytes = b""


Event = Tokens | Complete
