"""Fully connected networks."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from bsam.experiments.models.layers import LECUN, AppendZero, initialise

__all__ = ["mlp", "mlp_elu"]


def mlp(
    hidden: tuple[int, ...], num_classes: int, image_shape: tuple[int, ...], generator: torch.Generator | None = None
) -> nn.Sequential:
    """A fully connected network with ReLU between its layers.

    Möllenhoff and Khan (2023) print 784-500-300-9 with ReLU for MNIST (appendix G.1) and 2-24-12-12-1 for two moons
    (appendix F.2). Their code differs (`mlp_elu` for MNIST, another network for two moons): these are as printed, with
    initial weights `LECUN` and biases 0, of which the paper says nothing. With two classes the one learned logit is
    that of class 0. `hidden` has the sizes of the hidden layers; the other arguments are explained in `make_model`.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise((math.prod(image_shape), *hidden)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(hidden[-1], num_classes - 1), AppendZero())
    initialise(model, LECUN, generator)
    return model


def mlp_elu(num_classes: int, image_shape: tuple[int, ...], generator: torch.Generator | None = None) -> nn.Sequential:
    """Make the network of the authors' code for MNIST: 784-500-300-10 with ELU, and biases that start at 0.05."""
    layers = list(mlp((500, 300), num_classes + 1, image_shape, generator))[:-1]  # one more output, no constant logit
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.bias, 0.05)
    return nn.Sequential(*(nn.ELU() if isinstance(layer, nn.ReLU) else layer for layer in layers))
