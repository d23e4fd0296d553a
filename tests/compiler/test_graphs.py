"""Traced graphs become smaller, and give the same numbers."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from bsam.compiler.graphs import keep_layouts, last_sums, merge_views, share_copies
from bsam.compiler.layers import OurLayers
from bsam.compiler.registry import DECOMPOSITIONS
from bsam.compiler.tracing import compile_in_two
from bsam.experiments.models.resnet20_frn import Block
from bsam.kernels import filter_response

aten = torch.ops.aten


def trace(function, *inputs):
    table = DECOMPOSITIONS
    return make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def count(graph, target):
    return sum(node.target is target for node in graph.graph.nodes)


def test_views_in_a_row_become_one():
    def function(x):
        there = x.permute(2, 0, 1).permute(1, 2, 0).permute(0, -2, -1)  # nothing in the end
        return there.reshape(6, 4).view(2, 12).unsqueeze(0) + x.permute(1, 0, 2).permute(2, 1, 0).reshape(1, 2, 12)

    x = torch.randn(2, 3, 4)
    graph = trace(function, x)
    merge_views(graph)
    graph.recompile()
    assert count(graph, aten.permute.default) == 1
    assert count(graph, aten.reshape.default) == 2
    assert count(graph, aten.unsqueeze.default) == count(graph, aten.view.default) == 0
    assert torch.equal(graph(x), function(x))


def test_what_is_written_through_a_view_is_seen():
    def function(x):
        y = x.clone()
        y.view(6).view(2, 3).add_(1)
        return y * 2

    x = torch.randn(2, 3)
    graph = trace(function, x)
    merge_views(graph)
    graph.recompile()
    assert torch.equal(graph(x), function(x))


def gradients_of(block):
    """The gradients of a module at three sets of weights, put together, and what they are a function of."""
    weights = {name: torch.randn(3, *p.shape) for name, p in block.named_parameters()}

    @torch.no_grad()
    def function(x, *values):
        def one(x, values):
            named = dict(zip(weights, values, strict=True))
            loss, pullback = vjp(lambda w: functional_call(block, w, (x,)).square().mean(), named)
            return torch.cat([g.flatten() for g in pullback(torch.ones_like(loss))[0].values()])

        with OurLayers():
            return [torch.vmap(one)(x, values)]

    return function, (torch.randn(3, 2, 4, 8, 8), *weights.values())


@pytest.fixture
def gradients(monkeypatch):
    """Those of a block of ResNet-20, as on CUDA."""
    monkeypatch.setattr(filter_response, "_has_kernels", lambda x: True)
    torch.manual_seed(0)
    return gradients_of(Block(4, 8))


def test_weights_of_a_convolution_are_laid_out_once(gradients):
    function, inputs = gradients
    graph = trace(function, *inputs)
    before = graph(*inputs)[0]
    merge_views(graph)
    graph.recompile()
    laid_out = {node.args[1] for node in graph.graph.nodes if str(node.target).startswith("bsam.convolution.")}
    used_again = {n.args[1] for n in graph.graph.nodes if str(n.target).startswith("bsam.convolution_input_gradient.")}
    assert len(laid_out) == 3
    assert len(used_again) == 1
    torch.testing.assert_close(graph(*inputs)[0], before)


@pytest.fixture
def packed(gradients):
    """The same with all weights in one flat tensor, as in a pack."""
    function, (x, *weights) = gradients
    sizes = [w[0].numel() for w in weights]

    def of_pack(x, flat):
        parts = flat.split(sizes, dim=1)
        return function(x, *(part.view_as(w) for part, w in zip(parts, weights, strict=True)))

    return of_pack, (x, torch.cat([w.flatten(1) for w in weights], 1))


def test_copies_that_operators_share_are_written_once(packed):
    function, inputs = packed
    graph = trace(function, *inputs)
    merge_views(graph)
    share_copies(graph)
    graph.recompile()
    shared = [node for node in graph.graph.nodes if node.target is aten.as_strided.default]
    assert any(str(user.target).startswith("bsam.convolution.") for node in shared for user in node.users)
    for node in shared:
        assert len(node.users) > 1
        assert list(node.args[0].users) == [node]
    torch.testing.assert_close(graph(*inputs)[0], function(*inputs)[0])


def test_compiled_gradients_of_a_pack(packed):
    function, inputs = packed
    torch.testing.assert_close(compile_in_two(function, list(inputs))(*inputs)[0], function(*inputs)[0])


class Normalised(nn.Module):
    """A block with BatchNorm: what comes between its convolutions is the compiler's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, track_running_stats=False) for _ in range(2))

    def forward(self, x):
        x = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(x)))


