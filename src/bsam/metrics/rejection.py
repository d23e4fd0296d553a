r"""What accuracy is left if doubtful predictions are rejected, and which of them to reject.

Predictions are accepted in the order of their doubt $s$ (`bsam.metrics.scores`), the most certain ones first. There are
$n$ labels, and $e_k$ of the $k$ most certain ones are predicted wrongly.

| metric | formula | meaning |
|---|---|---|
| coverage | $k / n$ | the share that is accepted |
| risk | $e_k / k$ | the share of errors among the accepted |
| area | $\frac1n \sum_k e_k / k$ | the mean risk over all coverages; Geifman and El-Yaniv (2017) |
| accuracy at $c$% | $1 - e_k / k$, $k = \lceil c n / 100 \rceil$ | the accuracy of the $c$% with the least doubt |

If several labels have the same score, $e_k$ is its expectation over a random order of them, so that the order of the
data does not matter. The area is at best that of a perfect order, which is above 0 if there are errors.

The threshold for a wanted risk
-------------------------------
`threshold_for_risk` chooses the largest coverage $k / n$, in steps of 5%, at which the risk is below the wanted $r$
with the probability `level`. Let $t$ be the score of example $k + 1$. The $k'$ examples with $s < t$ are independent
draws from all examples with $s < t$, so that their number of errors is binomial with the unknown risk $R(t)$. The
threshold is safe if

```math
P(\mathrm{Binomial}(k', r) \le e) \le \frac{1 - \text{level}}{20}
```

where $e$ is the number of errors that were seen, and 20 the number of thresholds that are tried. If every $R(t)$ above
$r$ is called safe with at most this probability, then one of the 20 is with at most 1 - `level`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bsam.metrics.bootstrap import Numbers, check_bootstrap, num_times, with_intervals
from bsam.metrics.classes import by_rank
from bsam.metrics.inputs import ClassPredictions, checked, labelled
from bsam.metrics.scores import Score, doubt

__all__ = [
    "RejectionSummary",
    "RiskCoverage",
    "Threshold",
    "rate_rejection",
    "risk_coverage",
    "threshold_for_risk",
]

_COVERAGES = (80, 90, 95)
"""The coverages, in percent, at which the accuracy is computed."""
_NUM_STEPS = 20
"""The number of coverages that are tried for a threshold with a guarantee."""


@dataclass(frozen=True)
class RejectionSummary(Numbers):
    """What rejecting doubtful predictions is worth. `intervals` has (low, high) per metric, or is empty."""

    names: ClassVar[tuple[str, ...]] = ("area", *(f"accuracy_{c}" for c in _COVERAGES))

    num_examples: int
    """The number of labels."""
    area: float
    """The area under the curve of risk against coverage: smaller is better."""
    accuracy_80: float
    """The accuracy of the 80% of the predictions that have the least doubt."""
    accuracy_90: float
    accuracy_95: float
    intervals: dict[str, tuple[float, float]]
    level: float


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The curve of risk against coverage, at each distinct score in increasing order: float64 tensors.

    Attributes:
        threshold: the score; predictions with at most this score are accepted.
        coverage: the share that is accepted.
        risk: the share of errors among the accepted.
    """

    threshold: Tensor
    coverage: Tensor
    risk: Tensor


