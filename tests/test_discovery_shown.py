"""What is shown of discovery: metrics and readiness; and a gateway that has nobody to ask."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from control_rig import running
from fleet import add_ready, eventually

from extproc.control.discovery_metrics import DiscoveryMetrics
from extproc.control.metrics import Metrics
from extproc.discovery.state import DiscoveryState
from extproc.service import Service, startable
from extproc.settings import Settings
from extproc.workers.worker import Role


def page(metrics: Metrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]


def test_metrics() -> None:
    metrics, state = Metrics(), DiscoveryState("kubernetes")
    DiscoveryMetrics(state, metrics)
    provider = 'provider="kubernetes"'
    assert page(metrics) == [
        f"pd_discovery_up{{{provider}}} 0",
        f"pd_discovery_last_sync_timestamp_seconds{{{provider}}} 0",
        f"pd_discovery_waiting{{{provider}}} 0",
    ]
    counts = {("prefill", "ready"): 2}
    state.count = lambda: counts
    state.good(1234.5)
    state.waiting = 1
    state.changes["added"] += 2
    state.events["list"] += 1
    state.failures["cut"] += 3
    assert page(metrics) == [
        f"pd_discovery_up{{{provider}}} 1",
        f"pd_discovery_last_sync_timestamp_seconds{{{provider}}} 1234.5",
        f'pd_discovery_found{{{provider},role="prefill",state="ready"}} 2',
        f"pd_discovery_waiting{{{provider}}} 1",
        f'pd_discovery_changes_total{{{provider},change="added"}} 2',
        f'pd_discovery_events_total{{{provider},event="list"}} 1',
        f'pd_discovery_failures_total{{{provider},reason="cut"}} 3',
    ]
    counts = {("prefill", "terminating"): 2}
    state.failed("cut", "the Kubernetes API does not answer")
    assert page(metrics)[:3] == [
        f"pd_discovery_up{{{provider}}} 0",
        f"pd_discovery_last_sync_timestamp_seconds{{{provider}}} 1234.5",
        f'pd_discovery_found{{{provider},role="prefill",state="terminating"}} 2',
    ]


async def test_readiness_says_what_is_wrong_with_discovery() -> None:
    state = DiscoveryState("kubernetes")
    async with running(discovery=state) as api:
        answer = await api.get("/readiness")
        assert answer.status == 503
        assert answer.json["reason"].endswith("; kubernetes discovery: has not begun, and has found nobody yet")
        state.good(1.0)
        assert "discovery" not in (await api.get("/readiness")).json["reason"]
        state.failed("forbidden", "the service account may not list and watch pods")
        assert (
            (await api.get("/readiness"))
            .json["reason"]
            .endswith("; kubernetes discovery: the service account may not list and watch pods")
        )
        for role, url in ((Role.PREFILL, "http://10.0.0.1:1"), (Role.DECODE, "http://10.0.0.2:1")):
            add_ready(api.registry, role, url, "tiny")
        await eventually(lambda: all(worker.usable for worker in api.registry))
        assert (await api.get("/readiness")).status == 200, "what is known is served, whatever the API does"


async def test_a_gateway_that_is_nowhere_in_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings.model_validate(
        {
            "pd_disaggregation": True,
            "discovery_provider": "kubernetes",
            "prefill_selector": "app=x",
            "run_dir": tmp_path / "run",
        }
    )
    with caplog.at_level(logging.ERROR):
        assert await startable(Service(settings)) == 1
    assert "cannot start: no Kubernetes cluster" in caplog.text
    assert not (tmp_path / "run").exists()
