"""Running averages over samples of the weights: probabilities in log space, or moments."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bsam.batches import as_tensor
from bsam.executor import callers_level
from bsam.likelihood import check_likelihood, check_outputs, class_dimension
from bsam.prediction.results import entropy

__all__ = ["Average", "ClassAverage", "average_for", "one_output", "targets_like"]


class Average(Protocol):
    """An average over samples, for one batch and its labels."""

    def add(self, outputs: Tensor, weights: Sequence[float] | None = None) -> None:
        """Add the outputs of some samples, (samples, n, ...).

        All samples count the same, or each its share in `weights`: those of all samples sum to 1.
        """

    def columns(self) -> dict[str, Tensor | None]:
        """Return the fields of the result that have one row per example."""


class ClassAverage:
    """The mean of probabilities over samples, for one batch, in log space, chunk by chunk.

    Args:
        likelihood: `"categorical"` or `"bernoulli"`.
        labels: The labels of the batch, or None. They are checked against the first outputs.
        class_dim: The dimension of the outputs (n, ...) that has the classes, see `class_dimension`.
        keep_samples: Whether to return the log-probabilities of each sample too.
    """

    def __init__(
        self, likelihood: str, labels: Any, *, class_dim: int | None = None, keep_samples: bool = False
    ) -> None:
        self._likelihood, self._class_dim = likelihood, class_dim
        self._labels = None if labels is None else as_tensor(labels).detach().cpu()
        self._samples: list[Tensor] | None = [] if keep_samples else None
        self._log_sum: Tensor | None = None
        self._entropy_sum: Tensor | float = 0.0
        self._energy_sum: Tensor | float = 0.0
        self._count = 0  # of the samples that all count the same

    def add(self, outputs: Tensor, weights: Sequence[float] | Tensor | None = None) -> None:
        """Add the outputs of some samples, (samples, n, ...).

        All samples count the same, or each its share in `weights`, also as a tensor (samples, n): those of all samples
        sum to 1, for each example.
        """
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        log_p = self._log_probs(outputs)
        if self._log_sum is None and self._likelihood == "categorical" and not torch.compiler.is_compiling():
            _warn_of_probabilities(outputs[0].movedim(class_dimension(tuple(outputs.shape[1:]), self._class_dim), -1))
        if self._log_sum is None and self._labels is not None:
            self._labels = _class_labels(self._labels, log_p[0], tuple(outputs.shape[1:]), self._likelihood)
        if self._samples is not None:
            self._samples.append(log_p.cpu())
        entropies, energies = entropy(log_p), self._energies(outputs)
        if weights is not None:
            shares = torch.as_tensor(weights, dtype=log_p.dtype, device=log_p.device)
            shares = shares.reshape(*shares.shape, *[1] * (entropies.ndim - shares.ndim))
            log_p, entropies, energies = log_p + shares.log()[..., None], shares * entropies, shares * energies
        log_sum = log_p.logsumexp(dim=0)
        self._log_sum = log_sum if self._log_sum is None else torch.logaddexp(self._log_sum, log_sum)
        self._entropy_sum = self._entropy_sum + entropies.sum(dim=0)
        self._energy_sum = self._energy_sum + energies.sum(dim=0)
        self._count += len(outputs) if weights is None else 0

    def columns(self) -> dict[str, Tensor | None]:
        """Return the columns of `Predictions`."""
        assert self._log_sum is not None
        total = self._count or 1
        log_probs = self._log_sum - math.log(total)
        information = entropy(log_probs) - self._entropy_sum / total
        return {
            "log_probs": log_probs,
            "mutual_information": information.clamp(min=0),  # rounding may take it below 0
            "labels": self._labels,
            "sample_log_probs": None if self._samples is None else torch.cat(self._samples).movedim(0, 1),
            "energy": torch.as_tensor(self._energy_sum / total) if self._likelihood == "categorical" else None,
        }

    def _energies(self, outputs: Tensor) -> Tensor:
        """Return -logsumexp of the logits (samples, n, ...) over the classes; zeros for yes/no questions."""
        if self._likelihood != "categorical":
            return outputs.new_zeros(())
        return -outputs.logsumexp(dim=1 + class_dimension(tuple(outputs.shape[1:]), self._class_dim))

    def _log_probs(self, outputs: Tensor) -> Tensor:
        """Map logits (samples, n, ...) to log-probabilities, with the classes in the last dimension."""
        if self._likelihood == "categorical":
            dim = class_dimension(tuple(outputs.shape[1:]), self._class_dim)
            return outputs.movedim(1 + dim, -1).log_softmax(dim=-1)
        logit = one_output(outputs)  # of class 1, the other has the logit 0
        return torch.stack([F.logsigmoid(-logit), F.logsigmoid(logit)], dim=-1)


def _warn_of_probabilities(outputs: Tensor) -> None:
    """Warn if outputs (n, ..., K) that should be logits are probabilities: their softmax would be nearly uniform."""
    if outputs.shape[-1] > 1 and bool((outputs >= 0).all() & ((outputs.sum(dim=-1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            "the outputs of the model are probabilities, but logits are needed: leave the softmax at its end out, or "
            "write forward=lambda model, inputs: model(inputs).log().",
            stacklevel=callers_level(),
        )


def _class_labels(labels: Tensor, log_probs: Tensor, outputs: tuple[int, ...], likelihood: str) -> Tensor:
    """Return the labels as whole numbers; raise unless there is one for each row of log_probs (n, ..., K)."""
    wanted = tuple(log_probs.shape[:-1])
    given = tuple(labels.shape)
    flat = labels.squeeze(1) if given == (wanted[0], 1, *wanted[1:]) else labels
    if flat.shape != wanted:
        raise ValueError(_why_not(given, wanted, outputs, likelihood))
    whole = flat.long()
    if not torch.equal(whole.to(flat.dtype), flat):
        raise ValueError(f"labels must be class numbers 0, 1, ..., not {flat[whole != flat][0].item()}.")
    return whole


def _why_not(given: tuple[int, ...], wanted: tuple[int, ...], outputs: tuple[int, ...], likelihood: str) -> str:
    """Say why labels of shape `given` do not go with outputs, and what to write."""
    n = outputs[0]
    if likelihood == "bernoulli":
        return (
            f'labels of shape {given} came with outputs of shape {outputs}: with likelihood="bernoulli" each output '
            f"answers a yes/no question of its own, so labels must have shape {wanted}, of 0 and 1. Write "
            'likelihood="categorical" if each example has one of K classes.'
        )
    if len(wanted) == 1:
        return (
            f"labels of shape {given} came with outputs for {n} examples: labels must have shape ({n},), "
            "one class number per example. Write one_hot.argmax(dim=1) if each row has a single 1. If rows may have "
            'several (multi-label), write likelihood="bernoulli".'
        )
    said = f"labels of shape {given} came with outputs of shape {outputs}: labels must have shape {wanted}"
    others = [dim for dim in range(1, len(outputs)) if (*outputs[:dim], *outputs[dim + 1 :]) == given]
    if others:
        return f"{said} if the classes are in the default dimension. Write class_dim={others[0]} to say where they are."
    return f"{said}, one class number per position. Write one_hot.argmax(dim=...) over the classes if they are one-hot."


class GaussianAverage:
    """Mean and variance of the outputs over samples, for one batch, and the density of the targets.

    Args:
        noise_std: Standard deviation of the targets around the outputs.
        targets: The targets of the batch, or None. They are checked against the first outputs.
        keep_samples: Whether to return the outputs of each sample too.
    """

    def __init__(self, noise_std: float, targets: Any, *, keep_samples: bool = False) -> None:
        self._noise_std = noise_std
        self._targets: Tensor | None = None if targets is None else as_tensor(targets).detach()
        self._samples: list[Tensor] | None = [] if keep_samples else None
        self._mean: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0  # sum of squared distances from the mean
        self._log_sum: Tensor | None = None
        self._below: Tensor | float = 0.0  # sum of the probabilities of a smaller target
        self._total = 0.0  # of the samples, or of their shares

    def add(self, outputs: Tensor, weights: Sequence[float] | None = None) -> None:
        check_outputs("gaussian", tuple(outputs.shape[1:]))
        f = one_output(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
        if self._targets is not None and self._total == 0:
            self._targets = targets_like(self._targets, f[0])
        if self._samples is not None:
            self._samples.append(f.cpu())
        if weights is None:
            shares, added = f.new_ones(()), float(len(f))
            mean, squares = f.mean(dim=0), f.var(dim=0, correction=0) * added
        else:
            shares, added = f.new_tensor(weights).reshape(-1, *[1] * (f.ndim - 1)), math.fsum(weights)
            mean = (shares * f).sum(dim=0) / added
            squares = (shares * (f - mean).square()).sum(dim=0)
        total = self._total + added
        shift = mean - self._mean  # Chan et al. (1983): merge two sets of samples
        self._mean = self._mean + shift * (added / total)
        self._squares = self._squares + squares + shift.square() * (self._total * added / total)
        self._total = total
        if self._targets is not None:
            z = (self._targets - f) / self._noise_std
            log_p = -0.5 * z.square() - math.log(self._noise_std) - 0.5 * math.log(2 * math.pi)
            log_p = log_p.sum(dim=2) if log_p.ndim == 3 else log_p
            log_sum = (log_p + shares.log().reshape(-1, 1)).logsumexp(dim=0)
            self._log_sum = log_sum if self._log_sum is None else torch.logaddexp(self._log_sum, log_sum)
            self._below = self._below + (shares * torch.special.ndtr(z)).sum(dim=0)

    def columns(self) -> dict[str, Tensor | None]:
        return {
            "mean": torch.as_tensor(self._mean),
            "epistemic_variance": torch.as_tensor(self._squares / self._total),
            "targets": self._targets,
            "log_density": None if self._log_sum is None else self._log_sum - math.log(self._total),
            "cdf": None if self._log_sum is None else torch.as_tensor(self._below / self._total),
            "sample_means": None if self._samples is None else torch.cat(self._samples).movedim(0, 1),
        }


def one_output(outputs: Tensor) -> Tensor:
    """Drop a dimension of one output: reshape (samples, n, 1, ...) to (samples, n, ...)."""
    return outputs.squeeze(2) if outputs.ndim >= 3 and outputs.shape[2] == 1 else outputs


def targets_like(targets: Tensor, f: Tensor) -> Tensor:
    """Return the targets in the type of the outputs (n,) or (n, D); raise unless the shapes are equal."""
    y = targets.to(f.device, f.dtype)
    y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != f.shape:
        raise ValueError(f"targets of shape {tuple(targets.shape)} came with outputs of shape {tuple(f.shape)}.")
    return y


def average_for(
    likelihood: str, noise_std: float | None, *, class_dim: int | None = None, keep_samples: bool = False
) -> Callable[[Any], Average]:
    """Return a function that makes an empty average, given the labels of a batch."""
    check_likelihood(likelihood, noise_std)
    if class_dim is not None and (likelihood != "categorical" or isinstance(class_dim, bool)):
        raise ValueError(f'class_dim={class_dim!r} is only for likelihood="categorical", not {likelihood!r}.')
    if likelihood == "gaussian":
        assert noise_std is not None
        return functools.partial(GaussianAverage, noise_std, keep_samples=keep_samples)
    return functools.partial(ClassAverage, likelihood, class_dim=class_dim, keep_samples=keep_samples)
