"""The page of `bsam demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from torch import Tensor

import bsam
from bsam.experiments.config import Config
from bsam.experiments.demo import Map, cells
from bsam.experiments.methods import METHODS
from bsam.experiments.report.diagrams import draw_reliability, draw_svg
from bsam.experiments.report.mistakes import count_errors, find_mistakes
from bsam.experiments.report.page import write_page
from bsam.experiments.style import probability

__all__ = ["write_demo_page"]


def write_demo_page(
    folder: Path, record: dict[str, Any], predictions: dict[str, bsam.Predictions], maps: dict[str, Map], images: Tensor
) -> Path:
    """Write `index.html` into `folder`: the table, mistakes, reliability diagrams, and the maps of two moons.

    Args:
        folder: Folder of the page.
        record: The demo's record.
        predictions: By method, the predictions of the first seed.
        maps: By method, its map of two moons.
        images: The images that were predicted.
    """
    titled = {METHODS[method].title: each for method, each in predictions.items()}
    return write_page(
        folder / "index.html",
        "demo.html.j2",
        rows=cells(record),
        record=record,
        ours=METHODS["bsam"].title,
        errors=count_errors(titled),
        mistakes=find_mistakes(images, titled),
        reliability=[
            (title, draw_reliability(each, num_bins=10, label=f"Reliability diagram of {title}"))
            for title, each in titled.items()
        ],
        moons=[(METHODS[m].title, _moons(m, each), f"{each.certain_far_away(0.95):.0%}") for m, each in maps.items()],
        settings=[(METHODS[method].title, _settings(result["config"])) for method, result in record["methods"].items()],
        num_samples=record["methods"]["bsam"]["config"]["num_samples"],
    )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in which methods differ, without those that have their defaults."""
    names = ("lr", "prior_precision", "rho", "damping", "splits", "beta2", "swag_lr")
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    return {name: config[name] for name in names if config[name] != defaults[name]}


def _moons(method: str, result: Map) -> Markup:
    parts = (result.x, result.y, result.probability, result.points, result.labels)

    def draw(axes: Axes) -> None:
        image = probability(axes, *(part.numpy() for part in parts))
        axes.set_xlabel("first feature")
        axes.set_ylabel("second feature")
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.85, ticks=[0, 0.5, 1])
        bar.set_label("probability of class 1")

    return draw_svg(draw, size=(4.6, 3.1), label=f"Predictions of {METHODS[method].title} on two moons")
