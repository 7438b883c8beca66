"""Text of a sequence's tokens as they come: never half a character, spaces as in the text as a whole."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from extproc.text.pieces import Pieces

_REPLACED: Final = "\ufffd"
_PER_BYTE: Final = "extproc-per-byte"
# Tokens that may be one character together: it has four bytes at most.
_TAIL: Final = 4
_WINDOW: Final = 6  # tokens that a text is decoded with, so that it is as in the whole


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for every byte that is no text, as the library's ``ByteFallback`` has it."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _REPLACED * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_each)


class ByPieces:
    """Implements :class:`extproc.text.tokenizer.Detokenizer` for decoders that are local (``pieces.is_local``).

    A token costs 0.3 µs (measured, ``python -m bench.text``).

    Args:
        pieces: what each token adds, without those that are left out.
        prompt_ids: what came before.
        per_byte: what bytes that are no text become: one U+FFFD each, or one for what may have been a character.
        added: added tokens whose neighbours have no space between them; None: they have what the decoder puts there.
    """

    __slots__ = ("_added", "_after_added", "_begun", "_decoder", "_half", "_pieces")

    def __init__(
        self,
        pieces: Pieces,
        prompt_ids: Sequence[int] = (),
        *,
        per_byte: bool = False,
        added: Mapping[int, bytes] | None = None,
    ) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(_PER_BYTE if per_byte else "replace")
        self._half = False
        self._added = added or None
        self._after_added = False
        self._begun = False
        tail: list[bytes] = []
        for token_id in reversed(prompt_ids):
            if piece := pieces[token_id]:
                self._begun = True
                tail.append(piece)
                if len(tail) == _TAIL:
                    break
        if tail and tail[0][-1] >= 0x80:
            self._decode(b"".join(reversed(tail)))

    def add(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        pieces = self._pieces
        if not self._begun:
            return self._begin(ids)
        if self._added is not None:
            data = self._joined(ids)
        else:
            data = pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[token_id] for token_id in ids])
        if not self._half:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._decode(data)

    def end(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)

    def _begin(self, ids: Sequence[int]) -> str:
        """The text's first token has a piece of its own."""
        for at, token_id in enumerate(ids):
            if self._pieces[token_id] or self._pieces.first(token_id):
                self._begun = True
                self._after_added = self._added is not None and token_id in self._added
                return self._decode(self._pieces.first(token_id)) + (self.add(ids[at + 1 :]) if ids[at + 1 :] else "")
        return ""

    def _joined(self, ids: Sequence[int]) -> bytes:
        """Of added tokens that follow each other, without the spaces between (vLLM 0.32, ``decode_next``)."""
        added, data = self._added or {}, b""
        for token_id in ids:
            is_added = token_id in added
            data += added[token_id] if is_added and self._after_added else self._pieces[token_id]
            self._after_added = is_added
        return data

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._half = bool(self._decoder.getstate()[0])
        return text


class ByWindow:
    """The same for all other tokenizers: the last tokens are decoded as a whole, and what is new of that is given out.

    A token costs two calls of the library. Text that ends in U+FFFD, which may be half a character, is held back for as
    many tokens as a character may have.

    Args:
        decode: makes text of ids.
        prompt_ids: what came before.
        skipped: ids that are left out.
    """

    __slots__ = ("_decode", "_ids", "_read", "_skipped", "_start")

    def __init__(
        self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int], skipped: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        kept: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id not in skipped:
                kept.append(token_id)
                if len(kept) == _WINDOW:
                    break
        self._ids = kept[::-1]
        self._start = 0  # of the window
        self._read = len(kept)  # tokens whose text is out

    def add(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        self._ids += [token_id for token_id in ids if token_id not in self._skipped]
        before = self._decode(self._ids[self._start : self._read])
        end = len(self._ids)
        text = self._decode(self._ids[self._start :])
        if text.endswith(_REPLACED):
            if end - self._read < _TAIL:
                return ""
            for end in range(len(self._ids) - 1, len(self._ids) - _TAIL, -1):
                text = self._decode(self._ids[self._start : end])
                if not text.endswith(_REPLACED):
                    break
        if len(text) <= len(before):
            return ""
        self._read = end
        self._start = max(self._start, self._read - _WINDOW)
        if self._start > 4 * _WINDOW:
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0
        return text[len(before) :]

    def end(self) -> str:
        """See Detokenizer."""
        before = self._decode(self._ids[self._start : self._read])
        rest = self._decode(self._ids[self._start :])[len(before) :]
        self._read = len(self._ids)
        return rest
