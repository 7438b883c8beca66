"""What came of the runs: figures, a table, a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from bench.simulate.fleet import Outcome


class Cell(NamedTuple):
    """One rule in one scenario with one seed.

    Attributes:
        hit: share of prompt tokens found in prefix caches.
        mean, p99: time until the prefill is done, which is most of the time to first token; seconds.
        busy: how busy the busiest worker was, as a multiple of the mean.
        queue: mean of the longest queue less the mean queue, at each arrival; requests.
        moved: share of later turns that went elsewhere than the turn before.
    """

    scenario: str
    rule: str
    seed: int
    hit: float
    mean: float
    p99: float
    busy: float
    queue: float
    moved: float


class Figure(NamedTuple):
    """One of a cell's figures, as tables and drawings show it. ``factor``: what it is multiplied by to be shown."""

    field: str
    title: str
    places: int
    factor: float = 1.0
    logarithmic: bool = False


FIGURES: Final = (
    Figure("hit", "hit rate, %", 1, 100),
    Figure("mean", "TTFT, mean, seconds", 2, logarithmic=True),
    Figure("p99", "TTFT, 99th percentile, seconds", 2, logarithmic=True),
    Figure("busy", "busiest worker, multiple of the mean", 2, logarithmic=True),
    Figure("queue", "longest queue less the mean one, requests", 1),
    Figure("moved", "later turns that went elsewhere, %", 0, 100),
)
_DRAWN: Final = ("hit", "p99", "busy")


def cell(scenario: str, rule: str, seed: int, outcome: Outcome) -> Cell:
    """The figures of one run."""
    times = sorted(outcome.ttft)
    return Cell(
        scenario,
        rule,
        seed,
        outcome.hits / outcome.tokens,
        fmean(times),
        times[min(int(len(times) * 0.99), len(times) - 1)],
        max(outcome.busy) / fmean(outcome.busy),
        fmean(outcome.longest) - fmean(outcome.mean),
        outcome.moves / max(1, outcome.later),
    )


def tables(cells: Sequence[Cell]) -> str:
    """One for each figure, in Markdown: the mean of the seeds, and the lowest and highest."""
    scenarios = list(dict.fromkeys(each.scenario for each in cells))
    rules = list(dict.fromkeys(each.rule for each in cells))
    pieces = []
    for figure in FIGURES:
        lines = [f"| {figure.title} | {' | '.join(scenarios)} |", "|---|" + "---|" * len(scenarios)]
        for rule in rules:
            texts = [spread(_values(cells, figure, scenario, rule), figure.places) for scenario in scenarios]
            lines.append(f"| {rule} | {' | '.join(texts)} |")
        pieces.append("\n".join(lines))
    return "\n\n".join(pieces)


def beside(cells: Sequence[Cell], one: str, others: Sequence[str]) -> str:
    """``one`` less each of ``others``, or over it, seed by seed: what comes is the same for both."""
    lines = [f"| {one} beside | scenario | hit rate, points | TTFT mean, times | p99, times |", "|---|---|---|---|---|"]
    for other in others:
        for scenario in dict.fromkeys(each.scenario for each in cells):
            mine, theirs = (
                {each.seed: each for each in cells if (each.scenario, each.rule) == (scenario, rule)}
                for rule in (one, other)
            )
            pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
            if pairs:
                hits = spread([100 * (here.hit - there.hit) for here, there in pairs], 1, sign="+")
                means = spread([here.mean / there.mean for here, there in pairs], 2)
                tails = spread([here.p99 / there.p99 for here, there in pairs], 2)
                lines.append(f"| {other} | {scenario} | {hits} | {means} | {tails} |")
    return "\n".join(lines)


def spread(values: Sequence[float], places: int, sign: str = "") -> str:
    """The mean, and the lowest and the highest."""
    if not values:
        return ""
    low, middle, high = (f"{value:{sign}.{places}f}" for value in (min(values), fmean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _values(cells: Sequence[Cell], figure: Figure, scenario: str, rule: str) -> list[float]:
    found = [each for each in cells if (each.scenario, each.rule) == (scenario, rule)]
    return [figure.factor * getattr(each, figure.field) for each in found]


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Hit rate, tail, imbalance: a column for each scenario, a line for each rule, from the lowest to the highest."""
    import matplotlib as mpl  # noqa: PLC0415 - only this needs it

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "simulate", "font.size": 8})
    scenarios = list(dict.fromkeys(each.scenario for each in cells))
    rules = list(dict.fromkeys(each.rule for each in cells))
    drawn = [figure for figure in FIGURES if figure.field in _DRAWN]
    size = (2.2 + 1.9 * len(scenarios), (0.6 + 0.17 * len(rules)) * len(drawn))
    figures, axes = plt.subplots(len(drawn), len(scenarios), figsize=size, sharey=True, squeeze=False)
    places = range(len(rules) - 1, -1, -1)
    for row, figure in zip(axes, drawn, strict=True):
        for axis, scenario in zip(row, scenarios, strict=True):
            for place, rule in zip(places, rules, strict=True):
                values = _values(cells, figure, scenario, rule)
                color = (
                    "C3" if rule.startswith("cache_aware") else "0.35" if rule.startswith(("peer", "oracle")) else "C0"
                )
                axis.plot([min(values), max(values)], [place, place], color=color, linewidth=1)
                axis.plot([fmean(values)], [place], "o", color=color, markersize=3.5)
            if figure.logarithmic:
                axis.set_xscale("log")
            axis.set_yticks(list(places), rules)
            axis.set_title(scenario, fontsize=8)
            axis.set_xlabel(figure.title, fontsize=7)
            axis.tick_params(axis="x", which="both", labelsize=6)
            axis.grid(alpha=0.3)
    figures.tight_layout()
    figures.savefig(path, metadata={"Date": None})
    # Lines of drawing instructions end in blanks.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def _color(rule: str) -> str:
    if rule.startswith("cache_aware"):
        return "C3"
    return "0.35" if rule.startswith(("peer", "oracle")) else "C0"
