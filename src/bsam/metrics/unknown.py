r"""How well doubt tells unknown inputs, of another kind than the training data, from known ones.

Known examples $i$ and unknown examples $j$ have scores of doubt $s$ (`bsam.metrics.scores`). A threshold $t$ accepts
the examples with $s \le t$. All numbers are exact, with every distinct score as a threshold:

| metric | definition | remark |
|---|---|---|
| AUROC | $P(s_j > s_i) + \frac12 P(s_j = s_i)$ | 0.5 is chance |
| AUPR known | $\sum_t (R_t - R_{t-1}) P_t$, recall $R_t$, precision $P_t$ | known examples are the positives |
| AUPR unknown | the same from the largest score down | unknown examples are the positives |
| FPR at 95% | share of unknown examples with $s_j \le t$ | $t$ is the smallest that accepts 95% of the known examples |

The area under precision and recall is the step-wise sum ("average precision" of scikit-learn); at chance it is the
share of its positives, so it depends on how many examples of each kind there are. FPR at 95% has the known examples as
positives, as Liang et al. (2018) define it; OpenOOD has the unknown ones, which gives another number.

The intervals resample known and unknown examples apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bsam.metrics.bootstrap import Numbers, check_bootstrap, num_times, with_intervals
from bsam.metrics.classes import auroc_of, by_rank
from bsam.metrics.inputs import ClassPredictions, HasPredictions, checked, unpacked
from bsam.metrics.scores import Score, check_score, doubt

__all__ = ["UnknownSummary", "rate_unknown", "two_scores"]

_ACCEPTED = 0.95
"""The share of known examples that must be accepted."""


@dataclass(frozen=True)
class UnknownSummary(Numbers):
    """How well doubt tells unknown from known inputs. `intervals` has (low, high) per metric, or is empty."""

    names: ClassVar[tuple[str, ...]] = ("auroc", "aupr_known", "aupr_unknown", "fpr_95")

    num_examples: int
    """Of both kinds."""
    num_unknown: int
    auroc: float
    aupr_known: float
    aupr_unknown: float
    fpr_95: float
    """The share of unknown inputs that are accepted if 95% of the known ones are: smaller is better."""
    intervals: dict[str, tuple[float, float]]
    level: float


def rate_unknown(
    known: ClassPredictions | Tensor,
    unknown: ClassPredictions | Tensor,
    score: Score = "confidence",
    *,
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> UnknownSummary:
    """Rate how well doubt tells unknown inputs from known ones.

    Args:
        known: Predictions for inputs of the kind of the training data: `bsam.Predictions`, or (log_probs, labels).
            Labels are not used. Or your own scores, a tensor (n,) that is larger where the model doubts more.
        unknown: The same for inputs of another kind.
        score: Which score of doubt to use, see `bsam.metrics.doubt`; not used for your own scores.
        num_bootstrap: Number of resamples; 0 gives no intervals.
        level: Coverage of the intervals.
        seed: Seed of the bootstrap's separate generator.

    Examples:
        >>> print(rate_unknown(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]), num_bootstrap=0))
        5 examples
        auroc          0.8333
        aupr_known     0.9167
        aupr_unknown   0.8333
        fpr_95         0.5000
    """
    check_bootstrap(num_bootstrap, level)
    scores = two_scores(known, unknown, score)
    sizes = [len(part) for part in scores]
    rank = torch.unique(torch.cat(scores), return_inverse=True)[1]
    is_known = torch.arange(sum(sizes), device="cpu") < sizes[0]

    def metrics_of(index: Tensor) -> Tensor:
        times = num_times(index)
        return torch.stack(_numbers(rank, times * is_known, times * ~is_known), dim=-1)

    values, intervals = with_intervals(
        UnknownSummary.names, metrics_of, sizes, sum(sizes), num_bootstrap=num_bootstrap, level=level, seed=seed
    )
    return UnknownSummary(sum(sizes), sizes[1], **values, intervals=intervals, level=level)


def _numbers(rank: Tensor, known: Tensor, unknown: Tensor) -> list[Tensor]:
    """Return the four metrics, from how often each known and each unknown example (..., n) occurs."""
    auroc = auroc_of(rank, unknown, known)
    known, unknown = by_rank(rank, known), by_rank(rank, unknown)
    known_up, unknown_up = known.cumsum(dim=-1), unknown.cumsum(dim=-1)
    num_known, num_unknown = known_up[..., -1:], unknown_up[..., -1:]
    known_down, unknown_down = num_known - known_up + known, num_unknown - unknown_up + unknown
    aupr_known = (known / num_known * known_up / (known_up + unknown_up).clamp(min=1)).sum(dim=-1)
    aupr_unknown = (unknown / num_unknown * unknown_down / (known_down + unknown_down).clamp(min=1)).sum(dim=-1)
    enough = known_up >= _ACCEPTED * num_known - 1e-9
    first = enough.double().argmax(dim=-1, keepdim=True)  # the first of equal maxima
    return [auroc, aupr_known, aupr_unknown, (unknown_up.gather(-1, first) / num_unknown)[..., 0]]


def two_scores(
    known: ClassPredictions | Tensor, unknown: ClassPredictions | Tensor, score: Score
) -> tuple[Tensor, Tensor]:
    """Return the scores of known and of unknown examples, float64 (n,) on the CPU, or raise."""
    check_score(score)
    named = {"known": known, "unknown": unknown}
    if isinstance(known, Tensor) != isinstance(unknown, Tensor):
        raise TypeError("known and unknown must both be predictions, or both be tensors of scores")
    if not isinstance(known, Tensor):
        assert not isinstance(unknown, Tensor)
        sizes = [_num_classes(name, each) for name, each in (("known", known), ("unknown", unknown))]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"known has {sizes[0]} classes, unknown {sizes[1]}; predict both with the same network. Scores of "
                "different networks cannot be compared"
            )
    found = []
    for name, each in named.items():
        values = each.detach().cpu().double() if isinstance(each, Tensor) else doubt(each, score)
        if values.ndim != 1:
            raise ValueError(
                f"{name} must have one score per example, got shape {tuple(values.shape)}; for tokens or pixels give "
                "scores of examples, for example predictions.entropy.mean(dim=1)"
            )
        if not len(values):
            raise ValueError(f"{name} has no examples; both sets need at least one")
        if bool(values.isnan().any()):
            raise ValueError(f"the scores of {name} must be numbers, got NaN; look for inf or NaN in the logits")
        found.append(values)
    return found[0], found[1]


def _num_classes(name: str, predictions: ClassPredictions | HasPredictions) -> int:
    log_probs, _ = unpacked(predictions)
    if not isinstance(log_probs, Tensor) or log_probs.ndim < 2:
        raise ValueError(f"{name} must have log_probs of shape (n, K), or be a tensor (n,) of scores")
    if log_probs.ndim == 2:
        checked(log_probs, torch.zeros(len(log_probs), dtype=torch.int64, device="cpu"), None)
    return log_probs.shape[-1]
