"""Problems with many data: 49,000 or 50,000 training images.

`CHOOSING` decided bSAM's `max_curvature_data`, after CIFAR-100 had shown that a limit is needed
(`sqrt_num_data.toml`). The problems of `JUDGED` were run once, when it was fixed.

| problem | data | network |
|---|---|---|
| `mnist_mlp_32`, `mnist_mlp_256` | MNIST | multilayer perceptron |
| `cifar10_mlp_32`, `cifar10_mlp_256` | CIFAR-10 | multilayer perceptron |
| `cifar10_cnn_32`, `cifar10_cnn_256` | CIFAR-10 | convolutions with GroupNorm |
| `fashion_mlp_64` | FashionMNIST | multilayer perceptron |
| `cifar100_cnn_64` | CIFAR-100 | convolutions with GroupNorm |

The last two are judged. The number at the end of a name is the batch size. Pixels are averaged in squares of four, so
that a run takes a minute. Most runs have few epochs; `cifar10_mlp_256` has so many that labels are learned by heart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.small_problems import Data, Problem, group_norm, perceptron
from bsam.experiments.data import load as load_images

__all__ = ["CHOOSING", "JUDGED"]


def images(name: str, num_classes: int, *, seed: int) -> Callable[[Path], Data]:
    """50,000 images (of CIFAR 49,000) with half the height and width, 1,000 for validation and 2,000 test images."""

    def load(folder: Path) -> Data:
        source = load_images(name, folder, download=False)
        order = torch.randperm(len(source.train[0]), generator=torch.Generator().manual_seed(seed))
        num_train = min(50_000, len(order) - 1000)

        def shrunk(x: Tensor) -> Tensor:
            return F.avg_pool2d(source.normalise(x), 2)

        parts = order[:num_train], order[num_train : num_train + 1000]
        train, validation = ((shrunk(source.train[0][i]), source.train[1][i]) for i in parts)
        return Data(train, validation, (shrunk(source.test[0][:2000]), source.test[1][:2000]), num_classes=num_classes)

    return load


def convolutions(data: Data) -> nn.Module:
    """Three convolutions with GroupNorm, each followed by pooling."""
    layers: list[nn.Module] = []
    for inputs, units in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, units, 3, padding=1), group_norm(units), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, data.num_classes))


mnist = images("mnist", 10, seed=30)
cifar10 = images("cifar10", 10, seed=31)
CIFAR10 = "cifar-10-batches-py"
CHOOSING: dict[str, Problem] = {
    "mnist_mlp_256": Problem(mnist, perceptron(256, 128), epochs=3, batch_size=256, needs="MNIST"),
    "mnist_mlp_32": Problem(mnist, perceptron(256, 128), epochs=2, batch_size=32, needs="MNIST"),
    "cifar10_mlp_256": Problem(cifar10, perceptron(256, 128), epochs=15, batch_size=256, needs=CIFAR10),
    "cifar10_cnn_256": Problem(cifar10, convolutions, epochs=3, batch_size=256, needs=CIFAR10),
    "cifar10_mlp_32": Problem(cifar10, perceptron(256, 128), epochs=2, batch_size=32, needs=CIFAR10),
    "cifar10_cnn_32": Problem(cifar10, convolutions, epochs=1, batch_size=32, needs=CIFAR10),
}
JUDGED: dict[str, Problem] = {
    "fashion_mlp_64": Problem(
        images("fashionmnist", 10, seed=32), perceptron(256, 128), epochs=10, batch_size=64, needs="FashionMNIST"
    ),
    "cifar100_cnn_64": Problem(
        images("cifar100", 100, seed=33), convolutions, epochs=4, batch_size=64, needs="cifar-100-python"
    ),
}
