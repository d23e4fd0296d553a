"""Checks what the metrics are given: predictions of classes, and their labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ClassPredictions", "HasPredictions", "check_normalised", "checked", "labelled", "unpacked"]


class HasPredictions(Protocol):
    """Predictions of classes, such as `bsam.Predictions`."""

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities, (n, ..., K)."""

    @property
    def labels(self) -> Tensor | None:
        """Labels, (n, ...)."""


ClassPredictions = HasPredictions | tuple[Tensor, Tensor]
"""Log-probabilities (n, ..., K) and labels (n, ...), as an object that has them or as a tuple."""


def unpacked(predictions: ClassPredictions) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and labels, or raise a TypeError."""
    match predictions:
        case (log_probs, labels):
            pass
        case object(log_probs=log_probs, labels=labels):
            pass
        case _:
            raise TypeError(
                "predictions must have .log_probs and .labels, or be the tuple of the two, "
                f"got {type(predictions).__name__}; write (log_probs, labels)"
            )
    return log_probs, labels


def labelled(predictions: ClassPredictions) -> tuple[Tensor, Tensor, int | None]:
    """Return log-probabilities, labels and the number of labels that are not rated, or raise if there are no labels."""
    log_probs, labels = unpacked(predictions)
    if labels is None:
        raise ValueError("the predictions have no labels, which the metrics need; predict on (inputs, labels)")
    return log_probs, labels, getattr(predictions, "ignore_index", None)


def check_normalised(log_p: Tensor, place: Callable[[int], str]) -> None:
    """Raise if the probabilities of a row of (N, K) do not sum to 1; rows with NaN are left to the caller."""
    log_total = log_p.logsumexp(dim=1)
    bad = (log_total.abs() > 1e-3).nonzero()  # NaN is not
    if len(bad):
        row = int(bad[0])
        probabilities = log_p.min() >= 0 and log_p.max() <= 1
        cure = "probs.log() for probabilities" if probabilities else "log_softmax(logits.float(), dim=1)"
        raise ValueError(
            "log_probs must be normalised, |logsumexp| <= 1e-3 in every row, "
            f"got logsumexp = {log_total[row]:.4g} in {place(row)}; write {cure}"
        )


def checked(log_probs: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (N, K) and labels (N,) without the ignored ones, and how many each example has.

    They are float64 and int64 on the CPU. Raises an error that says what to write instead.
    """
    for name, value in (("log_probs", log_probs), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; write torch.as_tensor({name})")
    if log_probs.ndim < 2:
        raise ValueError(
            f"log_probs must have shape (n, K), got {tuple(log_probs.shape)}; "
            "write log_probs.reshape(-1, K) for K classes"
        )
    shape, num_classes = tuple(log_probs.shape[:-1]), log_probs.shape[-1]
    if num_classes < 2:
        raise ValueError(
            f"log_probs must have at least 2 classes, got {num_classes}; for one logit of a yes/no question "
            "write log_softmax(torch.cat([torch.zeros_like(logit), logit], dim=1), dim=1)"
        )
    if labels.shape != shape:
        cure = "write log_probs.movedim(1, -1) if the classes are in dimension 1"
        if len(shape) == 1:
            cure = (
                "write one_hot.argmax(dim=1) if each row has a single 1; if rows may have several (multi-label), give "
                "log_probs of shape (n, L, 2), as bsam.predict makes them"
            )
        raise ValueError(f"labels must have shape {shape}, one per row of log_probs, got {tuple(labels.shape)}; {cure}")
    if not log_probs.is_floating_point():
        raise TypeError(f"log_probs must be floating point, got {log_probs.dtype}; apply log_softmax to logits")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers, got {labels.dtype}; write labels.long()")
    all_labels = labels.detach().cpu().long()
    rated = torch.ones_like(all_labels, dtype=torch.bool) if ignore_index is None else all_labels != ignore_index
    log_p, y = log_probs.detach().cpu().double()[rated].contiguous(), all_labels[rated]

    def place(i: int) -> str:
        where = rated.nonzero()[i].tolist()
        return f"row {where[0]}" if len(where) == 1 else f"position {where}"

    bad = (~(log_p < torch.inf)).nonzero()  # NaN is not below inf
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"log_probs must be numbers below inf (-inf, probability 0, is fine), got {log_p[row, column]:g} "
            f"in {place(row)}, column {column}; look for inf or NaN in the logits given to log_softmax"
        )
    check_normalised(log_p, place)
    bad = ((y < 0) | (y >= num_classes)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"labels must lie in 0..{num_classes - 1}, got {y[row]} in {place(row)}; renumber the classes, or drop the "
            f"labels that mean nothing: write ignore_index={y[row]} in summary, Metrics or bsam.predict"
        )
    return log_p, y, rated.flatten(1).sum(dim=1) if rated.ndim > 1 else rated.long()
