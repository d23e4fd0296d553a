"""LeNet-5."""

from __future__ import annotations

import torch
from torch import nn

from bsam.experiments.models.layers import LECUN, AppendZero, image_size, initialise

__all__ = ["lenet5"]


def lenet5(num_classes: int, image_shape: tuple[int, ...], generator: torch.Generator | None = None) -> nn.Sequential:
    """LeNet-5 with ReLU.

    LeCun, Bottou, Bengio and Haffner (1998), "Gradient-Based Learning Applied to Document Recognition", Proceedings of
    the IEEE, section II.B. Möllenhoff and Khan (2023), appendix G.1, say no more than that its activations are ReLU.
    The rest is as in the authors' code: three 5x5 convolutions that keep the size, each with 3x3 max-pooling of stride
    2 without padding, and 64 hidden units. Ours are the initial weights: `LECUN`, biases 0. An image needs at least
    15 x 15 pixels. The arguments are explained in `make_model`.
    """
    channels, height, width = image_size("lenet5", image_shape, smallest=15)
    layers: list[nn.Module] = []
    for outputs in (6, 16, 120):
        layers += [nn.Conv2d(channels, outputs, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)]
        channels, height, width = outputs, (height - 1) // 2, (width - 1) // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, 64), nn.ReLU(), nn.Linear(64, num_classes - 1)]
    model = nn.Sequential(*layers, AppendZero())
    initialise(model, LECUN, generator)
    return model
