"""The page of `bsam demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

import bsam
from bsam.experiments.config import Config
from bsam.experiments.demo import Map, cells
from bsam.experiments.methods import METHODS
from bsam.experiments.report.diagrams import draw_reliability
from bsam.experiments.report.page import write_page
from bsam.experiments.report.svg import draw_svg

__all__ = ["write_demo_page"]

# Orange for class 0, blue for class 1, white where the prediction says "I do not know": also for the colour-blind.
_MAP = LinearSegmentedColormap.from_list("certainty", ["#c2570c", "#fdba74", "#ffffff", "#93c5fd", "#1d4ed8"])
_CLASSES = ("#7c2d12", "#172554")


def write_demo_page(
    folder: Path, record: dict[str, Any], predictions: dict[str, bsam.Predictions], maps: dict[str, Map]
) -> Path:
    """Write `index.html` into `folder`: the table, reliability diagrams, and what two moons look like."""
    return write_page(
        folder / "index.html",
        "demo.html.j2",
        rows=cells(record),
        record=record,
        reliability=[
            (METHODS[m].title, draw_reliability(p, num_bins=10, label=f"Reliability diagram of {METHODS[m].title}"))
            for m, p in predictions.items()
        ],
        moons=[(METHODS[method].title, _moons(method, m), _far_certainty(m)) for method, m in maps.items()],
        settings=[(METHODS[method].title, _settings(result["config"])) for method, result in record["methods"].items()],
        num_samples=record["methods"]["bsam"]["config"]["num_samples"],
    )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """What distinguishes one method's settings from another's."""
    names = ("lr", "prior_precision", "rho", "damping", "splits", "beta2", "swag_lr")
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    return {name: config[name] for name in names if config[name] != defaults[name]}


def _moons(method: str, result: Map) -> Markup:
    extent = float(result.x[0]), float(result.x[-1]), float(result.y[0]), float(result.y[-1])

    def draw(axes: Axes) -> None:
        options: Any = {"origin": "lower", "extent": extent, "cmap": _MAP, "vmin": 0, "vmax": 1}
        image = axes.imshow(result.probability.numpy(), interpolation="bilinear", **options)
        for label, (colour, marker) in enumerate(zip(_CLASSES, ("o", "^"), strict=True)):
            points = result.points[result.labels == label].numpy()
            axes.scatter(points[:, 0], points[:, 1], s=14, c=colour, marker=marker, edgecolors="white", linewidths=0.5)
        axes.set_xlabel("first feature")
        axes.set_ylabel("second feature")
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.85, ticks=[0, 0.5, 1])
        bar.set_label("probability of class 1")

    return Markup(draw_svg(draw, size=(4.6, 3.1), label=f"Predictions of {METHODS[method].title} on two moons"))


def _far_certainty(result: Map) -> str:
    """Which share of the area outside the data's own box is predicted with more than 99% certainty."""
    low, high = result.points.min(0).values - 0.5, result.points.max(0).values + 0.5
    x, y = np.meshgrid(result.x.numpy(), result.y.numpy())
    outside = (x < float(low[0])) | (x > float(high[0])) | (y < float(low[1])) | (y > float(high[1]))
    p = result.probability.numpy()[outside]
    return f"{np.mean(np.maximum(p, 1 - p) > 0.99):.0%}"
