"""Diagrams as inline SVG that follow the page: its text colour, light or dark, and its width."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import bsam
from bsam.experiments.reproduce.study_figure import draw_metric

__all__ = ["draw_curves", "draw_reliability", "draw_svg"]

_INK = "#123456"
"""Stands for the page's text colour until the SVG is written."""
_INKED = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")


def draw_reliability(
    predictions: bsam.Predictions | bsam.metrics.ReliabilityTable, *, num_bins: int = 20, label: str
) -> Markup:
    """Draw a reliability diagram; a screen reader says `label`."""

    def draw(axes: Axes) -> None:
        bsam.metrics.reliability_diagram(predictions, num_bins=num_bins, ax=axes)
        if legend := axes.get_legend():
            legend.remove()  # the caption explains the colours

    return draw_svg(draw, size=(3.0, 3.0), label=label)


def draw_curves(record: dict[str, Any], metric: str, *, label: str) -> Markup:
    """Draw one metric of a sweep or an ablation; a screen reader says `label`."""

    def draw(axes: Axes) -> None:
        draw_metric(axes, record, metric)
        columns = 3 if sum(len(curve["label"]) for curve in record["series"]) < 40 else 1
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize="small")

    return draw_svg(draw, size=(4.6, 3.2), label=label)


def draw_svg(
    draw: Callable[[Axes], Any], *, size: tuple[float, float], label: str, colours: Mapping[str, str] | None = None
) -> Markup:
    """Return what `draw` puts on empty axes of `size` inches, as an SVG element that scales with its container.

    A screen reader says `label`. `colours` has colours of the page, like `var(--good)`, by the colour that `draw` uses.
    """
    style: Any = {**dict.fromkeys(_INKED, _INK), "axes.facecolor": "none", "svg.fonttype": "none", "font.size": 10}
    buffer = io.StringIO()
    with matplotlib.rc_context({**style, "svg.hashsalt": "bsam"}):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for drawn, shown in {_INK: "currentColor", **(colours or {})}.items():
        svg = svg.replace(drawn, shown)
    # A height in points would keep the figure from shrinking with the page. Ids must differ within a page.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', svg, count=1)
    prefix = re.sub(r"\W+", "-", label.lower())
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
    return Markup(svg)
