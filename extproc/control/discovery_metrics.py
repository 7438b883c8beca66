"""The series of discovery; there are none where it is off."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.control.metrics import Counter, Family, Metrics
from extproc.discovery.state import DiscoveryState


class DiscoveryMetrics:
    """Read from ``state`` for each page."""

    def __init__(self, state: DiscoveryState, metrics: Metrics) -> None:
        self._state = state
        self._up = metrics.gauge(
            "pd_discovery_up", "Whether what is known of the fleet is up to date (1) or may be old (0).", ("provider",)
        )
        self._synced = metrics.gauge(
            "pd_discovery_last_sync_timestamp_seconds", "When it last was, as Unix time; 0: never.", ("provider",)
        )
        self._found = metrics.gauge(
            "pd_discovery_found", "Pods, or entries of the file, by how far they are.", ("provider", "role", "state")
        )
        self._waiting = metrics.gauge(
            "pd_discovery_waiting",
            "Found workers that do not answer, so that they are not registered yet.",
            ("provider",),
        )
        self._changes = metrics.counter(
            "pd_discovery_changes_total", "What was done to workers: added, changed, replaced, removed.", _BY_CHANGE
        )
        self._events = metrics.counter(
            "pd_discovery_events_total", "Events of the watch, lists, or readings of the file.", ("provider", "event")
        )
        self._failures = metrics.counter(
            "pd_discovery_failures_total", "Failures of the Kubernetes API or the file.", ("provider", "reason")
        )
        metrics.before_render(self._collect)

    def _collect(self) -> None:
        state = self._state
        self._up.labels(state.provider).set(state.up)
        self._synced.labels(state.provider).set(state.synced)
        self._waiting.labels(state.provider).set(state.waiting)
        self._found.clear()
        for (role, how), number in state.found.items():
            self._found.labels(state.provider, role, how).set(number)
        self._show(self._changes, state.changes)
        self._show(self._events, state.events)
        self._show(self._failures, state.failures)

    def _show(self, family: Family[Counter], counts: Mapping[str, int]) -> None:
        for kind, number in counts.items():
            family.labels(self._state.provider, kind).value = number


_BY_CHANGE = ("provider", "change")
