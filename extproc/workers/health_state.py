"""When a worker counts as healthy: the thresholds, and the counting of probe results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from extproc.workers.spec import HealthOverrides
from extproc.workers.worker import Status

_Number = TypeVar("_Number", int, float)


def _first(own: _Number | None, common: _Number) -> _Number:
    return common if own is None else own


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When a worker counts as healthy; names and defaults are those of the peer's ``--health-*`` flags. In seconds;
    0 for ``transport_threshold``, ``stall`` means: never.
    """

    failure_threshold: int = 3
    success_threshold: int = 2
    timeout: float = 5.0
    interval: float = 60.0
    endpoint: str = "/health"
    enabled: bool = True
    transport_threshold: int = 3  # ours: connections of requests, refused or lost in a row, that take a worker out
    stall: float = 10.0  # a worker with legs under way that answers none for so long is asked for a sign of life
    wedge: float = 20.0  # it has so long to give one

    def overridden(self, by: HealthOverrides) -> HealthSettings:
        """These settings with one worker's own on top."""
        return HealthSettings(
            failure_threshold=_first(by.failure_threshold, self.failure_threshold),
            success_threshold=_first(by.success_threshold, self.success_threshold),
            timeout=_first(by.timeout_secs, self.timeout),
            interval=_first(by.check_interval_secs, self.interval),
            endpoint=self.endpoint,
            enabled=self.enabled if by.disable_health_check is None else not by.disable_health_check,
            transport_threshold=self.transport_threshold,
            stall=self.stall,
            wedge=self.wedge,
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to look, in seconds, where the flags do not say."""

    seek: float = 2.0  # between probes of a worker that is not in rotation: at first, growing up to the interval
    seek_growth: float = 1.25
    confirm: float = 0.25  # between probes of a READY worker that refuses connections
    report: float = 1.0  # least time between a probe and one that the data path asks for
    doubt: float = 5.0  # least time between two identifications that the data path gives reason for
    ranks: float = 300.0  # until a server is asked again how many data-parallel ranks it has
    restart: float = 10.0  # between questions to a Mooncake prefill's bootstrap server: nobody reports a restart
    resolve: float = 30.0  # between look-ups of a name
    jitter: float = 0.1  # of every pause, so that many workers are not probed in step
    concurrency: int = 128  # probes under way at once


class HealthState:
    """Counts probe results of one worker and says what state it is in. Pure.

    ======================  =========================================  =========
    from                    consecutive results                        to
    ======================  =========================================  =========
    PENDING                 1 success                                  READY
    PENDING                 10 x failure_threshold failures            FAILED
    READY                   failure_threshold failures                 NOT_READY
    NOT_READY               success_threshold successes                READY
    NOT_READY               3 x failure_threshold failures             FAILED
    FAILED, never READY     1 success                                  READY
    FAILED, once READY      success_threshold successes                READY
    READY                   what requests met with, or a wedge         NOT_READY
    NOT_READY by requests   nobody else is left                        READY
    READY                   1 success, and it is not known what it is  NOT_READY
    any                     1 result that shows it is the wrong kind   FAILED
    ======================  =========================================  =========

    FAILED only says that the trouble lasts; probing goes on. ``settings`` may be set anew at any time.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.status = Status.PENDING
        self.failures = 0
        self.successes = 0
        self.settings = settings
        self._was_ready = False

    def succeeded(self) -> Status:
        """A probe found the worker healthy."""
        self.failures = 0
        self.successes += 1
        needed = self.settings.success_threshold if self._was_ready else 1
        if self.status is not Status.READY and self.successes >= needed:
            self.status = Status.READY
            self._was_ready = True
        return self.status

    def failed(self) -> Status:
        """A probe failed."""
        self.successes = 0
        self.failures += 1
        threshold = self.settings.failure_threshold
        if self.status is Status.READY and self.failures >= threshold:
            self.status = Status.NOT_READY
            self.failures = 0
        elif (self.status is Status.NOT_READY and self.failures >= 3 * threshold) or (
            self.status is Status.PENDING and self.failures >= 10 * threshold
        ):
            self.status = Status.FAILED
        return self.status

    def dropped(self) -> Status:
        """What a request met with, or was left waiting for, says more than a probe."""
        self.failures = self.successes = 0
        self.status = Status.NOT_READY
        return self.status

    def spared(self) -> Status:
        """It was dropped for what requests met with, but they have nowhere else to go: a probe must tell."""
        self.failures = self.successes = 0
        self.status = Status.READY
        return self.status

    def withheld(self) -> Status:
        """The worker is healthy, but nobody knows what it is: it need not show its health again when it says so."""
        self.failures = 0
        self.successes += 1
        if self.status is Status.READY:
            self.status = Status.NOT_READY
        return self.status

    def unfit(self) -> Status:
        """The worker is healthy, but not what it is registered as."""
        self.successes = 0
        self.failures += 1
        self.status = Status.FAILED
        return self.status
