"""Diagrams of metrics. They need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bsam.metrics.calibration import ReliabilityTable, ece_of
from bsam.metrics.classes import whole
from bsam.metrics.inputs import ClassPredictions
from bsam.metrics.regression import HasGaussianPredictions, quantile_calibration
from bsam.metrics.rejection import rate_rejection, risk_coverage
from bsam.metrics.scores import Score
from bsam.metrics.unknown import rate_unknown, two_scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["quantile_diagram", "reliability_diagram", "risk_coverage_diagram", "unknown_diagram"]


def reliability_diagram(
    predictions: ClassPredictions | ReliabilityTable, *, num_bins: int = 20, ax: Axes | None = None
) -> Axes:
    """Draws accuracy against confidence, bin by bin, below a histogram of the confidences.

    Bins with fewer than 25 examples are pale: their accuracy is uncertain by 10 percentage points or more.

    Args:
        predictions: an object with `.log_probs` (n, K) and `.labels` (n,), or the tuple of the two, or their bins.
        num_bins: number of confidence bins, if `predictions` are not bins already.
        ax: where to draw; a new figure if None.
    """
    plt = _pyplot("reliability_diagram")
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    table = predictions if isinstance(predictions, ReliabilityTable) else whole(predictions, num_bins).reliability()
    num_bins = len(table.count)
    filled = table.count > 0
    center = ((filled.nonzero().flatten() + 0.5) / num_bins).tolist()
    count, confidence, accuracy = (column[filled] for column in (table.count, table.confidence, table.accuracy))
    ax = _axes(plt, ax)

    width = 1 / num_bins
    shade = (count / _SURE_COUNT).clamp(0.15, 1).tolist()
    blue, red = ([(*to_rgb(colour), alpha) for alpha in shade] for colour in ("cornflowerblue", "tab:red"))
    ax.bar(center, accuracy.tolist(), width, color=blue, edgecolor="white")
    ax.bar(
        center,
        (confidence - accuracy).tolist(),
        width,
        bottom=accuracy.tolist(),
        color=[(*colour, 0.3 * alpha) for *colour, alpha in red],
        edgecolor=red,
        hatch="//",
    )
    ax.plot([0, 1], [0, 1], color=plt.rcParams["text.color"], linestyle="--", linewidth=1, label="perfect calibration")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    handles = [
        *ax.get_legend_handles_labels()[0],
        Patch(color="cornflowerblue", label="accuracy"),
        Patch(facecolor=(*to_rgb("tab:red"), 0.3), edgecolor="tab:red", hatch="//", label="gap to the mean confidence"),
    ]
    title = f"ECE {ece_of(table).item():.4f}"
    ax.legend(handles=handles, loc="upper left", title=title, alignment="left", fontsize="small")

    histogram = ax.inset_axes((0, 1.06, 1, 0.15), sharex=ax)
    histogram.bar(center, (count / count.sum()).tolist(), width, color="lightgray", edgecolor="white")
    histogram.set(ylim=(0, 1), yticks=[1])
    histogram.set_ylabel("share", fontsize="small")
    histogram.tick_params(labelbottom=False, labelsize="small")
    histogram.spines[["top", "right"]].set_visible(False)
    return ax


def risk_coverage_diagram(
    predictions: ClassPredictions | Mapping[str, ClassPredictions],
    score: Score = "confidence",
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draws the share of errors among the accepted predictions against the share that is accepted.

    Args:
        predictions: predictions with labels, or several of them by name, each of which gets a curve.
        score: by which score of doubt predictions are rejected, see `bsam.metrics.doubt`.
        ax: where to draw; a new figure if None.
    """
    plt = _pyplot("risk_coverage_diagram")
    named = predictions if isinstance(predictions, Mapping) else {"": predictions}
    if not named:
        raise ValueError("predictions is empty: give predictions with labels, or several of them by name")
    curves = {
        name: (risk_coverage(each, score), rate_rejection(each, score, num_bootstrap=0).area)
        for name, each in named.items()
    }
    ax = _axes(plt, ax)
    highest = 0.0
    for name, (curve, area) in curves.items():
        said = f"{name}, area {area:.4f}" if name else f"area {area:.4f}"
        ax.plot(curve.coverage.tolist(), curve.risk.tolist(), drawstyle="steps-post", label=said)
        # The first few predictions have a risk of 0 or 1: they would set the scale of the whole curve.
        seen = curve.risk[curve.coverage >= 0.1]
        highest = max(highest, float(seen.max()), float(curve.risk[-1]))
    ax.set(xlim=(0, 1), ylim=(0, 1.1 * highest if highest > 0 else 1))
    ax.set(xlabel="coverage: share of accepted predictions", ylabel="risk: share of errors among them")
    ax.legend(loc="upper left", title=f"rejected by {_WORDS[score]}", alignment="left", fontsize="small")
    return ax


