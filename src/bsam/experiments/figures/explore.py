"""A page to explore the theory with: a loss, and sliders for sigma, rho, delta and the mean.

The numbers are those of `bsam.theory` on grids of the mean m, sigma and rho. The page interpolates them linearly, with
sigma on a logarithmic scale. It shows these objectives, see `bsam.theory.objectives`; the regulariser is delta/2 m^2:

    E_Bayes    expected loss under N(m, sigma^2), -f, and the regulariser
    E_SAM      max-loss in a ball of radius rho, and the regulariser
    E_relaxed  sup_eps loss(m + eps) - eps^2 / (2 sigma^2), and the regulariser; the constant of log Z is left out

and below them -f and -f**.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from bsam.experiments.report.page import write_page
from bsam.theory.fenchel import biconjugate, expected_negative_loss, max_loss, max_loss_in_ball
from bsam.theory.gaussian import Array
from bsam.theory.losses import Loss, Majorant, quadratic, three_minima

__all__ = ["LOSSES", "Grids", "compute_grids", "sharp_and_flat", "write_explore"]

MEANS = np.linspace(-5.6, 5.6, 161)
SIGMAS = np.geomspace(0.1, 2.5, 25)
RADII = np.linspace(0.0, 2.5, 26)
_TOLERANCE = 1e-3
_DECIMALS = 4


def sharp_and_flat() -> Loss:
    """A loss with a deep, sharp minimum at 2 and a shallow, flat one at -2; it is 3 far away."""
    centers, widths, depths = np.array([2.0, -2.0]), np.array([0.3, 1.4]), np.array([2.7, 2.3])

    def wells(theta: Array) -> tuple[Array, Array]:
        z = (theta[..., None] - centers) / widths
        return z, depths * np.exp(-(z**2) / 2)

    def value(theta: Array) -> Array:
        return np.asarray(3.0 - wells(theta)[1].sum(-1))

    def gradient(theta: Array) -> Array:
        z, well = wells(theta)
        return np.asarray((z / widths * well).sum(-1))

    def hessian(theta: Array) -> Array:
        z, well = wells(theta)
        return np.asarray(((1 - z**2) / widths**2 * well).sum(-1))

    return Loss(value, gradient, hessian, majorant=Majorant(3.0))


LOSSES: dict[str, tuple[str, Callable[[], Loss]]] = {
    "Three minima": ("A flat minimum in the middle, and a sharp one on each side.", three_minima),
    "Sharp and flat": ("A deep, sharp minimum on the right, and a shallow, flat one on the left.", sharp_and_flat),
    "Quadratic": (
        "One minimum at 1. Here <math><msup><mi>f</mi><mtext>∗∗</mtext></msup><mo>=</mo><mi>f</mi></math>, and the "
        "relaxation is infinite from <math><mi>σ</mi><mo>=</mo><mn>1.41</mn></math> on.",
        lambda: quadratic(1.0, 0.5),
    ),
}
"""By name: one sentence of HTML about the loss, and the function that makes it."""


@dataclass(frozen=True)
class Grids:
    """The numbers of one loss."""

    loss: Array
    """(means)."""
    expected: Array
    """-f, (sigmas, means)."""
    biconjugate: Array
    """-f**, (sigmas, means)."""
    relaxed: Array
    """The supremum in E_relaxed, (sigmas, means); infinite where 1 / sigma^2 is too small."""
    ball: Array
    """The max-loss, (radii, means)."""


@cache
def compute_grids(name: str) -> Grids:
    """Compute the numbers of a loss."""
    loss = LOSSES[name][1]()
    means, sigmas = np.broadcast_arrays(MEANS, SIGMAS[:, None])
    return Grids(
        loss=loss(MEANS),
        expected=-expected_negative_loss(loss, means, sigmas**2).value,
        biconjugate=-biconjugate(loss, means, sigmas**2, tolerance=_TOLERANCE).value,
        relaxed=max_loss(loss, means, 1 / sigmas**2).value,
        ball=np.stack([loss(MEANS) if rho == 0 else max_loss_in_ball(loss, MEANS, float(rho)).value for rho in RADII]),
    )


def write_explore(path: Path) -> Path:
    """Write the page: one file that needs no network."""
    losses = []
    for name, (about, _) in LOSSES.items():
        grids = compute_grids(name)
        losses.append({"name": name, "about": about} | {key: _rounded(value) for key, value in vars(grids).items()})
    axes = {"means": _rounded(MEANS, 4), "sigmas": _rounded(SIGMAS, 6), "radii": _rounded(RADII, 4)}
    tables = json.dumps({**axes, "losses": losses}, separators=(",", ":"))
    return write_page(path, "explore.html.j2", script="explore.js", tables=Markup(tables), losses=list(LOSSES))


def _rounded(values: Array, decimals: int = _DECIMALS) -> Any:
    """Return nested lists of rounded numbers; None stands for infinity."""
    if values.ndim > 1:
        return [_rounded(row, decimals) for row in values]
    return [round(value, decimals) if np.isfinite(value) else None for value in values.tolist()]
