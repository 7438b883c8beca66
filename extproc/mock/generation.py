"""What the mock model writes: a pure function of prompt, seed and limits, so that answers can be compared byte by byte.

The vocabulary has 4096 tokens: 2 ends a text, the others are two-syllable words. A prompt's text is cut into tokens of
four characters. Nothing is remembered between requests.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

VOCABULARY = 4096
END_OF_TEXT = 2
CONTEXT = 131_072
_PIECE = 4
_STORY = 65_536
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvwyz" for vowel in "aeio"]
WORDS = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES]
WORDS[END_OF_TEXT] = ""


@cache
def _story() -> list[int]:
    """An endless text to read from: where to start depends on the prompt."""
    return random.Random(20).choices(range(3, VOCABULARY), k=_STORY)  # noqa: S311 - text, not a secret


def word(token: int) -> str:
    """A token's text; ids outside the vocabulary read as the replacement character."""
    return WORDS[token] if 0 <= token < VOCABULARY else "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text or as token ids."""

    text: str | None = None
    ids: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """In tokens."""
        if self.ids is not None:
            return len(self.ids)
        return -(-len(self.text or "") // _PIECE)

    @property
    def as_text(self) -> str:
        """The text, or what the tokens read as."""
        return "".join(word(token) for token in self.ids) if self.ids is not None else self.text or ""

    def end(self, most: int) -> Prompt:
        """Its last tokens, at most so many."""
        if self.ids is not None:
            return Prompt(ids=self.ids[max(0, len(self.ids) - most) :])
        text = self.text or ""
        return Prompt(text[max(0, self.length - most) * _PIECE :])

    @property
    def digest(self) -> int:
        """32 bits that tell prompts apart."""
        if self.ids is not None:
            return zlib.crc32(repr(self.ids).encode(), 1)
        return zlib.crc32((self.text or "").encode("utf-8", "surrogatepass"))

    def tokens(self) -> list[tuple[int, str]]:
        """Every token with its text."""
        if self.ids is not None:
            return [(token, word(token)) for token in self.ids]
        text = self.text or ""
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        return [(zlib.crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY - 3) + 3, piece) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a text, and what varies it."""

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    keep_stop: bool = False
    seed: int = 0  # samples of one prompt have seeds of their own; unused at temperature 0
    min_tokens: int = 0  # only the model of the gRPC workers minds


@dataclass(frozen=True, slots=True)
class Text:
    """What the model writes for one sample. ``ids[i]`` adds ``pieces[i]`` to the text."""

    ids: list[int]
    pieces: list[str]
    finish: dict[str, object] = field(default_factory=dict)  # the engine's finish_reason object
    first: int = END_OF_TEXT  # the token that a prefill writes, even where the limits allow none


def write(
    prompt: Prompt, limits: Limits, natural_length: int, *, context: int = CONTEXT, source: int | None = None
) -> Text:
    """The whole text: ``natural_length`` tokens, the last of which ends it, or what the limits leave of it.

    ``context`` bounds prompt and text together, in tokens. ``source`` is the digest of the prompt that the KV cache was
    computed from; None: of this one.
    """
    available = max(context - prompt.length, 0)
    cap = available if limits.max_new_tokens is None else min(limits.max_new_tokens, available)
    start = ((prompt.digest if source is None else source) + limits.seed * 7919) % _STORY
    if limits.ignore_eos or cap <= natural_length:
        ids = _read(start, cap)
        finish: dict[str, object] = {"type": "length", "length": cap}
    else:
        ids = [*_read(start, natural_length - 1), END_OF_TEXT]
        finish = {"type": "stop", "matched": END_OF_TEXT}
    pieces = [WORDS[token] for token in ids]
    if limits.stop or limits.stop_token_ids:
        ids, pieces, finish = _stopped(ids, pieces, finish, limits)
    return Text(ids, pieces, finish, ids[0] if ids else _story()[start])


def _read(start: int, count: int) -> list[int]:
    story = _story()
    ids = story[start : start + count]
    while len(ids) < count:
        ids += story[: count - len(ids)]
    return ids


def _stopped(
    ids: list[int], pieces: list[str], finish: dict[str, object], limits: Limits
) -> tuple[list[int], list[str], dict[str, object]]:
    """Cut at the first stop token or stop string; a text's tokens up to there all count as written."""
    for count, token in enumerate(ids, 1):
        if token in limits.stop_token_ids:
            kept = pieces[: count if limits.keep_stop else count - 1]
            return ids[:count], kept + [""] * (count - len(kept)), {"type": "stop", "matched": token}
        text = "".join(pieces[:count])
        hits = [(at, stop) for stop in limits.stop if stop and (at := text.find(stop)) >= 0]
        if hits:
            at, stop = min(hits)
            end = at + len(stop) if limits.keep_stop else at
            return ids[:count], _cut(pieces[:count], end), {"type": "stop", "matched": stop}
    return ids, pieces, finish


def _cut(pieces: list[str], end: int) -> list[str]:
    ends = accumulate(len(piece) for piece in pieces)
    return [piece[: max(0, end - (upto - len(piece)))] for piece, upto in zip(pieces, ends, strict=True)]


def logprob(token: int, place: int = 0) -> float:
    """The log probability of a token; ``place`` counts the alternatives of one position."""
    return -((token * 37 + 11) % 997) / 1024 - 0.5 * place - 0.0625


def alternatives(token: int, count: int) -> list[tuple[float, int]]:
    """The ``count`` most likely tokens of a position, best first, the chosen one in front."""
    return [(logprob(token, place), (token + place * 13) % VOCABULARY) for place in range(count)]
