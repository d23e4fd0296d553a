"""Relaxed Bayes and Bayes, both with full covariance, and the gap between them (appendix F.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bsam.experiments.style import BLUE, GRAY, GREEN, RED, ellipse
from bsam.theory.fenchel import expected_negative_loss
from bsam.theory.gaussian import Array
from bsam.theory.losses import logistic_regression, separable_data
from bsam.theory.relaxed_bayes import Trace, bayesian_learning_rule, biconjugate_gradient

__all__ = ["Relaxed", "compute_relaxed", "draw_relaxed"]

TITLES = {"bayes": "Bayes, $f$", "relaxed": "relaxed Bayes, $f^{**}$", "sampled": "$f^{**}$ by sampled tangents"}


@dataclass(frozen=True)
class Relaxed:
    """The learning rule for f, for f**, and for f** approximated by L tangents at samples of q."""

    traces: dict[str, Trace]  # by objective
    gaps: dict[str, Array]  # f - f** per step, with f** computed to its tolerance
    apparent_gap: Array  # the third rule's f - f** per step, with f** approximated by L sampled tangents
    num_tangents: int  # L, the number of sampled tangents
    weights: Array  # grid of both weights
    density: Array  # exact posterior on the grid, not normalised, (w_2, w_1)


@cache
def compute_relaxed(num_steps: int = 120, num_tangents: int = 64, learning_rate: float = 0.5) -> Relaxed:
    """Run the three learning rules on `separable_data`, with prior N(0, I), starting at the prior."""
    loss = logistic_regression(*separable_data())
    run = partial(bayesian_learning_rule, loss, prior_precision=1.0, learning_rate=learning_rate, num_steps=num_steps)
    traces = {
        "bayes": run(objective="bayes"),
        "relaxed": run(objective="relaxed"),
        "sampled": run(objective="relaxed", num_tangents=num_tangents, tolerance=np.inf),
    }
    generator = np.random.default_rng(1)
    true, apparent = [], []
    for mean, V in zip(traces["sampled"].mean, traces["sampled"].covariance, strict=True):
        points = mean + generator.standard_normal((num_tangents, 2)) @ np.linalg.cholesky(V).T
        f = float(expected_negative_loss(loss, mean, V, tolerance=1e-8).value)
        true.append(f - biconjugate_gradient(loss, mean, V, points[:16]).lower)
        apparent.append(f - biconjugate_gradient(loss, mean, V, points, tolerance=np.inf).upper)
    weights = np.linspace(-1, 5, 161)
    mesh = np.stack(np.meshgrid(weights, weights), -1)
    log_density = -loss(mesh) - (mesh**2).sum(-1) / 2
    return Relaxed(
        traces=traces,
        gaps={"bayes": traces["bayes"].gap, "relaxed": traces["relaxed"].gap, "sampled": np.array(true)},
        apparent_gap=np.array(apparent),
        num_tangents=num_tangents,
        weights=weights,
        density=np.exp(log_density - log_density.max()),
    )


def draw_relaxed(result: Relaxed, figure: Figure) -> None:
    """Draw the posteriors, and below them the gap of the relaxation per iteration."""
    left, right = figure.subplots(2, 1)
    left.contour(
        result.weights, result.weights, result.density, levels=[0.1, 0.3, 0.5, 0.7, 0.9], colors=GRAY, linewidths=0.7
    )
    styles = {"bayes": (BLUE, "-"), "relaxed": (RED, "-"), "sampled": (GREEN, "--")}
    for name, (colour, style) in styles.items():
        trace = result.traces[name]
        ellipse(left, trace.mean[-1], trace.covariance[-1], ec=colour, ls=style, lw=2)
        left.plot(*trace.mean[-1], "+", color=colour, ms=8, mew=2)
        right.plot(result.gaps[name], color=colour, ls=style, lw=2, label=f"at {TITLES[name]}")
    right.plot(
        result.apparent_gap, color=GREEN, ls=":", lw=1.5, label=f"what {result.num_tangents} sampled tangents report"
    )
    exact = Line2D([], [], color=GRAY, lw=0.7, label="exact posterior")
    handles = [Line2D([], [], color=c, ls=s, lw=2, label=TITLES[name]) for name, (c, s) in styles.items()]
    left.legend(handles=[exact, *handles], loc="upper left")
    left.set(xlim=(0, 4), ylim=(-0.4, 3.9), xlabel="$w_1$", ylabel="$w_2$")
    left.set_title("posteriors: 90% of the mass")
    right.axhline(0, color=GRAY, lw=0.7)
    right.set(xlabel="iteration", ylabel="$f - f^{**}$, in nats", ylim=(-0.3, 6.5))
    right.set_title("gap of the relaxation")
    right.legend(loc="upper right")