@dataclass(frozen=True)
class Threshold:
    """Which predictions to accept, and what may be expected of them; printed, it says so in sentences."""

    threshold: float
    """Accept a prediction if its score of doubt is below this number."""
    score: Score
    risk: float
    """The wanted share of errors among the accepted predictions."""
    level: float | None
    """The probability of the guarantee; None if there is none."""
    coverage: float
    """The share of the given predictions that is accepted."""
    found_risk: float
    """The share of errors among them; NaN if none is accepted."""
    num_examples: int

    def accepts(self, predictions: ClassPredictions) -> Tensor:
        """Return which predictions are accepted, as booleans (n, ...)."""
        return doubt(predictions, self.score) < self.threshold

    def __str__(self) -> str:
        if self.coverage == 0:
            safe = "has a risk that low" if self.level is None else "is safe"
            need = ""
            if self.level is not None:
                fewest = _fewest(self.risk, self.level)
                need = f" This takes at least {fewest} accepted examples without an error, or more of them with errors."
            return f"No threshold {safe} on these {self.num_examples} examples: reject everything.{need}"
        rule = f"Accept predictions whose {self.score.replace('_', ' ')} is below {self.threshold:.4g}"
        if self.score == "confidence":
            sure = f"{1 - self.threshold:.4g}" if self.threshold >= 1e-3 else f"1 - {self.threshold:.4g}"
            rule = f"Accept predictions whose largest probability is above {sure}"
        if math.isinf(self.threshold):
            rule = "Accept all predictions"
        shares = f"{self.coverage:.1%}, with {self.found_risk:.2%} errors"
        seen = f"Of the {self.num_examples} given examples, these are {shares}."
        if self.level is None:
            return (
                f"{rule}. {seen} On new data, expect more: the threshold was chosen on these examples, so nothing is "
                f"guaranteed. Write level=0.95 for a guarantee."
            )
        return (
            f"{rule}. {seen} On new data of the same kind, at most {self.risk:.2%} of the accepted predictions are "
            f"errors, in the long run. Such a statement is right for at least {100 * self.level:g}% of all sets of "
            "examples that could have been given; it says nothing about data of another kind."
        )


