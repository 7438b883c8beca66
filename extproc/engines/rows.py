"""What engines' messages have in common: log probabilities, and messages that are none."""

from __future__ import annotations

from typing import Any, Final

from extproc.errors import GatewayError
from extproc.generation.events import Logprobs, PromptLogprobs, Top

_SHOWN: Final = 32  # bytes of a message that cannot be read


def logprobs_of(message: Any) -> Logprobs:
    """``OutputLogProbs`` of any engine."""
    return Logprobs(message.token_logprobs, message.token_ids, _tops(message))


def prompt_logprobs_of(message: Any) -> PromptLogprobs:
    """``InputLogProbs`` of SGLang or vLLM; a value that is not set is None."""
    values = [item.value if item.HasField("value") else None for item in message.token_logprobs]
    return PromptLogprobs(values, message.token_ids, _tops(message))


def bad_reply(message: bytes) -> GatewayError:
    """The error for a message that is not what an engine's ``Generate`` answers with."""
    shown = message[:_SHOWN].hex()
    return GatewayError("decode_bad_reply", f"a worker's message is no GenerateResponse: {shown}")


def _tops(message: Any) -> list[Top]:
    return [(top.token_ids, top.values) for top in message.top_logprobs]
