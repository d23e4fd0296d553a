"""Small networks in float64, and how to compare two of them with their optimizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bsam.experiments.models import make_model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),  # a bias would have no gradient but rounding, which Adam enlarges
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.BatchNorm1d(16),
        nn.Linear(16, 4),
    )


class Tied(nn.Module):
    """The second layer is the transpose of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 4, bias=False)
        self.second = nn.Linear(12, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) @ self.second.weight)


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def resnet20() -> nn.Module:
    return make_model("resnet20_frn", num_classes=4, image_shape=(3, 32, 32), seed=0)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "convolutional": (convolutional, (3, 2, 2)),
    "normalised": (normalised, (3, 2, 2)),
    "tied": (Tied, (12,)),
    "partly frozen": (partly_frozen, (12,)),
    "resnet20_frn": (resnet20, (3, 32, 32)),
}
"""How to make a network with 4 outputs, and the shape of its inputs."""


def make_network(name: str, seed: int = 0) -> nn.Module:
    """The network in float64; the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return NETWORKS[name][0]().double()


def make_batch(name: str, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *NETWORKS[name][1], generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (size,), generator=generator)


def mean_loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def assert_close(a: object, b: object, *, tolerance: float = 1e-10) -> None:
    """Nested values are equal, tensors up to a tolerance."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    elif isinstance(a, dict):
        assert isinstance(b, dict)
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key], tolerance=tolerance)
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_close(left, right, tolerance=tolerance)
    else:
        assert a == b
