"""The metrics page: what Prometheus reads must be what was counted."""

from __future__ import annotations

import aiohttp
import pytest
from fleet import FakeEnvoy, add_ready, until

from extproc.control.metrics import CONTENT_TYPE, Metrics
from extproc.control.metrics_server import MetricsServer
from extproc.control.worker_metrics import WorkerMetrics
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status


def lines(metrics: Metrics) -> list[str]:
    page = metrics.render().decode()
    assert page.endswith("\n")
    return page.splitlines()


def test_a_counter() -> None:
    metrics = Metrics()
    requests = metrics.counter("pd_requests_total", "Requests.", ("model", "status"))
    requests.labels("tiny", "200").inc()
    requests.labels("tiny", "200").inc(2)
    requests.labels("tiny", "503").inc(0.5)
    assert lines(metrics) == [
        "# HELP pd_requests_total Requests.",
        "# TYPE pd_requests_total counter",
        'pd_requests_total{model="tiny",status="200"} 3',
        'pd_requests_total{model="tiny",status="503"} 0.5',
    ]


def test_a_gauge_goes_both_ways() -> None:
    metrics = Metrics()
    live = metrics.gauge("pd_live", "Live requests.").labels()
    live.inc()
    live.inc(-3)
    assert lines(metrics)[-1] == "pd_live -2"
    live.set(0.1)
    assert lines(metrics)[-1] == "pd_live 0.1"


def test_a_histogram_is_cumulative_and_includes_its_bounds() -> None:
    metrics = Metrics()
    seconds = metrics.histogram("pd_seconds", "Time.", ("leg",), buckets=(0.5, 1, 10)).labels("prefill")
    for value in (0.1, 0.5, 0.75, 10, 11):
        seconds.observe(value)
    assert lines(metrics)[2:] == [
        'pd_seconds_bucket{leg="prefill",le="0.5"} 2',
        'pd_seconds_bucket{leg="prefill",le="1"} 3',
        'pd_seconds_bucket{leg="prefill",le="10"} 4',
        'pd_seconds_bucket{leg="prefill",le="+Inf"} 5',
        'pd_seconds_sum{leg="prefill"} 22.35',
        'pd_seconds_count{leg="prefill"} 5',
    ]


def test_texts_are_escaped() -> None:
    metrics = Metrics()
    metrics.gauge("pd_x", "A \\ and\na break.", ("name",)).labels('a"b\\c\nd').set(1)
    assert lines(metrics) == [
        "# HELP pd_x A \\\\ and\\na break.",
        "# TYPE pd_x gauge",
        'pd_x{name="a\\"b\\\\c\\nd"} 1',
    ]


def test_numbers_that_are_none() -> None:
    metrics = Metrics()
    gauge = metrics.gauge("pd_x", "X.").labels()
    for value, text in ((float("inf"), "+Inf"), (float("-inf"), "-Inf"), (float("nan"), "NaN"), (1e300, "1e+300")):
        gauge.set(value)
        assert lines(metrics)[-1] == f"pd_x {text}"


def test_removed_series_are_gone() -> None:
    metrics = Metrics()
    family = metrics.gauge("pd_x", "X.", ("worker",))
    family.labels("a").set(1)
    family.labels("b").set(1)
    family.remove("a")
    family.remove("never there")
    assert lines(metrics)[2:] == ['pd_x{worker="b"} 1']
    family.clear()
    assert lines(metrics)[2:] == []


