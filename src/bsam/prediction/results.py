"""The results of `predict`: one row per example, on the CPU, and their files."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bsam.files import naming, read_file, write_file

__all__ = ["GaussianPredictions", "Predictions", "entropy"]


def entropy(log_p: Tensor) -> Tensor:
    """The entropy of probabilities along the last dimension, in nats."""
    terms: Tensor = torch.special.entr(log_p.exp())  # -p log p, and 0 at p = 0
    return terms.sum(dim=-1)


class _Saved:
    """Saves and loads a dataclass of tensors and plain values."""

    kind: ClassVar[str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one safetensors file; a file at `path` is replaced completely or not at all."""
        found = [(field, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        values = {field.name: value for field, value in found if isinstance(value, Tensor) or value != field.default}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        settings = {name: value for name, value in values.items() if name not in tensors}
        write_file(path, tensors, format="bsam.predictions", kind=self.kind, settings=settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote."""
        _, tensors, settings = read_file(path, format="bsam.predictions", kinds=(cls.kind,))
        with naming(path):
            return cls(**{name: tensor.clone() for name, tensor in tensors.items()}, **settings)


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(_Saved):
    """Probabilities of K classes for n examples, on the CPU; `bsam.metrics.summary` rates them.

    An example has one label, or one at each of several positions: T tokens, H × W pixels, or the questions of a
    multi-label problem, each with two classes. The classes are always in the last dimension.
    """

    log_probs: Tensor
    """Logarithms of the averaged probabilities: (n, K), (n, T, K) for tokens, (n, H, W, K) for pixels, (n, L, 2) for L
    questions. NaN at positions that only longer examples of other batches have."""
    mutual_information: Tensor
    """Information of the weights about each label, in nats, (n, ...): epistemic uncertainty. 0 if the mean predicts."""
    labels: Tensor | None
    """(n, ...), or None if the data had none."""
    num_samples: int
    """0: none. The mean of the posterior predicted (of a mixture, that of each part), or, if linearised, an integral
    replaced them."""
    seed: int
    computed_by: str = ""
    """`"vmap"`, `"loop"` (with the reason, if vmap failed), `"mean"` or `"linearised"`."""
    ignore_index: int = -100
    """The label that is not rated: of padding, or positions without a label."""
    sample_log_probs: Tensor | None = None
    """Logarithms of the probabilities of each sample, (num_samples, n, ..., K), if `keep_samples=True`. If no weight is
    sampled, there is one: the mean's, or one per part of a mixture."""
    sample_weights: Tensor | None = None
    """What each of these samples counts in the averages, (num_samples,); None if all count the same."""
    energy: Tensor | None = None
    r"""$-\log \sum_k \exp f_k$ of the logits $f$, (n, ...), averaged over the samples: larger for inputs that look
    unknown. None for yes/no questions, whose one logit has no such sum, and in a file of an earlier version."""

    kind: ClassVar[str] = "classes"

    def __post_init__(self) -> None:
        shape = tuple(self.log_probs.shape) if isinstance(self.log_probs, Tensor) else ()
        _check_shape("log_probs", self.log_probs, (-1,) * max(2, len(shape)))
        _check_shape("mutual_information", self.mutual_information, shape[:-1])
        if self.labels is not None:
            _check_shape("labels", self.labels, shape[:-1])
        if self.sample_log_probs is not None:
            _check_shape("sample_log_probs", self.sample_log_probs, (-1, *shape))
        _check_sample_weights(self.sample_weights, self.sample_log_probs)
        if self.energy is not None:
            _check_shape("energy", self.energy, shape[:-1])

    @property
    def probs(self) -> Tensor:
        """The averaged probabilities, (n, ..., K). `probs[..., 1]` are those of yes, for yes/no questions."""
        return self.log_probs.exp()

    @property
    def classes(self) -> Tensor:
        """The most probable class of each label, (n, ...)."""
        return self.log_probs.argmax(dim=-1)

    @property
    def entropy(self) -> Tensor:
        """The entropy of the averaged probabilities, in nats, (n, ...): total uncertainty."""
        return entropy(self.log_probs)

    @property
    def sample_probs(self) -> Tensor | None:
        """The probabilities of each sample, (num_samples, n, ..., K), if `keep_samples=True`."""
        return None if self.sample_log_probs is None else self.sample_log_probs.exp()

    def __len__(self) -> int:
        return len(self.log_probs)

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else "with labels"
        positions = " x ".join(map(str, self.log_probs.shape[1:-1]))
        return (
            f"Predictions({len(self)} examples{f' of {positions} positions' if positions else ''}, "
            f"{self.log_probs.shape[-1]} classes, {labels}, "
            f"num_samples={self.num_samples}, seed={self.seed}, computed_by={self.computed_by!r})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPredictions(_Saved):
    """Real outputs for n examples, on the CPU; a model with one output, (n,) or (n, 1), gives (n,).

    `bsam.metrics.summary` rates them.
    """

    mean: Tensor
    """The average output, (n,) or (n, D)."""
    epistemic_variance: Tensor
    """The variance of the output over the samples, of the same shape."""
    noise_std: float
    """The standard deviation of a measurement around the true output."""
    targets: Tensor | None
    """Of the same shape, or None if the data had none."""
    log_density: Tensor | None
    """The log-density of the mixture at each target, (n,), summed over the D outputs of an example."""
    num_samples: int
    """0: none. The mean of the posterior predicted (of a mixture, that of each part), or, if linearised, an integral
    replaced them."""
    seed: int
    computed_by: str = ""
    """`"vmap"`, `"loop"` (with the reason, if vmap failed), `"mean"` or `"linearised"`."""

    cdf: Tensor | None = None
    """The predicted probability of a smaller target, of the shape of the targets: uniform between 0 and 1 if the
    predictions are calibrated. None if there are no targets, or in a file of an earlier version."""
    sample_means: Tensor | None = None
    """The output of each sample, (num_samples, n) or (num_samples, n, D), if `keep_samples=True`. If no weight is
    sampled, there is one: the mean's, or one per part of a mixture."""
    sample_weights: Tensor | None = None
    """What each of these samples counts in the averages, (num_samples,); None if all count the same."""

    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check_shape("mean", self.mean, (-1,) if isinstance(self.mean, Tensor) and self.mean.ndim == 1 else (-1, -1))
        _check_shape("epistemic_variance", self.epistemic_variance, tuple(self.mean.shape))
        for name in ("targets", "cdf"):
            if getattr(self, name) is not None:
                _check_shape(name, getattr(self, name), tuple(self.mean.shape))
        if self.sample_means is not None:
            _check_shape("sample_means", self.sample_means, (-1, *self.mean.shape))
        _check_sample_weights(self.sample_weights, self.sample_means)
        if self.log_density is not None:
            _check_shape("log_density", self.log_density, (len(self),))

    @property
    def variance(self) -> Tensor:
        """The variance of a measurement: epistemic variance plus the square of `noise_std`."""
        return self.epistemic_variance + self.noise_std**2

    @property
    def std(self) -> Tensor:
        """The standard deviation of a measurement."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval that holds a measurement with this probability, by output.

        It is that of the average over the samples if `keep_samples=True`, and otherwise that of a Gaussian with its
        mean and variance.
        """
        if not 0 < level < 1:
            raise ValueError(f"level={level} must lie between 0 and 1, like 0.95.")
        tails = [(1 - level) / 2, (1 + level) / 2]
        if self.sample_means is None:
            low, high = torch.special.ndtri(torch.tensor(tails, dtype=torch.float64)).tolist()
            return self.mean + low * self.std, self.mean + high * self.std
        low, high = (self._quantile(tail) for tail in tails)
        return low, high

    def _quantile(self, probability: float) -> Tensor:
        """Return a quantile of the average over the samples, by bisection."""
        assert self.sample_means is not None
        f = self.sample_means.double()
        shares = f.new_full((len(f),), 1 / len(f)) if self.sample_weights is None else self.sample_weights.double()
        shares = shares.reshape(-1, *[1] * (f.ndim - 1))
        z = float(torch.special.ndtri(torch.tensor(probability, dtype=torch.float64))) * self.noise_std
        below, above = f.amin(dim=0) + z, f.amax(dim=0) + z  # the quantiles of the samples lie between these
        for _ in range(60):
            middle = (below + above) / 2
            is_below = (shares * torch.special.ndtr((middle - f) / self.noise_std)).sum(dim=0) < probability
            below, above = torch.where(is_below, middle, below), torch.where(is_below, above, middle)
        return ((below + above) / 2).to(self.mean.dtype)

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        targets = "no targets" if self.targets is None else "with targets"
        return (
            f"GaussianPredictions({len(self)} examples, {targets}, noise_std={self.noise_std}, "
            f"num_samples={self.num_samples}, seed={self.seed}, computed_by={self.computed_by!r})"
        )


def _check_sample_weights(weights: Tensor | None, samples: Tensor | None) -> None:
    if weights is not None:
        _check_shape("sample_weights", weights, (0 if samples is None else len(samples),))


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise unless `value` is a tensor of `shape`, in which -1 stands for any length."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}: it must be a tensor.")
    if value.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, value.shape, strict=True)):
        wanted = tuple("any" if want == -1 else want for want in shape)
        raise ValueError(f"{name} has shape {tuple(value.shape)}: it must have {wanted}.")
