r"""Metrics of class probabilities: accuracy, NLL, ECE, AUROC and Brier score.

Every example $i$ has log-probabilities $\log p_{ik}$ over $K$ classes and a label $y_i$. Its prediction is the class
with the largest probability (the lowest index among equals). Its confidence $c_i$ is this probability. $a_i$ is 1 if
the prediction is correct and 0 if not. $[\cdot]$ is 1 if the statement is true and 0 if not. Over $n$ examples:

| metric | formula | remark |
|---|---|---|
| accuracy | $\frac1n \sum_i a_i$ | |
| NLL | $-\frac1n \sum_i \log p_{i, y_i}$ | natural logarithm |
| ECE | $\sum_b \frac{n_b}{n} \lvert \bar a_b - \bar c_b \rvert$ | $B$ bins: $(b - 1) / B < c_i \le b / B$ in bin $b$ |
| AUROC | $P(c_i > c_j) + \frac12 P(c_i = c_j)$ | for $i$ correct and $j$ misclassified |
| Brier | $\frac1n \sum_i \sum_k (p_{ik} - [y_i = k])^2$ | from 0 to 2 |

If an example has several labels (tokens, pixels, the questions of a multi-label problem), $i$ runs over all labels of
all examples, except those that are ignored. The bootstrap resamples whole examples, because the labels of one example
may depend on each other: a bootstrap over labels would give intervals that are too narrow.

- ECE: Guo et al. (2017), <https://arxiv.org/abs/1706.04599>; $\bar a_b$ and $\bar c_b$ are the means of $a_i$ and $c_i$
  in a bin of $n_b$ examples.
- AUROC of misclassification: Osawa et al. (2019), appendix H, <https://arxiv.org/abs/1906.02506>. It is exact, without
  a grid of thresholds. It is NaN if all examples are correct or all are wrong.

Other packages may give other numbers. torchmetrics 1.9 and older count a confidence of exactly 1.0 in a separate
extra bin (<https://github.com/Lightning-AI/torchmetrics/issues/3510>), which changes the ECE of a network
that saturates; here 1.0 belongs to the last bin. Its bins are also closed on the left, while those of
Guo et al. are closed on the right. scikit-learn halves the Brier score of two classes.

The ECE has no bootstrap interval. Noise in a bin always adds to $\lvert \bar a_b - \bar c_b \rvert$, so the ECE of a
sample is biased upwards, and the ECE of a resample is biased twice. If the probabilities are calibrated, a percentile
interval hardly ever covers the ECE of the population, and a basic or a bias-corrected interval covers it too rarely.
The bias depends on the number of examples: compare the ECE of two methods on sets of the same size,
over several seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast, overload

import torch
from torch import Tensor

from bsam.metrics.bootstrap import Numbers, check_bootstrap, num_times, with_intervals
from bsam.metrics.calibration import ReliabilityTable, ece_of, reliability_of
from bsam.metrics.inputs import ClassPredictions, checked, labelled
from bsam.metrics.regression import GaussianSummary, HasGaussianPredictions, rate_gaussian

__all__ = [
    "Metrics",
    "Summary",
    "accuracy",
    "auroc",
    "auroc_of",
    "brier",
    "by_rank",
    "ece",
    "nll",
    "reliability",
    "summary",
    "whole",
]

_WITH_INTERVAL = ("accuracy", "nll", "auroc", "brier")


@dataclass(frozen=True)
class Summary(Numbers):
    """The five metrics of one set of predictions. `intervals` has (low, high) per metric but the ECE, or is empty.

    `num_examples` is the number of labels: an example of tokens or pixels has several.
    """

    names: ClassVar[tuple[str, ...]] = ("accuracy", "nll", "ece", "auroc", "brier")

    num_examples: int
    accuracy: float
    nll: float
    ece: float
    auroc: float
    brier: float
    intervals: dict[str, tuple[float, float]]
    level: float


class _Examples(NamedTuple):
    """The numbers per example that the metrics need: float64 tensors of shape (n,)."""

    nll: Tensor
    confidence: Tensor
    correct: Tensor
    brier: Tensor


def _per_example(log_probs: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[_Examples, Tensor]:
    """Return the numbers of all labels that are not ignored, and how many each example has."""
    # Each row separately, so that no number depends on the other examples of the batch.
    log_p, y, counts = checked(log_probs, labels, ignore_index)
    rows = torch.arange(len(y), device=y.device)
    log_confidence, predicted = log_p.max(dim=1)  # the first of equal maxima
    error = log_p.exp()
    error[rows, y] -= 1  # p_k - 1[y = k]
    numbers = _Examples(
        nll=-log_p[rows, y],
        confidence=log_confidence.exp(),
        correct=(predicted == y).double(),
        # A sum from left to right: sum() would split a single very long row over the threads.
        brier=error.square_().cumsum(dim=1)[:, -1].clone(),
    )
    return numbers, counts


# The formulas. All reduce over the last dimension, so that one call handles a stack of bootstrap resamples.


def by_rank(rank: Tensor, counts: Tensor) -> Tensor:
    """Sum the counts of labels (..., n) of equal rank; ranks number distinct scores in increasing order."""
    empty = counts.new_zeros(*counts.shape[:-1], int(rank.max()) + 1)
    return empty.scatter_add(-1, rank.expand_as(counts), counts)


def auroc_of(rank: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    """Return P(right above wrong), ties half, from how often labels (..., n) of each kind occur."""
    right, wrong = by_rank(rank, right), by_rank(rank, wrong)
    wrong_below = wrong.cumsum(dim=-1) - wrong
    pairs = right.sum(dim=-1) * wrong.sum(dim=-1)
    return (right * (wrong_below + wrong / 2)).sum(dim=-1) / pairs


class _Resampled:
    """Computes the metrics of `_WITH_INTERVAL` for resampled examples, of which each has one or several labels."""

    def __init__(self, examples: _Examples, counts: Tensor) -> None:
        counts = counts[counts > 0]
        self.num_examples = len(counts)
        self._owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        self._counts = counts.double()
        sums = torch.zeros(3, len(counts), dtype=torch.float64, device=counts.device)
        self._sums = sums.index_add_(1, self._owner, torch.stack([examples.correct, examples.nll, examples.brier]))
        self._correct = examples.correct
        self._rank = torch.unique(examples.confidence, return_inverse=True)[1]

    def __call__(self, index: Tensor) -> Tensor:
        """Return the metrics, (R, 4), of R resamples: the numbers of n examples, (R, n)."""
        size = self._counts[index].sum(dim=-1)
        accuracy, nll, brier = (column[index].sum(dim=-1) / size for column in self._sums)
        times = num_times(index)[:, self._owner]  # of each label
        auroc = auroc_of(self._rank, times * self._correct, times * (1 - self._correct))
        return torch.stack([accuracy, nll, auroc, brier], dim=-1)


class Metrics:
    """The metrics of a set that comes in batches. They are exactly those of the whole set, for any batches.

    Four float64 numbers per label are kept, on the CPU.

    Args:
        num_bins: number of confidence bins of the ECE.
        ignore_index: labels with this number are not rated, like -100 in torch; None rates all labels.

    Examples:
        >>> import torch
        >>> metrics = Metrics()
        >>> for p, y in [([0.9, 0.1], 0), ([0.2, 0.8], 1), ([0.6, 0.4], 1)]:
        ...     metrics.update(torch.tensor([p]).log(), torch.tensor([y]))
        >>> print(metrics.compute(num_bootstrap=0))
        3 examples
        accuracy   0.6667
        nll        0.4149
        ece        0.3000
        auroc      1.0000
        brier      0.2733
    """

    def __init__(self, num_bins: int = 20, ignore_index: int | None = None) -> None:
        if not isinstance(num_bins, int) or num_bins < 1:
            raise ValueError(
                f"num_bins must be a positive integer, got {num_bins!r}; write num_bins=20 for the default"
            )
        self.num_bins = num_bins
        self.ignore_index = ignore_index
        self._batches: list[_Examples] = []
        self._counts: list[Tensor] = []  # the number of labels of each example

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Adds a batch: log-probabilities (n, K) and integer labels (n,), or (n, ..., K) and (n, ...)."""
        numbers, counts = _per_example(log_probs, labels, self.ignore_index)
        self._batches.append(numbers)
        self._counts.append(counts)

    def merge(self, other: Metrics) -> None:
        """Adds all examples of `other`, for example those of another worker."""
        if other.num_bins != self.num_bins:
            raise ValueError(
                f"cannot merge metrics of {other.num_bins} bins into metrics of {self.num_bins}; "
                f"write Metrics(num_bins={self.num_bins}) for both"
            )
        self._batches = self._batches + other._batches
        self._counts = self._counts + other._counts

    def reliability(self) -> ReliabilityTable:
        """Count, mean confidence and accuracy of every confidence bin."""
        examples = self._examples()
        return reliability_of(examples.confidence, examples.correct, self.num_bins)

    def compute(self, *, num_bootstrap: int = 1000, level: float = 0.95, seed: int = 0) -> Summary:
        """The metrics of all examples so far, with percentile bootstrap intervals over the examples.

        The interval of the AUROC uses the resamples in which it is defined. The ECE has no interval: it is biased, and
        no bootstrap interval that we tried covers the truth as often as it claims (see above).

        Args:
            num_bootstrap: number of resamples; 0 gives no intervals. 1000 of 10,000 examples take a second.
            level: coverage of the intervals.
            seed: seed of a separate generator; the global generator is not touched.
        """
        check_bootstrap(num_bootstrap, level)
        examples = self._examples()
        resampled = _Resampled(examples, torch.cat(self._counts))
        n = len(examples.nll)
        values, intervals = with_intervals(
            _WITH_INTERVAL, resampled, resampled.num_examples, n, num_bootstrap=num_bootstrap, level=level, seed=seed
        )
        ece = ece_of(reliability_of(examples.confidence, examples.correct, self.num_bins)).item()
        return Summary(num_examples=n, **values, ece=ece, intervals=intervals, level=level)

    def _examples(self) -> _Examples:
        if not any(len(batch.nll) for batch in self._batches):
            raise ValueError("the metrics need at least one example, got none; update with a batch of n > 0 rows first")
        return _Examples(*(torch.cat(column) for column in zip(*self._batches, strict=True)))


