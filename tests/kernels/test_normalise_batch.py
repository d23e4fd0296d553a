"""BatchNorm as formulas: torch's numbers, statistics and gradients, alone and under vmap."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from bsam.compiler.layers import OurLayers


@pytest.mark.parametrize("shape", [(8, 5), (4, 5, 7), (4, 5, 3, 6)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_numbers_statistics_and_gradients_are_torchs(shape, affine, momentum):
    torch.manual_seed(0)
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    theirs, ours = (kinds[len(shape)](5, affine=affine, momentum=momentum).double() for _ in range(2))
    x, dy = torch.randn(shape, dtype=torch.float64) * 3 + 1, torch.randn(shape, dtype=torch.float64)
    results = []
    for layer, mode in ((theirs, None), (ours, OurLayers())):
        for k in range(2):
            inputs = (x + k).requires_grad_()
            if mode is None:
                y = layer(inputs)
            else:
                with mode:
                    y = layer(inputs)
            gradients = torch.autograd.grad((y * dy).sum(), [inputs, *layer.parameters()])
        results.append([y, *gradients, *layer.buffers()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_torchs_own_is_not_called():
    layer, x = nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)
    with OurLayers():
        graph = make_fx(lambda x: layer(x), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert not any("batch_norm" in str(node.target) for node in graph.graph.nodes)


def test_sets_of_weights_under_vmap_are_each_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    weights = {n: torch.stack([p.detach() + 0.1 * k for k in range(3)]) for n, p in net.named_parameters()}
    buffers = {n: torch.stack([b] * 3) for n, b in net.named_buffers()}
    x = torch.randn(3, 4, 3, 8, 8)

    @torch.no_grad()
    def one(weights, buffers, x):
        def loss(weights):
            moved = {name: b.clone() for name, b in buffers.items()}
            return functional_call(net, {**weights, **moved}, (x,)).square().mean(), moved

        value, pullback, moved = vjp(loss, weights, has_aux=True)
        return pullback(torch.ones_like(value))[0], moved

    with OurLayers():
        together = torch.vmap(one)(weights, buffers, x)
    for k in range(3):
        alone = one(*({n: t[k] for n, t in each.items()} for each in (weights, buffers)), x[k])
        for ours, theirs in zip(together, alone, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name][k], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_evaluation_is_torchs(affine):
    layer = nn.BatchNorm2d(3, affine=affine).double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    layer(x)
    layer.eval()
    expected = layer(x)
    with OurLayers():
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(torch.vmap(layer)(torch.stack([x, x + 1]))[0], expected)


def test_without_statistics_the_batchs_own_are_used():
    layer = nn.BatchNorm1d(3, track_running_stats=False).double().eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = layer(x)
    with OurLayers():
        torch.testing.assert_close(layer(x), expected)


def test_single_values_are_refused_as_by_torch():
    layer, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    with OurLayers(), pytest.raises(ValueError, match="more than 1 value per channel"):
        layer.train()(x[:1])


def test_half_precision_is_computed_in_float32():
    layer, x = nn.BatchNorm2d(4), torch.randn(8, 4, 6, 6)
    with OurLayers():
        y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x.bfloat16().float()), rtol=1e-2, atol=2e-2)
