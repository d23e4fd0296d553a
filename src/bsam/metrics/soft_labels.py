r"""Probabilities against soft labels: the shares of several people's answers.

The predicted probabilities are $p_{ik}$. The shares $q_{ik}$ sum to 1 for each of $n$ examples.

| metric | formula | remark |
|---|---|---|
| cross-entropy | $-\frac1n \sum_{ik} q_{ik} \log p_{ik}$ | natural logarithm; $0 \log 0 = 0$ |
| KL | $\frac1n \sum_{ik} q_{ik} \log (q_{ik} / p_{ik})$ | the cross-entropy above its smallest value, at $p = q$ |

With one-hot shares the cross-entropy is the NLL. (Peterson et al., 2019, ICCV, have such labels of CIFAR-10.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bsam.metrics.bootstrap import Numbers, check_bootstrap, with_intervals
from bsam.metrics.inputs import ClassPredictions, checked, unpacked

__all__ = ["SoftLabelSummary", "rate_soft_labels"]


@dataclass(frozen=True)
class SoftLabelSummary(Numbers):
    """The distance of probabilities from soft labels. `intervals` has (low, high) per metric, or is empty."""

    names: ClassVar[tuple[str, ...]] = ("cross_entropy", "kl")

    num_examples: int
    cross_entropy: float
    kl: float
    intervals: dict[str, tuple[float, float]]
    level: float


def rate_soft_labels(
    predictions: ClassPredictions | Tensor,
    soft_labels: Tensor,
    *,
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> SoftLabelSummary:
    """Compare predicted probabilities with soft labels.

    Args:
        predictions: `bsam.Predictions` of one label per example, (log_probs, labels), or log-probabilities (n, K)
            alone. Hard labels are not used.
        soft_labels: Shares (n, K) of the same examples in the same order; each row sums to 1.
        num_bootstrap: Number of resamples; 0 gives no intervals.
        level: Coverage of the intervals.
        seed: Seed of the bootstrap's separate generator.

    Examples:
        >>> p = torch.tensor([[0.5, 0.5], [0.8, 0.2]])
        >>> print(rate_soft_labels(p.log(), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), num_bootstrap=0))
        2 examples
        cross_entropy   0.4581
        kl              0.1116
    """
    check_bootstrap(num_bootstrap, level)
    log_probs = predictions if isinstance(predictions, Tensor) else unpacked(predictions)[0]
    for name, value in (("log_probs", log_probs), ("soft_labels", soft_labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; write torch.as_tensor({name})")
    if log_probs.ndim != 2 or soft_labels.shape != log_probs.shape:
        raise ValueError(
            f"soft_labels must have the shape (n, K) of log_probs, got {tuple(soft_labels.shape)} and "
            f"{tuple(log_probs.shape)}; both need the same examples and the same classes"
        )
    log_p, _, _ = checked(log_probs, torch.zeros(len(log_probs), dtype=torch.int64, device="cpu"), None)
    q = soft_labels.detach().cpu().double()
    if not len(q):
        raise ValueError("the metrics need at least one example, got none")
    bad = (~((q >= 0).all(dim=1) & ((q.sum(dim=1) - 1).abs() <= 1e-3))).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"soft_labels must be shares >= 0 that sum to 1, got {q[row].tolist()} in row {row}; write "
            "counts / counts.sum(dim=1, keepdim=True) for counts of answers"
        )
    cross = -torch.where(q > 0, q * log_p, 0.0).sum(dim=1)
    both = torch.stack([cross, cross - torch.special.entr(q).sum(dim=1)])
    values, intervals = with_intervals(
        SoftLabelSummary.names,
        lambda index: both[:, index].mean(dim=-1).T,
        len(q),
        2 * len(q),
        num_bootstrap=num_bootstrap,
        level=level,
        seed=seed,
    )
    return SoftLabelSummary(len(q), **values, intervals=intervals, level=level)
