"""A prompt that is given as token ids, read as far as somebody looks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import orjson

from extproc.workers.kv_events import packed

_FIRST: Final = 512  # bytes of JSON that are read at first; twice as many each time
_TOKEN_IDS: Final = re.compile(rb"\[[ \t\n\r]*\d")


class TokenPrompt:
    """See the module.

    Args:
        raw: a JSON list of numbers, as :meth:`of` has seen.

    Attributes:
        blocks: what was made of it, by whoever makes that and under keys of theirs.
    """

    __slots__ = ("_next", "_raw", "_read", "_step", "blocks")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._next = 1  # of raw, behind the bracket
        self._step = _FIRST
        self._read = b""  # packed
        self.blocks: dict[object, object] = {}

    @classmethod
    def of(cls, raw: bytes) -> TokenPrompt | None:
        """``raw`` as such a prompt; None where it is something else: text, messages, several prompts."""
        return cls(raw) if _TOKEN_IDS.match(raw) else None

    def pieces(self, width: int) -> Iterator[bytes]:
        """The packed token ids, in pieces of whole blocks of ``width`` bytes; what is left at the end is left out.

        What is no list of token ids after all ends where that shows.
        """
        done = 0
        while True:
            while len(self._read) < done + width:
                if self._next >= len(self._raw):
                    return
                self._read_on()
            end = len(self._read) - (len(self._read) - done) % width
            yield self._read[done:end]
            done = end

    def _read_on(self) -> None:
        raw = self._raw
        end = raw.find(b",", self._next + self._step)
        piece = raw[self._next : end if end >= 0 else raw.rfind(b"]")]
        self._next = end + 1 if end >= 0 else len(raw)
        self._step *= 2
        try:
            self._read += packed(orjson.loads(b"[%b]" % piece))
        except (orjson.JSONDecodeError, TypeError, OverflowError):
            self._next = len(raw)
