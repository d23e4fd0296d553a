r"""Is SAM overconfident and Laplace underconfident on other data too? Figure 3's claim on 200 data sets (not in paper).

The data sets are `bsam.theory.losses.murphy_data(seed)` for the seeds 0, 1, .. 199, among them the 135 of Figure 3;
none is left out. Two priors: the book's N(0, 100 I), and N(0, I). The methods and their settings are those of
`bsam.experiments.figures.logistic`.

All data sets are trained at once, with one row of weights per data set. bSAM treats each weight separately, so it is
the package's optimizer on the sum of all losses. SAM's perturbation needs a norm, here the norm of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import expit  # type: ignore[import-untyped]
from torch import Tensor, nn

from bsam.experiments.figures.logistic import Gaussian, Settings, exact_predictive, predictive, train_bsam
from bsam.experiments.figures.threads import one_thread
from bsam.experiments.style import BLACK, BLUE, GREEN, RED
from bsam.optim.sam import perturbation
from bsam.theory.gaussian import Array
from bsam.theory.losses import murphy_data

__all__ = ["DataSets", "compute_data_sets", "draw_data_sets", "prior_name"]

TITLES = {"sam": "SAM", "bsam": "bSAM", "laplace": "SAM + Laplace"}


@dataclass(frozen=True)
class DataSets:
    """Mean confidences over a map, see `Logistic.confidence`."""

    separable: NDArray[np.bool_]  # per seed: whether a line through zero separates the classes
    confidence: dict[float, dict[str, Array]]  # by prior precision and method, one number per seed

    def excess(self, prior_precision: float, method: str) -> Array:
        """Return the method's confidence minus that of exact Bayes, per data set."""
        found = self.confidence[prior_precision]
        return found[method] - found["exact"]


@cache
@one_thread()
def compute_data_sets(
    num_sets: int = 200, prior_precisions: tuple[float, ...] = (0.01, 1.0), settings: Settings | None = None
) -> DataSets:
    """Train bSAM and SAM on all data sets, and integrate over the exact posteriors."""
    settings = settings or Settings(map_grid=21)
    sets = [murphy_data(seed) for seed in range(num_sets)]
    yx = np.stack([labels[:, None] * features for features, labels in sets])  # the likelihood depends on nothing else
    grid = np.linspace(-8, 8, settings.map_grid)
    points = np.stack(np.meshgrid(grid, grid[grid >= 0]), -1).reshape(-1, 2)  # p(-x) = 1 - p(x)
    confidence = {
        prior_precision: _confidences(yx, points, replace(settings, prior_precision=prior_precision))
        for prior_precision in prior_precisions
    }
    return DataSets(np.array([_is_separable(one) for one in yx]), confidence)


def _is_separable(yx: Array) -> bool:
    """Whether some w has <w, y x> > 0 for all points: they then lie in an open half plane."""
    angles = np.sort(np.arctan2(yx[:, 1], yx[:, 0]))
    gaps = np.diff(np.append(angles, angles[0] + 2 * np.pi))
    return bool(gaps.max() > np.pi)


def _confidences(yx: Array, points: Array, settings: Settings) -> dict[str, Array]:
    point, (mean, variances) = _train_sam(torch.from_numpy(yx), settings), _train_bsam(torch.from_numpy(yx), settings)
    p = expit(np.einsum("snd,sd->sn", yx, point))
    precision = np.einsum("sn,snd->sd", p * (1 - p), yx**2) + settings.prior_precision
    found: dict[str, list[Array]] = {name: [] for name in ("exact", *TITLES)}
    for i, one in enumerate(yx):
        found["exact"].append(_exact(one, points, settings.prior_precision))
        found["sam"].append(expit(points @ point[i]))
        found["bsam"].append(predictive(points, Gaussian(mean[i], np.diag(variances[i]))))
        found["laplace"].append(predictive(points, Gaussian(point[i], np.diag(1 / precision[i]))))
    return {name: np.abs(np.array(maps) - 0.5).mean(1) + 0.5 for name, maps in found.items()}


def _exact(yx: Array, points: Array, prior_precision: float) -> Array:
    """Integrate by the trapezoidal rule in polar coordinates: the posterior of separable data is a narrow cone."""
    radius = np.linspace(0, 5 / np.sqrt(prior_precision), 121)[1:]
    angle = np.linspace(-np.pi, np.pi, 240, endpoint=False)
    direction = np.stack([np.cos(angle), np.sin(angle)], -1)
    weights = (radius[:, None, None] * direction).reshape(-1, 2)
    log_density = -np.logaddexp(0, -weights @ yx.T).sum(1) - prior_precision / 2 * (weights**2).sum(1)
    mass = np.exp(log_density - log_density.max()) * np.repeat(radius, len(angle))
    return exact_predictive(points, weights, mass)


def _mean_losses(w: Tensor, yx: Tensor) -> Tensor:
    return F.softplus(-torch.einsum("snd,sd->sn", yx, w)).mean(1)


def _train_sam(yx: Tensor, settings: Settings) -> Array:
    gradient = torch.func.grad(lambda w: _mean_losses(w, yx).sum())
    decay = settings.prior_precision / yx.shape[1]
    w = yx.new_zeros(len(yx), 2)
    for _ in range(settings.sam_steps):
        g = gradient(w)
        eps = perturbation(g, g.norm(dim=1, keepdim=True), settings.sam_rho)
        w = w - settings.sam_lr * (gradient(w + eps) + decay * w)
    return np.asarray(w)


def _train_bsam(yx: Tensor, settings: Settings) -> tuple[Array, Array]:
    N, w = yx.shape[1], nn.Parameter(yx.new_zeros(len(yx), 2))
    optimizer = train_bsam(w, lambda: _mean_losses(w, yx).sum(), N, settings, settings.bsam_damping)
    return w.detach().numpy(), 1 / (N * optimizer.state[w]["unit_precision"]).numpy()


def prior_name(prior_precision: float) -> str:
    """Return the prior's name as a formula, which Matplotlib and LaTeX read alike."""
    variance = "" if prior_precision == 1 else rf"{1 / prior_precision:g}\,"
    return rf"$\mathcal{{N}}(0, {variance}I)$"


def draw_data_sets(result: DataSets, figure: Figure) -> None:
    """Draw the excess confidence of each method over exact Bayes; markers of separable data sets are filled."""
    panels = figure.subplots(len(result.confidence), 1)
    styles = {"sam": (RED, "^"), "bsam": (BLUE, "o"), "laplace": (GREEN, "v")}
    for axes, (prior_precision, found) in zip(panels, result.confidence.items(), strict=True):
        for method, (colour, marker) in styles.items():
            options: Any = {"s": 16, "marker": marker, "edgecolors": colour, "linewidths": 0.7}
            excess = result.excess(prior_precision, method)
            for chosen, face, kind in ((result.separable, colour, ""), (~result.separable, "none", ", not separable")):
                label = TITLES[method] + (kind or ", separable")
                axes.scatter(found["exact"][chosen], excess[chosen], facecolors=face, label=label, **options)
        axes.axhline(0, color=BLACK, lw=1)
        axes.set_title(f"prior {prior_name(prior_precision)}")
        axes.set_ylabel("confidence minus exact Bayes")
    panels[-1].set_xlabel("mean confidence of exact Bayes")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