def images_of(node):
    """What our operators for convolutions read, but for weights."""
    name = getattr(node.target, "__name__", "")
    if not str(node.target).startswith("bsam.convolution"):
        return []
    return node.args[:2] if name.startswith("convolution_weight_gradient") else node.args[:1]


def test_images_are_written_as_convolutions_read_them():
    torch.manual_seed(0)
    function, inputs = gradients_of(Normalised())
    graph = trace(function, *inputs)
    merge_views(graph)
    keep_layouts(graph)
    graph.recompile()
    torch.testing.assert_close(graph(*inputs)[0], function(*inputs)[0])
    read = [image for node in graph.graph.nodes for image in images_of(node)]
    computed = [image for image in read if image.target is aten.as_strided.default]
    assert len(read) == len(computed) + 2  # but for the first convolution and the gradient of its weights
    assert all(image.meta["val"].is_contiguous(memory_format=torch.channels_last) for image in read)
    compiled, codes = run_and_get_code(lambda: compile_in_two(function, list(inputs)))
    torch.testing.assert_close(compiled(*inputs)[0], function(*inputs)[0])
    made = [line for code in codes for line in code.splitlines() if "empty_strided_cpu((3, 2, 8, 8, 8)" in line]
    assert made
    assert all("(1024, 512, 1, 64, 8)" in line for line in made)
    assert not any("empty_strided_cpu((6, 8, 8, 8)" in code for code in codes)  # copies


def test_what_has_to_be_copied_is():
    def function(x, w):
        return torch.ops.bsam.convolution(F.relu(x).transpose(1, 2).reshape(4, 4, 4, 4), w, 1, 1, False)

    x, w = torch.randn(2, 2, 4, 4, 4), torch.randn(1, 3, 3, 8, 4)
    graph = trace(function, x, w)
    merge_views(graph)
    keep_layouts(graph)
    graph.recompile()
    assert count(graph, aten.as_strided.default) == 0
    torch.testing.assert_close(graph(x, w), function(x, w))


def test_last_sums_come_after_everything_else(gradients):
    function, inputs = gradients
    graph = trace(function, *inputs)
    last = last_sums(graph)
    assert any(node.target is aten.cat.default for node in last)
    assert all(user in last or user.op == "output" for node in last for user in node.users)
    assert not any(str(node.target).startswith("bsam.") for node in last)
    parts = split_module(graph, graph, lambda node: int(node in last))
    assert [name for name, _ in parts.named_children()] == ["submod_0", "submod_1"]
    torch.testing.assert_close(parts(*inputs)[0], function(*inputs)[0])


def test_a_gradient_that_is_used_elsewhere_is_not_put_off(monkeypatch):
    monkeypatch.setattr(filter_response, "_has_kernels", lambda x: True)

    def function(dy, x):
        dw = torch.ops.bsam.convolution_weight_gradient(dy, x, 3, 1, 1, 1, False)
        return [torch.cat([(dw * 2).flatten(), dy.flatten()]), F.relu(x * dw.sum() + dy.sum())]

    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    graph = trace(function, x, x)
    names = {node.name for node in last_sums(graph)}
    assert "cat" in names
    assert not {node.name for node in graph.graph.nodes if node.target in (aten.sum.default, operator.getitem)} & names
