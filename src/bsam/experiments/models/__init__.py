"""The networks of the paper's experiments.

| name | network | used for | parameters |
|---|---|---|---|
| `mlp` | 784-500-300-9, ReLU | MNIST | 545,509 |
| `mlp_elu` | 784-500-300-10, ELU, as in the authors' code | MNIST, a row of ours | 545,810 |
| `mlp_small` | 64-100-100-9, ReLU | digits, in the demo (not the paper's) | 17,509 |
| `lenet5` | LeNet-5, ReLU | FashionMNIST | 82,061 |
| `resnet20_frn` | ResNet-20, filter response normalisation | CIFAR-10 | 273,977 |
| | | CIFAR-100 | 279,827 |
| | | TinyImageNet | 324,535 |
| `resnet18` | ResNet-18 for small images, BatchNorm | CIFAR-10 | 11,173,449 |
| `moons_mlp` | 2-24-12-12-1, ReLU | two moons | 541 |

All are classifiers that return logits (batch, num_classes). As in Möllenhoff and Khan (2023), "SAM as an Optimal
Relaxation of Bayes", ICLR, appendix G.1, the categorical distribution is a minimal exponential family: the network has
one output less than there are classes. The last logit is the constant 0, which the model appends (`mlp_elu` does not).

The paper does not describe its networks completely. The rest is as in the authors' released code; the docstring of each
network says which part is from where.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bsam.experiments.models.lenet5 import lenet5
from bsam.experiments.models.mlp import mlp, mlp_elu
from bsam.experiments.models.resnet18 import resnet18
from bsam.experiments.models.resnet20_frn import resnet20_frn

__all__ = ["MODELS", "make_model"]

MODELS: dict[str, Callable[[int, tuple[int, ...], torch.Generator | None], nn.Module]] = {
    "mlp": partial(mlp, (500, 300)),
    "mlp_elu": mlp_elu,
    "mlp_small": partial(mlp, (100, 100)),
    "lenet5": lenet5,
    "resnet20_frn": resnet20_frn,
    "resnet18": resnet18,
    "moons_mlp": partial(mlp, (24, 12, 12)),
}
"""By name, the function of (num_classes, image_shape, generator) that builds the network."""


def make_model(name: str, *, num_classes: int, image_shape: tuple[int, ...], seed: int | None = None) -> nn.Module:
    """Make a network with its initial weights, always on the CPU.

    Args:
        name: One of `MODELS`.
        num_classes: Number of logits that the network returns, with the constant last one.
        image_shape: The shape of one input: (channels, height, width), or for an MLP any shape.
        seed: Seed of a generator for the initial weights; torch's global generator is not changed. None: the global
            generator draws them.

    >>> make_model("mlp", num_classes=10, image_shape=(1, 28, 28), seed=0)(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """
    if name not in MODELS:
        raise ValueError(f"name={name!r} must be one of {', '.join(MODELS)}.")
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes} must be at least 2: a classifier needs two classes.")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    # torch's layers draw weights from the global generator before ours replace them: hence the fork.
    with torch.device("cpu"), torch.random.fork_rng(devices=[], enabled=seed is not None):
        return MODELS[name](num_classes, image_shape, generator)
