"""ResNet-18, layer by layer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.experiments.models.test_init import examples, make


def test_resnet18_layer_by_layer():
    """The same for ResNet-18; its running statistics are 0 and 1 at the start."""
    model = make("resnet18").double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    p = list(model.parameters())

    def conv(x, stride=1):
        weight, gamma, beta = p.pop(0), p.pop(0), p.pop(0)
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        return gamma[:, None, None] * x / math.sqrt(1 + 1e-5) + beta[:, None, None]

    inputs, _ = examples("resnet18", 1)
    inputs = inputs.double()
    with torch.no_grad():
        x = conv(inputs).relu()
        for stage in range(4):
            for block in range(2):
                first = stage > 0 and block == 0
                residual = conv(conv(x, 2 if first else 1).relu())
                x = (residual + (conv(x, 2) if first else x)).relu()
        logits = x.mean(dim=(2, 3)) @ p.pop(0).T + p.pop(0)
        assert not p
        torch.testing.assert_close(model(inputs), torch.cat([logits, torch.zeros(1, 1, dtype=torch.float64)], dim=1))


def test_resnet18_batch_norm():
    layers = [layer for layer in make("resnet18").modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(layers) == 20
    assert {(layer.eps, layer.momentum) for layer in layers} == {(1e-5, 0.1)}


@pytest.mark.parametrize("training", [True, False])
def test_resnet18_starts_uniform(training):
    x, _ = examples("resnet18")
    probabilities = make("resnet18").train(training)(x).softmax(dim=1)
    assert torch.equal(probabilities, torch.full((4, 10), 0.1))
