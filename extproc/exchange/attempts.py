"""When a request whose prefill failed is tried again, and how long that waits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from extproc.errors import GatewayError
from extproc.workers.ranks import entries
from extproc.workers.worker import Worker

_FRACTION: Final = 1 << 32
_TRANSIENT: Final = (408, 429)


class OnPrefillFailure(Enum):
    """What a failed prefill leg means; the values are those of ``--on-prefill-failure``."""

    RETRY = "retry"  # the request is tried on other pairs, then fails
    DECODE_ONLY = "decode-only"  # the decode computes the prompt
    FAIL = "fail"  # the request fails


class KvMissing(Enum):
    """What a prefill's answer without usable parameters means; the values are those of ``--kv-missing``."""

    RECOMPUTE = "recompute"  # the decode computes the prompt
    FAIL = "fail"  # the request fails


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The operator's word on failures.

    Attributes:
        on_prefill_failure: what a failed prefill leg means.
        attempts: how often a request may be tried, the first time included.
        initial, maximum: seconds before the second attempt, and before any.
        multiplier: by which the time grows from one to the next.
        jitter: part of the time that is random, in both directions.
    """

    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    attempts: int = 5
    initial: float = 0.05
    maximum: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        try:
            seconds = min(self.initial * self.multiplier ** (failures - 1), self.maximum)
        except OverflowError:
            seconds = self.maximum
        return seconds * (1 + self.jitter * (2 * random.getrandbits(32) / _FRACTION - 1))


class Attempts:
    """One request's attempts: what failed, and what comes next."""

    __slots__ = ("_deadline", "_policy", "failed", "number")

    def __init__(self, policy: RetryPolicy, deadline: float) -> None:
        self._policy = policy
        self._deadline = deadline
        self.number = 1
        self.failed: tuple[Worker, ...] = ()  # not to be chosen again

    def after(self, error: GatewayError, workers: Sequence[Worker], now: float) -> float | None:
        """Seconds until the next attempt; None when there is to be none.

        A worker's ``Retry-After`` is obeyed as long as it is not longer than any pause may be: then the client does
        better to hear of it. Nothing is tried that could not begin before the deadline.

        Args:
            error: why the last attempt failed.
            workers: whose fault it was.
            now: by the exchange's clock.
        """
        policy, code = self._policy, error.fault.code
        if code.endswith(("_unreachable", "_connection_lost")):  # so is every rank of the server
            workers = [entry for worker in workers for entry in entries(worker)]
        if code != "egress_unavailable":  # which is no worker's fault
            self.failed = (*self.failed, *workers)
        if policy.on_prefill_failure is not OnPrefillFailure.RETRY or self.number >= policy.attempts:
            return None
        if not is_transient(error):
            return None
        pause = policy.pause(self.number)
        asked = _asked(error.retry_after)
        if asked > policy.maximum:
            return None
        pause = max(pause, asked)
        if now + pause >= self._deadline:
            return None
        self.number += 1
        return pause


def is_transient(error: GatewayError) -> bool:
    """Whether the same request may succeed elsewhere: transport failures, 408, 429 and 5xx of a worker."""
    return error.status in _TRANSIENT or (error.status >= 500 and error.fault.retryable)


def _asked(retry_after: int | bytes | None) -> float:
    """The seconds of a worker's ``Retry-After``; 0 for a date, our own, or none."""
    return float(retry_after) if isinstance(retry_after, bytes) and retry_after.isdigit() else 0.0
