"""When a worker counts as healthy: every row of the table in HealthState."""

from __future__ import annotations

import pytest

from extproc.workers.health_state import HealthSettings, HealthState
from extproc.workers.spec import HealthOverrides
from extproc.workers.worker import Status

SETTINGS = HealthSettings(failure_threshold=3, success_threshold=2)
READY, NOT_READY, FAILED, PENDING = Status.READY, Status.NOT_READY, Status.FAILED, Status.PENDING


def after(results: str, settings: HealthSettings = SETTINGS) -> Status:
    """The status after probes: ``+`` good, ``-`` bad, ``x`` shows that the worker is the wrong kind."""
    state = HealthState(settings)
    for result in results:
        {"+": state.succeeded, "-": state.failed, "x": state.unfit}[result]()
    return state.status


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ("", PENDING),
        ("+", READY),  # at once: whoever registers a worker wants it used
        ("-" * 29, PENDING),
        ("-" * 30, FAILED),
        ("-" * 30 + "+", READY),  # it only took long to start
        ("-" * 29 + "+", READY),
        ("+--", READY),
        ("+--+--", READY),  # only failures in a row count
        ("+---", NOT_READY),
        ("+---+", NOT_READY),
        ("+---++", READY),
        ("+---+-+", NOT_READY),  # only successes in a row count
        ("+---" + "-" * 8, NOT_READY),
        ("+---" + "-" * 9, FAILED),
        ("+---" + "-" * 9 + "+", FAILED),
        ("+---" + "-" * 9 + "++", READY),  # never terminal
        ("x", FAILED),
        ("x+", READY),
        ("+x", FAILED),
        ("+x+", FAILED),
        ("+x++", READY),
    ],
)
def test_transitions(results: str, status: Status) -> None:
    assert after(results) is status


def test_the_thresholds_are_the_operators() -> None:
    one = HealthSettings(failure_threshold=1, success_threshold=1)
    assert after("+-", one) is NOT_READY
    assert after("+-+", one) is READY
    assert after("-" * 10, one) is FAILED


def test_the_defaults_are_the_peers() -> None:
    assert HealthSettings() == HealthSettings(
        failure_threshold=3, success_threshold=2, timeout=5, interval=60, endpoint="/health", enabled=True
    )


def test_a_worker_may_have_settings_of_its_own() -> None:
    own = HealthOverrides(timeout_secs=1, failure_threshold=7, disable_health_check=True)
    assert SETTINGS.overridden(own) == HealthSettings(
        failure_threshold=7, success_threshold=2, timeout=1, interval=60, enabled=False
    )
    assert SETTINGS.overridden(HealthOverrides()) == SETTINGS
    off = HealthSettings(enabled=False)
    assert off.overridden(HealthOverrides(disable_health_check=False)).enabled
