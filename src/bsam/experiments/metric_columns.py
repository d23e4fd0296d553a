"""The four metrics as columns of a table: their titles, their decimals, and how a mean and its sd are written."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["DECIMALS", "TITLES", "mean_and_sd", "number", "signed", "values_of"]

TITLES = {"accuracy": "accuracy ↑", "nll": "NLL ↓", "ece": "ECE ↓", "auroc": "AUROC ↑"}
"""Title of each column."""
DECIMALS = {"accuracy": 2, "nll": 3, "ece": 4, "auroc": 3}
"""Number of decimals of each metric."""


def values_of(evaluations: Iterable[Mapping[str, Any]], metric: str) -> tuple[float, ...]:
    """Return a metric of several evaluations, accuracy in percent, without those for which it is not defined."""
    found = (evaluation[metric] for evaluation in evaluations)
    return tuple((100 if metric == "accuracy" else 1) * value for value in found if value is not None)


def mean_and_sd(values: tuple[float, ...]) -> tuple[float | None, float | None]:
    """Return mean and standard deviation; None without a value, or for the standard deviation of one value."""
    return statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def number(metric: str, mean: float | None, sd: float | None) -> str:
    """Write mean (sd) with the metric's decimals, or the mean alone; `-` stands for a missing number.

    A deviation that is not 0 has at least one digit that is not 0.
    """
    decimals = digits = DECIMALS[metric]
    if mean is None or sd is None:
        return "-" if mean is None else f"{mean:.{decimals}f}"
    while sd > 1e-6 and not round(sd, digits):
        digits += 1
    return f"{mean:.{decimals}f} ({sd:.{digits}f})"


def signed(metric: str, difference: float) -> str:
    """Write a difference with its sign and the metric's decimals; a difference that rounds to 0 has no sign."""
    written = f"{difference:+.{DECIMALS[metric]}f}"
    return written if float(written) else written[1:]
