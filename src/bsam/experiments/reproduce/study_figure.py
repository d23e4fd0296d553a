"""The figure of a sweep or an ablation: one panel per metric, one curve per series."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bsam.experiments.metric_columns import TITLES
from bsam.experiments.reproduce.show import scale_note
from bsam.experiments.style import BLUE, GREEN, PURPLE, RED, new_figure, save

__all__ = ["draw_metric", "draw_study"]

_STYLES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PURPLE, "D"))


def draw_study(record: dict[str, Any], path: Path) -> Path:
    """Draw a record that `collect` returned."""
    figure = new_figure(9, 6.4)
    for axes, metric in zip(figure.subplots(2, 2).flat, TITLES, strict=True):
        draw_metric(axes, record, metric)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_STYLES))
    figure.suptitle("\n".join(filter(None, (record["title"], scale_note(record["scale"])))))
    return save(figure, path)


def draw_metric(axes: Axes, record: dict[str, Any], metric: str) -> None:
    """Draw one metric of a record; a bar is one standard deviation over the seeds."""
    xs = list(dict.fromkeys(x for curve in record["series"] for x in curve["x"]))
    numeric = all(isinstance(x, int | float) for x in xs)
    for k, ((colour, marker), curve) in enumerate(zip(_STYLES, record["series"], strict=False)):
        where = curve["x"] if numeric else [xs.index(x) + 0.15 * k for x in curve["x"]]  # beside each other
        means = [math.nan if mean is None else mean for mean, _ in curve["metrics"][metric]]
        sds = [sd or 0.0 for _, sd in curve["metrics"][metric]]
        line = "-" if numeric else ""
        axes.errorbar(where, means, sds, color=colour, marker=marker, ls=line, capsize=3, label=curve["label"])
    if numeric and 0 in xs:
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
    elif numeric:
        axes.set_xscale("log", base=2 if all(x == int(x) for x in xs) else 10)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
    else:
        axes.set_xticks(range(len(xs)), xs)
        axes.margins(x=0.15)
    axes.minorticks_off()
    axes.set_xlabel(record["x"])
    axes.set_ylabel(TITLES[metric] + (", %" if metric == "accuracy" else ""))
    axes.grid(alpha=0.3)