def unknown_diagram(
    known: ClassPredictions | Tensor,
    unknown: ClassPredictions | Tensor,
    score: Score = "confidence",
    *,
    num_bins: int = 40,
    ax: Axes | None = None,
) -> Axes:
    """Draws histograms of the doubt about known and about unknown inputs.

    Args:
        known: predictions, or scores (n,), of inputs of the kind of the training data; as for `rate_unknown`.
        unknown: the same for inputs of another kind.
        score: which score of doubt to draw, see `bsam.metrics.doubt`.
        num_bins: number of bins of each histogram.
        ax: where to draw; a new figure if None.
    """
    plt = _pyplot("unknown_diagram")
    scores = two_scores(known, unknown, score)
    found = rate_unknown(*scores, num_bootstrap=0)
    both = torch.cat(scores)
    low, high = float(both.min()), float(both.max())
    if high == low:
        low, high = low - 0.5, high + 0.5
    ax = _axes(plt, ax)
    edges = [low + (high - low) * i / num_bins for i in range(num_bins + 1)]
    colours = ("cornflowerblue", "tab:red")
    for values, colour, name in zip(scores, colours, ("known", "unknown"), strict=True):
        each = [1 / len(values)] * len(values)
        label = f"{name}, {len(values)} examples"
        ax.hist(values.tolist(), edges, weights=each, color=colour, alpha=0.5, edgecolor=colour, label=label)
    threshold = float(scores[0].sort().values[max(0, _num_accepted(len(scores[0])) - 1)])
    ax.axvline(
        threshold,
        color=plt.rcParams["text.color"],
        linestyle="--",
        linewidth=1,
        label="accepts 95% of the known",
    )
    words = "scores" if isinstance(known, Tensor) else f"doubt: {_WORDS[score]}"
    title = f"AUROC {found.auroc:.4f}, FPR at 95% {found.fpr_95:.4f}"
    ax.set(
        xlim=(low, high), ylim=(0, 1.4 * ax.get_ylim()[1]), xlabel=words, ylabel="share of examples"
    )  # for the legend
    ax.legend(loc="upper right", title=title, alignment="left", fontsize="small")
    return ax


def quantile_diagram(predictions: HasGaussianPredictions, *, num_levels: int = 20, ax: Axes | None = None) -> Axes:
    """Draws how often targets are below their predicted quantiles, below a histogram of their probabilities.

    Args:
        predictions: `bsam.GaussianPredictions` with targets.
        num_levels: number of steps between the levels 0 and 1.
        ax: where to draw; a new figure if None.
    """
    plt = _pyplot("quantile_diagram")
    table = quantile_calibration(predictions, num_levels)
    ax = _axes(plt, ax)
    level, observed = table.level.tolist(), table.observed.tolist()
    ax.plot(level, observed, color="cornflowerblue", marker="o", markersize=3, label="observed")
    ax.fill_between(level, level, observed, color="tab:red", alpha=0.3, label="gap")
    ax.plot([0, 1], [0, 1], color=plt.rcParams["text.color"], linestyle="--", linewidth=1, label="perfect calibration")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability of a smaller target", ylabel="observed share")
    ax.legend(loc="upper left", title=f"area between {table.error:.4f}", alignment="left", fontsize="small")
    share = table.observed.diff(prepend=table.observed.new_zeros(1))[1:]
    share[0] += table.observed[0]
    width = 1 / num_levels
    histogram = ax.inset_axes((0, 1.06, 1, 0.15), sharex=ax)
    center = [(i + 0.5) * width for i in range(num_levels)]
    histogram.bar(center, share.tolist(), width, color="lightgray", edgecolor="white")
    histogram.axhline(width, color=plt.rcParams["text.color"], linestyle="--", linewidth=1)
    histogram.set(ylim=(0, max(2 * width, 1.1 * float(share.max()))))
    histogram.set_ylabel("share", fontsize="small")
    histogram.tick_params(labelbottom=False, labelsize="small")
    histogram.spines[["top", "right"]].set_visible(False)
    return ax


_SURE_COUNT = 25
"""Examples of a bin for which the standard error of its accuracy is at most 0.1."""
_WORDS = {
    "confidence": "1 - largest probability",
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "energy": "energy",
}
"""The scores on the axes of diagrams."""


def _num_accepted(num_known: int) -> int:
    """Return the smallest number that is at least 95% of the known examples."""
    return math.ceil(0.95 * num_known - 1e-9)


def _pyplot(name: str) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"{name} needs matplotlib, which is missing: pip install matplotlib") from error
    return plt


def _axes(plt: Any, ax: Axes | None) -> Axes:
    """Return the axes to draw on; those of a new figure if None."""
    if ax is not None:
        return ax
    made: Axes = plt.subplots(figsize=(4.5, 5), layout="constrained")[1]
    return made
