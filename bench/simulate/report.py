"""What came of the runs: figures, a table, a drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.simulate.fleet import Outcome


class Cell(NamedTuple):
    """One rule in one scenario.

    Attributes:
        hit: share of prompt tokens found in prefix caches.
        mean, p50, p99: time until the prefill is done, which is most of the time to first token; seconds.
        waited: 99th percentile of what of it was spent in the worker's queue.
        busy: how busy the busiest worker was, as a multiple of the mean.
        queue: mean of the longest queue less the mean queue, at each arrival; requests.
        moved: share of later turns that went elsewhere than the turn before.
    """

    scenario: str
    rule: str
    hit: float
    mean: float
    p50: float
    p99: float
    waited: float
    busy: float
    queue: float
    moved: float


def cell(scenario: str, rule: str, outcome: Outcome) -> Cell:
    """The figures of one run."""
    times = sorted(outcome.ttft)
    return Cell(
        scenario,
        rule,
        outcome.hits / outcome.tokens,
        fmean(times),
        _at(times, 0.5),
        _at(times, 0.99),
        _at(sorted(outcome.waited), 0.99),
        max(outcome.busy) / fmean(outcome.busy),
        fmean(outcome.longest) - fmean(outcome.mean),
        outcome.moves / max(1, outcome.later),
    )


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def means(cells: Sequence[Cell]) -> list[Cell]:
    """Over the seeds."""
    runs: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for each in cells:
        runs[each.scenario, each.rule].append(each)
    return [Cell(*names, *map(fmean, zip(*(each[2:] for each in of), strict=True))) for names, of in runs.items()]


def table(cells: Sequence[Cell]) -> str:
    """In Markdown."""
    lines = [
        "| scenario | policy | hit rate | TTFT mean | p50 | p99 | queued p99 | busiest | longest queue | moved |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in cells:
        figures = f"{each.mean:.2f} s | {each.p50:.2f} s | {each.p99:.2f} s | {each.waited:.2f} s"
        lines.append(
            f"| {each.scenario} | {each.rule} | {each.hit:.1%} | {figures} | {each.busy:.2f} x | +{each.queue:.1f} "
            f"| {each.moved:.0%} |"
        )
    return "\n".join(lines)


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Hit rate, tail and imbalance, a bar for each rule in each scenario."""
    import matplotlib as mpl  # noqa: PLC0415 - only this needs it

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "simulate", "font.size": 9})
    scenarios = list(dict.fromkeys(each.scenario for each in cells))
    rules = list(dict.fromkeys(each.rule for each in cells))
    found = {(each.scenario, each.rule): each for each in cells}
    figure, axes = plt.subplots(3, 1, figsize=(9, 8), sharex=True)
    for axis, (name, title) in zip(
        axes,
        (("hit", "hit rate"), ("p99", "TTFT p99, seconds"), ("busy", "busiest worker / mean")),
        strict=True,
    ):
        width = 0.85 / len(rules)
        for number, rule in enumerate(rules):
            values = [getattr(found[scenario, rule], name) for scenario in scenarios]
            places = [place + number * width for place in range(len(scenarios))]
            axis.bar(places, values, width, label=rule, color=f"C{number % 10}", hatch="///" * (number // 10))
        axis.set_ylabel(title)
        axis.grid(axis="y", alpha=0.3)
        if name == "p99":
            axis.set_yscale("log")
    axes[-1].set_xticks([place + 0.4 for place in range(len(scenarios))], scenarios)
    axes[0].legend(ncols=min(6, len(rules)), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
