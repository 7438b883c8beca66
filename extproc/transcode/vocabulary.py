"""Tokens as log probabilities show them, in JSON that is made once per token.

Of a token that is part of a character engines' own servers show different things, see :class:`Halves`.

Source: vllm 0.32 v1/engine/logprobs.py (``_verify_tokens``, ``_correct_decoded_token``); sglang 0.5.23
managers/tokenizer_manager.py (``detokenize_logprob_tokens``), entrypoints/openai/utils.py (``_lossless_token_text``);
tokenspeed runtime/entrypoints/openai/utils.py (``to_openai_style_logprobs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import orjson

from extproc.text.tokenizer import Tokenizer

BEFORE: Final = 4  # tokens that may be one character together
_REPLACEMENT: Final = "\ufffd"
# Some 400 bytes each. Alternatives are mostly the same; all are made anew when there would be more.
_MOST: Final = 1 << 16


class Halves(Enum):
    """How a token that is part of a character is shown."""

    JOINED = "joined"  # with the tokens before, if it completes their character, else as nothing: vLLM
    REPLACED = "replaced"  # as U+FFFD: SGLang's chat, TokenSpeed
    BYTES = "bytes"  # a character per byte (Latin-1), if the vocabulary is of bytes: SGLang's completions


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


# By tokenizer, which may go when its model does; by form: as they are, with halves as bytes, as ids.
_Forms = tuple[dict[int, Shown], dict[int, Shown], dict[int, Shown]]
_known: Final[WeakKeyDictionary[Tokenizer, _Forms]] = WeakKeyDictionary()


class Vocabulary:
    """The tokens of a tokenizer, for one request; what is known of them all requests share.

    Args:
        halves: how parts of characters are shown.
        as_ids: a token's text is ``token_id:N``.
    """

    __slots__ = ("_as_bytes", "_as_ids", "_joins", "_known", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, halves: Halves = Halves.REPLACED, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._as_bytes = halves is Halves.BYTES and tokenizer.is_byte_level
        self._joins = halves is Halves.JOINED
        kept = _known.get(tokenizer)
        if kept is None:
            kept = _known[tokenizer] = ({}, {}, {})
        self._known = kept[2 if as_ids else self._as_bytes]

    def __getitem__(self, token: int) -> Shown:
        """How ``token`` is shown by itself."""
        shown = self._known.get(token)
        if shown is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            shown = self._known[token] = self._made(token)
        return shown

    def behind(self, before: Sequence[int], token: int) -> Shown:
        """How ``token`` is shown behind the tokens ``before``, of which the last BEFORE are enough."""
        shown = self[token]
        if not (shown.partial and self._joins):
            return shown
        return _shown(joined(self._tokenizer, before, token), self._tokenizer.token(token)[1], partial=False)

    def _made(self, token: int) -> Shown:
        text, own = self._tokenizer.token(token)
        if self._as_ids:
            return _shown(f"token_id:{token}", own, partial=False)
        if self._as_bytes and _REPLACEMENT in text and not _is_text(own):
            text = own.decode("latin-1")
        return _shown(text, own, partial=text.endswith(_REPLACEMENT))


def joined(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """The text of ``token``, which by itself is part of a character, as vLLM has it.

    Where it completes a character that tokens ``before`` have begun, all of that; else nothing.
    """
    for count in range(1, min(len(before), BEFORE) + 1):
        context = before[-count:]
        whole = tokenizer.decode([*context, token], skip_special=False)
        if whole.endswith(_REPLACEMENT):
            continue
        clean = len(context)
        while clean and tokenizer.decode(context[clean - 1 : clean], skip_special=False).endswith(_REPLACEMENT):
            clean -= 1
        told = tokenizer.decode(context[:clean], skip_special=False) if clean else ""
        return _behind(told, whole)
    return ""


def _behind(told: str, whole: str) -> str:
    """``whole`` without what it has in common with the beginning of ``told``, most often all of that."""
    if whole.startswith(told):
        return whole[len(told) :]
    alike = next(at for at, (one, other) in enumerate(zip(told + "\0", whole + "\1", strict=False)) if one != other)
    return whole[alike:]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(text: str, own: bytes, *, partial: bool) -> Shown:
    shown = b"%b" % orjson.dumps(text)  # what orjson 3.13 gives keeps 4 KB as long as it lives
    return Shown(shown, b'{"token":%b,"logprob":' % shown, b',"bytes":%b' % orjson.dumps(list(own)), partial)
