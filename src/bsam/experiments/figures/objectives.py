"""Max-loss and expected loss, and how variance smooths both (Figure 1 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import brentq  # type: ignore[import-untyped]

from bsam.experiments.style import BLACK, BLUE, GRAY, GREEN, PURPLE, RED
from bsam.theory.fenchel import biconjugate, expected_negative_loss, max_loss, max_loss_in_ball, worst_case
from bsam.theory.gaussian import Array, Univariate
from bsam.theory.losses import Loss, Majorant, three_minima
from bsam.theory.objectives import bayes_objective, relaxation_of_sam, sam_objective

__all__ = [
    "Neighbourhood",
    "Smoothing",
    "TheoremTwo",
    "compute_neighbourhood",
    "compute_smoothing",
    "compute_theorem_2",
    "count_minima",
    "draw_sam_vs_bayes",
    "draw_smoothing",
    "draw_theorem_2",
    "draw_worst_case",
]

MINIMA = {"A": -4.0, "B": 0.0, "C": 3.6}
"""The minima of `bsam.theory.losses.three_minima`."""


# -- one neighbourhood: maximum, expectation, worst expectation --------------------------------------------------------


@dataclass(frozen=True)
class Neighbourhood:
    """The losses of SAM, Bayes and relaxed Bayes around one omega."""

    theta: Array  # a grid
    loss: Array  # the loss on the grid
    omega: float  # the centre of ball and Gaussian
    rho: float  # radius of the ball
    sigma: float  # standard deviation of the Gaussian
    max_loss: float  # the largest loss in the ball
    perturbation: float  # where the largest loss is, relative to omega
    expected_loss: float  # -f(mu), under the Gaussian
    samples: Array  # samples of the Gaussian
    worst_expected_loss: float  # -f**(mu), under the worst distribution with the Gaussian's mean and variance
    atoms: Array  # the points of the worst distribution
    weights: Array  # their probabilities
    majorant: Array  # a quadratic above the loss that touches it at the atoms; its expectation is -f**(mu)


def compute_neighbourhood(
    omega: float = -3.7, rho: float = 1.0, sigma: float = 0.8, num_samples: int = 12, seed: int = 0
) -> Neighbourhood:
    """Compute the losses of `three_minima` around omega, with a ball and with a Gaussian."""
    loss, theta = three_minima(), np.linspace(-5.6, 5.6, 561)
    ball = max_loss_in_ball(loss, omega, rho)
    worst = worst_case(loss, Univariate(), omega, sigma**2)
    first, second = (float(part) for part in worst.natural)
    offset = float((loss(worst.atoms) + first * worst.atoms + second * worst.atoms**2).max())  # f*(lambda')
    atoms = np.unique(worst.atoms.round(2))  # the search returns several copies of each atom
    weights = np.array([worst.weights[np.abs(worst.atoms - atom) < 0.01].sum() for atom in atoms])
    return Neighbourhood(
        theta=theta,
        loss=loss(theta),
        omega=omega,
        rho=rho,
        sigma=sigma,
        max_loss=float(ball.value),
        perturbation=float(ball.perturbation),
        expected_loss=-float(expected_negative_loss(loss, omega, sigma**2).value),
        samples=omega + sigma * np.random.default_rng(seed).standard_normal(num_samples),
        worst_expected_loss=-worst.value,
        atoms=atoms,
        weights=weights,
        majorant=offset - first * theta - second * theta**2,
    )


def draw_sam_vs_bayes(result: Neighbourhood, figure: Figure) -> None:
    """Draw Figure 1(a): max-loss in a ball above, expected loss under a Gaussian below."""
    loss = three_minima()
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    here = float(loss(result.omega))
    for axes in (upper, lower):
        axes.plot(result.theta, result.loss, color=GRAY, lw=2, label=r"loss $\ell(\theta)$")
        axes.plot(result.omega, here, "o", color=BLACK, zorder=6, label=rf"loss at $\omega$: {here:.2f}")
        axes.set(ylabel=r"loss $\ell$", xlim=(-5.6, 5.6), ylim=(-0.5, 7.2))
        _name_minima(axes, result.theta, result.loss)
    left, right = result.omega - result.rho, result.omega + result.rho
    upper.axvspan(left, right, color=RED, alpha=0.13, lw=0)
    for side in (left, right):
        upper.annotate("", (side, 5.6), (result.omega, 5.6), arrowprops={"arrowstyle": "->", "color": RED})
        upper.text((side + result.omega) / 2, 5.7, r"$\rho$", color=RED, ha="center", va="bottom")
    upper.text(right + 0.12, 5.6, "the ball\n" r"$|\theta - \omega| \leq \rho$", color=RED, va="center")
    upper.axhline(result.max_loss, color=RED, ls="--", lw=1)
    label = f"max-loss: {result.max_loss:.2f}"
    upper.plot(result.omega + result.perturbation, result.max_loss, "o", color=RED, ms=9, zorder=5, label=label)
    upper.set_title(rf"SAM: the largest loss within $\rho$ = {result.rho:g}")
    _gaussian(lower, result)
    lower.text(result.omega + 1.7 * result.sigma, 0.1, r"$\mathcal{N}(\omega, \sigma^2)$", color=BLUE)
    label = f"expected loss: {result.expected_loss:.2f}"
    lower.axhline(result.expected_loss, color=BLUE, ls="--", lw=1, label=label)
    lower.vlines(result.samples, result.expected_loss, loss(result.samples), color=BLUE, lw=0.6, alpha=0.5)
    lower.plot(result.samples, loss(result.samples), "o", color=BLUE, ms=5, alpha=0.9, label="losses of samples")
    lower.set_title(rf"Bayes: the mean loss under a Gaussian, $\sigma$ = {result.sigma:g}")
    lower.set_xlabel(r"$\theta$")
    for axes in (upper, lower):
        axes.legend(loc="upper right")


def _gaussian(axes: Axes, result: Neighbourhood) -> None:
    density = np.exp(-((result.theta - result.omega) ** 2) / (2 * result.sigma**2))
    axes.fill_between(result.theta, 0, 0.9 * density, color=BLUE, alpha=0.2, lw=0)


def draw_worst_case(result: Neighbourhood, figure: Figure) -> None:
    """Draw f**: the expected loss under the worst distribution with the Gaussian's mean and variance."""
    axes = figure.subplots()
    axes.plot(result.theta, result.loss, color=GRAY, lw=2, label=r"loss $\ell(\theta)$")
    _gaussian(axes, result)
    axes.plot(result.theta, result.majorant, color=PURPLE, lw=1.5, label="quadratic above it, with mean $-f^{**}$")
    label = f"$-f$: mean under the Gaussian, {result.expected_loss:.2f}"
    axes.axhline(result.expected_loss, color=BLUE, ls="--", lw=1, label=label)
    label = f"$-f^{{**}}$: worst mean, {result.worst_expected_loss:.2f}"
    axes.axhline(result.worst_expected_loss, color=RED, ls="--", lw=1, label=label)
    height = three_minima()(result.atoms)
    axes.vlines(result.atoms, 0, height, color=RED, lw=1.2)
    axes.scatter(result.atoms, height, s=200 * result.weights, color=RED, zorder=5, label="worst distribution's atoms")
    axes.text(result.omega + 1.4 * result.sigma, 0.2, r"$\mathcal{N}(\omega, \sigma^2)$", color=BLUE)
    axes.set(xlabel=r"$\theta$", ylabel=r"loss $\ell$", ylim=(0, 10.5), xlim=(result.theta[0], result.theta[-1]))
    axes.legend(loc="upper right")


