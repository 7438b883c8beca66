"""Numbers from elsewhere, engines and labels: those that may be believed. Pure.

One that an engine says beside its other figures must not spoil what is shown, summed and compared of a whole fleet: a
count of 300 digits has no place in JSON of 64 bits, and one of 5000 is none that Python reads.
"""

from __future__ import annotations

import math
from typing import Final

MOST: Final = 10**12  # no engine has so many requests, tokens or tokens per second
_DIGITS: Final = len(str(MOST))


def amount(value: object) -> float | None:
    """``value``; None where it is no number from 0 to MOST."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= MOST else None


def count(value: object) -> int | None:
    """The same as a whole number."""
    known = amount(value)
    return None if known is None else int(known)


def count_in(text: str | bytes) -> int | None:
    """The number that ``text`` is; None where it is anything else than a few ASCII digits, or above MOST."""
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
        return None
    return count(int(text))
