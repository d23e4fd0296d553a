"""A posterior with all its mass at one point.

It is the result of SGD, Adam and SAM, so that `bsam.predict`, files and reports can use them like other posteriors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bsam.files import Settings
from bsam.modules import named_buffers, named_parameters
from bsam.posterior.base import (
    Posterior,
    check_generator,
    check_same_layout,
    check_temperature,
    copied,
    copied_mean,
)
from bsam.posterior.base_model import FrozenWeights
from bsam.shards import cut, local, name_of_world, true_anywhere

__all__ = ["PointMass"]


class PointMass(Posterior):
    """A distribution with all mass at `mean`.

    Args:
        mean: The weights by name, as in `model.named_parameters()`. They are copied.
        buffers: The buffers that belong to them, as in `model.named_buffers()`.
        frozen: Names of parameters that training did not change, for `without_frozen`. By default those that are given
            as `nn.Parameter` without `requires_grad`.
        base: What is known of further parameters of the model, by name, which are not part of this distribution.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> PointMass.from_model(model)
        PointMass(8 parameters in 2 tensors)
    """

    kind: ClassVar[str] = "point"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        frozen: Iterable[str] | None = None,
        base: Mapping[str, FrozenWeights] | None = None,
    ) -> None:
        self.mean = copied_mean(mean, base)
        # Views of one number, to save the memory of a second set of weights.
        self.std = {name: torch.zeros((), device=m.device).expand(m.shape) for name, m in self.mean.items()}
        self.buffers = copied("buffers", buffers)
        self._note_layout(mean, frozen, base)

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """Make a point from the present weights and buffers of `model`."""
        return cls(named_parameters(model), buffers=named_buffers(model))

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a copy of the mean; `generator` is not used."""
        check_generator(generator)
        return {name: mean.clone() for name, mean in self.mean.items()}

    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Return 0 at the mean, -inf elsewhere."""
        check_same_layout("a sample", sample, self.mean)
        means = list(self.mean.values())
        differ = [(cut(sample[name], mean).to(mean.device) != local(mean)).any() for name, mean in self.mean.items()]
        return torch.tensor(-math.inf if any(true_anywhere(differ, means)) else 0.0, dtype=torch.float64)

    def entropy(self) -> Tensor:
        """Return minus infinity: the limit of narrower and narrower densities."""
        return torch.tensor(-math.inf, dtype=torch.float64)

    def kl(self) -> Tensor:
        """Raise: the KL divergence of a point from any density is infinite."""
        raise ValueError("the KL divergence of a PointMass from a prior is infinite: use a posterior with a variance.")

    def temper(self, temperature: float) -> Self:
        """Return itself: a multiple of variance 0 is 0."""
        check_temperature(temperature)
        return self

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        return {"mean": self.mean, "buffer": self.buffers}, self._layout_settings()

    @classmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        layout = {"frozen": settings.get("frozen"), "base": settings.get("base")}
        return cls(groups.get("mean", {}), buffers=groups.get("buffer", {}), **layout)

    def __repr__(self) -> str:
        remark = name_of_world(self.mean.values())
        return f"PointMass({self.num_parameters} parameters in {len(self.mean)} tensors{remark})"
