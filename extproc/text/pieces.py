"""What each token of a vocabulary adds to a text, as bytes.

Of nearly all models a text is its tokens' pieces put together: only the first token of a text differs (it has no space
before it), and a character may be spread over several tokens. So the pieces are found out once per token, by asking the
library, and kept; what is then left to do for a token is a look into a dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders that make of a token the same wherever it stands, but at the beginning of the text.
_LOCAL: Final = frozenset({"ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Fuse", "Replace", "Strip"})
_ANCHORS: Final = 64  # ids that are tried as the token that another one is put behind


def _bytes_of_characters() -> dict[str, int]:
    """The bytes that byte-level vocabularies write as characters (GPT-2's ``bytes_to_unicode``)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _bytes_of_characters()


def decoder_parts(tokenizer: RustTokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder, as ``tokenizer.json`` writes them; empty where it has none."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    told: dict[str, Any] = orjson.loads(decoder.__getstate__())
    return list(told["decoders"]) if told["type"] == "Sequence" else [told]


def is_local(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether texts of such a decoder can be put together from pieces."""
    fused = False
    for part in parts:
        kind = part["type"]
        if kind not in _LOCAL or (kind == "ByteLevel" and len(parts) > 1):
            return False
        if kind == "Strip" and fused and (part["stop"] or part["start"] > 1):
            return False  # takes away from the end of the whole, or of several tokens
        if kind == "Replace" and fused:
            return False  # may span tokens
        fused = fused or kind == "Fuse"
    return True


class Pieces(dict[int, bytes]):
    """The bytes of a token within a text, by id; looked up once, then kept (some 100 bytes each).

    An id that the vocabulary does not have, and a special token where those are left out, has no bytes.
    """

    __slots__ = ("_anchor", "_before", "_byte_level", "_fallback", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: RustTokenizer, skipped: frozenset[int] = frozenset()) -> None:
        super().__init__()
        kinds = {part["type"] for part in decoder_parts(tokenizer)}
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_level = "ByteLevel" in kinds
        self._fallback = "ByteFallback" in kinds
        self._anchor, self._before = _anchor(tokenizer)

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._within(token_id)
        return piece

    def first(self, token_id: int) -> bytes:
        """The same for the first token of a text."""
        token = self._token(token_id)
        if token is None or self._byte_level:
            return self[token_id]
        alone = self._decode([token_id])
        byte = self._byte(token)
        return alone.encode() if byte is None else byte if alone else b""

    def _within(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _of_byte_level(token)
        if (byte := self._byte(token)) is not None:
            return byte
        return self._decode([*self._anchor, token_id])[len(self._before) :].encode()

    def _token(self, token_id: int) -> str | None:
        if token_id in self._skipped or token_id < 0:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _byte(self, token: str) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(token) if self._fallback else None
        return None if match is None else bytes([int(match[1], 16)])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _of_byte_level(token: str) -> bytes:
    """As the library's decoder: a token with a character that stands for no byte is taken as it is written."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _anchor(tokenizer: RustTokenizer) -> tuple[list[int], str]:
    """A token that is text, to put others behind, and its text; none where there is none among the first."""
    for token_id in range(min(_ANCHORS, tokenizer.get_vocab_size())):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        if text.strip() and tokenizer.decode([token_id, token_id]).startswith(text):
            return [token_id], text
    return [], ""
