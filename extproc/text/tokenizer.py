"""What a model's tokenizer can do, whatever library it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from extproc.generation.asked import ChatPrompt


class Prepared(NamedTuple):
    """A prompt as an engine takes it: the text that was tokenised ("" where the client gave ids), and its ids."""

    text: str
    ids: tuple[int, ...]


class Detokenizer(Protocol):
    """Makes text of one sequence's tokens as they come. All that it gave out, joined, is the sequence's text."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that is certain with these tokens. Never half a character; "" while one is not whole."""
        ...

    def end(self) -> str:
        """What was held back. A character that has stayed half is U+FFFD."""
        ...


class Tokenizer(Protocol):
    """A loaded tokenizer. Safe to use from several threads."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end an answer: those of the generation config, the model's config and the tokenizer."""
        ...

    @property
    def vocab_size(self) -> int:
        """The least number that every id is below, added tokens included."""
        ...

    @property
    def is_byte_level(self) -> bool:
        """The vocabulary is of bytes (GPT-2's way), so that a token's bytes are known even if they are no text."""
        ...

    @property
    def context(self) -> int | None:
        """How many tokens prompt and answer may have together, as the model's files say; None: they do not."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of ``text``; with ``special``, those that the tokenizer puts around a text (BOS) are added."""
        ...

    def chat(self, prompt: ChatPrompt) -> str:
        """The conversation as the model's chat template writes it. To be encoded without special tokens.

        Raises GatewayError (400) when the template refuses it, or there is none.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, spaces_between: bool = True) -> str:
        """The text of ``ids`` as a whole."""
        ...

    def token(self, id: int) -> tuple[str, bytes]:  # noqa: A002 -- what it is called
        """One token's text and bytes, as log probabilities show them. The bytes may be half a character."""
        ...

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool = True, spaces_between: bool = True
    ) -> Detokenizer:
        """For an answer to the prompt ``prompt_ids``, whose last tokens decide on the answer's first space."""
        ...
