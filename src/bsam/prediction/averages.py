"""Running averages over samples of the weights: probabilities in log space, or moments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bsam.likelihood import check_likelihood, check_outputs
from bsam.prediction.results import entropy

__all__ = ["LOG_PROBS", "Average", "ClassAverage", "average_for", "one_output", "targets_like"]

_LOG_ZERO = torch.tensor(-math.inf, device="cpu")
"""The logarithm of an empty sum: a tensor without dimensions, so that it combines with any type."""


class Average(Protocol):
    """An average over samples, for one batch and its labels."""

    def add(self, outputs: Tensor) -> None:
        """Add the outputs of some samples, (samples, n, ...)."""

    def columns(self) -> dict[str, Tensor | None]:
        """Return the fields of the result that have one row per example."""


class ClassAverage:
    """The mean of probabilities over samples, for one batch, in log space, chunk by chunk."""

    def __init__(self, log_probs: Callable[[Tensor], Tensor], labels: Any) -> None:
        self._log_probs = log_probs
        self._labels = labels
        self._log_sum = _LOG_ZERO
        self._entropy_sum: Tensor | float = 0.0
        self._total = 0.0  # of the weights

    def add(self, outputs: Tensor, weights: Tensor | None = None) -> None:
        """Add the outputs of some samples, (samples, n, ...).

        Each sample has weight 1, or `weights` (samples, n), which sum to 1 for each example.
        """
        log_p = self._log_probs(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
        entropies = entropy(log_p)
        if weights is not None:
            log_p, entropies = log_p + weights.log()[..., None], weights * entropies
        self._log_sum = torch.logaddexp(self._log_sum.to(log_p.device), log_p.logsumexp(dim=0))
        self._entropy_sum = self._entropy_sum + entropies.sum(dim=0)
        self._total += len(outputs) if weights is None else 1

    def columns(self) -> dict[str, Tensor | None]:
        """Return the columns of `Predictions`."""
        log_probs = self._log_sum - math.log(self._total)
        information = entropy(log_probs) - self._entropy_sum / self._total
        labels = None if self._labels is None else _class_labels(self._labels, len(log_probs))
        # Rounding may take the mutual information below 0.
        return {"log_probs": log_probs, "mutual_information": information.clamp(min=0), "labels": labels}


def _categorical(outputs: Tensor) -> Tensor:
    """Map logits (samples, n, K) to log-probabilities."""
    check_outputs("categorical", tuple(outputs.shape[1:]))
    return outputs.log_softmax(dim=-1)


def _bernoulli(outputs: Tensor) -> Tensor:
    """Map logits (samples, n) of class 1 to log-probabilities of both classes."""
    check_outputs("bernoulli", tuple(outputs.shape[1:]))
    logit = one_output(outputs)
    return torch.stack([F.logsigmoid(-logit), F.logsigmoid(logit)], dim=-1)


LOG_PROBS = {"categorical": _categorical, "bernoulli": _bernoulli}


def _class_labels(labels: Any, n: int) -> Tensor:
    given = torch.as_tensor(labels).detach().cpu()
    flat = given.squeeze(1) if given.shape == (n, 1) else given
    if flat.shape != (n,):
        raise ValueError(
            f"labels of shape {tuple(given.shape)} came with outputs for {n} examples: labels must have shape ({n},), "
            "one class number per example. Write one_hot.argmax(dim=1) if each row has a single 1. If rows may have "
            'several (multi-label), predict one label at a time with likelihood="bernoulli", '
            "forward=lambda model, inputs: model(inputs)[:, 0] and labels[:, 0]."
        )
    whole = flat.long()
    if not torch.equal(whole.to(flat.dtype), flat):
        raise ValueError(f"labels must be class numbers 0, 1, ..., not {flat[whole != flat][0].item()}.")
    return whole


class GaussianAverage:
    """Mean and variance of the outputs over samples, for one batch, and the density of the targets."""

    def __init__(self, noise_std: float, targets: Any) -> None:
        self._noise_std = noise_std
        self._targets: Tensor | None = None if targets is None else torch.as_tensor(targets).detach()
        self._mean: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0  # sum of squared distances from the mean
        self._log_sum = _LOG_ZERO
        self._count = 0

    def add(self, outputs: Tensor) -> None:
        check_outputs("gaussian", tuple(outputs.shape[1:]))
        f = one_output(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
        count, total = len(f), self._count + len(f)
        mean, squares = f.mean(dim=0), f.var(dim=0, correction=0) * count
        shift = mean - self._mean  # Chan et al. (1983): merge two sets of samples
        self._mean = self._mean + shift * (count / total)
        self._squares = self._squares + squares + shift.square() * (self._count * count / total)
        self._count = total
        if self._targets is not None:
            self._targets = y = targets_like(self._targets, f[0])
            z = (y - f) / self._noise_std
            log_p = -0.5 * z.square() - math.log(self._noise_std) - 0.5 * math.log(2 * math.pi)
            log_p = log_p.sum(dim=2) if log_p.ndim == 3 else log_p
            self._log_sum = torch.logaddexp(self._log_sum.to(log_p.device), log_p.logsumexp(dim=0))

    def columns(self) -> dict[str, Tensor | None]:
        return {
            "mean": torch.as_tensor(self._mean),
            "epistemic_variance": torch.as_tensor(self._squares / self._count),
            "targets": self._targets,
            "log_density": None if self._targets is None else self._log_sum - math.log(self._count),
        }


def one_output(outputs: Tensor) -> Tensor:
    """Reshape (samples, n, 1) to (samples, n)."""
    return outputs.squeeze(2) if outputs.ndim == 3 and outputs.shape[2] == 1 else outputs


def targets_like(targets: Tensor, f: Tensor) -> Tensor:
    """Return the targets in the type of the outputs (n,) or (n, D); raise unless the shapes are equal."""
    y = targets.to(f.device, f.dtype)
    y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != f.shape:
        raise ValueError(f"targets of shape {tuple(targets.shape)} came with outputs of shape {tuple(f.shape)}.")
    return y


def average_for(likelihood: str, noise_std: float | None) -> Callable[[Any], Average]:
    """Return a function that makes an empty average, given the labels of a batch."""
    check_likelihood(likelihood, noise_std)
    if likelihood == "gaussian":
        assert noise_std is not None
        return functools.partial(GaussianAverage, noise_std)
    return functools.partial(ClassAverage, LOG_PROBS[likelihood])
