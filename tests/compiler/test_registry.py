"""The tables of operators that have our own kernels."""

import pytest
import torch

import bsam.kernels  # noqa: F401  # registers itself
from bsam.compiler import registry
from bsam.compiler.registry import DECOMPOSITIONS, LAYERS, WEIGHT_GRADIENTS, better_on, register


@pytest.fixture
def _empty(monkeypatch):
    """Empty tables for the test."""
    for name in ("LAYERS", "DECOMPOSITIONS"):
        monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr(registry, "WEIGHT_GRADIENTS", set())


def test_the_kernels_are_registered():
    assert torch.conv2d in LAYERS
    assert LAYERS
    assert DECOMPOSITIONS
    assert WEIGHT_GRADIENTS


@pytest.mark.usefixtures("_empty")
def test_register_adds_to_each_table():
    def ours(x):
        return x

    register(layers={torch.sin: ours})
    register(decompositions={torch.ops.aten.sin.default: ours}, weight_gradients=[(torch.ops.aten.sin.default, 1)])
    register(layers={torch.cos: ours})
    assert {torch.sin: ours, torch.cos: ours} == registry.LAYERS
    assert {torch.ops.aten.sin.default: ours} == registry.DECOMPOSITIONS
    assert {(torch.ops.aten.sin.default, 1)} == registry.WEIGHT_GRADIENTS


def test_kernels_are_for_cuda_with_triton(monkeypatch):
    for has_triton in (True, False):
        monkeypatch.setattr(registry, "_HAS_TRITON", has_triton)
        assert better_on(torch.device("cuda")) == has_triton
        assert not better_on(torch.device("cpu"))
