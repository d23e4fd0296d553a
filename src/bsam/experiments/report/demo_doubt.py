"""The demo's section on doubt: what rejection is worth, and what each method says about images that are no digits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from markupsafe import Markup
from matplotlib.axes import Axes
from torch import Tensor

import bsam
from bsam.experiments.methods import METHODS
from bsam.experiments.report.diagrams import draw_svg
from bsam.experiments.report.mistakes import Answer, data_uri

__all__ = ["Strange", "doubt_lines", "draw_risk", "draw_strange", "find_strange"]


@dataclass(frozen=True)
class Strange:
    """An image that is no digit, and what the methods say about it."""

    source: str
    """The image as a data URI."""
    what: str
    answers: list[Answer]


def doubt_lines(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: the method, or two runs of it, and in percent the means over the seeds.

    They are the errors among all digits, and among the 90% with the least doubt; then the AUROC of unknown sets.
    """
    lines = []
    rows = {METHODS[method].title: found["runs"] for method, found in record["methods"].items()}
    for name, runs in (rows | {f"2 × {METHODS[m].title}": runs for m, runs in record["pairs"].items()}).items():
        shares = (
            [1 - run["accuracy"] for run in runs],
            [1 - run["accuracy_90"] for run in runs],
            *([run["unknown"][each] for run in runs] for each in runs[0]["unknown"]),
        )
        lines.append((name, [f"{100 * statistics.fmean(values):.1f}" for values in shares]))
    return lines


def draw_risk(predictions: Mapping[str, bsam.Predictions]) -> Markup:
    """Draw risk against coverage of all methods."""

    def draw(axes: Axes) -> None:
        bsam.metrics.risk_coverage_diagram(dict(predictions), ax=axes)
        axes.set_xlim(0.5, 1)
        largest = max(float(bsam.metrics.risk_coverage(each).risk[-1]) for each in predictions.values())
        axes.set_ylim(0, 1.3 * largest + 1e-3)
        axes.legend(loc="upper left", frameon=False, fontsize="small")

    return draw_svg(draw, size=(4.4, 3.4), label="Risk against coverage of all methods")


def draw_strange(known: bsam.Predictions, unknown: bsam.Predictions, title: str) -> Markup:
    """Draw how sure a method is of digits, and of images that are none."""

    def draw(axes: Axes) -> None:
        for predictions, name in ((known, "digits"), (unknown, "no digits")):
            sure = predictions.probs.amax(dim=1)
            axes.hist(sure, bins=20, range=(0, 1), weights=torch.full_like(sure, 1 / len(sure)), alpha=0.75, label=name)
        axes.set(xlabel="largest probability", ylabel="share", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left", frameon=False, fontsize="small")

    return draw_svg(draw, size=(3.0, 2.4), label=f"How sure {title} is of digits and of other images")


def find_strange(images: Tensor, unknown: Mapping[str, bsam.Predictions], what: str, count: int = 3) -> list[Strange]:
    """Return the images that are no digits of which the methods are most sure.

    Args:
        images: Raw grey values (n, 1, height, width).
        unknown: By title of the method, its predictions of these images.
        what: What the images show.
        count: Number of images.
    """
    best = {name: each.probs.max(1) for name, each in unknown.items()}
    order = torch.stack([each.values for each in best.values()]).mean(0).argsort(descending=True)
    return [
        Strange(
            data_uri(images[i]),
            what,
            [Answer(name, int(each.indices[i]), float(each.values[i]), False) for name, each in best.items()],
        )
        for i in order[:count].tolist()
    ]
