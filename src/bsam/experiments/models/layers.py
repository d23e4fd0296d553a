"""Shared parts of the networks: initial weights, the constant logit, and the check of the image's shape."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HE", "LECUN", "AppendZero", "image_size", "initialise"]

LECUN = 1.0
"""Scale of `initialise`: sigma = 1 / sqrt(fan_in) before the cut, which leaves a standard deviation of 0.88 sigma. The
default of the layers of Haiku, the library of the authors' code; but for the cut that of LeCun et al. (1998),
"Efficient BackProp"."""
HE = math.sqrt(2) / 0.87962566103423978
"""Scale of `initialise`: standard deviation sqrt(2 / fan_in) after the cut, as He et al. (2015), "Delving Deep into
Rectifiers", ICCV, ask for in front of a ReLU. The number is the standard deviation of a standard normal cut at 2."""


class AppendZero(nn.Module):
    """Appends the logit of the last class, the constant 0, to the learned logits."""

    def forward(self, logits: Tensor) -> Tensor:
        """(batch, K - 1) -> (batch, K)."""
        return F.pad(logits, (0, 1))


def initialise(model: nn.Module, scale: float, generator: torch.Generator | None) -> None:
    """Draw the weights of all linear and convolutional layers, and set their biases to 0.

    The weights are normal with sigma = scale / sqrt(fan_in), cut at 2 sigma. A generator of None is torch's global one.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            sigma = scale / math.sqrt(layer.weight[0].numel())
            nn.init.trunc_normal_(layer.weight, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def image_size(name: str, image_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return channels, height and width, or raise an error that says what the network `name` needs."""
    if len(image_shape) != 3 or min(image_shape[1:]) < smallest:
        raise ValueError(
            f"image_shape={image_shape}: {name} needs (channels, height, width) of at least {smallest} x {smallest} "
            "pixels. An MLP takes any shape."
        )
    channels, height, width = image_shape
    return channels, height, width
