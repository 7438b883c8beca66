"""What was used, in JSON: the prompt's counts are the prefill's, the output's are the decode's.

vLLM tells of cached tokens only with ``--enable-prompt-tokens-details``; here they are always told, as by OpenAI.
"""

from __future__ import annotations

from typing import NamedTuple

from extproc.generation.events import Usage


class Counts(NamedTuple):
    """Tokens of one sequence; ``reasoning`` ones are counted as ``completion``, too, ``cached`` ones as ``prompt``."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0

    @property
    def whole(self) -> bytes:
        """``usage`` of an answer that is not streamed."""
        return b'%b,"prompt_tokens_details":{"cached_tokens":%d},"completion_tokens_details":%b}' % (
            self._begun,
            self.cached,
            b'{"reasoning_tokens":%d}' % self.reasoning if self.reasoning else b"null",
        )

    @property
    def last(self) -> bytes:
        """``usage`` of the chunk that ends a stream: without nulls."""
        reasoning = b',"completion_tokens_details":{"reasoning_tokens":%d}' % self.reasoning if self.reasoning else b""
        return b'%b,"prompt_tokens_details":{"cached_tokens":%d}%b}' % (self._begun, self.cached, reasoning)

    @property
    def so_far(self) -> bytes:
        """``usage`` of each chunk of a stream, with ``continuous_usage_stats``."""
        return self._begun + b"}"

    @property
    def _begun(self) -> bytes:
        return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (
            self.prompt,
            self.prompt + self.completion,
            self.completion,
        )


class Tally:
    """The counts of one sequence as both legs tell them.

    Args:
        prompt: how many tokens the prompt has, until the prefill says it.
    """

    __slots__ = ("_cached", "_prefilled", "_prompt", "_reasoning")

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._cached = 0
        self._reasoning = 0
        self._prefilled = False

    def prefilled(self, usage: Usage) -> None:
        """What the prefill read, and what it found in its cache, counts: for a decode, a cache handed over is found."""
        self._prefilled = True
        self._prompt, self._cached = usage.prompt or self._prompt, usage.cached

    def decoded(self, usage: Usage) -> None:
        """What the decode says last."""
        self._reasoning = usage.reasoning
        if not self._prefilled:
            self._prompt, self._cached = usage.prompt or self._prompt, usage.cached

    def counts(self, completion: int) -> Counts:
        """All counts, with ``completion`` tokens generated."""
        return Counts(self._prompt, completion, self._cached, self._reasoning)
