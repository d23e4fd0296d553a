"""Models, data and posteriors of the tests of predictions."""

import pytest
import torch
from torch import nn

from bsam.posterior import DiagonalGaussian

D, K = 4, 3
WITH_STATISTICS_OF_THE_MEAN = pytest.mark.filterwarnings("ignore:the running statistics of BatchNorm belong")
"""For tests of a network with BatchNorm, in which its statistics do not matter."""


def seeded(make, dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().to(dtype)
        model.train()
        return model


def mlp(outputs=K):
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs))


class ConvNet(nn.Module):
    """Convolutions and BatchNorm with statistics that are not the initial ones."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten())
        self.head = nn.Linear(4 * 9, K)
        self.body[1].running_mean.normal_()
        self.body[1].running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Branching(nn.Module):
    """Control flow that depends on the weights: vmap refuses it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, K)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


class NoBatchingRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


class CustomFunction(nn.Linear):
    def forward(self, x):
        return NoBatchingRule.apply(super().forward(x))


class Hoarder(nn.Module):
    """Keeps its weight in a list, where torch.func.functional_call does not find it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, K, bias=False)
        self.weights = [self.layer.weight]

    def forward(self, x):
        return x @ self.weights[0].T


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, K)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()))


def images(n):
    return torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def vectors(n):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def classes(n, k=K):
    return torch.randint(k, (n,), generator=torch.Generator().manual_seed(2))


def gaussian(model, std=0.3):
    return DiagonalGaussian.from_model(model, {p: torch.full_like(p, std) for p in model.parameters()})


def literal_outputs(model, posterior, x, num_samples=5, seed=0):
    """What the definition says: draw, write, run, one sample after another."""
    generator = torch.Generator().manual_seed(seed)
    model = model.eval()
    outputs = []
    for _ in range(num_samples):
        with posterior.sampled(model, generator), torch.no_grad():
            outputs.append(model(x))
    model.train()
    return torch.stack(outputs)


def state_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().clone() for name, t in tensors.items()}, [m.training for m in model.modules()]


def assert_unchanged(before, model):
    after = state_of(model)
    assert before[1] == after[1]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


def assert_close(a, b, tolerance=1e-12):
    for name in ("log_probs", "mutual_information", "entropy"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=tolerance, atol=tolerance)