@pytest.mark.parametrize("name", ["pd-x_total", "1x_total", "", "pd_x"])
def test_bad_counter_names(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Metrics().counter(name, "X.")


@pytest.mark.parametrize("labels", [("le",), ("a", "a"), ("__a",), ("a-b",), ("",)])
def test_bad_labels(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="label"):
        Metrics().gauge("pd_x", "X.", labels)


@pytest.mark.parametrize("buckets", [(), (1, 1), (2, 1), (1, float("inf"))])
def test_bad_buckets(buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="buckets"):
        Metrics().histogram("pd_x", "X.", buckets=buckets)


def test_a_name_is_used_once() -> None:
    metrics = Metrics()
    metrics.gauge("pd_x", "X.")
    with pytest.raises(ValueError, match="used already"):
        metrics.histogram("pd_x", "X.")


def test_labels_must_be_complete() -> None:
    with pytest.raises(ValueError, match="labels"):
        Metrics().gauge("pd_x", "X.", ("a", "b")).labels("1")


async def test_workers_on_the_page() -> None:
    metrics = Metrics()
    registry = Registry(FakeEnvoy().publish, drain_poll=0.001)
    WorkerMetrics(registry, metrics)
    worker = add_ready(registry, Role.PREFILL, "http://10.0.0.1:8000")
    await until(registry, lambda: worker.usable)
    worker.load = 3
    worker.tokens = 70
    page = lines(metrics)
    assert 'pd_worker_up{role="prefill",worker="http://10.0.0.1:8000"} 1' in page
    assert 'pd_worker_load{role="prefill",worker="http://10.0.0.1:8000"} 3' in page
    assert 'pd_worker_prompt_tokens{role="prefill",worker="http://10.0.0.1:8000"} 70' in page
    assert not any(line.startswith(("pd_engine_", "pd_worker_envoy_")) for line in page), "nothing is known of these"
    registry.set_status(worker, Status.NOT_READY)
    assert 'pd_worker_up{role="prefill",worker="http://10.0.0.1:8000"} 0' in lines(metrics)
    registry.remove(worker)
    successor = add_ready(registry, Role.PREFILL, "http://10.0.0.1:8000")
    await until(registry, lambda: successor.usable)
    successor.load = 2
    page = lines(metrics)
    assert 'pd_worker_up{role="prefill",worker="http://10.0.0.1:8000"} 1' in page
    assert 'pd_worker_load{role="prefill",worker="http://10.0.0.1:8000"} 5' in page
    worker.load = successor.load = 0
    registry.remove(successor)
    await until(registry, lambda: not len(registry))
    assert not any("10.0.0.1" in line for line in lines(metrics))
    await registry.close()


async def test_what_engines_say_on_the_page() -> None:
    metrics = Metrics()
    registry = Registry(FakeEnvoy().publish)
    WorkerMetrics(registry, metrics)
    worker = add_ready(registry, Role.DECODE, "http://10.0.0.1:8000")
    worker.envoy_active = 0
    worker.engine_load = EngineLoad(0, [RankLoad(0, running=3, kv_usage=0.25), RankLoad(1, running=0, waiting=2)])
    named = 'role="decode",worker="http://10.0.0.1:8000"'
    assert [line for line in lines(metrics) if line.startswith(("pd_engine_", "pd_worker_envoy_"))] == [
        f"pd_worker_envoy_requests{{{named}}} 0",
        f'pd_engine_running_requests{{{named},dp_rank="0"}} 3',
        f'pd_engine_running_requests{{{named},dp_rank="1"}} 0',
        f'pd_engine_waiting_requests{{{named},dp_rank="1"}} 2',
        f'pd_engine_kv_usage{{{named},dp_rank="0"}} 0.25',
    ]
    worker.engine_load = worker.envoy_active = None
    assert not any(line.startswith(("pd_engine_", "pd_worker_envoy_")) for line in lines(metrics))
    await registry.close()


async def test_the_server_serves_the_page_and_nothing_else() -> None:
    metrics = Metrics()
    metrics.gauge("pd_x", "X.").labels().set(1)
    server = MetricsServer(metrics, "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        async with session.get("/metrics") as response:
            assert response.headers["content-type"] == CONTENT_TYPE
            assert await response.read() == metrics.render()
        async with session.get("/workers") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
        async with session.post("/metrics") as response:
            assert response.status == 405
    with pytest.raises(OSError, match="address already in use"):
        await MetricsServer(metrics, "127.0.0.1", server.port).start()
    await server.stop()
