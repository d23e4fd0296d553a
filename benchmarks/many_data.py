"""Problems with many data, on which a limit of the factor sqrt(N) in bSAM's curvature was tried and rejected.

| problem | data | network | epochs |
|---|---|---|---|
| `mnist_mlp_256` | MNIST, 50,000 | multilayer perceptron | 3 |
| `mnist_mlp_32` | MNIST, 50,000 | multilayer perceptron | 2 |
| `cifar10_mlp_256` | CIFAR-10, 49,000 | multilayer perceptron | 15 |
| `cifar10_cnn_32` | CIFAR-10, 49,000 | convolutions with GroupNorm | 1 |
| `cifar10_cnn_128` | CIFAR-10, 10,000 | convolutions with GroupNorm | 20 |

The number at the end of a name is the batch size. Pixels are averaged in squares of four, so that a run takes about a
minute on one core. Nothing was chosen by the runs, so no problem was kept to judge a choice. `out_of_the_box.py` runs
them (the set `many`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.small_problems import Data, Problem, group_norm, perceptron
from bsam.experiments.data import load as load_images

__all__ = ["PROBLEMS"]


def images(name: str, num_train: int, *, seed: int) -> Callable[[Path], Data]:
    """Images of ten classes with half the height and width, 1,000 for validation and 2,000 test images."""

    def load(folder: Path) -> Data:
        source = load_images(name, folder, download=False)
        order = torch.randperm(len(source.train[0]), generator=torch.Generator().manual_seed(seed))

        def shrunk(x: Tensor) -> Tensor:
            return F.avg_pool2d(source.normalise(x), 2)

        parts = order[:num_train], order[num_train : num_train + 1000]
        train, validation = ((shrunk(source.train[0][i]), source.train[1][i]) for i in parts)
        return Data(train, validation, (shrunk(source.test[0][:2000]), source.test[1][:2000]), num_classes=10)

    return load


def convolutions(data: Data) -> nn.Module:
    """Three convolutions with GroupNorm, each followed by pooling."""
    layers: list[nn.Module] = []
    for inputs, units in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, units, 3, padding=1), group_norm(units), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, data.num_classes))


mnist = images("mnist", 50_000, seed=30)
cifar10 = images("cifar10", 49_000, seed=31)
CIFAR10 = "cifar-10-batches-py"
PROBLEMS: dict[str, Problem] = {
    "mnist_mlp_256": Problem(mnist, perceptron(256, 128), epochs=3, batch_size=256, needs="MNIST"),
    "mnist_mlp_32": Problem(mnist, perceptron(256, 128), epochs=2, batch_size=32, needs="MNIST"),
    "cifar10_mlp_256": Problem(cifar10, perceptron(256, 128), epochs=15, batch_size=256, needs=CIFAR10),
    "cifar10_cnn_32": Problem(cifar10, convolutions, epochs=1, batch_size=32, needs=CIFAR10),
    "cifar10_cnn_128": Problem(
        images("cifar10", 10_000, seed=31), convolutions, epochs=20, batch_size=128, needs=CIFAR10
    ),
}
