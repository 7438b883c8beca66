"""What the log and the metrics call a request's end, and which way it was served: nothing falls back in silence."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fakes import Rig, mutated, nixl

from extproc.control.metrics import Metrics
from extproc.exchange.attempts import OnPrefillFailure, RetryPolicy
from extproc.exchange.record import NO_PARAMS, WAIVED, Record
from extproc.observe import RequestLog, RequestMetrics, outcome_of

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": []}
PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [1],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}
ANSWER = json.dumps({"kv_transfer_params": PARAMS}).encode()
BEGIN = [("x-pd-upstream", "127.0.0.1:11")]


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


class Seen:
    """What is said of one request, which the prefill answers so, by NIXL: in its headers, the metrics and the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *answers: tuple[int, bytes], **retry: Any) -> None:
        self.metrics = Metrics()
        rig = Rig(*nixl(), retry=RetryPolicy(jitter=0, **retry))
        client = rig.post(PATH, CHAT)
        for status, body in answers:
            rig.clock.time += 0.25
            rig.egress.out_at("prefill")[0].answer(status, body)
            rig.clock.advance(0.1)
        self.said = client.call.take()
        self.headers: dict[str, str] = {}
        if len(self.said) == 2:  # the decode leg was released
            client.decode_head(headers=BEGIN)
            self.headers = mutated(client.call.take()[0])
        client.close()
        (record,) = rig.records
        with caplog.at_level(logging.INFO, "extproc.request"):
            RequestLog().finished(record)
        RequestMetrics(self.metrics).finished(record)
        self.line = vars(caplog.records[-1])

    def counts(self, series: str) -> bool:
        return f"{series}\n" in self.metrics.render().decode()


def test_a_cache_that_was_handed_over(caplog):
    seen = Seen(caplog, (200, ANSWER))
    assert (seen.headers["x-pd-kv"], seen.line["kv"], seen.line["kv_note"]) == ("handed", "handed", None)
    assert seen.counts('pd_kv_caches_total{handoff="nixl",kv="handed"} 1')
    assert seen.counts('pd_prefill_duration_seconds_sum{handoff="nixl"} 0.25')
    assert seen.counts('pd_prefill_duration_seconds_count{handoff="nixl"} 1')
    assert seen.headers["server-timing"].startswith("route;dur=0.00, prefill;dur=250.00, decode;dur=")
    assert seen.counts('pd_retries_total{handoff="nixl"} 0')


@pytest.mark.parametrize("body", [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{"a":1}}'])
def test_a_prefill_that_says_nothing_of_its_cache_is_counted_and_named(body, caplog):
    """The decode computes the prompt: the answer is right, and slow."""
    seen = Seen(caplog, (200, body))
    assert (seen.headers["x-pd-kv"], seen.line["kv"], seen.line["kv_note"]) == ("recomputed", "recomputed", NO_PARAMS)
    assert seen.counts('pd_kv_caches_total{handoff="nixl",kv="recomputed"} 1')


def test_a_decode_that_does_without_its_prefill_is_counted_and_named(caplog):
    """Only where the operator wants it: ``--on-prefill-failure decode-only``."""
    seen = Seen(caplog, (500, b"kaputt"), on_prefill_failure=OnPrefillFailure.DECODE_ONLY)
    assert (seen.headers["x-pd-kv"], seen.line["kv"], seen.line["kv_note"]) == ("recomputed", "recomputed", WAIVED)
    assert "x-pd-prefill" not in seen.headers
    assert seen.line["prefill"] is None
    assert seen.counts('pd_kv_caches_total{handoff="nixl",kv="recomputed"} 1')


def test_otherwise_none_does(caplog):
    seen = Seen(caplog, (500, b"kaputt"), (500, b"kaputt too"))
    assert len(seen.said) == 1
    assert (seen.line["levelname"], seen.line["status"], seen.line["code"]) == ("WARNING", 502, "prefill_failed")
    assert "kaputt too" in seen.line["reason"]
    assert seen.counts(
        'pd_requests_total{api="chat",handoff="nixl",status="502",code="prefill_failed",outcome="failed"} 1'
    )


def test_who_was_given_to_nobody_is_no_handoff_without_retries():
    metrics = Metrics()
    record = Record(1.0)
    record.ended = 2.0
    RequestMetrics(metrics).finished(record)
    assert "pd_retries_total{" not in metrics.render().decode()


def test_another_attempt_is_counted_and_named(caplog):
    seen = Seen(caplog, (500, b"kaputt"), (200, ANSWER))
    assert (seen.headers["x-pd-attempts"], seen.line["attempts"]) == ("2", 2)
    assert (seen.headers["x-pd-prefill"], seen.line["prefill"]) == ("http://127.0.0.1:2",) * 2
    assert seen.counts('pd_retries_total{handoff="nixl"} 1')
