r"""Logistic regression with two weights: exact Bayes, bSAM, SAM, Laplace at SAM's solution (Figure 3, appendix F.1).

The paper prints neither its data nor its settings; it says that the data are adopted from Murphy (2012), Chapter 8.4,
and separable by a line through zero. Ours:

- The data are the book's, `bsam.theory.losses.murphy_data()` with N = 60, and so is the prior, N(0, 100 I). We chose
  these data after a look at the results on other data of ours. The settings below were not changed.
  `bsam.experiments.figures.data_sets` has the results for other data of this kind, and for another prior. There are no
  minibatches.
- bSAM has the paper's settings of its networks: lr 0.1, betas (0.9, 0.999), rho
  0.01, damping gamma = 0.1; 8,000 steps, cosine to zero.
- SAM is SGD with the same prior, rho = 0.05 as in the paper's tables, 2,000 steps. Laplace takes the exact diagonal
  Hessian at SAM's solution.

On a quadratic with curvature h (of the mean loss) the precision of Algorithm 1 converges to

    N s* = N (delta + gamma + h sqrt(2 / (pi N)))                  not at Bayes' N (delta + h)

because the algorithm leaves out a sqrt(N) of its derivation (`bsam.theory.derivation`). It uses a fraction of the
curvature, and the damping gamma, which is not in the derivation, decides how wide the posterior is. Two more results
separate these two effects: bSAM with gamma = 0, and the derivation's update, with its sqrt(N) and with gamma = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.optimize import minimize  # type: ignore[import-untyped]
from scipy.special import expit  # type: ignore[import-untyped]
from torch import Tensor, nn

import bsam
from bsam.experiments.figures.threads import one_thread
from bsam.experiments.style import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, RED, ellipse, probability, scatter
from bsam.theory.derivation import bsam_update
from bsam.theory.fenchel import expectation
from bsam.theory.gaussian import Array
from bsam.theory.losses import Loss, logistic_regression, murphy_data

__all__ = [
    "Gaussian",
    "Logistic",
    "Settings",
    "compute_logistic",
    "draw_logistic",
    "draw_posterior",
    "exact_predictive",
    "predictive",
    "stationary_precision",
    "train_bsam",
]

METHODS = {
    "exact": "exact Bayes",
    "bsam": "bSAM",
    "sam": "SAM, point estimate",
    "laplace": "SAM + Laplace",
    "mean_field": "Bayes, diagonal",
    "bsam_undamped": r"bSAM, $\gamma = 0$",
    "bsam_sqrt_n": r"bSAM with $\sqrt{N}$, $\gamma = 0$",
}


@dataclass(frozen=True)
class Settings:
    """Every choice, explained at the top of this module."""

    prior_precision: float = 0.01
    bsam_steps: int = 8000
    bsam_lr: float = 0.1
    bsam_rho: float = 0.01
    bsam_damping: float = 0.1
    bsam_betas: tuple[float, float] = (0.9, 0.999)
    sam_steps: int = 2000
    sam_lr: float = 1.0
    sam_rho: float = 0.05
    seed: int = 0
    weight_grid: int = 401
    map_grid: int = 61


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian over the two weights."""

    mean: Array
    covariance: Array

    @property
    def variances(self) -> Array:
        """The diagonal of the covariance."""
        return np.diag(self.covariance)


@dataclass(frozen=True)
class Logistic:
    """The results of all methods."""

    settings: Settings
    features: Array  # (N, 2)
    labels: Array  # -1 or 1
    x: Array  # grid of both features
    maps: dict[str, Array]  # by method: p(y = 1) on the grid, (x_2, x_1)
    wide_x: Array  # a wider grid of both features, to be drawn
    wide_maps: dict[str, Array]  # the same predictions on the wider grid
    weights: Array  # grid of both weights
    density: Array  # exact posterior on the grid, (w_2, w_1)
    mode: Array  # the MAP estimate
    samples: Array  # samples of the exact posterior, (n, 2)
    point: Array  # SAM's solution
    gaussians: dict[str, Gaussian]  # by method; `exact` has the moments of the exact posterior
    separating: dict[str, float]  # by method: the share of the mass whose weights separate the training points
    stationary: dict[str, Array]  # by variant of bSAM: variances by s*, with the mean curvature under its own Gaussian
    fixed_point: dict[str, Array]  # the same variances, by the true E|g| instead of a quadratic's

    def distance(self, method: str) -> float:
        """Return the total variation distance to exact Bayes: the mean of |p - p_exact| over the map."""
        return float(np.abs(self.maps[method] - self.maps["exact"]).mean())

    def confidence(self, method: str) -> float:
        """Return the mean over the map of the more likely class's probability."""
        return float(np.abs(self.maps[method] - 0.5).mean() + 0.5)


