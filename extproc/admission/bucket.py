"""A token bucket: so many requests a second in the long run, and a few more at once."""

from __future__ import annotations


class TokenBucket:
    """See the module. It starts full.

    Args:
        rate: tokens that come back per second.
        capacity: tokens that it holds at most, at least 1.
        now: seconds.
    """

    __slots__ = ("_at", "_capacity", "_rate", "_tokens")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self._rate = rate
        self._capacity = self._tokens = capacity
        self._at = now

    def wait(self, now: float, tokens: float = 1.0) -> float:
        """Seconds until there are so many tokens; 0: there are."""
        self._refill(now)
        return max(0.0, (tokens - self._tokens) / self._rate)

    def take(self) -> None:
        """Take one; there must be one."""
        self._tokens -= 1

    def _refill(self, now: float) -> None:
        if now > self._at:
            # A millionth of what is missing is forgiven: else a timer that ends just then might find it not quite full.
            tokens = self._tokens + (now - self._at) * self._rate
            self._tokens = min(self._capacity, round(tokens, 6))
            self._at = now
