"""A model, and a posterior of each kind."""

import torch
from torch import nn

from bsam.posterior import DiagonalGaussian, LowRankGaussian, PointMass


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    """Tied weights, BatchNorm, a frozen layer, a transient buffer, a scalar and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.scale * self.head(self.frozen(self.norm(self.embed(x)))) + self.offset


def make_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
        model(torch.randn(16, 4, dtype=torch.float64))  # moves the running statistics
        return model


def gaussian(model, std=0.1, prior_precision=2.0):
    widths = {p: torch.full_like(p, std) for p in model.parameters() if p.requires_grad}
    return DiagonalGaussian.from_model(model, widths, prior_precision=prior_precision)


def low_rank(model):
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return LowRankGaussian(
        dict(model.named_parameters()),
        {name: torch.full_like(p, 0.01) for name, p in trainable.items()},
        {name: torch.linspace(-0.1, 0.1, 3).double().view(3, *[1] * p.ndim) * p for name, p in trainable.items()},
        buffers=PointMass.from_model(model).buffers,
        prior_precision=2.0,
    )


KINDS = {"gaussian": gaussian, "point": PointMass.from_model, "low_rank": low_rank}


def snapshot(model):
    return {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
