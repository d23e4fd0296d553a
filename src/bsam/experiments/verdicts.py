"""Verdicts that compare our numbers with printed ones: better, worse, equal or open.

Both numbers are a mean and a standard deviation over seeds. The printed mean is rounded: the true one lies within h,
half a unit of its last digit.

1. d = ours - printed, with the standard error and the degrees of freedom of Welch.
2. p is Welch's two-sided p-value of |d| - h, or 1 if |d| <= h: rounding never counts as a difference.
3. Holm's correction makes p larger, so that in a family of verdicts (those of one table) the chance of any "better" or
   "worse" between equal numbers is at most 5%. Corrected p below 5%: *better* or *worse*.
4. Otherwise *equal*, if the 90% interval of d, widened by h on both sides, lies inside [-margin, margin].
5. Otherwise *open*: the seeds are too few, or their spread too large, to decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

__all__ = ["INTERVAL", "SIGNIFICANCE", "Case", "Difference", "Summary", "Verdict", "holm", "judge", "welch"]

Verdict = Literal["better", "worse", "equal", "open"]
SIGNIFICANCE = 0.05
INTERVAL = 0.90
"""Two one-sided tests at 5% are one interval of 90%."""


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation of a number over seeds."""

    mean: float
    sd: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise two values or more."""
        return cls(statistics.fmean(values), statistics.stdev(values), len(values))


@dataclass(frozen=True)
class Difference:
    """A difference of two means, with Welch's standard error and degrees of freedom."""

    value: float
    standard_error: float
    degrees: float

    def p_value(self, rounding: float = 0.0) -> float:
        """Return the two-sided p-value of the part of the difference that rounding does not explain."""
        excess = max(abs(self.value) - rounding, 0.0)
        if self.standard_error == 0.0:
            return float(excess == 0.0)
        return float(2 * stdtr(self.degrees, -excess / self.standard_error))

    def interval(self, rounding: float = 0.0) -> tuple[float, float]:
        """Return the 90% interval, widened by the rounding on both sides."""
        quantile = float(stdtrit(self.degrees, (1 + INTERVAL) / 2)) if self.standard_error else 0.0
        half_width = quantile * self.standard_error + rounding
        return self.value - half_width, self.value + half_width


def welch(a: Summary, b: Summary) -> Difference:
    """Compare two means whose variances may differ."""
    u, v = a.sd**2 / a.count, b.sd**2 / b.count
    if u + v == 0.0:
        return Difference(a.mean - b.mean, 0.0, math.inf)
    share = u / (u + v)
    degrees = 1 / (share**2 / (a.count - 1) + (1 - share) ** 2 / (b.count - 1))
    return Difference(a.mean - b.mean, math.sqrt(u + v), degrees)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct m p-values by Holm's method: multiply the smallest by m, the next by m - 1, and so on."""
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


@dataclass(frozen=True)
class Case:
    """One of our numbers and the printed one."""

    difference: Difference
    """Ours minus the printed one."""
    rounding: float
    """Half a unit of the printed number's last digit."""
    margin: float
    """Largest difference that is called equal."""
    higher_is_better: bool


def judge(family: Sequence[Case]) -> list[Verdict]:
    """Return the verdicts of a family of cases that share Holm's correction."""
    corrected = holm([case.difference.p_value(case.rounding) for case in family])
    return [_verdict(case, p) for case, p in zip(family, corrected, strict=True)]


def _verdict(case: Case, p: float) -> Verdict:
    if p < SIGNIFICANCE:
        return "better" if (case.difference.value > 0) == case.higher_is_better else "worse"
    low, high = case.difference.interval(case.rounding)
    return "equal" if -case.margin <= low and high <= case.margin else "open"