def stationary_precision(
    curvature: Array, *, num_data: int, prior_precision: float, damping: float, sqrt_num_data: bool = False
) -> Array:
    """Return N s*, the posterior precision to which Algorithm 1 converges on a quadratic.

    Args:
        curvature: h, of the mean loss.
        num_data: N.
        prior_precision: N delta.
        damping: gamma.
        sqrt_num_data: Whether the update has the derivation's sqrt(N).

    >>> stationary_precision(np.array([1.0]), num_data=100, prior_precision=1.0, damping=0.0).round(2)
    array([8.98])
    """
    N = num_data
    share = np.sqrt(2 / np.pi) if sqrt_num_data else np.sqrt(2 / (np.pi * N))
    return np.asarray(prior_precision + N * damping + N * curvature * share)


@cache
@one_thread()
def compute_logistic(settings: Settings = Settings()) -> Logistic:  # noqa: B008
    """Run every method."""
    features, labels = murphy_data()
    loss, N = logistic_regression(features, labels), len(labels)
    x, y = torch.from_numpy(features), torch.from_numpy((labels + 1) / 2)
    grid, wide = (np.linspace(-reach, reach, settings.map_grid) for reach in (8, 24))
    points, wide_points = (np.stack(np.meshgrid(each, each), -1).reshape(-1, 2) for each in (grid, wide))
    inputs = torch.from_numpy(points)

    weights = np.linspace(-5, 50, settings.weight_grid)  # beyond lies 1e-4 of the mass
    mesh = np.stack(np.meshgrid(weights, weights), -1).reshape(-1, 2)
    log_density = -loss(mesh) - settings.prior_precision / 2 * (mesh**2).sum(1)
    mass = np.exp(log_density - log_density.max())
    mass /= mass.sum()
    mean = mass @ mesh
    gaussians = {"exact": Gaussian(mean, (mesh - mean).T @ ((mesh - mean) * mass[:, None]))}
    generator = np.random.default_rng(settings.seed)
    chosen = mesh[generator.choice(len(mesh), size=10, p=mass)]
    samples = chosen + (weights[1] - weights[0]) * generator.uniform(-0.5, 0.5, chosen.shape)

    def as_map(p: Array | Tensor) -> Array:
        return np.asarray(p).reshape(len(grid), len(grid))

    maps = {"exact": as_map(exact_predictive(points, mesh, mass))}
    stationary, fixed_point = {}, {}
    for name, damping in (("bsam", settings.bsam_damping), ("bsam_undamped", 0.0)):
        model = _linear()
        optimizer = train_bsam(model.weight, partial(_mean_loss, model, x, y), N, settings, damping)
        posterior = optimizer.posterior(model)
        predictions = bsam.predict_linearised(model, posterior, inputs, likelihood="bernoulli", batch_size=4096)
        maps[name] = as_map(predictions.probs[:, 1])  # the model is linear, so nothing is approximated
        gaussians[name] = _gaussian_of(posterior)
        stationary[name], fixed_point[name] = _predicted_variances(loss, gaussians[name], settings, damping, N)

    model = _train_sam(x, y, settings)
    point = model.weight.detach().numpy().ravel().copy()
    maps["sam"] = as_map(expit(points @ point))
    posterior = bsam.laplace(model, "bernoulli", (x, y), prior_precision=settings.prior_precision, curvature="hessian")
    predictions = bsam.predict_linearised(model, posterior, inputs, likelihood="bernoulli", batch_size=4096)
    maps["laplace"], gaussians["laplace"] = as_map(predictions.probs[:, 1]), _gaussian_of(posterior)

    gaussians["mean_field"] = _mean_field(loss, settings.prior_precision, gaussians["laplace"])
    gaussians["bsam_sqrt_n"] = _with_sqrt_n(loss, settings, N)
    stationary["bsam_sqrt_n"], fixed_point["bsam_sqrt_n"] = _predicted_variances(
        loss, gaussians["bsam_sqrt_n"], settings, 0.0, N, sqrt_n=True
    )
    for name in ("mean_field", "bsam_sqrt_n"):
        maps[name] = as_map(predictive(points, gaussians[name]))

    wide_maps = {"exact": as_map(exact_predictive(wide_points, mesh, mass)), "sam": as_map(expit(wide_points @ point))}
    for name in ("bsam", "laplace"):
        wide_maps[name] = as_map(predictive(wide_points, gaussians[name]))

    def separates(w: Array) -> Array:
        return np.asarray((w @ (labels[:, None] * features).T > 0).all(-1))

    separating = {"exact": float(mass @ separates(mesh)), "sam": float(separates(point))}
    z, normal = _normal_nodes()
    for name in gaussians.keys() - {"exact"}:  # all of them are diagonal
        separating[name] = float(normal @ separates(gaussians[name].mean + z * np.sqrt(gaussians[name].variances)))
    return Logistic(
        settings=settings,
        features=features,
        labels=labels,
        x=grid,
        maps=maps,
        wide_x=wide,
        wide_maps=wide_maps,
        weights=weights,
        density=mass.reshape(len(weights), -1) / (weights[1] - weights[0]) ** 2,
        mode=_mode(loss, settings.prior_precision),
        samples=samples,
        point=point,
        gaussians=gaussians,
        separating=separating,
        stationary=stationary,
        fixed_point=fixed_point,
    )


