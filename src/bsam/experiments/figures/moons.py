"""Two moons with a 2-24-12-12-1 network: bSAM, SAM, and SAM with a linearised Laplace approximation (appendix F.2).

The settings are those of the authors' demo and of `bsam demo`. bSAM keeps the paper's beta2 = 0.999: after 1,000 steps
its precision is still partly its initial value, s = 1. With beta2 = 0.99, which was tried first, s falls to the
damping, 0.1. For N = 100 this is a standard deviation of 0.3 for every weight, and steps that are ten times longer. The
result then depends on the seed, so the numbers, but not the picture, have five seeds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bsam.experiments.demo import CERTAIN, Map, load_demo, moons
from bsam.experiments.figures.threads import one_thread
from bsam.experiments.style import probability

__all__ = ["Moons", "compute_moons", "draw_certainty", "draw_moons"]

FORGETFUL = "bsam, beta2 = 0.99"
FORGETFUL_SEEDS = 5
TITLES = {"sam-sgd": "SAM", "bsam": "bSAM", "laplace": "SAM + Laplace, linearised"}


@dataclass(frozen=True)
class Moons:
    """The maps of the three methods."""

    maps: dict[str, Map]
    forgetful: tuple[float | None, ...]
    """Training accuracy of `FORGETFUL` per seed; None if the training diverged."""

    def certain_far_away(self, method: str) -> float:
        """Return the share of the map outside the data's bounding box where the prediction is certain."""
        return self.maps[method].certain_far_away()

    def accuracy(self, method: str) -> float:
        """Return the share of training points whose class is predicted at the nearest point of the grid."""
        return _accuracy(self.maps[method])


def _accuracy(found: Map) -> float:
    column = (found.points[:, :1] - found.x).abs().argmin(1)
    row = (found.points[:, 1:] - found.y).abs().argmin(1)
    return float(((found.probability[row, column] > 0.5) == (found.labels == 1)).double().mean())


@cache
@one_thread()
def compute_moons(epochs: int | None = None) -> Moons:
    """Train the three methods with one seed, and `FORGETFUL` with several."""
    demo = load_demo()
    configs = demo.moons
    forgetful = {"bsam": replace(demo.moons["bsam"], beta2=0.99, damping=0.1)}
    if epochs is not None:
        configs, forgetful = (
            {method: replace(config, epochs=epochs) for method, config in part.items()} for part in (configs, forgetful)
        )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "after .* steps", UserWarning
        )  # the initial value of s still counts, as intended
        maps = moons(replace(demo, moons=configs))
        accuracies: list[float | None] = []
        for seed in range(FORGETFUL_SEEDS):
            try:
                accuracies.append(_accuracy(moons(replace(demo, moons=forgetful), seed=seed)["bsam"]))
            except FloatingPointError:
                accuracies.append(None)
    return Moons({method: maps[method] for method in TITLES}, tuple(accuracies))


def draw_certainty(result: Moons, figure: Figure) -> None:
    """Draw the maps of SAM and bSAM, white where the prediction is 0.5."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, method in zip(panels, ("sam-sgd", "bsam"), strict=True):
        image = _map(axes, result, method)
        axes.set(xlabel="first feature", xticks=[-2, 0, 2, 4])
    panels[0].set_ylabel("second feature")
    figure.colorbar(image, ax=panels, ticks=[0, 0.5, 1], label="probability of class 1", location="bottom", aspect=40)


def draw_moons(result: Moons, figure: Figure) -> None:
    """Draw the three maps, white where the prediction is 0.5."""
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, method in zip(panels.flat, TITLES, strict=False):
        image = _map(axes, result, method)
    for axes in panels[:, 0]:
        axes.set_ylabel("second feature")
    for axes in panels.flat[:3]:
        axes.set_xlabel("first feature")
        axes.tick_params(labelbottom=True)
    key = panels[1, 1]
    key.axis("off")
    figure.colorbar(image, ax=key, location="top", ticks=[0, 0.5, 1], label="probability of class 1", fraction=0.9)
    key.text(
        0.5, 0.75, "lines at 0.1, 0.5 and 0.9\nmarkers: training data", transform=key.transAxes, ha="center", va="top"
    )


def _map(axes: Axes, result: Moons, method: str) -> Any:
    found = result.maps[method]
    x, y, p = (part.double().numpy() for part in (found.x, found.y, found.probability))
    share = f"more than {CERTAIN:.0%} certain\non {result.certain_far_away(method):.0%} of the area\nfar from the data"
    axes.set_title(f"{TITLES[method]}\n{share}")
    return probability(axes, x, y, p, found.points.double().numpy(), found.labels.double().numpy())
