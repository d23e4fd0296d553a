"""A Gaussian over the weights with a diagonal covariance.

The posterior of bSAM: q(theta) = prod_j N(theta_j | mu_j, sigma_j^2). With z_j = (theta_j - mu_j) / sigma_j and the
prior p(theta) = prod_j N(theta_j | 0, 1 / delta_j), where delta_j is `prior_precision`,

    log q(theta)  =  sum_j  -1/2 z_j^2 - log sigma_j - 1/2 log(2 pi)
    entropy       =  sum_j  log sigma_j + 1/2 log(2 pi e)
    KL(q || p)    =  sum_j  1/2 (delta_j sigma_j^2 + delta_j mu_j^2 - 1 - log(delta_j sigma_j^2))

The sums are over the elements with sigma_j > 0, in float64. The other elements are fixed: in the limit sigma_j -> 0
each would add an infinite constant.

Weights can be pruned by their signal-to-noise ratio |mu_j| / sigma_j (Graves, 2011, "Practical Variational Inference
for Neural Networks", NeurIPS; Blundell et al., 2015, "Weight Uncertainty in Neural Networks", ICML).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from bsam.files import Settings
from bsam.modules import clean_names, named_buffers, named_parameters
from bsam.posterior.base import (
    Posterior,
    check_generator,
    check_same_layout,
    check_temperature,
    copied,
    copied_mean,
    first_few,
)
from bsam.posterior.base_model import FrozenWeights
from bsam.shards import cut, is_sharded, like, local, name_of_world, sum_parts, true_anywhere
from bsam.torch_private import foreach_add_, foreach_mul_

__all__ = ["DiagonalGaussian"]


class DiagonalGaussian(Posterior):
    """Independent Gaussians, one per weight.

    Args:
        mean: All weights by name, as in `model.named_parameters()`, also frozen ones. They are copied.
        std: Their standard deviations, under the same names; 0 where a weight is not sampled. Stored in float32, or
            in float64 if the mean is float64.
        buffers: The buffers that belong to the mean, as in `model.named_buffers()`.
        prior_precision: Precision of the prior, a Gaussian around 0: one number for all, or one number per name.
            Only `kl` needs it, and only for sampled parameters.
        frozen: Names of parameters that training did not change, for `without_frozen`. By default those that are given
            as `nn.Parameter` without `requires_grad`, and are not sampled.
        base: What is known of further parameters of the model, by name, which are not part of this distribution.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> mean = dict(model.named_parameters())
        >>> posterior = DiagonalGaussian(mean, {name: torch.full_like(p, 0.1) for name, p in mean.items()})
        >>> posterior
        DiagonalGaussian(8 parameters in 2 tensors, 8 sampled, std 0.1 to 0.1)
        >>> generator = torch.Generator().manual_seed(0)
        >>> with posterior.sampled(model, generator):
        ...     prediction = model(torch.ones(3))
    """

    kind: ClassVar[str] = "diagonal_gaussian"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        prior_precision: float | Mapping[str, float] | None = None,
        frozen: Iterable[str] | None = None,
        base: Mapping[str, FrozenWeights] | None = None,
    ) -> None:
        self.mean = copied_mean(mean, base)
        self.std = copied("std", std, base)
        self.buffers = copied("buffers", buffers)
        check_same_layout("std", self.std, self.mean)
        wrong = []
        for name, mu in self.mean.items():
            sigma = cut(self.std[name], mu).to(mu.device, torch.float64 if mu.dtype == torch.float64 else torch.float32)
            self.std[name] = like(mu, sigma)
            wrong.append(~((sigma >= 0) & sigma.isfinite()).all())
        for name, is_wrong in zip(self.mean, true_anywhere(wrong, list(self.mean.values())), strict=True):
            if is_wrong:
                raise ValueError(f"the std of {name} must be finite and >= 0 everywhere. Write 0 for a fixed weight.")
        for name in self.sampled_names:
            if not self.mean[name].is_floating_point():
                raise TypeError(f"{name} is {self.mean[name].dtype}: only floating point weights can have a std > 0.")
        self._note_layout(mean, frozen, base)
        names = clean_names([*mean, *self.base])
        self.prior_precision = by_name(prior_precision, {name: names[name] for name in mean})

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        std: Mapping[Tensor, Tensor],
        *,
        prior_precision: float | Mapping[Tensor, float] | None = None,
    ) -> Self:
        """Make a Gaussian around the present weights of `model`, with its buffers.

        Args:
            model: The model.
            std: The standard deviations of some of its parameters, by parameter. All other parameters are fixed.
            prior_precision: One number, or one number per parameter.
        """
        parameters = named_parameters(model)
        known = set(parameters.values())
        for parameter in std:
            if parameter not in known:
                raise ValueError(
                    f"std has a parameter of shape {tuple(parameter.shape)} that is not in the model: give the model "
                    "that was trained. A copy of it has parameters of its own."
                )
        precision: float | dict[str, float] | None
        if isinstance(prior_precision, Mapping):
            precision = {name: prior_precision[p] for name, p in parameters.items() if p in prior_precision}
        else:
            precision = prior_precision
        return cls(
            parameters,
            {
                name: std[p] if p in std else like(p, torch.zeros(local(p).shape, device=p.device))
                for name, p in parameters.items()
            },
            buffers=named_buffers(model),
            prior_precision=precision,
        )

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw all weights; weights that are not sampled are copies of the mean.

        Args:
            generator: The only source of randomness. It may be on another device than the weights: numbers are drawn
                there and moved.
        """
        check_generator(generator)
        names, theta = self.sampled_names, {}
        if names:
            drawn = [_drawn_like(self.std[name], generator) for name in names]
            # All tensors at once, because on a GPU single launches would take longer than the arithmetic.
            foreach_mul_(drawn, [local(self.std[name]) for name in names])
            foreach_add_(drawn, [local(self.mean[name]) for name in names])
            theta = dict(zip(names, drawn, strict=True))
        return {
            name: like(mean, theta[name].to(mean.dtype)) if name in theta else mean.clone()
            for name, mean in self.mean.items()
        }

    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density of the sampled elements of `sample`; -inf if another element is not at its mean."""
        check_same_layout("a sample", sample, self.mean)
        terms, moved = [], []
        for name, mean in self.mean.items():
            theta, fixed = cut(sample[name], mean).to(mean.device), local(self.std[name]) == 0
            moved.append((theta != local(mean))[fixed].any())
            mu, sigma = self._sampled_elements(name)
            z = (theta[~fixed].double() - mu) / sigma
            terms.append((-0.5 * z.square() - sigma.log() - 0.5 * math.log(2 * math.pi)).sum().cpu())
        if any(true_anywhere(moved, list(self.mean.values()))):
            return torch.tensor(-math.inf, dtype=torch.float64)
        return self._total(list(self.mean), terms)

    def entropy(self) -> Tensor:
        """Return the differential entropy of the sampled elements; -inf if there are none, as for a point."""
        if not self.sampled_names:
            return torch.tensor(-math.inf, dtype=torch.float64)
        terms = []
        for name in self.sampled_names:
            _, sigma = self._sampled_elements(name)
            terms.append((sigma.log() + 0.5 * math.log(2 * math.pi * math.e)).sum().cpu())
        return self._total(self.sampled_names, terms)

    def kl(self) -> Tensor:
        """Return the KL divergence of the sampled elements from the prior."""
        check_prior(self.sampled_names, self.prior_precision)
        terms = []
        for name in self.sampled_names:
            (mu, sigma), delta = self._sampled_elements(name), self.prior_precision[name]
            variance = sigma.square()
            terms.append(0.5 * (delta * variance + delta * mu.square() - 1 - (delta * variance).log()).sum().cpu())
        return self._total(self.sampled_names, terms)

    def temper(self, temperature: float) -> Self:
        """Return the posterior with `temperature` times the variance; 0 gives a point, below 1 a cold posterior."""
        check_temperature(temperature)
        return type(self)(
            self.mean,
            {name: std * math.sqrt(temperature) for name, std in self.std.items()},
            buffers=self.buffers,
            prior_precision=self.prior_precision,
            frozen=self.frozen,
            base=self.base,
        )

    def pruned(self, keep: float, *, by: Literal["signal_to_noise", "magnitude"] = "signal_to_noise") -> Self:
        r"""Return the posterior with the least important weights fixed at 0: mean 0 and std 0.

        All sampled weights are compared with each other, across tensors. Weights with equal numbers are kept in the
        order of `sampled_names`. Weights that are not sampled stay.

        Args:
            keep: The share of the sampled weights that is kept, from 0 to 1; their number is rounded.
            by: `"signal_to_noise"` keeps the largest $\lvert \mu \rvert / \sigma$ (mean over std), `"magnitude"` the
                largest $\lvert \mu \rvert$.
        """
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 <= keep <= 1:
            raise ValueError(f"keep={keep!r} must be a share from 0 to 1, like 0.25 to keep a quarter of the weights.")
        if by not in ("signal_to_noise", "magnitude"):
            raise ValueError(f"by={by!r} must be 'signal_to_noise' or 'magnitude'.")
        if any(is_sharded(mean) for mean in self.mean.values()):
            raise ValueError(
                "a sharded posterior cannot be pruned, because all weights are compared with each other: save it, load "
                "it with bsam.load_posterior(path) in one process, and prune it there."
            )
        if not self.sampled_names:
            raise ValueError("no weight is sampled: there is no signal-to-noise ratio to prune by.")
        found = [self._sampled_elements(name) for name in self.sampled_names]
        scores = torch.cat([(mu.abs() / sigma if by == "signal_to_noise" else mu.abs()).cpu() for mu, sigma in found])
        order = scores.argsort(descending=True, stable=True)
        stays = torch.zeros(len(scores), dtype=torch.bool)
        stays[order[: round(keep * len(scores))]] = True
        mean, std = dict(self.mean), dict(self.std)
        sizes = [len(mu) for mu, _ in found]
        for name, kept in zip(self.sampled_names, torch.split(stays, sizes), strict=True):
            drops = torch.zeros_like(std[name], dtype=torch.bool)
            drops[std[name] > 0] = ~kept.to(drops.device)
            mean[name], std[name] = mean[name].masked_fill(drops, 0), std[name].masked_fill(drops, 0)
        return type(self)(
            mean,
            std,
            buffers=self.buffers,
            prior_precision=self.prior_precision,
            frozen=self.frozen,
            base=self.base,
        )

    def _sampled_elements(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and std of the elements with std > 0, in float64; of a sharded model, of those on this rank."""
        std = local(self.std[name])
        return local(self.mean[name])[std > 0].double(), std[std > 0].double()

    def _total(self, names: Sequence[str], terms: list[Tensor]) -> Tensor:
        """Sum one term per parameter, over all ranks of a sharded model."""
        return sum(sum_parts(terms, [self.mean[name] for name in names]), torch.zeros((), dtype=torch.float64))

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        groups = {"mean": self.mean, "std": self.std, "buffer": self.buffers}
        return groups, {"prior_precision": self.prior_precision, **self._layout_settings()}

    @classmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        return cls(
            groups.get("mean", {}),
            groups.get("std", {}),
            buffers=groups.get("buffer", {}),
            prior_precision=settings["prior_precision"],
            frozen=settings.get("frozen"),
            base=settings.get("base"),
        )

    def __repr__(self) -> str:
        if any(is_sharded(mean) for mean in self.mean.values()):  # one rank alone may print this
            remark = name_of_world(self.mean.values())
            return f"DiagonalGaussian({self.num_parameters} parameters in {len(self.mean)} tensors{remark})"
        sigmas = [self._sampled_elements(name)[1] for name in self.sampled_names]
        low, high = (min(float(s.min()) for s in sigmas), max(float(s.max()) for s in sigmas)) if sigmas else (0, 0)
        return (
            f"DiagonalGaussian({self.num_parameters} parameters in {len(self.mean)} tensors, "
            f"{sum(s.numel() for s in sigmas)} sampled, std {low:.3g} to {high:.3g})"
        )


