"""What is common to two prompts, in a few dozen numbers: hashes of a prompt's beginnings, each longer than the last.

A prompt is looked at as it stands in the body, as bytes. It is cut at the same places as every other one: every
``FIRST`` bytes at the beginning, and from ``GROWTH`` times as far on in pieces that grow with the distance, so that a
long prompt has few (220 KB: 80) and is still known to within a sixteenth. Two prompts have the same number at a cut if
they are the same up to there. What follows the last cut is left out: the bracket that closes a list of messages stands
there, which the conversation's next turn does not have at that place.

Python's own hash is keyed anew in every process, so nobody can make prompts that are mistaken for each other; nothing
of it leaves the process. (Measured: 55 µs for 220 KB, 1.3 µs for 2 KB, 0.4 µs for a chat of 300 bytes.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

BYTES_PER_TOKEN: Final = 4  # of text and the JSON around it; a common rule of thumb for English
FIRST: Final = 256
GROWTH: Final = 16


class Cuts:
    """The places, in bytes, at which every prompt is cut: growing ones, or fixed ones of which the last is the end."""

    __slots__ = ("_fixed", "ends")

    def __init__(self, fixed: Sequence[int] = (), first: int = FIRST) -> None:
        self._fixed = bool(fixed)
        self.ends = sorted(fixed) if fixed else [first]
        assert self.ends[0] > 0

    def within(self, size: int) -> int:
        """How many of them a prompt of ``size`` bytes has, the one at its very end not counted."""
        ends = self.ends
        if not self._fixed:
            first = ends[0]
            while ends[-1] < size:
                ends.append(ends[-1] + max(first, ends[-1] // GROWTH))
        return bisect_left(ends, size)


class PromptChain:
    """The numbers of one prompt. Whoever is chosen for it is noted under all of them, so they are made at once.

    Attributes:
        size: of the prompt, in bytes.
        numbers: one for each cut that it has.
        ends: where the cuts are, and more.
    """

    __slots__ = ("ends", "numbers", "size")

    def __init__(self, prompt: bytes, cuts: Cuts, kind: object = None) -> None:
        """``kind``: what else must be the same, such as the model."""
        self.size = len(prompt)
        count = cuts.within(self.size)
        self.ends: Sequence[int] = cuts.ends
        self.numbers: list[int] = []
        before, start = kind, 0
        for end in cuts.ends[:count]:
            before = hash((before, prompt[start:end]))
            self.numbers.append(before)
            start = end
