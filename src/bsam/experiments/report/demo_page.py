"""The page of `bsam demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

import bsam
from bsam.experiments.config import Config
from bsam.experiments.data import Dataset
from bsam.experiments.demo import CERTAIN, Map, cells
from bsam.experiments.methods import METHODS
from bsam.experiments.report.demo_doubt import doubt_lines, draw_risk, draw_strange, find_strange
from bsam.experiments.report.diagrams import draw_reliability, draw_svg
from bsam.experiments.report.mistakes import count_errors, find_mistakes
from bsam.experiments.report.page import write_page
from bsam.experiments.style import probability
from bsam.experiments.suites.unknown_inputs import unknown_images

__all__ = ["write_demo_page"]


def write_demo_page(
    folder: Path,
    record: dict[str, Any],
    predictions: dict[str, bsam.Predictions],
    strange: dict[str, dict[str, bsam.Predictions]],
    maps: dict[str, Map],
    data: Dataset,
) -> Path:
    """Write `index.html` into `folder`: the table, mistakes, doubt, reliability diagrams, and maps of two moons.

    Args:
        folder: Folder of the page.
        record: The demo's record.
        predictions: By method, the predictions of the first seed.
        strange: By method and unknown set, predictions for images that are no digits.
        maps: By method, its map of two moons.
        data: The data set whose test part was predicted.
    """
    images = data.test[0]
    titled = {METHODS[method].title: each for method, each in predictions.items()}
    unknown = {
        name: {METHODS[method].title: each[name] for method, each in strange.items()}
        for name in ("mirrored", "photographs")
    }
    mirrored, photographs = (unknown_images(data, name, None) for name in unknown)
    return write_page(
        folder / "index.html",
        "demo.html.j2",
        rows=cells(record),
        record=record,
        ours=METHODS["bsam"].title,
        errors=count_errors(titled),
        mistakes=find_mistakes(images, titled),
        doubt=doubt_lines(record),
        unknown_names=["mirrored digits", "photographs"],
        risk=draw_risk(titled),
        strange_histograms=[
            (title, draw_strange(titled[title], each, title)) for title, each in unknown["mirrored"].items()
        ],
        strange=[
            *find_strange(mirrored, unknown["mirrored"], "a mirrored digit", 2),
            *find_strange(photographs, unknown["photographs"], "a piece of a photograph", 1),
        ],
        reliability=[
            (title, draw_reliability(each, num_bins=10, label=f"Reliability diagram of {title}"))
            for title, each in titled.items()
        ],
        moons=[(METHODS[m].title, _moons(m, each), f"{each.certain_far_away():.0%}") for m, each in maps.items()],
        settings=[(METHODS[method].title, _settings(result["config"])) for method, result in record["methods"].items()],
        certain=f"{CERTAIN:.0%}",
        seconds=[(METHODS[method].title, result["seconds"]) for method, result in record["methods"].items()],
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