def exact_predictive(points: Array, weights: Array, mass: Array) -> Array:
    """Return p(y = 1) at each point, averaged over weights with these masses."""
    likely = mass > 1e-9 * mass.max()
    mass = mass[likely] / mass[likely].sum()
    return np.concatenate([expit(part @ weights[likely].T) @ mass for part in np.array_split(points, 40)])


def predictive(points: Array, q: Gaussian) -> Array:
    """Return p(y = 1) at each point, averaged over a Gaussian of the weights."""
    variance = ((points @ q.covariance) * points).sum(1)
    return np.asarray(expectation(expit, points @ q.mean, variance, tolerance=1e-6).value)


def _mean_loss(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x)[:, 0], y)


def _linear() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def train_bsam(
    weights: Tensor, mean_loss: Callable[[], Tensor], num_data: int, settings: Settings, damping: float
) -> bsam.BSAM:
    """Train the weights without minibatches; the optimizer's state has their precision."""
    optimizer = bsam.BSAM(
        [weights],
        lr=settings.bsam_lr,
        num_data=num_data,
        rho=settings.bsam_rho,
        prior_precision=settings.prior_precision,
        betas=settings.bsam_betas,
        damping=damping,
        sqrt_num_data=False,
        max_noise=None,
        max_grad_norm=None,
        seed=settings.seed,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=settings.bsam_steps)
    for _ in range(settings.bsam_steps):
        optimizer.step(mean_loss)
        scheduler.step()
    return optimizer


def _train_sam(x: Tensor, y: Tensor, settings: Settings) -> nn.Linear:
    model = _linear()
    decay = settings.prior_precision / len(x)
    optimizer: Any = bsam.SAM(
        model.parameters(), torch.optim.SGD, rho=settings.sam_rho, lr=settings.sam_lr, weight_decay=decay
    )
    for _ in range(settings.sam_steps):
        optimizer.step(partial(_mean_loss, model, x, y))
    return model


def _gaussian_of(posterior: bsam.DiagonalGaussian) -> Gaussian:
    mean, std = (part["weight"].double().numpy().ravel() for part in (posterior.mean, posterior.std))
    return Gaussian(mean, np.diag(std**2))


