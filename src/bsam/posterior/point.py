"""A posterior that is certain: all its mass at one point.

What SGD, Adam and SAM give. It lets `bsam.predict`, files and reports treat them as they treat a posterior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

__all__ = ["PointMass"]


class PointMass(Posterior):
    """All mass at `mean`.

    Args:
        mean: The weights by name, as `model.named_parameters()` gives them. They are copied.
        buffers: The buffers that belong to them, as `model.named_buffers()` gives them.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> PointMass.from_model(model)
        PointMass(8 parameters in 2 tensors)
    """

    kind: ClassVar[str] = "point"

    def __init__(self, mean: Mapping[str, Tensor], *, buffers: Mapping[str, Tensor] | None = None) -> None:
        self.mean = copied_mean(mean)
        # Views of one number, for a point should not cost the memory of two.
        self.std = {name: torch.zeros((), device=m.device).expand(m.shape) for name, m in self.mean.items()}
        self.buffers = copied("buffers", buffers)

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """The present weights and buffers of `model`."""
        return cls(named_parameters(model), buffers=named_buffers(model))

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """A copy of the mean; `generator` is not used."""
        check_generator(generator)
        return {name: mean.clone() for name, mean in self.mean.items()}

    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """0 at the mean, -inf elsewhere."""
        check_same_layout("a sample", sample, self.mean)
        equal = all(bool((sample[name].to(mean.device) == mean).all()) for name, mean in self.mean.items())
        return torch.tensor(0.0 if equal else -math.inf, dtype=torch.float64)

    def entropy(self) -> Tensor:
        """Minus infinity: the limit of a density that gets ever narrower."""
        return torch.tensor(-math.inf, dtype=torch.float64)

    def kl(self) -> Tensor:
        """Raises: the divergence of a point from any density is infinite."""
        raise ValueError(
            "the KL divergence of a PointMass from a prior is infinite: it needs a posterior with a width."
        )

    def temper(self, temperature: float) -> Self:
        """Itself: a multiple of variance 0 is 0."""
        check_temperature(temperature)
        return self

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        return {"mean": self.mean, "buffer": self.buffers}, {}

    @classmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        return cls(groups.get("mean", {}), buffers=groups.get("buffer", {}))

    def __repr__(self) -> str:
        return f"PointMass({self.num_parameters} parameters in {len(self.mean)} tensors)"
