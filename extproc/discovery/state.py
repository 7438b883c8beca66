"""How discovery goes: for metrics, for ``/readiness``, and for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class DiscoveryState:
    """Written by the driver and the registrar; read by whoever shows it.

    Attributes:
        provider: ``kubernetes`` or ``file``.
        up: what is known is up to date: pods are watched, or the file is good.
        trouble: why it is not, without addresses, which are nobody's business; empty when it is.
        synced: Unix time when everything was last known to be up to date; 0: never.
        count: how many pods, or entries of the file, there are, by role and state.
        waiting: ready, and not registered yet: their port answers neither over HTTP nor over gRPC.
        events: of the watch, or readings of the file, by kind.
        failures: by reason.
        changes: what was done to workers, by kind (:class:`extproc.discovery.steps.Step`).
    """

    provider: str
    up: bool = False
    trouble: str = "has not begun"
    synced: float = 0.0
    count: Callable[[], Mapping[tuple[str, str], int]] = dict
    waiting: int = 0
    events: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)

    def good(self, now: float) -> None:
        """All is known, at Unix time ``now``."""
        self.up, self.trouble, self.synced = True, "", now

    def failed(self, reason: str, trouble: str) -> None:
        """Something failed. ``reason`` is a short word for metrics; what is known holds meanwhile."""
        self.up, self.trouble = False, trouble
        self.failures[reason] += 1

    @property
    def found(self) -> Mapping[tuple[str, str], int]:
        """What ``count`` says now."""
        return self.count()

    @property
    def doubt(self) -> str:
        """What ``/readiness`` adds where the gateway is not ready; empty when discovery is not the cause."""
        if not self.trouble:
            return ""
        behind = "" if self.synced else ", and has found nobody yet"
        return f"{self.provider} discovery: {self.trouble}{behind}"