def _mode(loss: Loss, prior_precision: float) -> Array:
    theta = np.zeros(2)
    for _ in range(50):  # Newton's method
        gradient = loss.gradient(theta) + prior_precision * theta
        theta = theta - np.linalg.solve(loss.hessian(theta) + prior_precision * np.eye(2), gradient)
    return theta


def _mean_field(loss: Loss, prior_precision: float, start: Gaussian) -> Gaussian:
    """Find the diagonal Gaussian with the highest ELBO."""

    def negative_elbo(x: Array) -> tuple[float, Array]:
        omega, v = x[:2], np.exp(x[2:])
        value, g, H = (
            expectation(part, omega, np.diag(v), dim=2, tolerance=1e-5).value
            for part in (loss.value, loss.gradient, loss.hessian)
        )
        kl = prior_precision / 2 * (omega @ omega + v.sum()) - x[2:].sum() / 2  # up to a constant
        by_variance = (np.diag(H) + prior_precision) / 2 - 1 / (2 * v)  # Price's theorem
        return float(value + kl), np.concatenate([g + prior_precision * omega, v * by_variance])

    x = minimize(negative_elbo, np.append(start.mean, np.log(start.variances)), jac=True, method="L-BFGS-B").x
    return Gaussian(x[:2], np.diag(np.exp(x[2:])))


def _with_sqrt_n(loss: Loss, settings: Settings, N: int) -> Gaussian:
    """Run Algorithm 1 with the sqrt(N) of its derivation, without damping and without momentum."""
    generator = np.random.default_rng(settings.seed)
    omega, s = np.zeros(2), np.ones(2)
    for step in range(settings.bsam_steps):
        theta = omega + generator.standard_normal(2) / np.sqrt(N * s)
        g = loss.gradient(theta) / N
        omega, s = bsam_update(
            omega,
            s,
            g,
            loss.gradient(theta + settings.bsam_rho * g / s) / N,
            num_data=N,
            delta=settings.prior_precision / N,
            learning_rate=settings.bsam_lr / 2 * (1 + np.cos(np.pi * step / settings.bsam_steps)),
            beta2=settings.bsam_betas[1],
            damping=0.0,
            sqrt_num_data=True,
        )
    return Gaussian(omega, np.diag(1 / (N * s)))


def _normal_nodes() -> tuple[Array, Array]:
    """Return a grid on the plane, and the mass of a standard normal at its points."""
    z = np.stack(np.meshgrid(*[np.linspace(-5, 5, 101)] * 2), -1).reshape(-1, 2)
    mass = np.exp(-(z**2).sum(1) / 2)
    return z, mass / mass.sum()


def _predicted_variances(
    loss: Loss, q: Gaussian, settings: Settings, damping: float, N: int, *, sqrt_n: bool = False
) -> tuple[Array, Array]:
    """Return the variances of s*, with the mean curvature under q, and of s = delta + gamma + sqrt(s) E|g|."""
    h = np.diag(expectation(loss.hessian, q.mean, q.covariance, dim=2, tolerance=1e-6).value) / N
    options: Any = {"num_data": N, "prior_precision": settings.prior_precision, "damping": damping}
    z, weights = _normal_nodes()
    s = 1 / (N * q.variances)
    for _ in range(50):
        g = weights @ np.abs(loss.gradient(q.mean + z / np.sqrt(N * s))) / N
        s = s / 2 + (settings.prior_precision / N + damping + np.sqrt(N * s if sqrt_n else s) * g) / 2
    return 1 / stationary_precision(h, sqrt_num_data=sqrt_n, **options), 1 / (N * s)


