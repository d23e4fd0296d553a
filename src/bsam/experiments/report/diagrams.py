"""The diagrams of the pages."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

import bsam
from bsam.experiments.report.svg import draw_svg
from bsam.experiments.reproduce.study_figure import draw_metric

__all__ = ["draw_curves", "draw_reliability"]


def draw_reliability(
    predictions: bsam.Predictions | bsam.metrics.ReliabilityTable, *, num_bins: int = 20, label: str
) -> Markup:
    """A reliability diagram; `label` is what a screen reader says."""

    def draw(axes: Axes) -> None:
        bsam.metrics.reliability_diagram(predictions, num_bins=num_bins, ax=axes)
        if legend := axes.get_legend():
            legend.remove()  # the caption says it

    return Markup(draw_svg(draw, size=(3.0, 3.0), label=label))


def draw_curves(record: dict[str, Any], metric: str, *, label: str) -> Markup:
    """A metric of a sweep or an ablation; `label` is what a screen reader says."""

    def draw(axes: Axes) -> None:
        draw_metric(axes, record, metric)
        columns = 3 if sum(len(curve["label"]) for curve in record["series"]) < 40 else 1
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize="small")

    return Markup(draw_svg(draw, size=(4.6, 3.2), label=label))
