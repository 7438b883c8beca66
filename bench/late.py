"""What late answers cost: the filter that they need in each request that needs none, and one that does come late.

A late answer is that of another attempt after the decode leg was released to Envoy (docs/architecture.md). Envoy is
started beside the sidecar from what ``pd-extproc envoy-config`` prints, once as it is and once without the late filter.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from bench.child import Child, free_ports
from bench.measure import CASES, LATE_CASES
from bench.report import ratio_range
from bench.run import Plan
from bench.systems import LOG_LEVEL, Running, UnavailableError, common_flags, find_envoy, registered
from extproc.dataplane.ext_proc import LATE_FILTER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.fleet import Fleet
    from bench.run import Result

_NORMAL = ("small", "stream")
_WITH, _WITHOUT = "late-filter", "no-late-filter"


@dataclass(frozen=True, slots=True)
class Apart:
    """``pd-extproc launch --no-envoy``, and an Envoy of our own beside it."""

    name: str
    filtered: bool  # with the late filter
    only: frozenset[str] = frozenset()
    part: str = "sidecar"
    disaggregated: bool = True

    async def start(self, fleet: Fleet, folder: Path) -> Running:
        """See System."""
        port, admin, metrics = free_ports(3)
        flags = [
            *common_flags(fleet, port, metrics, "round_robin"),
            *("--envoy-concurrency", "1", "--envoy-admin-port", str(admin), "--run-dir", str(folder / self.name)),
            *("--drain-settle-secs", "0", "--shutdown-grace-period-secs", "2"),
        ]
        config = folder / f"{self.name}-envoy.yaml"
        config.write_text(await self._config(flags, folder))
        (folder / self.name).mkdir(mode=0o700)
        service = await Child.start(
            [sys.executable, "-m", "extproc", "launch", "--no-envoy", *flags], folder / f"{self.name}.log"
        )
        command: list[str | Path] = [
            *(find_envoy(), "-c", config, "--concurrency", "1", "--disable-hot-restart", "-l", LOG_LEVEL)
        ]
        envoy = await Child.start(command, folder / f"{self.name}-envoy.log")
        return await registered(Running(self, port, [service, envoy]), fleet)

    async def _config(self, flags: Sequence[str], folder: Path) -> str:
        log = folder / f"{self.name}-config.log"
        printing = await Child.start([sys.executable, "-m", "extproc", "envoy-config", *flags], log, pipe=True)
        text, _ = await printing.process.communicate()
        if printing.process.returncode:
            raise UnavailableError(f"{self.name}: {printing.tail()}")
        return text.decode() if self.filtered else without_late_filter(text.decode())


def without_late_filter(config: str) -> str:
    """An Envoy configuration without the filter for late answers. Raises ValueError when there is none."""
    document = yaml.safe_load(config)
    removed = 0
    for listener in document["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            for network_filter in chain["filters"]:
                filters = network_filter["typed_config"].get("http_filters", [])
                kept = [each for each in filters if each["name"] != LATE_FILTER]
                removed += len(filters) - len(kept)
                network_filter["typed_config"]["http_filters"] = kept
    if not removed:
        raise ValueError(f"no filter {LATE_FILTER!r} in Envoy's configuration")
    return yaml.safe_dump(document, sort_keys=False)


def plan(names: Sequence[str] | None, concurrencies: Sequence[int], rounds: int, share: float) -> Plan:
    """Normal requests with and without the filter, and late ones; only those of the ``names``, if any are given."""
    cases = [case for case in CASES if case.name in _NORMAL] + list(LATE_CASES)
    if names:
        cases = [case for case in cases if case.name in names]
    systems = [Apart(_WITH, filtered=True), Apart(_WITHOUT, filtered=False, only=frozenset(_NORMAL))]
    return Plan(cases, systems, concurrencies, rounds, share)


def summary(result: Result) -> str:
    """Both prices, as ratios within each round."""
    cells = {(cell["concurrency"], cell["system"], cell["case"]): cell for cell in result["cells"]}
    lines = []
    for (concurrency, system, case), cell in cells.items():
        if system != _WITH:
            continue
        if case in _NORMAL and (other := cells.get((concurrency, _WITHOUT, case))):
            lines.append(f"{case}, c={concurrency}: with the filter / without: {_ratio(cell, other)}")
        elif other := cells.get((concurrency, _WITH, case.removeprefix("late-"))):
            extra = statistics.median(
                a - b for a, b in zip(cell["cpu_total_rounds"], other["cpu_total_rounds"], strict=True)
            )
            lines.append(f"{case}, c={concurrency}: late / direct: {_ratio(cell, other)}, {extra:+.0f} µs a request")
    return "\n".join(lines)


def _ratio(cell: Result, other: Result) -> str:
    low, middle, high = ratio_range(cell, other)
    return f"{middle:.3f} (rounds {low:.3f} to {high:.3f})"
