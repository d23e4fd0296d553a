"""What the tests of all optimizers share: a model, batches, and snapshots."""

import copy

import torch
from torch import nn

from tests.optimizers import METHODS, make


def take_step(optimizer, closure):
    """A step without a batch. VOGN needs examples: it gets one that the closure does not look at."""
    if optimizer.per_example and closure is not None:
        return optimizer.step(lambda _: closure(), torch.zeros(1))
    return optimizer.step(closure)


def network(name, dtype=torch.float32):
    torch.manual_seed(5)
    norm = nn.LayerNorm(6) if METHODS[name].per_example else nn.BatchNorm1d(6)  # VOGN refuses layers that mix examples
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch(size=12, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator, dtype=dtype), torch.randint(3, (size,), generator=generator)


def cross_entropy(model):
    return lambda x, y: nn.functional.cross_entropy(model(x), y)


def snapshot(model, optimizer):
    """Everything that a refused step must leave as it was, as plain values."""
    return copy.deepcopy(
        {
            "model": {k: v.clone() for k, v in model.state_dict().items()},
            "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "state": optimizer.state_dict(),
            "flags": [p.requires_grad for p in model.parameters()],
        }
    )


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def trained(name, **options):
    model = network(name)
    optimizer = make(name, model.parameters(), **options)
    for seed in range(3):
        optimizer.step(cross_entropy(model), *batch(seed=seed))
    return model, optimizer