def _drawn_like(std: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal noise for a tensor; of a sharded one, all ranks draw the whole and keep their parts."""
    noise = torch.randn(std.shape, generator=generator, device=generator.device, dtype=std.dtype)
    return (cut(noise, std).clone() if is_sharded(std) else noise).to(std.device)


def by_name(precision: float | Mapping[str, float] | None, names: Mapping[str, str]) -> dict[str, float]:
    """Return the prior precisions by clean name; `names` maps the names of the mean to clean names."""
    if precision is None:
        return {}
    if not isinstance(precision, Mapping):
        precision = dict.fromkeys(names, precision)
    unknown = [name for name in precision if name not in names]
    if unknown:
        raise ValueError(f"prior_precision has {first_few(unknown)}, which is not in the mean.")
    for name, value in precision.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"prior_precision={value!r} of {name} must be a finite number >= 0.")
    return {names[name]: float(value) for name, value in precision.items()}


def check_prior(sampled_names: list[str], precision: Mapping[str, float]) -> None:
    """Raise unless the KL divergence of the sampled parameters from their prior is finite."""
    if not sampled_names:
        raise ValueError("no weight is sampled: the KL divergence of a point from a prior is infinite.")
    flat = [name for name in sampled_names if not precision.get(name)]
    if flat:
        raise ValueError(
            f"the prior precision of {first_few(flat)} is 0 or not given, and the KL divergence from a flat prior "
            "is infinite: make the posterior with a positive prior_precision. An optimizer takes it from "
            "prior_precision= or weight_decay= of the parameter's group."
        )
