"""A compiled function as one operator: called, traced, and under vmap over the runs."""

import gc
import shutil

import pytest
import torch

from bsam.compiler import program
from bsam.compiler.program import Program
from bsam.torch_private import trace_graph

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)


def function(tree, scale):
    return {"sum": tree["a"] + scale * tree["b"], "parts": [tree["a"].sin(), scale.cos()]}


def arguments(*runs):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (*runs, 3), "b": (*runs, 3)}
    tree = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tree, torch.randn(*runs, 1, generator=generator)


@pytest.fixture(scope="module")
def compiled():
    return Program(function, arguments(), stacked=False)


def test_trees_go_in_and_out(compiled):
    tree, scale = arguments()
    other = {name: 2 * t for name, t in tree.items()}
    torch.testing.assert_close(compiled(other, scale), function(other, scale))


def test_a_traced_step_calls_it_and_does_not_see_inside(compiled):
    tree, scale = arguments()
    graph = trace_graph(lambda a, b, s: [compiled({"a": a, "b": b}, s)["sum"]] * 2, [tree["a"], tree["b"], scale], {})
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert operators.count(torch.ops.bsam.program.default) == 1
    assert torch.ops.aten.sin.default not in operators
    torch.testing.assert_close(graph(tree["a"], tree["b"], scale)[0], function(tree, scale)["sum"])


def test_a_stack_of_runs_needs_vmap_and_dies_with_its_owner():
    tree, scale = arguments(2)
    stacked = Program(torch.vmap(function), (tree, scale), stacked=True)
    torch.testing.assert_close(torch.vmap(stacked)(tree, scale), torch.vmap(function)(tree, scale))
    with pytest.raises(RuntimeError, match="call it under vmap over the runs"):
        stacked(*arguments())
    number = stacked._number
    assert program._PROGRAMS[number] is stacked
    del stacked
    gc.collect()
    assert number not in program._PROGRAMS
