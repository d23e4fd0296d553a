r"""A mixture of posteriors: several runs as one distribution.

An ensemble of networks is a posterior too: with parts q_1 .. q_M, one per run, and weights w_1 .. w_M that sum to 1,

    q(theta)  =  sum_m w_m q_m(theta)

A deep ensemble is a mixture of points (Lakshminarayanan, Pritzel and Blundell, 2017, NeurIPS); mixtures of Gaussians
are MultiSWAG (Wilson and Izmailov, 2020, NeurIPS) and ensembles of bSAM, VOGN or IVON. The moments are

    mean      =  sum_m w_m mean_m
    variance  =  sum_m w_m (variance_m + (mean_m - mean)^2)

`bsam.predict` does not draw the part at random. Part m has a fixed number n_m of samples, each of which counts
w_m / n_m in the average. This has the same expectation as random parts, and less noise. A part that is a point has
n_m = 1. Every other part has one sample, and each further sample goes to the part with the largest w_m / (n_m + 1/2)
(Webster's method of apportionment): with equal weights, the numbers differ by at most one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn

from bsam.files import Settings
from bsam.posterior.base import Posterior, check_generator, check_same_layout, check_temperature, from_contents
from bsam.posterior.base_model import Rename
from bsam.posterior.diagonal import DiagonalGaussian
from bsam.posterior.point import PointMass
from bsam.posterior.swag import LowRankGaussian

__all__ = ["PART_KINDS", "Mixture"]

PART_KINDS: tuple[type[Posterior], ...] = (DiagonalGaussian, LowRankGaussian, PointMass)
"""The kinds of parts that a file may have."""


class Mixture(Posterior):
    """A mixture of posteriors of one model, such as those of several runs: an ensemble.

    Each part keeps its own buffers: with BatchNorm, `sampled` and `bsam.predict` use the running statistics of the part
    that a sample comes from.

    Args:
        parts: The posteriors, of any kind, on one device. The parts of a part that is a mixture become parts of this
            one.
        weights: The probabilities of the parts, > 0, as numbers, an array or a tensor; they are divided by their sum.
            By default all are equal.

    Examples:
        >>> runs = [nn.Linear(4, 3) for seed in range(5)]
        >>> ensemble = Mixture([PointMass.from_model(model) for model in runs])
        >>> ensemble
        Mixture(5 parts of 15 parameters: 5 PointMass)
    """

    kind: ClassVar[str] = "mixture"

    def __init__(
        self, parts: Iterable[Posterior], weights: Iterable[float] | Tensor | np.ndarray | None = None
    ) -> None:
        if not isinstance(parts, Iterable):
            raise TypeError(f"parts is of type {type(parts).__name__}: write Mixture([posterior, ...]).")
        given = list(parts)
        for i, part in enumerate(given):
            if Posterior not in type(part).__mro__:  # a protocol cannot be asked by isinstance
                raise TypeError(f"part {i} is of type {type(part).__name__}: it must be a posterior.")
        if not given:
            raise ValueError("parts is empty: a mixture needs at least one posterior.")
        shares = _checked_weights(weights, len(given))
        self._parts = tuple(part for outer in given for part in outer.parts)
        self._weights = tuple(
            share * weight for outer, share in zip(given, shares, strict=True) for weight in outer.weights
        )
        for i, part in enumerate(self._parts[1:], 1):
            _check_alike(i, part, self._parts[0])
        first = self._parts[0]
        self.buffers: dict[str, Tensor] = {}
        self.frozen = frozenset.intersection(*(part.frozen for part in self._parts)) - set(self.sampled_names)
        self.base = first.base

    @property
    def parts(self) -> tuple[Posterior, ...]:
        """The parts, none of which is a mixture."""
        return self._parts

    @property
    def weights(self) -> tuple[float, ...]:
        """The probabilities of the parts; they sum to 1."""
        return self._weights

    @functools.cached_property
    def mean(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The mean of the mixture. It lies between the parts, and is rarely a useful network."""
        means = {}
        for name, first in self._parts[0].mean.items():
            # As differences from the first part, so that the mean of equal numbers is exactly this number.
            shift = sum(
                w * (part.mean[name].double() - first.double())
                for w, part in zip(self._weights, self._parts, strict=True)
            )
            means[name] = (first.double() + shift).to(first.dtype)
        return means

    @functools.cached_property
    def std(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The standard deviations of the mixture: within the parts, and between their means."""
        stds = {}
        for name, mean in self.mean.items():
            variance = sum(
                w * (part.std[name].double().square() + (part.mean[name].double() - mean.double()).square())
                for w, part in zip(self._weights, self._parts, strict=True)
            )
            dtype = torch.float64 if mean.dtype == torch.float64 else torch.float32
            stds[name] = torch.as_tensor(variance).sqrt().to(dtype)
        return stds

    @functools.cached_property
    def sampled_names(self) -> list[str]:
        """The parameters that differ between samples, within a part or between parts, sorted."""
        first, *others = self._parts
        drawn = {name for part in self._parts for name in part.sampled_names}
        differ = {name for name, m in first.mean.items() if any(not torch.equal(m, o.mean[name]) for o in others)}
        return sorted(drawn | differ)

    @property
    def num_parameters(self) -> int:
        """The number of weights of one part, sampled or not."""
        return self._parts[0].num_parameters

    def num_draws(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of `num_samples` samples `bsam.predict` draws from each part.

        A part that is a point has one, in any case. `num_samples` are spread over the other parts; 0 means one pass at
        the mean of each part.
        """
        wide = [m for m, part in enumerate(self._parts) if part.sampled_names]
        if 0 < num_samples < len(wide):
            raise ValueError(
                f"num_samples={num_samples} is fewer than the {len(wide)} parts of the mixture that have a width: each "
                f"needs a sample. Write num_samples={len(wide)} or more, or 0 for the mean of each part."
            )
        counts = [1] * len(self._parts)
        for _ in range(num_samples - len(wide) if wide else 0):
            counts[max(wide, key=lambda m: self._weights[m] / (counts[m] + 0.5))] += 1  # the first of equals
        return tuple(counts)

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw a part by the weights, and all weights of the model from it.

        The buffers of the part are not in a sample; `sampled` writes them too.
        """
        return self._drawn_part(generator).sample(generator)

    def _drawn_part(self, generator: torch.Generator) -> Posterior:
        check_generator(generator)
        u = torch.rand((), generator=generator, device=generator.device, dtype=torch.float64).item()
        last = len(self._parts) - 1
        below = 0.0
        for m, weight in enumerate(self._weights):
            below += weight
            if u < below or m == last:
                return self._parts[m]
        raise AssertionError  # there is at least one part

    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density of `sample`; of a mixture of points, the log-probability.

        All parts must sample the same elements, because a density over more dimensions cannot be added to one over
        fewer.
        """
        check_same_layout("a sample", sample, self._parts[0].mean)
        for i, part in enumerate(self._parts[1:], 1):
            other = [n for n, std in part.std.items() if not torch.equal(std > 0, self._parts[0].std[n] > 0)]
            if other:
                raise ValueError(
                    f"parts 0 and {i} sample other elements of {other[0]}, so that the mixture has no density. Points "
                    "and Gaussians cannot be compared."
                )
        terms = [math.log(w) + part.log_prob(sample) for w, part in zip(self._weights, self._parts, strict=True)]
        return torch.stack(terms).logsumexp(dim=0)

    def entropy(self) -> NoReturn:
        """Raise: the entropy of a mixture has no closed form."""
        raise ValueError(
            "the entropy of a mixture has no closed form: average -posterior.log_prob(posterior.sample(generator)) "
            "over many samples."
        )

    def kl(self) -> NoReturn:
        """Raise: the KL divergence of a mixture has no closed form."""
        raise ValueError(
            "the KL divergence of a mixture from a prior has no closed form. The average of the parts' kl(), by their "
            "weights, is an upper bound."
        )

    def temper(self, temperature: float) -> Self:
        """Return the mixture with `temperature` times the variance of each part; the parts stay where they are."""
        check_temperature(temperature)
        return type(self)([part.temper(temperature) for part in self._parts], self._weights)

    def without_frozen(self) -> Self:
        """Return the mixture of the parts without their frozen parameters, which must be the same in all parts."""
        parts = [part.without_frozen() for part in self._parts]
        return self if all(a is b for a, b in zip(parts, self._parts, strict=True)) else type(self)(parts, self.weights)

    def renamed(self, rename: Rename) -> Self:
        """Return the mixture with other names, as `Posterior.renamed`."""
        return type(self)([part.renamed(rename) for part in self._parts], self._weights)

    def to(self, device: torch.device | str) -> Self:
        """Return the mixture with all tensors on `device`; itself if they are there already."""
        parts = [part.to(device) for part in self._parts]
        return self if all(a is b for a, b in zip(parts, self._parts, strict=True)) else type(self)(parts, self.weights)

    def write_mean(self, model: nn.Module) -> NoReturn:
        """Raise: the mean of runs that were trained apart is no useful network."""
        raise ValueError(
            "the mean of a mixture lies between its parts, where networks that were trained apart predict badly. Write "
            "posterior.parts[0].write_mean(model) for one of them, or PointMass(posterior.mean) if the mean is meant."
        )

    def check_fits(self, model: nn.Module) -> None:
        """Raise a ValueError unless `model` has exactly the parameters, and at least the buffers, of the parts."""
        self._parts[0].check_fits(model)

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        groups: dict[str, dict[str, Tensor]] = {}
        described = []
        for m, part in enumerate(self._parts):
            own, settings = part._contents()
            groups |= {f"{m}.{group}": named for group, named in own.items()}
            described.append({"kind": part.kind, "settings": settings})
        return groups, {"weights": list(self._weights), "parts": described}

    @classmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        by_kind = {kind.kind: kind for kind in PART_KINDS}
        parts = []
        for m, described in enumerate(settings["parts"]):
            kind = described["kind"]
            if kind not in by_kind:
                raise ValueError(f"part {m} is of the kind {kind!r}; known kinds are {', '.join(by_kind)}")
            own = {g.removeprefix(f"{m}."): named for g, named in groups.items() if g.startswith(f"{m}.")}
            parts.append(from_contents(by_kind[kind], own, described["settings"]))
        return cls(parts, settings["weights"])

    def __repr__(self) -> str:
        kinds = [type(part).__name__ for part in self._parts]
        said = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"Mixture({len(kinds)} parts of {self.num_parameters} parameters: {said})"


def _checked_weights(weights: Iterable[float] | Tensor | np.ndarray | None, num_parts: int) -> list[float]:
    """Return weights that sum to 1."""
    if weights is None:
        return [1 / num_parts] * num_parts
    listed = weights.tolist() if isinstance(weights, Tensor | np.ndarray) else weights
    if not isinstance(listed, Iterable):
        raise TypeError(f"weights={weights!r} must be a list of numbers, one per part, or None.")
    found = list(listed)
    if len(found) != num_parts:
        raise ValueError(f"weights has {len(found)} numbers for {num_parts} parts: give one per part, or None.")
    for i, weight in enumerate(found):
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not 0 < weight < math.inf:
            raise ValueError(f"weights[{i}]={weight!r} must be a finite number > 0. Leave out parts without weight.")
    found = [float(weight) for weight in found]
    total = math.fsum(found)
    return found if abs(total - 1) < 1e-12 else [weight / total for weight in found]  # files keep them exactly


def _check_alike(i: int, part: Posterior, first: Posterior) -> None:
    """Raise unless part i is a posterior of the same model, on the same device, as part 0."""
    try:
        check_same_layout(f"the mean of part {i}", part.mean, first.mean)
        check_same_layout(f"the buffers of part {i}", part.buffers, first.buffers)
    except ValueError as error:
        said = str(error).replace("of the mean", "of part 0")
        raise ValueError(f"{said} All parts of a mixture must be posteriors of one model.") from None
    for name in {**part.base, **first.base}:
        a, b = part.base.get(name), first.base.get(name)
        if a is None or b is None or not a.agrees_with(b):
            raise ValueError(f"parts 0 and {i} belong to base models whose frozen weights {name} differ.")
    devices = [{t.device for t in (*p.mean.values(), *p.buffers.values())} for p in (first, part)]
    if devices[0] != devices[1]:
        where = [" and ".join(sorted(map(str, found))) for found in devices]
        raise ValueError(f"part 0 is on {where[0]}, part {i} on {where[1]}: write part.to(device) for all of them.")
