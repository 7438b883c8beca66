"""Time, as an exchange sees it: a clock that tests can own, and the few moments that are not the operator's to set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

# How long a prefill leg may go on after the decode's answer ended. Measured on real SGLang: a prefill answers between
# 5 ms before and 40 ms after the decode's first token.
LINGER_SECONDS: Final = 0.05
# The same of a gRPC call, which an answer waits for that ends with the prefill's counts of tokens.
PREFILL_WORD_SECONDS: Final = 2.0
# For the head of a released decode's answer to come, before another answer is begun that it must not cross. Measured:
# an engine that sends it before it has a token does so within 10 ms, one that answers an abort likewise.
HEAD_SECONDS: Final = 0.05
# The same where the decode has been told to end: it will answer, but takes longer in the middle of a step, or on a busy
# machine, and a request whose answers cross is lost.
ENDED_HEAD_SECONDS: Final = 1.0
ABORT_SECONDS: Final = 5.0  # for a worker to take an abort
REST_SECONDS: Final = 5.0  # for the rest of a prefill's answer that has begun, when nobody wants it any more
LEFTOVER_SECONDS: Final = 480.0  # for a prefill to do what nobody wants any more: so long a decode would wait for it
# For a prefill to have sent a cache, and for its death to be noticed if it has not: it is looked at every 10 s.
PUSH_SECONDS: Final = 30.0
# For a decode that has the cache to show a token, where nothing but that tells it from one that waits in vain.
FIRST_TOKEN_SECONDS: Final = 5.0
TAKEN_SECONDS: Final = 1.0  # for a decode to have taken in a request that is not streamed, of which it shows nothing
UNPIN_SECONDS: Final = 0.1  # for Envoy to end a decode leg
SETTLE_SECONDS: Final = 1.0  # for an engine to ask for what a leg that was ended has not fetched, or is to have freed
# For Envoy to open the call of a late answer. Measured: 0.5 ms; but a machine may pause, and whoever comes later than
# this has lost the answer.
SECOND_CALL_SECONDS: Final = 10.0
CLOSING_SECONDS: Final = 5.0  # for Envoy to close a call that we have ended
ABANDONED: Final = "the request should have been closed"  # what Envoy hears when it did not


class Handle(Protocol):
    """Something scheduled."""

    def cancel(self) -> None:
        """Do not do it."""


class Clock(Protocol):
    """Time, injected so that tests own it."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def after(self, seconds: float, callback: Callable[[], None]) -> Handle:
        """Call ``callback`` once, ``seconds`` from now."""
