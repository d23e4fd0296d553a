"""ResNet-18 for small images, with BatchNorm."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from bsam.experiments.models.layers import LECUN, AppendZero, image_size, initialise

__all__ = ["resnet18"]


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution without bias, and BatchNorm with the decay .9 and eps 1e-5 of the authors' code."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs, eps=1e-5, momentum=0.1)))


class Block(nn.Module):
    """Two convolutions, and a shortcut around them that is a 1x1 convolution where the shape changes.

    With twice the channels, the image has half the height and width.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.residual = nn.Sequential(conv_norm(inputs, outputs, 3, stride), nn.ReLU(), conv_norm(outputs, outputs, 3))
        self.shortcut = nn.Identity() if inputs == outputs else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the ReLU of the sum of both paths."""
        return torch.relu(self.residual(x) + self.shortcut(x))


def resnet18(num_classes: int, image_shape: tuple[int, ...], generator: torch.Generator | None = None) -> nn.Sequential:
    """ResNet-18 with a 3x3 stem and no max-pooling, as is usual for CIFAR.

    He, Zhang, Ren and Sun (2016), "Deep Residual Learning for Image Recognition", CVPR, table 1: four stages of two
    blocks with 64, 128, 256 and 512 channels. Möllenhoff and Khan (2023) say no more than "ResNet-18". The rest is as
    in the authors' code: the stem, the BatchNorm settings, and initial weights `LECUN`, but 0 in the last layer. So all
    classes are equally likely at the start, and the first gradient is 0 in all layers but the last. The arguments are
    explained in `make_model`.
    """
    channels, _, _ = image_size("resnet18", image_shape, smallest=1)
    blocks: list[nn.Module] = []
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        blocks += [Block(inputs, outputs), Block(outputs, outputs)]
    head = nn.Linear(512, num_classes - 1)
    model = nn.Sequential(
        OrderedDict(
            stem=conv_norm(channels, 64, 3),
            relu=nn.ReLU(),
            blocks=nn.Sequential(*blocks),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=head,
            append_zero=AppendZero(),
        )
    )
    initialise(model, LECUN, generator)
    nn.init.zeros_(head.weight)
    return model
