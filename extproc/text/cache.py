"""What was tokenised before: whole texts (L0), and beginnings of texts that end at a special token (L1).

Both are off unless asked for, as with the peer. L1 is for conversations: a turn's prompt begins with the one before,
and a special token is taken out of a text before anything else, so that what is around it is tokenised apart. Not all
tokenizers keep it so (those that put a space before every text): whether this one does is tried out, else L1 is off.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

Encode = Callable[[str, bool], list[int]]  # text, whether special tokens are added
_OVERHEAD: Final = 250  # bytes of an entry besides its text and ids
_ENDS: Final = 2  # boundaries at the beginning, and at the end, of a text that are remembered

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What is remembered, of each tokenizer: entries and bytes; 0 entries or bytes: nothing."""

    l0_entries: int = 0
    l0_bytes: int = 0
    l1_bytes: int = 0


class _Recent:
    """Ids by key, the least recently used forgotten first."""

    def __init__(self, most: int | None, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._entries: OrderedDict[str | bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str | bytes) -> array[int] | None:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: str | bytes, ids: Sequence[int]) -> None:
        kept = array("I", ids)
        size = _size(key, kept)
        if size > self._most_bytes:
            return
        with self._lock:
            former = self._entries.pop(key, None)
            self._bytes += size - (0 if former is None else _size(key, former))
            self._entries[key] = kept
            while self._bytes > self._most_bytes or (self._most is not None and len(self._entries) > self._most):
                old_key, old = self._entries.popitem(last=False)
                self._bytes -= _size(old_key, old)


def _size(key: str | bytes, ids: array[int]) -> int:
    return _OVERHEAD + ids.itemsize * len(ids) + (len(key.encode()) if isinstance(key, str) else len(key))


class EncodeCache:
    """Encodes with what is remembered. May be called from several threads.

    Args:
        encode: the tokenizer.
        special: the texts of its special tokens.
        settings: what to remember.
    """

    def __init__(self, encode: Encode, special: Sequence[str], settings: CacheSettings) -> None:
        self._encode = encode
        whole = settings.l0_entries > 0 and settings.l0_bytes > 0
        self._texts = _Recent(settings.l0_entries, settings.l0_bytes) if whole else None
        self._prefixes: _Recent | None = None
        if settings.l1_bytes > 0 and (kept := [text for text in special if text and _splits_at(encode, text)]):
            self._prefixes = _Recent(None, settings.l1_bytes)
            self._boundary = re.compile("|".join(map(re.escape, sorted(kept, key=len, reverse=True))))
        elif settings.l1_bytes > 0:
            _logger.warning("--tokenizer-cache-enable-l1: no effect, this tokenizer's texts cannot be cut")

    def encode(self, text: str, *, special: bool) -> list[int]:
        """As the tokenizer does."""
        texts = self._texts
        if texts is None:
            return self._by_prefix(text, special=special)
        key = f"{special:d}{text}"
        found = texts.get(key)
        if found is not None:
            return found.tolist()
        ids = self._by_prefix(text, special=special)
        texts.put(key, ids)
        return ids

    def _by_prefix(self, text: str, *, special: bool) -> list[int]:
        prefixes = self._prefixes
        ends = [] if prefixes is None or special else [match.end() for match in self._boundary.finditer(text)]
        if prefixes is None or not ends:
            return self._encode(text, special)
        remembered = [end for at, end in enumerate(ends) if at < _ENDS or at >= len(ends) - _ENDS]
        keys = _digests(text, ends)
        start, ids = 0, []
        for end in reversed(ends):
            known = prefixes.get(keys[end])
            if known is not None:
                start, ids = end, known.tolist()
                break
        for end in remembered:
            if end > start:
                ids += self._encode(text[start:end], False)  # noqa: FBT003 -- see Encode
                prefixes.put(keys[end], ids)
                start = end
        return ids + self._encode(text[start:], False) if start < len(text) else ids  # noqa: FBT003


def _digests(text: str, ends: Sequence[int]) -> dict[int, bytes]:
    """A digest of the text up to each of these places."""
    digest, digests, start = hashlib.blake2b(digest_size=16), {}, 0
    for end in ends:
        digest.update(text[start:end].encode("utf-8", "surrogatepass"))
        digests[end] = digest.digest()
        start = end
    return digests


def _splits_at(encode: Encode, token: str) -> bool:
    """Whether what is behind this special token is tokenised as if it were a text of its own."""
    for before, behind in (("a b", "a b"), ("a ", " a"), ("a\n", "\n\na"), ("", "a"), (token, "a")):
        parts = encode(before + token, False) + encode(behind, False)  # noqa: FBT003
        if encode(before + token + behind, False) != parts:  # noqa: FBT003
            return False
    return True
