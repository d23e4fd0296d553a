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
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
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
    """Probabilities of K classes for n examples, on the CPU; `bsam.metrics.summary` rates them."""

    log_probs: Tensor
    """Logarithms of the averaged probabilities, (n, K)."""
    mutual_information: Tensor
    """Information of the weights about the label, in nats, (n,): epistemic uncertainty. 0 if the mean predicts."""
    labels: Tensor | None
    """(n,), or None if the data had none."""
    num_samples: int
    """0: none. The mean of the posterior predicted, or, if linearised, an integral replaced them."""
    seed: int
    computed_by: str = ""
    """`"vmap"`, `"loop"` (with the reason, if vmap failed), `"mean"` or `"linearised"`."""

    kind: ClassVar[str] = "classes"

    def __post_init__(self) -> None:
        _check_shape("log_probs", self.log_probs, (-1, -1))
        _check_shape("mutual_information", self.mutual_information, (len(self),))
        if self.labels is not None:
            _check_shape("labels", self.labels, (len(self),))

    @property
    def probs(self) -> Tensor:
        """The averaged probabilities, (n, K)."""
        return self.log_probs.exp()

    @property
    def classes(self) -> Tensor:
        """The most probable class of each example, (n,)."""
        return self.log_probs.argmax(dim=1)

    @property
    def entropy(self) -> Tensor:
        """The entropy of the averaged probabilities, in nats, (n,): total uncertainty."""
        return entropy(self.log_probs)

    def __len__(self) -> int:
        return len(self.log_probs)

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else "with labels"
        return (
            f"Predictions({len(self)} examples, {self.log_probs.shape[1]} classes, {labels}, "
            f"num_samples={self.num_samples}, seed={self.seed}, computed_by={self.computed_by!r})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPredictions(_Saved):
    """Real outputs for n examples, on the CPU; a model with one output, (n,) or (n, 1), gives (n,)."""

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
    """0: none. The mean of the posterior predicted, or, if linearised, an integral replaced them."""
    seed: int
    computed_by: str = ""
    """`"vmap"`, `"loop"` (with the reason, if vmap failed), `"mean"` or `"linearised"`."""

    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check_shape("mean", self.mean, (-1,) if isinstance(self.mean, Tensor) and self.mean.ndim == 1 else (-1, -1))
        _check_shape("epistemic_variance", self.epistemic_variance, tuple(self.mean.shape))
        if self.targets is not None:
            _check_shape("targets", self.targets, tuple(self.mean.shape))
        if self.log_density is not None:
            _check_shape("log_density", self.log_density, (len(self),))

    @property
    def variance(self) -> Tensor:
        """The variance of a measurement: epistemic variance plus noise_std squared."""
        return self.epistemic_variance + self.noise_std**2

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        targets = "no targets" if self.targets is None else "with targets"
        return (
            f"GaussianPredictions({len(self)} examples, {targets}, noise_std={self.noise_std}, "
            f"num_samples={self.num_samples}, seed={self.seed}, computed_by={self.computed_by!r})"
        )


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise unless `value` is a tensor of `shape`, in which -1 stands for any length."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}: it must be a tensor.")
    if value.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, value.shape, strict=True)):
        wanted = tuple("any" if want == -1 else want for want in shape)
        raise ValueError(f"{name} has shape {tuple(value.shape)}: it must have {wanted}.")
