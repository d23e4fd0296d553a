r"""Scores of doubt: one number per prediction that is larger where the prediction should be trusted less.

| score | formula | meaning |
|---|---|---|
| `"confidence"` | $1 - \max_k p_k$ | the probability of an error, as predicted |
| `"entropy"` | $H[p] = -\sum_k p_k \log p_k$ | total uncertainty, in nats |
| `"mutual_information"` | $H[p]$ minus the mean of $H[p_s]$ | disagreement of the samples (epistemic), in nats |
| `"energy"` | the mean of $-\log \sum_k \exp f_{sk}$ | energy of the logits, Liu et al. (2020), NeurIPS |

Here $p$ is the mean of the probabilities $p_s$ over samples $s$ of the weights, and $f_s$ are the logits of a sample.

The first two need probabilities alone. The mutual information is in `bsam.Predictions`, and 0 everywhere if no weight
is sampled. The energy needs logits, because probabilities do not change if a constant is added to all logits:
`bsam.predict` computes it for `likelihood="categorical"`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bsam.metrics.inputs import ClassPredictions, check_normalised, unpacked

__all__ = ["Score", "doubt"]

Score = Literal["confidence", "entropy", "mutual_information", "energy"]
"""The name of a score of doubt."""


def doubt(predictions: ClassPredictions, score: Score = "confidence") -> Tensor:
    """Return a score per label, (n, ...) in float64 on the CPU: larger where a prediction should be trusted less.

    Args:
        predictions: `bsam.Predictions`, or another object with `.log_probs` (n, ..., K), or the tuple (log_probs,
            labels). The labels are not used. The score is NaN where log_probs is NaN, as at padded positions.
        score: `"confidence"`, `"entropy"`, `"mutual_information"` or `"energy"`; see above.

    Examples:
        >>> p = torch.tensor([[0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
        >>> doubt((p.log(), torch.tensor([0, 0])))
        tensor([0.1000, 0.5000], dtype=torch.float64)
    """
    check_score(score)
    log_probs, _ = unpacked(predictions)
    if not isinstance(log_probs, Tensor):
        raise TypeError(f"log_probs must be a tensor, got {type(log_probs).__name__}")
    if log_probs.ndim < 2 or log_probs.shape[-1] < 2:
        raise ValueError(f"log_probs must have shape (n, ..., K) with K >= 2 classes, got {tuple(log_probs.shape)}")
    log_p = log_probs.detach().cpu().double()
    check_normalised(log_p.flatten(0, -2), lambda i: f"row {i}")  # probabilities or logits would be taken for no doubt
    if score == "confidence":
        return -torch.expm1(log_p.max(dim=-1).values)
    if score == "entropy":
        terms: Tensor = torch.special.entr(log_p.exp())
        return terms.sum(dim=-1)
    found: Any = getattr(predictions, score, None)
    if found is None:
        raise ValueError(f"the predictions have no {score}. {_CURES[score]}")
    values: Tensor = found.detach().cpu().double()
    if values.shape != log_p.shape[:-1]:
        raise ValueError(f"{score} has shape {tuple(values.shape)}: it must have {tuple(log_p.shape[:-1])}")
    return values


def check_score(score: str) -> None:
    """Accept the names of scores."""
    if score not in get_args(Score):
        raise ValueError(f"score={score!r} must be one of {', '.join(get_args(Score))}")


_CURES = {
    "mutual_information": "Give the result of bsam.predict, which has it.",
    "energy": (
        "It needs logits: give the result of bsam.predict with likelihood='categorical'. Predictions of yes/no "
        "questions, files of earlier versions, and log-probabilities alone do not have it."
    ),
}
