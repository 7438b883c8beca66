"""Tokens as log probabilities show them, in JSON that is made once per token."""

from __future__ import annotations

from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from extproc.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
# Some 400 bytes each. Alternatives are mostly the same; all are made anew when there would be more.
_MOST: Final = 1 << 16


class Shown(NamedTuple):
    """One token in JSON.

    Attributes:
        text: a string.
        before: an entry of chat's log probabilities up to the number.
        after: the rest of it, without the closing brace.
        partial: what its text is depends on the tokens before: it is part of a character.
    """

    text: bytes
    before: bytes
    after: bytes
    partial: bool


# By tokenizer, which may go when its model does; the second one is of tokens that are shown as ids.
_known: Final[WeakKeyDictionary[Tokenizer, tuple[dict[int, Shown], dict[int, Shown]]]] = WeakKeyDictionary()


class Vocabulary:
    """The tokens of a tokenizer, for one request; what is known of them all requests share.

    Args:
        as_ids: a token's text is ``token_id:N``.
    """

    __slots__ = ("_as_ids", "_known", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        kept = _known.get(tokenizer)
        if kept is None:
            kept = _known[tokenizer] = ({}, {})
        self._known = kept[as_ids]

    def __getitem__(self, token: int) -> Shown:
        """How ``token`` is shown."""
        shown = self._known.get(token)
        if shown is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            text, own = self._tokenizer.token(token)
            partial = _REPLACEMENT in text and not self._as_ids
            shown = self._known[token] = _shown(f"token_id:{token}" if self._as_ids else text, own, partial=partial)
        return shown

    def in_place(self, token: int, piece: str) -> Shown:
        """How ``token`` is shown where the text has grown by ``piece`` with it.

        The last token of a character is shown as all of it, those before as nothing, so that joined they are the text.
        """
        shown = self[token]
        if not shown.partial:
            return shown
        return _shown(piece, self._tokenizer.token(token)[1], partial=False)


def _shown(text: str, own: bytes, *, partial: bool) -> Shown:
    shown = b"%b" % orjson.dumps(text)  # what orjson 3.13 gives keeps 4 KB as long as it lives
    return Shown(shown, b'{"token":%b,"logprob":' % shown, b',"bytes":%b' % orjson.dumps(list(own)), partial)
