"""Layers are replaced inside the context, and only those that are registered and accept their arguments."""

import pytest
import torch
import torch.nn.functional as F

from bsam.compiler import layers
from bsam.compiler.layers import OurLayers, our_layers
from bsam.compiler.registry import LAYERS


@pytest.fixture
def calls(monkeypatch):
    """Exchanges `F.relu` for inputs of two dimensions; lists the shapes that it was asked for."""
    seen = []

    def ours(x, inplace=False):
        seen.append(tuple(x.shape))
        return NotImplemented if x.dim() != 2 else 10 * x.clamp(min=0)

    monkeypatch.setitem(LAYERS, F.relu, ours)
    return seen


def test_a_registered_function_is_replaced_inside(calls):
    x = torch.tensor([[-1.0, 2.0]])
    with OurLayers():
        assert torch.equal(F.relu(x), 10 * x.clamp(min=0))
        assert torch.equal(torch.nn.ReLU()(x), 10 * x.clamp(min=0))
        assert torch.equal(F.elu(x), F.elu(x))
    assert torch.equal(F.relu(x), x.clamp(min=0))
    assert calls == [(1, 2)] * 2


def test_what_ours_does_not_do_is_done_by_torch(calls):
    x = torch.tensor([-1.0, 2.0])
    with OurLayers():
        assert torch.equal(F.relu(x), x.clamp(min=0))
        assert torch.equal(F.relu(x.clone(), inplace=True), x.clamp(min=0))
    assert calls == [(2,)] * 2


@pytest.mark.parametrize("better", [True, False])
def test_where_they_are_faster(better, calls, monkeypatch):
    monkeypatch.setattr(layers, "better_on", lambda device: better)
    with our_layers(torch.device("cpu")):
        F.relu(torch.ones(1, 2))
    assert bool(calls) == better
