"""The two spaces of a Gaussian's parameters, and the biconjugate of the expected loss (Figure 2 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from bsam.experiments.figures.objectives import MINIMA
from bsam.experiments.style import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, RED
from bsam.theory.fenchel import biconjugate, expected_negative_loss
from bsam.theory.gaussian import Array, Univariate
from bsam.theory.losses import three_minima

__all__ = ["Spaces", "Surfaces", "compute_spaces", "compute_surfaces", "draw_biconjugate", "draw_dual_spaces"]


@dataclass(frozen=True)
class Spaces:
    """Some Gaussians on the line, in three sets of coordinates."""

    omega: Array  # means
    variance: Array
    mu: tuple[Array, Array]  # expectation parameters
    natural: tuple[Array, Array]  # natural parameters
    # By variance v: expectation and natural parameters of N(omega, v) for a grid of omega.
    curves: dict[float, tuple[tuple[Array, Array], tuple[Array, Array]]]


def compute_spaces() -> Spaces:
    """Compute the parameters of four Gaussians, and of all Gaussians with three variances."""
    family = Univariate()
    omega, v = np.array([-1.5, 0.0, 1.0, 2.0]), np.array([0.5, 1.0, 2.0, 0.5])
    grid = np.linspace(-13, 13, 261)
    curves = {
        x: (family.expectation(grid, np.full(261, x)), family.natural(grid, np.full(261, x))) for x in (0.5, 1.0, 2.0)
    }
    return Spaces(omega, v, family.expectation(omega, v), family.natural(omega, v), curves)


def draw_dual_spaces(result: Spaces, figure: Figure) -> None:
    """Draw Figure 2(a): M, above the parabola, and Omega, a half space, with the same four Gaussians in both."""
    upper, lower = figure.subplots(2, 1)
    grid = np.linspace(-3.2, 3.2, 201)
    upper.fill_between(grid, grid**2, 14, color=BLUE, alpha=0.12, lw=0)
    upper.plot(grid, grid**2, color=BLACK, lw=2, label=r"$v = 0$: the points $\theta$ themselves")
    lower.axhspan(-2, 0, color=RED, alpha=0.12, lw=0)
    lower.axhline(0, color=BLACK, lw=2, ls="--", label=r"$v = \infty$, not in $\Omega$")
    for style, (v, (mu, natural)) in zip((":", "--", "-."), result.curves.items(), strict=True):
        upper.plot(*mu, color=GRAY, lw=1, ls=style, label=f"$v = {v:g}$")
        lower.plot(*natural, color=GRAY, lw=1, ls=style, label=f"$v = {v:g}$")
    for i, (colour, marker) in enumerate(zip((ORANGE, GREEN, PURPLE, BLUE), "os^D", strict=True)):
        name = rf"$\mathcal{{N}}({result.omega[i]:g}, {result.variance[i]:g})$"
        for axes, (first, second) in ((upper, result.mu), (lower, result.natural)):
            axes.plot(first[i], second[i], marker, color=colour, ms=9, mec=BLACK, mew=0.6, label=name)
    upper.set(xlim=(-3, 3), ylim=(-0.5, 14), xlabel=r"$\mu_1 = \omega$", ylabel=r"$\mu_2 = \omega^2 + v$")
    lower.set(xlim=(-6, 6), ylim=(-2.0, 0.25), xlabel=r"$\lambda_1 = \omega / v$", ylabel=r"$\lambda_2 = -1 / (2 v)$")
    upper.set_title(r"$\mathcal{M}$: expectation parameters, $\mu = \nabla A(\lambda)$")
    lower.set_title(r"$\Omega$: natural parameters, $\lambda = \nabla A^*(\mu)$")
    upper.legend(loc="upper center", ncols=2, columnspacing=1)
    lower.legend(loc="lower center", ncols=4, columnspacing=1, handlelength=1.6)


@dataclass(frozen=True)
class Surfaces:
    """f and f** of the loss with three minima, over mu and over (omega, v)."""

    mu_1: Array  # (rows, columns): a mesh of M, whose first row is the boundary, v = 0
    mu_2: Array
    f_mu: Array  # f on the mesh of M
    biconjugate_mu: Array  # f** on the mesh of M
    lines: dict[str, tuple[Array, Array, Array, Array]]  # straight in mu, by their ends: mu_1, mu_2, f, f**
    slices: Array  # some v
    slice_omega: Array  # grid of the curves with these v
    slice_f: Array  # (slices, grid)
    slice_biconjugate: Array  # (slices, grid)


def compute_surfaces(
    num_omega: int = 121, num_v: int = 41, slices: tuple[float, ...] = (0.5, 2.0, 4.0), tolerance: float = 2e-3
) -> Surfaces:
    """Compute f and f** of `three_minima` for omega in [-5.5, 5.5]."""
    loss = three_minima()
    line = np.linspace(-5.5, 5.5, num_omega)
    # M up to mu_2 = 31, denser near the boundary
    mu_1, share = np.meshgrid(line, np.linspace(0, 1, num_v) ** 2)
    mu_2 = mu_1**2 + share * (31 - mu_1**2)
    grid, levels = np.linspace(-5.5, 5.5, 2 * num_omega), np.array(slices)

    def both(omega: Array, v: Array) -> tuple[Array, Array]:
        return expected_negative_loss(loss, omega, v).value, biconjugate(loss, omega, v, tolerance=tolerance).value

    lines = {}
    for ends in ("AB", "BC", "AC"):
        first, last = (MINIMA[end] for end in ends)
        t = np.sin(np.linspace(0, np.pi / 2, num_omega)) ** 2  # denser near the ends
        omega, second = (1 - t) * first + t * last, (1 - t) * first**2 + t * last**2
        lines[ends] = (omega, second, *both(omega, np.maximum(second - omega**2, 0)))
    over_mu, curves = both(mu_1, np.maximum(mu_2 - mu_1**2, 0)), both(grid, levels[:, None])
    return Surfaces(mu_1, mu_2, *over_mu, lines, levels, grid, *curves)


def draw_biconjugate(result: Surfaces, figure: Figure) -> None:
    """Draw Figures 2(b) and 2(c): a map of f** over mu, and f and f** along lines that are straight in mu, or not."""
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[1.3, 1, 1])
    levels = np.arange(-5, -0.2, 0.25)
    filled = top.contourf(result.mu_1, result.mu_2, result.biconjugate_mu, levels=levels, cmap="Oranges_r")
    filled.set_rasterized(True)
    figure.colorbar(filled, ax=top, label="$f^{**}$", aspect=30, ticks=np.arange(-5, 0))
    top.plot(result.mu_1[0], result.mu_2[0], color=BLACK, lw=2, label="$v = 0$")
    styles = dict(zip(result.lines, ("-", "--", ":"), strict=True))
    for ends, (mu_1, mu_2, f, lower) in result.lines.items():
        top.plot(mu_1, mu_2, color=GREEN, lw=1.8, ls=styles[ends], label=f"straight, {ends[0]} to {ends[1]}")
        t = (mu_1 - mu_1[0]) / (mu_1[-1] - mu_1[0])
        middle.plot([0, 1], lower[[0, -1]], color=GRAY, lw=1, ls=styles[ends])
        middle.plot(t, f, color=BLUE, lw=1.8, ls=styles[ends], label=f"$f$, {ends[0]} to {ends[1]}")
        middle.plot(t, lower, color=RED, lw=1.8, ls=styles[ends], label=f"$f^{{**}}$, {ends[0]} to {ends[1]}")
    for v, style, f, lower in zip(
        result.slices, ("-", "--", ":"), result.slice_f, result.slice_biconjugate, strict=True
    ):
        omega = result.slice_omega
        top.plot(omega, omega**2 + v, color=PURPLE, lw=1.2, ls=style, label=f"$v = {v:g}$")
        bottom.plot(omega, f, color=BLUE, lw=1.8, ls=style, label=f"$f$, $v = {v:g}$")
        bottom.plot(omega, lower, color=RED, lw=1.8, ls=style, label=f"$f^{{**}}$, $v = {v:g}$")
    bottom.plot(result.mu_1[0], result.f_mu[0], color=BLACK, lw=1.2, label=r"$-\ell$, $v = 0$")
    for name, place in MINIMA.items():
        top.annotate(name, (place, place**2), (0, -13), textcoords="offset points", ha="center")
        at = (place, float(np.interp(place, result.mu_1[0], result.f_mu[0])))
        bottom.annotate(name, at, (0, 3), textcoords="offset points", ha="center")
    top.set(xlabel=r"$\mu_1 = \omega$", ylabel=r"$\mu_2 = \omega^2 + v$", ylim=(-4, 46), xlim=(-5.5, 5.5))
    top.set_title(r"where the lines below lie: $f^{**}$ over $\mu$")
    middle.set(xlabel=r"position on the line in $\mu$", ylabel="$f$, $f^{**}$", ylim=(-4, 1.2))
    middle.set_title(r"straight lines in $\mu$: $f^{**}$ is convex, below its chords")
    bottom.set(xlabel=r"$\omega$", ylabel="$f$, $f^{**}$", ylim=(-5.3, 3.6), xlim=(-5.5, 5.5))
    bottom.set_title(r"fixed $v$, curves in $\mu$: $f^{**}$ is not convex")
    top.legend(loc="upper center", ncols=2)
    middle.legend(loc="upper center", ncols=3, columnspacing=1)
    bottom.legend(loc="upper center", ncols=3, columnspacing=1)
