"""The paper's figures on toy problems, computed with `bsam.theory` and the package's own optimizers.

A figure has a function that computes a frozen dataclass, and a function that draws it. `bsam figure NAME --out FILE`
calls both. `bsam figure all --out FOLDER` draws all figures, and writes the numbers behind them (`numbers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bsam.experiments.figures import cards, data_sets, duality, logistic, moons, objectives, relaxed
from bsam.experiments.style import in_print, new_figure, save

__all__ = ["FIGURES", "Picture", "draw", "picture"]


@dataclass(frozen=True)
class Picture:
    """A figure: its description, its size, and the functions that make it."""

    what: str
    """Short description, with its place in the paper."""
    size: tuple[float, float]
    """Width and height in inches."""
    compute: Callable[[], Any]
    draw: Callable[[Any, Figure], None]


FIGURES: dict[str, Picture] = {
    "sam-vs-bayes": Picture(
        "max-loss in a ball, expected loss under a Gaussian (Figure 1a)",
        (4.8, 5.4),
        objectives.compute_neighbourhood,
        objectives.draw_sam_vs_bayes,
    ),
    "worst-case": Picture(
        "what −f** is: the worst expected loss for given mean and variance (not in the paper)",
        (4.8, 3.9),
        objectives.compute_neighbourhood,
        objectives.draw_worst_case,
    ),
    "smoothing": Picture(
        "loss, expected loss and relaxation for growing variances (Figure 1b)",
        (4.8, 5.6),
        objectives.compute_smoothing,
        objectives.draw_smoothing,
    ),
    "theorem-2": Picture(
        "SAM's minimiser is the relaxation's (the star of Figure 1b)",
        (4.8, 6.2),
        objectives.compute_theorem_2,
        objectives.draw_theorem_2,
    ),
    "dual-spaces": Picture(
        "expectation and natural parameters of a Gaussian (Figure 2a)",
        (4.8, 6.6),
        duality.compute_spaces,
        duality.draw_dual_spaces,
    ),
    "biconjugate": Picture(
        "f and f** over the moments, where f** is convex, and at fixed variance (Figures 2b and 2c)",
        (4.8, 8.4),
        duality.compute_surfaces,
        duality.draw_biconjugate,
    ),
    "logistic": Picture(
        "predictions of exact Bayes, bSAM, SAM and SAM + Laplace (Figure 3)",
        (4.8, 5.4),
        logistic.compute_logistic,
        logistic.draw_logistic,
    ),
    "logistic-posterior": Picture(
        "their data, posterior and posterior shapes (appendix, logistic regression)",
        (4.8, 6.6),
        logistic.compute_logistic,
        logistic.draw_posterior,
    ),
    "data-sets": Picture(
        "who is over- and underconfident on 200 data sets (not in the paper)",
        (4.8, 6.6),
        data_sets.compute_data_sets,
        data_sets.draw_data_sets,
    ),
    "certainty": Picture(
        "predictions of SAM and bSAM on two moons, side by side (not in the paper)",
        (4.8, 3.5),
        moons.compute_moons,
        moons.draw_certainty,
    ),
    "moons": Picture(
        "predictions of bSAM, SAM and SAM + Laplace on two moons (appendix)",
        (4.8, 5.6),
        moons.compute_moons,
        moons.draw_moons,
    ),
    "relaxed-bayes": Picture(
        "posteriors of Bayes and relaxed Bayes, and the ELBO gap (appendix, f** instead of f)",
        (4.8, 7.4),
        relaxed.compute_relaxed,
        relaxed.draw_relaxed,
    ),
    **{
        f"method-{name}": Picture(
            f"{title} on a problem with two weights (not in the paper)",
            (3.4, 3.5),
            partial(cards.compute_card, name),
            cards.draw_card,
        )
        for name, (title, _) in cards.CARDS.items()
    },
}


def picture(name: str) -> Picture:
    """Return the figure with this name."""
    if name not in FIGURES:
        raise ValueError(f"there is no figure {name!r}. There are: {', '.join(FIGURES)}.")
    return FIGURES[name]


def draw(name: str, path: Path) -> Path:
    """Compute a figure and write it as .png, .svg or .pdf, by the ending of the path."""
    found = picture(name)
    result, figure = found.compute(), new_figure(*found.size)
    with in_print():
        found.draw(result, figure)
        return save(figure, path)