@overload
def summary(
    predictions: HasGaussianPredictions,
    *,
    num_bins: int = ...,
    num_bootstrap: int = ...,
    level: float = ...,
    seed: int = ...,
    ignore_index: int | None = ...,
) -> GaussianSummary: ...


@overload
def summary(
    predictions: ClassPredictions,
    *,
    num_bins: int = ...,
    num_bootstrap: int = ...,
    level: float = ...,
    seed: int = ...,
    ignore_index: int | None = ...,
) -> Summary: ...


def summary(
    predictions: ClassPredictions | HasGaussianPredictions,
    *,
    num_bins: int = 20,
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    ignore_index: int | None = None,
) -> Summary | GaussianSummary:
    """All metrics of a set of predictions, with bootstrap intervals except for the ECE (see `Metrics.compute`).

    Args:
        predictions: an object with `.log_probs` (n, ..., K) and `.labels` (n, ...), or the tuple of the two: several
            labels per example are tokens, pixels or questions. Or `GaussianPredictions`.
        num_bins: number of confidence bins of the ECE.
        num_bootstrap: number of resamples; 0 gives no intervals.
        level: coverage of the intervals.
        seed: seed of the bootstrap's separate generator.
        ignore_index: labels with this number are not rated; by default the `ignore_index` of the predictions, if they
            have one.

    Returns:
        A `Summary`, or a `GaussianSummary` for real predictions.
    """
    if all(hasattr(predictions, name) for name in ("mean", "targets", "log_density")):
        gaussian = cast(HasGaussianPredictions, predictions)
        return rate_gaussian(gaussian, num_bootstrap=num_bootstrap, level=level, seed=seed)
    metrics = whole(cast(ClassPredictions, predictions), num_bins, ignore_index)
    return metrics.compute(num_bootstrap=num_bootstrap, level=level, seed=seed)


