"""The two spaces of a Gaussian's parameters, and the biconjugate of the expected loss (Figure 2 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
    left, right = figure.subplots(1, 2)
    grid = np.linspace(-3.2, 3.2, 201)
    left.fill_between(grid, grid**2, 9, color=BLUE, alpha=0.12, lw=0)
    left.plot(grid, grid**2, color=BLACK, lw=2, label="v = 0: the points theta themselves")
    right.axhspan(-1.5, 0, color=RED, alpha=0.12, lw=0)
    right.axhline(0, color=BLACK, lw=2, ls="--")
    for style, (v, (mu, natural)) in zip((":", "--", "-."), result.curves.items(), strict=True):
        left.plot(*mu, color=GRAY, lw=1, ls=style)
        right.plot(*natural, color=GRAY, lw=1, ls=style, label=f"v = {v:g}")
    for i, (colour, marker) in enumerate(zip((ORANGE, GREEN, PURPLE, BLUE), "os^D", strict=True)):
        name = f"N({result.omega[i]:g}, {result.variance[i]:g})"
        for axes, (first, second) in ((left, result.mu), (right, result.natural)):
            label = name if axes is left else None
            axes.plot(first[i], second[i], marker, color=colour, ms=9, mec=BLACK, mew=0.6, label=label)
    left.set(xlim=(-3, 3), ylim=(-0.5, 8), xlabel="mu_1 = omega", ylabel="mu_2 = omega² + v")
    right.set(xlim=(-6, 6), ylim=(-1.5, 0.25), xlabel="lambda_1 = omega / v", ylabel="lambda_2 = -1 / (2 v)")
    left.set_title("M: expectation parameters, mu = grad A(lambda)", fontsize=10)
    right.set_title("Omega: natural parameters, lambda = grad A*(mu)", fontsize=10)
    left.legend(fontsize=8, loc="upper center")
    right.legend(fontsize=8, loc="lower left")


@dataclass(frozen=True)
class Surfaces:
    """f and f** of the loss with three minima, over mu and over (omega, v)."""

    mu_1: Array  # (rows, columns): a mesh of M, whose first row is the boundary, v = 0
    mu_2: Array
    f_mu: Array  # f on the mesh of M
    biconjugate_mu: Array  # f** on the mesh of M
    omega: Array  # (rows, columns): a mesh of (omega, v), whose first row is v = 0
    v: Array
    f: Array  # f on the mesh of (omega, v)
    biconjugate: Array  # f** on the mesh of (omega, v)
    slices: Array  # the v that have a curve of their own
    slice_omega: Array  # grid of these curves
    slice_f: Array  # (slices, grid)
    slice_biconjugate: Array  # (slices, grid)


def compute_surfaces(
    num_omega: int = 89, num_v: int = 23, slices: tuple[float, ...] = (0.5, 2.0, 4.0), tolerance: float = 2e-3
) -> Surfaces:
    """Compute f and f** of `three_minima` for omega in [-5.5, 5.5]."""
    loss = three_minima()
    line = np.linspace(-5.5, 5.5, num_omega)
    # M up to mu_2 = 34, denser near the boundary
    mu_1, share = np.meshgrid(line, np.linspace(0, 1, num_v) ** 2)
    mu_2 = mu_1**2 + share * (34 - mu_1**2)
    omega, v = np.meshgrid(line, 5 * np.linspace(0, 1, num_v) ** 1.5)
    grid, levels = np.linspace(-5.5, 5.5, 2 * num_omega), np.array(slices)

    def both(omega: Array, v: Array) -> tuple[Array, Array]:
        return expected_negative_loss(loss, omega, v).value, biconjugate(loss, omega, v, tolerance=tolerance).value

    over_mu, over_v, curves = both(mu_1, np.maximum(mu_2 - mu_1**2, 0)), both(omega, v), both(grid, levels[:, None])
    return Surfaces(mu_1, mu_2, *over_mu, omega, v, *over_v, levels, grid, *curves)


def draw_biconjugate(result: Surfaces, figure: Figure) -> None:
    """Draw Figures 2(b) and 2(c): f as a blue mesh above f** as a red surface, and slices of both."""
    options: Any = {"projection": "3d", "computed_zorder": False}
    left, right = (figure.add_subplot(1, 2, i, **options) for i in (1, 2))
    _surfaces(left, result.mu_1, result.mu_2, result.f_mu, result.biconjugate_mu)
    left.set(xlabel="mu_1", ylabel="mu_2", xticks=[-4, -2, 0, 2, 4], yticks=[0, 10, 20, 30])
    left.set_title("over mu: f** is convex", fontsize=10)
    left.view_init(elev=38, azim=-78)
    _surfaces(right, result.omega, result.v, result.f, result.biconjugate)
    for v, f, lower in zip(result.slices, result.slice_f, result.slice_biconjugate, strict=True):
        right.plot(result.slice_omega, np.full_like(f, v), f, color=BLUE, lw=2, zorder=6)
        right.plot(result.slice_omega, np.full_like(f, v), lower, color=RED, lw=2, zorder=6)
    right.set(xlabel="omega", ylabel="v", xticks=[-4, -2, 0, 2, 4], yticks=[0, *result.slices])
    right.set_title("over (omega, v), slices at v = " + ", ".join(f"{v:g}" for v in result.slices), fontsize=10)
    right.view_init(elev=30, azim=-55)
    names = {"f": BLUE, "f**": RED, "-loss, where v = 0": BLACK}
    handles = [Line2D([], [], color=colour, lw=2, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=8)


def _surfaces(axes: Axes, x: Array, y: Array, f: Array, lower: Array) -> None:
    axes_3d: Any = axes
    axes_3d.plot_surface(x, y, lower, color=RED, alpha=0.5, lw=0, rstride=1, cstride=1, zorder=1)
    axes_3d.plot_wireframe(x, y, f, color=BLUE, lw=0.5, rstride=3, cstride=6, zorder=2, alpha=0.7)
    axes_3d.plot(x[0], y[0], f[0], color=BLACK, lw=2, zorder=7)
    for name, place in MINIMA.items():
        i = int(np.abs(x[0] - place).argmin())
        axes_3d.text(x[0, i], y[0, i], f[0, i] + 0.25, name, zorder=8, ha="center")
    axes_3d.set_zlabel("f, f**")
    axes_3d.tick_params(labelsize=8, pad=0)
    axes_3d.set_box_aspect(None, zoom=0.95)