# -- growing variance --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smoothing:
    """A loss, its expectation and its relaxation for growing variances, as functions of the mean."""

    omega: Array  # a grid
    loss: Array  # the loss on the grid
    variances: Array  # v
    expected: Array  # -f(omega, v), (variances, grid)
    relaxed: Array  # -f**(omega, v), (variances, grid)
    sam_minimisers: Array  # per variance: where the max-loss in a ball of radius sqrt(v) is smallest


def compute_smoothing(variances: tuple[float, ...] = (0.02, 0.5, 2.0, 4.0), num_points: int = 441) -> Smoothing:
    """Compute -f and -f** of `three_minima` at some variances."""
    loss, omega, v = three_minima(), np.linspace(-5.6, 5.6, num_points), np.array(variances)
    f = expected_negative_loss(loss, omega, v[:, None]).value
    relaxed = biconjugate(loss, omega, v[:, None], tolerance=1e-3).value
    stars = [omega[max_loss_in_ball(loss, omega, rho).value.argmin()] for rho in np.sqrt(v)]
    return Smoothing(omega, loss(omega), v, -f, -relaxed, np.array(stars))


def count_minima(values: Array, threshold: float = 1e-3) -> int:
    """Count the local minima of a function on a grid that are deeper than `threshold`."""
    found, falling, extreme = 0, False, float(values[0])
    for value in values[1:].tolist():
        if falling and value > extreme + threshold:
            found, falling, extreme = found + 1, False, value
        elif not falling and value < extreme - threshold:
            falling, extreme = True, value
        else:
            extreme = min(extreme, value) if falling else max(extreme, value)
    return found


