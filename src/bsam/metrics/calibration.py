r"""Calibration errors of class probabilities, over bins of equal width or of equal size.

With the confidences $c_i$ of $n$ examples, whether each prediction is correct ($a_i$ is 1 or 0), and bins $b$ of $n_b$
examples, in which $a_i$ and $c_i$ have the means $\bar a_b$ and $\bar c_b$, the error is

```math
\sum_b \frac{n_b}{n} \lvert \bar a_b - \bar c_b \rvert
```

| name | of what | source |
|---|---|---|
| ECE | the largest probability is $c_i$; bins of equal width | Guo et al. (2017) |
| adaptive ECE | the same; bins of equal size | Nguyen and O'Connor (2015) |
| class-wise ECE | the mean over the classes $k$, with $c_i = p_{ik}$ and $a_i = [y_i = k]$ | Kull et al. (2019) |

The class-wise error with bins of equal size is the adaptive calibration error of Nixon et al. (2019),
<https://arxiv.org/abs/1904.01685>. Bins of equal size are made by sorting; their sizes differ by at most one. Examples
of equal confidence count with their mean $a_i$, so that their order does not matter.

None of these errors has a bootstrap interval, for the reason that `bsam.metrics.classes` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bsam.metrics.inputs import checked

__all__ = ["ReliabilityTable", "adaptive_ece", "classwise_ece", "ece_of", "reliability_of"]


@dataclass(frozen=True, eq=False)
class ReliabilityTable:
    """Statistics per confidence bin, in order: float64 tensors of length $B$.

    Bin $b$ has the confidences above $(b - 1) / B$ and at most $b / B$.

    Attributes:
        count: number of examples.
        confidence: their mean confidence, NaN in an empty bin.
        accuracy: their accuracy, NaN in an empty bin.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    def as_rows(self) -> list[list[float | None]]:
        """Count, confidence and accuracy of each bin as plain numbers for JSON, with None for NaN."""
        columns = (self.count, self.confidence, self.accuracy)
        return [[None if math.isnan(x) else x for x in row] for row in torch.stack(columns, dim=1).tolist()]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float | None]]) -> ReliabilityTable:
        """Make the table from the result of its `as_rows`."""
        numbers = [[math.nan if x is None else x for x in row] for row in rows]
        return cls(*torch.tensor(numbers, dtype=torch.float64).unbind(dim=1))


def reliability_of(confidence: Tensor, correct: Tensor, num_bins: int) -> ReliabilityTable:
    """Return the table of bins of equal width, over the last dimension."""
    # If p is exactly on an edge, exp(log p) may differ by some units in the last place, hence the 1e-12.
    inner_edges = torch.arange(1, num_bins, device=confidence.device).double() / num_bins + 1e-12
    bins = torch.bucketize(confidence, inner_edges)  # edges[i - 1] < confidence <= edges[i]
    empty = confidence.new_zeros(*confidence.shape[:-1], num_bins)
    count = empty.scatter_add(-1, bins, torch.ones_like(confidence))
    return ReliabilityTable(
        count=count,
        confidence=empty.scatter_add(-1, bins, confidence) / count,
        accuracy=empty.scatter_add(-1, bins, correct) / count,
    )


def ece_of(table: ReliabilityTable) -> Tensor:
    """Return the calibration error of a table of bins."""
    share = table.count / table.count.sum(dim=-1, keepdim=True)
    return (share * (table.accuracy - table.confidence).abs()).nansum(dim=-1)  # an empty bin adds 0


def adaptive_ece(log_probs: Tensor, labels: Tensor, num_bins: int = 20) -> float:
    """Expected calibration error over bins with the same number of examples.

    Args:
        log_probs: Log-probabilities, (n, ..., K).
        labels: Integer labels, (n, ...).
        num_bins: Number of bins; with fewer examples, one bin per example.

    Examples:
        >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
        >>> round(adaptive_ece(p.log(), torch.tensor([0, 0, 0, 1]), num_bins=2), 4)
        0.1
    """
    log_p, y = _rated(log_probs, labels, num_bins)
    log_confidence, predicted = log_p.max(dim=1)
    return float(_error_of_equal_bins(log_confidence.exp(), (predicted == y).double(), num_bins))


def classwise_ece(log_probs: Tensor, labels: Tensor, num_bins: int = 20, *, adaptive: bool = False) -> float:
    """Mean over the classes of the calibration error of the class's own probability.

    Args:
        log_probs: Log-probabilities, (n, ..., K).
        labels: Integer labels, (n, ...).
        num_bins: Number of bins of each class.
        adaptive: Bins with the same number of examples instead of the same width.
    """
    log_p, y = _rated(log_probs, labels, num_bins)
    probs = log_p.exp().T.contiguous()
    is_class = (y == torch.arange(len(probs), device=y.device)[:, None]).double()
    if not adaptive:
        return float(ece_of(reliability_of(probs, is_class, num_bins)).mean())
    errors = [float(_error_of_equal_bins(p, hit, num_bins)) for p, hit in zip(probs, is_class, strict=True)]
    return math.fsum(errors) / len(errors)


def _rated(log_probs: Tensor, labels: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    if not isinstance(num_bins, int) or num_bins < 1:
        raise ValueError(f"num_bins must be a positive integer, got {num_bins!r}; write num_bins=20 for the default")
    log_p, y, _ = checked(log_probs, labels, None)
    if not len(y):
        raise ValueError("the metrics need at least one example, got none")
    return log_p, y


def _error_of_equal_bins(confidence: Tensor, correct: Tensor, num_bins: int) -> Tensor:
    """Return the calibration error over bins whose sizes differ by at most one."""
    _, group, size = torch.unique(confidence, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(size), dtype=torch.float64, device=size.device).index_add_(0, group, correct) / size
    order = confidence.argsort()
    gap = (hits[group] - confidence)[order]
    return torch.stack([part.sum().abs() for part in torch.tensor_split(gap, min(num_bins, len(gap)))]).sum() / len(gap)