def rate_rejection(
    predictions: ClassPredictions,
    score: Score = "confidence",
    *,
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> RejectionSummary:
    """Rate what rejecting doubtful predictions is worth.

    Args:
        predictions: `bsam.Predictions` with labels, or the tuple (log_probs, labels).
        score: By which score of doubt predictions are rejected, see `bsam.metrics.doubt`.
        num_bootstrap: Number of resamples, of whole examples; 0 gives no intervals.
        level: Coverage of the intervals.
        seed: Seed of the bootstrap's separate generator.

    Examples:
        >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> print(rate_rejection((p.log(), torch.tensor([0, 0, 0, 1])), num_bootstrap=0))
        4 examples
        area          0.0625
        accuracy_80   0.7500
        accuracy_90   0.7500
        accuracy_95   0.7500
    """
    check_bootstrap(num_bootstrap, level)
    scores, wrong, counts = _scored(predictions, score)
    counts = counts[counts > 0]
    owner = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    rank = torch.unique(scores, return_inverse=True)[1]

    def metrics_of(index: Tensor) -> Tensor:
        times = num_times(index)[:, owner]
        return _numbers(by_rank(rank, times), by_rank(rank, times * wrong))

    values, intervals = with_intervals(
        RejectionSummary.names,
        metrics_of,
        len(counts),
        len(scores),
        num_bootstrap=num_bootstrap,
        level=level,
        seed=seed,
    )
    return RejectionSummary(len(scores), **values, intervals=intervals, level=level)


def _numbers(counts: Tensor, errors: Tensor) -> Tensor:
    """Return the metrics (R, 4), from the numbers of labels and of errors (R, distinct scores)."""
    k, e = counts.cumsum(dim=-1), errors.cumsum(dim=-1)
    before, e_before = k - counts, e - errors
    n = k[:, -1:]
    rate = errors / counts.clamp(min=1)  # of errors within equal scores
    # Within equal scores e_j / j = rate + (e_before - rate * before) / j; the 1/j add up to harmonic numbers.
    most = int(n.max())
    inverse = 1 / torch.arange(1, most + 1, dtype=torch.float64, device="cpu")
    harmonic = torch.cat([inverse.new_zeros(1), inverse.cumsum(dim=0)])
    sums = rate * counts + (e_before - rate * before) * (harmonic[k.long()] - harmonic[before.long()])
    found = [sums.sum(dim=-1) / n[:, 0]]
    for coverage in _COVERAGES:
        accepted = (n * coverage / 100 - 1e-9).ceil().clamp(min=1)
        group = torch.searchsorted(k, accepted)
        wrong = e_before.gather(-1, group) + rate.gather(-1, group) * (accepted - before.gather(-1, group))
        found.append((1 - wrong / accepted)[:, 0])
    return torch.stack(found, dim=-1)


def risk_coverage(predictions: ClassPredictions, score: Score = "confidence") -> RiskCoverage:
    """Return the curve of risk against coverage.

    Args:
        predictions: `bsam.Predictions` with labels, or the tuple (log_probs, labels).
        score: By which score of doubt predictions are rejected, see `bsam.metrics.doubt`.
    """
    scores, wrong, _ = _scored(predictions, score)
    distinct, rank = torch.unique(scores, return_inverse=True)
    k, e = (by_rank(rank, counts).cumsum(dim=0) for counts in (torch.ones_like(wrong), wrong))
    return RiskCoverage(threshold=distinct, coverage=k / len(scores), risk=e / k)


def threshold_for_risk(
    predictions: ClassPredictions, risk: float, score: Score = "confidence", *, level: float | None = 0.95
) -> Threshold:
    """Choose which predictions to accept, so that at most a wanted share of the accepted ones are errors.

    With `level`, the promise is for new data of the same kind (see above): it fails for at most 1 - `level` of all
    calibration sets that could have been drawn. It is for one rule: the best of several rules that were chosen on the
    same data, with other scores or networks, fails more often. With `level=None` the share is kept on the given data
    only, and a larger one must be expected on new data.

    Args:
        predictions: `bsam.Predictions` with one label per example, or the tuple (log_probs, labels). Neither training
            data nor the data on which the rule is judged afterwards.
        risk: The wanted share of errors, like 0.02.
        score: Which score of doubt is compared with the threshold, see `bsam.metrics.doubt`.
        level: The probability of the guarantee, or None.

    Examples:
        >>> p = torch.tensor([[0.99, 0.01]] * 200 + [[0.6, 0.4]] * 100)
        >>> rule = threshold_for_risk((p.log(), torch.tensor([0] * 200 + [0, 1] * 50)), 0.05)
        >>> print(round(rule.threshold, 4), round(rule.coverage, 4))
        0.4 0.6667
    """
    if not (isinstance(risk, int | float) and 0 < risk < 1):
        raise ValueError(f"risk={risk!r} must lie between 0 and 1; write 0.02 for 2% errors")
    if level is not None and not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}; write 0.95, or None for no guarantee")
    scores, wrong, counts = _scored(predictions, score)
    if int(counts.max()) > 1:
        raise ValueError("each example must have one label: labels of one example depend on each other")
    n, ordered = len(scores), scores.sort().values
    if level is None:
        candidates = [*torch.unique(scores).tolist()[1:], math.inf]
    else:
        wanted = [n * step // _NUM_STEPS for step in range(1, _NUM_STEPS + 1)]
        candidates = [math.inf if k == n else float(ordered[k]) for k in wanted]
    best, found = -math.inf, (0, 0)
    for candidate in candidates:
        accepted = scores < candidate
        k, e = int(accepted.sum()), int(wrong[accepted].sum())
        safe = e <= risk * k if level is None else _probability_of_fewer(k, e, risk) <= (1 - level) / _NUM_STEPS
        if k > found[0] and safe:
            best, found = candidate, (k, e)
    k, e = found
    return Threshold(
        threshold=best,
        score=score,
        risk=float(risk),
        level=level,
        coverage=k / n,
        found_risk=e / k if k else math.nan,
        num_examples=n,
    )


def _probability_of_fewer(k: int, e: int, risk: float) -> float:
    """Return P(Binomial(k, risk) <= e)."""
    j = torch.arange(e + 1, dtype=torch.float64, device="cpu")
    choose = math.lgamma(k + 1) - torch.lgamma(j + 1) - torch.lgamma(k - j + 1)
    return float((choose + j * math.log(risk) + (k - j) * math.log1p(-risk)).logsumexp(dim=0).exp())


def _fewest(risk: float, level: float) -> int:
    """Return how many accepted examples without an error make a threshold safe."""
    return math.ceil(math.log((1 - level) / _NUM_STEPS) / math.log1p(-risk))


def _scored(predictions: ClassPredictions, score: Score) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores and errors of all rated labels, float64 (N,), and how many labels each example has."""
    log_probs, labels, ignore_index = labelled(predictions)
    log_p, y, counts = checked(log_probs, labels, ignore_index)
    if not len(y):
        raise ValueError("the metrics need at least one example, got none; predict on n > 0 examples")
    scores = doubt(predictions, score)
    if ignore_index is not None:
        scores = scores[labels.detach().cpu() != ignore_index]
    scores = scores.flatten()
    if bool(scores.isnan().any()):
        raise ValueError(
            f"the {score} of doubt must be a number everywhere, got NaN; look for inf or NaN in the logits"
        )
    return scores, (log_p.argmax(dim=1) != y).double(), counts
