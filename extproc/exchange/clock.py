"""Time, as an exchange sees it: a clock that tests can own, and the few moments that are not the operator's to set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

# How long a prefill leg may go on after the decode's answer ended, and how long an early decode head is kept back.
# Measured on real SGLang: a prefill answers between 5 ms before and 40 ms after the decode's first token; one that
# refuses a request does so within 3 ms.
LINGER_SECONDS: Final = 0.05
HOLD_SECONDS: Final = 0.03
ABORT_SECONDS: Final = 5.0  # for a worker to take an abort
CLOSING_SECONDS: Final = 5.0  # for Envoy to close a call that we have ended


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
