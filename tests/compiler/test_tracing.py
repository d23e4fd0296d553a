"""A function that is traced and compiled gives the numbers of the function, and writes where it wrote."""

import shutil

import pytest
import torch

from bsam.compiler import graphs
from bsam.compiler.tracing import compile_function, compile_in_two

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)


def inputs(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_a_compiled_function_writes_into_its_inputs():
    def step(weights, gradient, rate):
        weights.sub_(rate * gradient)
        return [weights.square().sum()]

    weights, gradient = inputs((5,), (5,))
    rate = torch.tensor(0.1)
    compiled = compile_function(step, [weights.clone(), gradient, rate], unrolled=8)
    ours, plain = weights.clone(), weights.clone()
    for _ in range(2):
        rate.mul_(0.5)  # read at every call
        torch.testing.assert_close(compiled(ours, gradient, rate), step(plain, gradient, rate))
        torch.testing.assert_close(ours, plain)


def test_the_last_sums_are_a_part_of_their_own(monkeypatch):
    """After gradients of weights: here products of matrices count as such."""
    monkeypatch.setattr(graphs, "WEIGHT_GRADIENTS", {(torch.ops.aten.mm.default, None)})

    def function(a, b):
        return [2 * (a @ b).sum(0), a.sin()]

    a, b = inputs((4, 3), (3, 5))
    compiled = compile_in_two(function, [a, b])
    assert len(list(compiled.children())) == 2
    for scale in (1.0, 3.0):
        torch.testing.assert_close(list(compiled(scale * a, b)), function(scale * a, b))