def draw_logistic(result: Logistic, figure: Figure) -> None:
    """Draw Figure 3: predictive probabilities, white where they are 0.5, with lines at 0.1, 0.5 and 0.9."""
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    reach = result.x[-1]
    for axes, method in zip(panels.flat, ("exact", "bsam", "sam", "laplace"), strict=True):
        x, p = result.wide_x, result.wide_maps[method]
        image = probability(axes, x, x, p, result.features, result.labels, size=7)
        axes.plot(reach * np.array([-1, 1, 1, -1, -1]), reach * np.array([-1, -1, 1, 1, -1]), color=GRAY, lw=1, ls=":")
        axes.set_title(f"{METHODS[method]}\nmean confidence {result.confidence(method):.3f}")
    for axes in panels[-1]:
        axes.set_xlabel("$x_1$")
    for axes in panels[:, 0]:
        axes.set_ylabel("$x_2$")
    label = "$p(y = 1)$; confidence is averaged inside the dotted square"
    figure.colorbar(image, ax=panels, ticks=[0, 0.1, 0.5, 0.9, 1], label=label, location="bottom", aspect=40)


def draw_posterior(result: Logistic, figure: Figure) -> None:
    """Draw appendix F.1: data with decision boundaries, the exact posterior, and the Gaussians of the methods."""
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 1.35])
    left, middle, lower = (figure.add_subplot(grid[cell]) for cell in ((0, 0), (0, 1), (1, slice(None))))
    scatter(left, result.features, result.labels)
    reach = np.array([-9.0, 9.0])
    for k, w in enumerate(result.samples):
        left.plot(reach, -w[0] / w[1] * reach, color=ORANGE, lw=0.9, label="of samples" if k == 0 else None)
    left.plot(reach, -result.mode[0] / result.mode[1] * reach, color=BLACK, lw=2, label="of the MAP")
    left.set(xlim=(-8.5, 5), ylim=(-8.5, 8.5), xlabel="$x_1$", ylabel="$x_2$", title="data, boundaries")
    left.legend(loc="lower left")
    filled = middle.contourf(result.weights, result.weights, result.density, levels=10, cmap="Blues")
    filled.set_rasterized(True)
    middle.plot(*result.mode, "X", color=BLACK, ms=9, label="MAP", ls="")
    middle.plot(*result.samples.T, "^", color=ORANGE, mec=BLACK, mew=0.4, label="samples")
    middle.set_title("exact posterior")
    middle.legend(loc="upper left")
    _shapes(lower, result)
    for axes in (middle, lower):
        axes.set(xlim=(-2, 28), ylim=(-2, 17), xlabel="$w_1$", ylabel="$w_2$")
    lower.set(ylim=(-3, 26))


def _shapes(axes: Axes, result: Logistic) -> None:
    levels = result.density.max() * np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    axes.contour(result.weights, result.weights, result.density, levels=levels, colors=GRAY, linewidths=0.7)
    styles: dict[str, tuple[str, str]] = {
        "mean_field": (BLACK, "-"),
        "bsam": (RED, "-"),
        "bsam_undamped": (RED, ":"),
        "bsam_sqrt_n": (PURPLE, "-."),
        "laplace": (GREEN, "--"),
    }
    for method, (colour, style) in styles.items():
        q = result.gaussians[method]
        ellipse(axes, q.mean, q.covariance, ec=colour, ls=style, lw=1.8)
    axes.plot(*result.point, "*", color=BLUE, ms=12, mec=BLACK, mew=0.5)
    density = Line2D([], [], color=GRAY, lw=0.7, label="exact posterior's density")
    handles = [Line2D([], [], color=c, ls=s, lw=1.8, label=METHODS[m]) for m, (c, s) in styles.items()]
    star = Line2D([], [], color=BLUE, marker="*", ls="", ms=10, mec=BLACK, mew=0.5, label="SAM's point")
    axes.legend(handles=[density, *handles, star], loc="upper left", ncols=2)
    mean, width = result.gaussians["bsam"].mean, np.sqrt(result.gaussians["bsam"].variances[0])
    gamma = result.settings.bsam_damping
    axes.annotate(
        "bSAM: the damping sets the width.\n"
        rf"std. {width:.2f}, and $1 / \sqrt{{N \gamma}}$ = {1 / np.sqrt(len(result.labels) * gamma):.2f}",
        (float(mean[0]) + 0.9, float(mean[1])),
        (8.5, -2.2),
        color=RED,
        arrowprops={"arrowstyle": "->", "color": RED},
    )
    axes.set_title("shapes of the posteriors: 90% of the mass")
