"""The first section of the report: every number of ours against the paper's, in pictures and counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from scipy.special import stdtrit  # type: ignore[import-untyped]

from bsam.experiments.comparison import HIGHER_IS_BETTER, Cell, Comparison, Mark
from bsam.experiments.metric_columns import TITLES
from bsam.experiments.paper.results import PAPER_SEEDS, margins
from bsam.experiments.report.diagrams import draw_svg
from bsam.experiments.verdicts import INTERVAL, Summary, welch

__all__ = ["Panel", "draw_panels"]

_MARKERS: dict[Mark, str] = {"equal": "o", "better": "^", "worse": "v", "open": "o", "reduced": "s"}
_COLOURS: dict[Mark, str] = {
    "equal": "#123401",
    "better": "#123402",
    "worse": "#123403",
    "open": "#123404",
    "reduced": "#123405",
}
"""They stand for the page's colours until the SVG is written."""
_HOLLOW = ("open", "reduced")
_LOGARITHMIC = ("nll", "ece")


@dataclass(frozen=True)
class Panel:
    """One metric: our numbers against the paper's, and by how much ours are better."""

    title: str
    numbers: Markup
    gains: Markup


@dataclass(frozen=True)
class _Dot:
    """A number of the paper that we have run, and the margin of its block."""

    cell: Cell
    margin: float

    @property
    def gain(self) -> float:
        """By how many margins ours is better."""
        sign = 1 if HIGHER_IS_BETTER[self.cell.metric] else -1
        return sign * (self.cell.difference or 0.0) / self.margin


def draw_panels(comparisons: Iterable[Comparison]) -> list[Panel]:
    """Draw the two diagrams of each metric; nothing if no number can be compared."""
    dots = [
        _Dot(cell, margins()[comparison.table][block.name][cell.metric])
        for comparison in comparisons
        for block in comparison.blocks
        for row in block.rows
        for cell in row.cells
        if not row.ours and cell.difference is not None
    ]
    by_metric = {metric: [dot for dot in dots if dot.cell.metric == metric] for metric in TITLES}
    return [_panel(metric, found) for metric, found in by_metric.items() if found]


def _panel(metric: str, dots: list[_Dot]) -> Panel:
    name = TITLES[metric].split()[0]
    colours = {colour: f"var(--{mark})" for mark, colour in _COLOURS.items()}

    def numbers(axes: Axes) -> None:
        for cell in (dot.cell for dot in dots):
            assert cell.published is not None
            assert cell.mean is not None
            ours, paper = _half_width(cell.sd, len(cell.values)), _half_width(cell.published.sd, PAPER_SEEDS)
            _draw_dot(axes, cell, cell.published.mean, cell.mean, paper, ours)
        if metric in _LOGARITHMIC:
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(NullFormatter())
        limits = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot(limits, limits, color=axes.xaxis.label.get_color(), linestyle="--", linewidth=1, zorder=1)
        axes.set(xlim=limits, ylim=limits, xlabel=f"{name}, paper", ylabel=f"{name}, ours")

    def gains(axes: Axes) -> None:
        axes.axhspan(-1, 1, color=_COLOURS["equal"], alpha=0.15, linewidth=0, zorder=0)
        for place, dot in enumerate(sorted(dots, key=lambda dot: dot.gain)):
            _draw_dot(axes, dot.cell, place, dot.gain, 0.0, _half_width_of_difference(dot.cell) / dot.margin)
        axes.axhline(0, color=axes.xaxis.label.get_color(), linestyle="--", linewidth=1, zorder=1)
        axes.set_yscale("symlog", linthresh=2, linscale=1)
        limit = max(20, *(1.5 * abs(dot.gain) for dot in dots))
        axes.set(ylim=(-limit, limit), xticks=[], xlabel="numbers, by their gain", ylabel="gain, in margins")
        axes.set_yticks([-10, -2, -1, 0, 1, 2, 10], ["−10", "−2", "−1", "0", "1", "2", "10"])
        axes.minorticks_off()

    return Panel(
        TITLES[metric],
        draw_svg(numbers, size=(3.2, 2.9), label=f"Our {name} against the paper's", colours=colours),
        draw_svg(gains, size=(3.2, 2.4), label=f"By how much our {name} is better than the paper's", colours=colours),
    )


def _half_width(sd: float | None, count: int) -> float:
    """Return half the width of the interval of a mean; 0 for a single seed."""
    return 0.0 if sd is None else float(stdtrit(count - 1, (1 + INTERVAL) / 2)) * sd / math.sqrt(count)


def _half_width_of_difference(cell: Cell) -> float:
    """Return half the width of Welch's interval, as the verdicts have it; 0 for a single seed."""
    if len(cell.values) < 2 or cell.published is None or cell.published.sd is None:
        return 0.0
    difference = welch(Summary.of(cell.values), Summary(cell.published.mean, cell.published.sd, PAPER_SEEDS))
    low, high = difference.interval()
    return (high - low) / 2


def _draw_dot(axes: Axes, cell: Cell, x: float, y: float, x_error: float, y_error: float) -> None:
    assert cell.mark is not None
    colour = _COLOURS[cell.mark]
    axes.errorbar(
        x,
        y,
        xerr=x_error,
        yerr=y_error,
        fmt=_MARKERS[cell.mark],
        color=colour,
        markerfacecolor="none" if cell.mark in _HOLLOW else colour,
        markersize=4,
        elinewidth=0.6,
        markeredgewidth=0.8,
    )
