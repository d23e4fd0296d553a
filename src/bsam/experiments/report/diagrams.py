"""The diagrams of the pages: reliability, and metrics along a setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

import bsam
from bsam.experiments.report.svg import draw_svg

__all__ = ["Curve", "draw_curves", "draw_reliability"]

# Told apart by colour, marker and line, on white and on black (colours: Okabe and Ito, 2008).
_STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", "-"),
    ("#56B4E9", "P", "--"),
)


def draw_reliability(
    predictions: bsam.Predictions | bsam.metrics.ReliabilityTable, *, num_bins: int = 20, label: str
) -> Markup:
    """A reliability diagram; `label` is what a screen reader says."""

    def draw(axes: Axes) -> None:
        bsam.metrics.reliability_diagram(predictions, num_bins=num_bins, ax=axes)
        if legend := axes.get_legend():
            legend.remove()  # the caption says it

    return Markup(draw_svg(draw, size=(3.0, 3.0), label=label))


@dataclass(frozen=True)
class Curve:
    """A metric at some values of a setting."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    sd: Sequence[float | None]
    """None where one seed was run."""


def draw_curves(curves: Sequence[Curve], *, x_label: str, y_label: str, label: str) -> Markup:
    """Curves with bars of one standard deviation, over a logarithmic axis if the values span more than one decade."""
    values = sorted({x for curve in curves for x in curve.x})
    logarithmic = values[0] > 0 and values[-1] / values[0] >= 10

    def draw(axes: Axes) -> None:
        for curve, (colour, marker, line) in zip(curves, cycle(_STYLES)):
            sd = [math.nan if s is None else s for s in curve.sd]
            axes.errorbar(
                curve.x, curve.mean, sd, color=colour, marker=marker, linestyle=line, capsize=3, label=curve.label
            )
        if logarithmic:
            axes.set_xscale("log")
        axes.set_xticks(values, [f"{x:g}" for x in values], rotation=45 if len(values) > 6 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize="small")

    return Markup(draw_svg(draw, size=(4.2, 3.0), label=label))
