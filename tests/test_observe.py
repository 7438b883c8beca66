"""What the log and the metrics call a request's end."""

from __future__ import annotations

import pytest

from extproc.exchange.record import Record
from extproc.observe import outcome_of


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (200, "", "answered"),
        (500, "", "answered"),  # a worker's own
        (404, "model_not_found", "rejected"),
        (502, "prefill_failed", "failed"),
        (200, "prefill_failed", "failed"),  # the head was out: the answer was cut
        (0, "", "left"),
    ],
)
def test_outcomes(status, code, outcome):
    record = Record(1.0)
    record.status, record.code = status, code
    assert outcome_of(record) == outcome
