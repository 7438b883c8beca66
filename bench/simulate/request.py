"""A turn of a conversation on its way, as policies see it."""

from __future__ import annotations

from collections.abc import Mapping

from bench.simulate.traffic import BLOCK, Conversation, Turn


class Request:
    """It is the RequestView of the policies, too.

    Attributes:
        tokens, blocks: that its prompt has; no gateway knows.
        fields: headers.
        as_ids: the prompt is given as token ids, else as text.
    """

    __slots__ = ("arrived", "as_ids", "blocks", "conversation", "fields", "notes", "number", "tokens", "turn")
    model = "m"
    within = None

    def __init__(self, conversation: Conversation, number: int, arrived: float) -> None:
        self.conversation = conversation
        self.number = number
        self.turn: Turn = conversation.turns[number]
        self.arrived = arrived
        self.tokens = conversation.tokens(self.turn)
        self.blocks = self.tokens // BLOCK
        self.fields: Mapping[str, bytes] = {}
        self.notes: dict[object, object] = {}
        self.as_ids = False

    def prompt_tokens(self) -> int:
        """As a gateway guesses it of a body."""
        if self.as_ids:
            return self.tokens
        return (len(self.conversation.context) + self.turn.end + 100) // 4

    def prompt_bytes(self, most: int | None = None) -> bytes:
        """The messages, or all token ids."""
        if self.as_ids:
            return self.conversation.token_ids(self.tokens)[:most]
        return self.conversation.prompt(self.turn)[:most]

    def own_id(self) -> str:
        """None."""
        return ""

    def prompt_context(self) -> bytes:
        """The tools, which token ids have in them."""
        return b"" if self.as_ids else self.conversation.context
