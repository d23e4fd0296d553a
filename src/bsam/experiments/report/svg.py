"""Figures as inline SVG that follow the page: the colour of its text, light or dark, and its width."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw_svg"]

_INK = "#123456"
"""Stands for the page's text colour until the SVG is written."""
_INKED = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")


def draw_svg(draw: Callable[[Axes], Any], *, size: tuple[float, float], label: str) -> str:
    """What `draw` puts on an empty axes, as an SVG element that scales with its container.

    Args:
        draw: Draws on the axes it is given.
        size: Width and height in inches.
        label: What a screen reader says.
    """
    style: Any = {**dict.fromkeys(_INKED, _INK), "axes.facecolor": "none", "svg.fonttype": "none", "font.size": 10}
    buffer = io.StringIO()
    with matplotlib.rc_context({**style, "svg.hashsalt": "bsam"}):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # A height in points would keep it from shrinking with the page; ids must differ between the figures of one page.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', svg, count=1)
    prefix = re.sub(r"\W+", "-", label.lower())
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