def minima(grid: Array, values: Array) -> Array:
    """Return the local minima inside a grid."""
    inner = (values[1:-1] < values[:-2]) & (values[1:-1] <= values[2:])
    return grid[1:-1][inner]


def _name_minima(axes: Axes, theta: Array, curve: Array) -> None:
    for name, place in MINIMA.items():
        at = (place, float(np.interp(place, theta, curve)))
        axes.annotate(name, at, (0, -13), textcoords="offset points", ha="center")


def draw_smoothing(result: Smoothing, figure: Figure) -> None:
    """Draw Figure 1(b): loss, expected loss and relaxation for growing variances, and SAM's minimiser."""
    rows = -(-len(result.variances) // 2)
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    curves = zip(result.variances, result.expected, result.relaxed, result.sam_minimisers, strict=True)
    for axes, (v, expected, relaxed, star) in zip(panels.flat, curves, strict=False):
        axes.plot(result.omega, result.loss, color=GRAY, lw=1.5, label=r"loss $\ell$")
        axes.plot(result.omega, expected, color=BLUE, lw=2, label="expected loss $-f$")
        axes.plot(result.omega, relaxed, color=RED, lw=2, label="relaxation $-f^{**}$")
        for curve, colour, marker in ((expected, BLUE, "o"), (relaxed, RED, "s")):
            left = minima(result.omega, curve)
            label = f"minima of ${'-f' if marker == 'o' else '-f^{**}'}$"
            axes.plot(left, np.interp(left, result.omega, curve), marker, color=colour, ms=5, label=label)
        height = float(np.interp(star, result.omega, relaxed))
        label = r"SAM's minimiser, $\rho = \sigma$"
        axes.plot(star, height, "*", color=RED, ms=13, mec=BLACK, mew=0.8, zorder=6, ls="", label=label)
        _name_minima(axes, result.omega, result.loss)
        axes.set_title(rf"$v = \sigma^2 = {v:g}$")
    for axes in panels[-1]:
        axes.set(xlabel=r"$\omega$", xticks=[-4, -2, 0, 2, 4])
    for axes in panels[:, 0]:
        axes.set(ylabel="loss", ylim=(-0.5, 6.5))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


# -- Theorem 2 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TheoremTwo:
    """SAM's objective, the relaxation with the same minimiser, and the rho for which this holds."""

    theta: Array  # a grid
    centre: float  # centre of the regulariser delta/2 (theta - centre)^2
    delta: float  # strength of the regulariser
    rho: float  # radius of SAM's ball
    sigma: float  # sigma of the relaxation, by Theorem 2
    regularised: Array  # loss and regulariser on the grid
    bayes: Array  # E_Bayes with this sigma
    sam: Array  # E_SAM
    relaxed: Array  # E_relaxed, without the constant in log Z
    sam_minimiser: float  # global minimiser of E_SAM
    relaxed_minimiser: float  # global minimiser of E_relaxed, found without the one of E_SAM
    radii: Array  # more values of rho
    sam_minimisers: Array  # per radius: the minimiser of E_SAM near B
    is_kink: NDArray[np.bool_]  # per radius: whether two perturbations attain the maximum at the minimiser
    relaxed_minimisers: Array  # per radius: the minimiser near B of E_relaxed with Theorem 2's sigma; nan at a kink


def recentred(loss: Loss, centre: float) -> Loss:
    """Return theta -> loss(theta + centre), so that the regulariser delta/2 theta^2 is centred at `centre`."""
    bound = loss.majorant
    if bound is not None:  # a quadratic and a linear part, moved
        a, b = float(bound.curvature), float(bound.linear)
        constant = bound.constant + bound.slope * abs(centre) + b * centre + a * centre**2 / 2
        bound = Majorant(constant, b + a * centre, bound.slope, a)
    return Loss(
        lambda theta: loss.value(theta + centre),
        lambda theta: loss.gradient(theta + centre),
        lambda theta: loss.hessian(theta + centre),
        majorant=bound,
    )


def compute_theorem_2(
    centre: float = -6.0, delta: float = 0.12, rho: float = 0.6, num_points: int = 561, num_radii: int = 24
) -> TheoremTwo:
    """Minimise E_SAM on `three_minima`, turn the solution into a sigma, and minimise E_relaxed with it.

    The regulariser's centre is far from B, so that the minimiser of E_SAM near B lies on a slope: there one
    perturbation alone attains the maximum, which Theorem 2 needs.
    """
    loss, theta = recentred(three_minima(), centre), np.linspace(-5.6, 5.6, num_points)
    x = theta - centre
    sam = sam_objective(loss, x, rho, delta)
    solution, eps = _sam_minimiser(loss, x, rho, delta)
    sigma = relaxation_of_sam(loss, solution, eps, delta).sigma
    relaxed = _relaxed_objective(loss, x, sigma, delta)
    best = _stationary(loss, x[relaxed.argmin()], sigma, delta)
    near = np.linspace(-1.2, 1.2, 241) - centre
    radii = np.linspace(0.05, 1.2, num_radii)
    found = [_sam_minimiser(loss, near, radius, delta) for radius in radii]
    kinks, others = [], []
    for m, e in found:
        try:
            s = relaxation_of_sam(loss, m, e, delta).sigma
            kinks.append(False)
            others.append(_stationary(loss, near[_relaxed_objective(loss, near, s, delta).argmin()], s, delta))
        except ValueError:
            kinks.append(True)
            others.append(np.nan)
    return TheoremTwo(
        theta=theta,
        centre=centre,
        delta=delta,
        rho=rho,
        sigma=sigma,
        regularised=loss(x) + delta / 2 * x**2,
        bayes=bayes_objective(loss, x, sigma, delta),
        sam=sam.value,
        relaxed=relaxed,
        sam_minimiser=solution + centre,
        relaxed_minimiser=best + centre,
        radii=radii,
        sam_minimisers=np.array([m for m, _ in found]) + centre,
        is_kink=np.array(kinks),
        relaxed_minimisers=np.array(others) + centre,
    )


def _sam_minimiser(loss: Loss, grid: Array, rho: float, delta: float) -> tuple[float, float]:
    """Find the minimiser of E_SAM and its perturbation: on the grid, then where the slope changes its sign."""
    i = int(np.clip(sam_objective(loss, grid, rho, delta).value.argmin(), 1, len(grid) - 2))
    fine = np.linspace(grid[i - 1], grid[i + 1], 401)
    values, eps = sam_objective(loss, fine, rho, delta, resolution=0.005)
    i = int(np.clip(values.argmin(), 1, len(fine) - 2))

    def slope(theta: float) -> float:
        return float(delta * theta + loss.gradient(np.asarray(theta + eps[i])))

    low, high = float(fine[i - 1]), float(fine[i + 1])
    if slope(low) < 0 < slope(high):  # one perturbation throughout: a smooth minimum
        return float(brentq(slope, low, high, xtol=1e-13)), float(eps[i])
    return float(fine[i]), float(eps[i])


def _relaxed_objective(loss: Loss, grid: Array, sigma: float, delta: float) -> Array:
    return max_loss(loss, grid, 1 / sigma**2).value + delta / 2 * grid**2


def _stationary(loss: Loss, start: float, sigma: float, delta: float) -> float:
    """Find the minimum of E_relaxed near `start`, where its slope delta m + eps / sigma^2 changes its sign."""

    def slope(m: float) -> float:
        return float(delta * m + max_loss(loss, m, 1 / sigma**2).perturbation / sigma**2)

    low, high = start - 0.02, start + 0.02
    return float(brentq(slope, low, high, xtol=1e-12)) if slope(low) < 0 < slope(high) else start


def draw_theorem_2(result: TheoremTwo, figure: Figure) -> None:
    """Draw the star of Figure 1(b): SAM and the relaxation have one minimiser; and the rho for which this holds."""
    upper, lower = figure.subplots(2, 1, height_ratios=[1.3, 1])
    sam, relaxed = r"$\mathcal{E}_\mathrm{SAM}$", r"$\mathcal{E}_\mathrm{relaxed}$"
    squared = rf"$\sigma^2$ = {result.sigma**2:.2f}"
    upper.plot(result.theta, result.regularised, color=GRAY, lw=1.5, label="loss and regulariser")
    upper.plot(result.theta, result.bayes, color=BLUE, lw=1.8, label=rf"$\mathcal{{E}}_\mathrm{{Bayes}}$, {squared}")
    upper.plot(result.theta, result.sam, color=RED, lw=2, label=rf"{sam}, $\rho$ = {result.rho:g}")
    upper.plot(result.theta, result.relaxed, color=GREEN, lw=2, ls="--", label=f"{relaxed}, {squared}")
    for curve, place, colour, name in (
        (result.sam, result.sam_minimiser, RED, sam),
        (result.relaxed, result.relaxed_minimiser, GREEN, relaxed),
    ):
        height = float(np.interp(place, result.theta, curve))
        style = {"marker": "*", "ms": 12, "mec": BLACK, "mew": 0.7, "zorder": 5, "ls": ""}
        upper.plot(place, height, color=colour, label=f"minimum of {name}", **style)
    upper.axvline(result.sam_minimiser, color=BLACK, lw=0.7, ls=":")
    _name_minima(upper, result.theta, result.regularised)
    upper.set(xlabel=r"$\theta$, or the mean $m$", ylabel="objective", ylim=(-1.2, 12.5), xlim=(-5.6, 4.3))
    upper.legend(loc="upper left", ncols=2, columnspacing=1)
    lower.plot(result.radii, result.sam_minimisers, color=RED, lw=2.5, label=f"minimiser of {sam}")
    label = rf"of {relaxed}, with Theorem 2's $\sigma$"
    lower.plot(result.radii, result.relaxed_minimisers, color=GREEN, lw=2, ls="--", label=label)
    if result.is_kink.any():
        first = result.radii[result.is_kink].min()
        label = r"two worst $\epsilon$: a kink"
        lower.axvspan(first, result.radii[-1], color=GRAY, alpha=0.25, lw=0, label=label)
    lower.set(xlabel=r"$\rho$", ylabel="minimiser near B")
    lower.legend()