def accuracy(log_probs: Tensor, labels: Tensor) -> float:
    """Fraction of the examples whose most probable class is the label."""
    return summary((log_probs, labels), num_bootstrap=0).accuracy


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the label, in nats; inf if a label has probability 0."""
    return summary((log_probs, labels), num_bootstrap=0).nll


def ece(log_probs: Tensor, labels: Tensor, num_bins: int = 20) -> float:
    """Expected calibration error over equal-width bins, closed on the right.

    Examples:
        >>> import torch
        >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1]])  # confidence 0.9, accuracy 0.5
        >>> round(ece(p.log(), torch.tensor([0, 1])), 4)
        0.4
    """
    return summary((log_probs, labels), num_bins=num_bins, num_bootstrap=0).ece


def auroc(log_probs: Tensor, labels: Tensor) -> float:
    """How well the confidence separates correct from wrong predictions; NaN if there are not both kinds."""
    return summary((log_probs, labels), num_bootstrap=0).auroc


def brier(log_probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot label, summed over the classes."""
    return summary((log_probs, labels), num_bootstrap=0).brier


def reliability(log_probs: Tensor, labels: Tensor, num_bins: int = 20) -> ReliabilityTable:
    """Count, mean confidence and accuracy of every confidence bin, from which the ECE is computed."""
    return whole((log_probs, labels), num_bins).reliability()


def whole(predictions: ClassPredictions, num_bins: int, ignore_index: int | None = None) -> Metrics:
    """Return the metrics of one set of predictions."""
    log_probs, labels, own = labelled(predictions)
    metrics = Metrics(num_bins, own if ignore_index is None else ignore_index)
    metrics.update(log_probs, labels)
    return metrics
