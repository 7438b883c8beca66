"""``GET /engine_metrics``: the engines' pages as one."""

from __future__ import annotations

from control_rig import running
from fleet import add_ready, engine, until

from extproc.control.engine_metrics import Pages
from extproc.workers.worker import Role, Status

PAGE = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b}, {"} 1.0
# HELP e2e_seconds Time.
# TYPE e2e_seconds histogram
e2e_seconds_bucket{le="0.5"} 1
e2e_seconds_sum 0.25
e2e_seconds_count{} 1
# TYPE unused counter
# a remark

bare 7
nonsense
"""


def test_each_family_stands_once_with_the_series_of_all() -> None:
    pages = Pages()
    assert pages.empty
    pages.add("http://a:1", PAGE.splitlines())
    pages.add("http://b:1", PAGE.splitlines())
    assert pages.text().splitlines() == [
        "# HELP vllm:num_requests_running Number of requests.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{worker_addr="http://a:1",engine="0",model_name="a b}, {"} 1.0',
        'vllm:num_requests_running{worker_addr="http://b:1",engine="0",model_name="a b}, {"} 1.0',
        "# HELP e2e_seconds Time.",
        "# TYPE e2e_seconds histogram",
        'e2e_seconds_bucket{worker_addr="http://a:1",le="0.5"} 1',
        'e2e_seconds_sum{worker_addr="http://a:1"} 0.25',
        'e2e_seconds_count{worker_addr="http://a:1"} 1',
        'e2e_seconds_bucket{worker_addr="http://b:1",le="0.5"} 1',
        'e2e_seconds_sum{worker_addr="http://b:1"} 0.25',
        'e2e_seconds_count{worker_addr="http://b:1"} 1',
        'bare{worker_addr="http://a:1"} 7',
        'bare{worker_addr="http://b:1"} 7',
    ]


async def test_workers_that_are_ready_are_asked_once_and_those_that_show_nothing_left_out() -> None:
    async with engine(owner="vllm") as shows, engine() as shows_none, engine(owner="vllm") as out, running() as api:
        assert (await api.get("/engine_metrics")).status == 503
        for server in (shows_none, out, shows):
            worker = add_ready(api.registry, Role.PREFILL, server.url)
            await until(api.registry, lambda worker=worker: worker.usable)
            if server is out:
                api.registry.set_status(worker, Status.NOT_READY)
        again = add_ready(api.registry, Role.DECODE, shows.url)
        await until(api.registry, lambda: again.usable)
        answer = await api.get("/engine_metrics")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert answer.text == (
            f'vllm:num_requests_running{{worker_addr="{shows.url}"}} 0.0\n'
            f'vllm:prompt_tokens_total{{worker_addr="{shows.url}"}} 0\n'
        )
        assert [server.count("/metrics") for server in (shows, shows_none, out)] == [1, 1, 0]


async def test_where_none_shows_any() -> None:
    async with engine() as server, running() as api:
        worker = add_ready(api.registry, Role.DECODE, server.url)
        await until(api.registry, lambda: worker.usable)
        answer = await api.get("/engine_metrics")
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_available_workers")
