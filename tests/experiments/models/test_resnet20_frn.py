"""ResNet-20 and its filter response normalisation."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from bsam.experiments.models import make_model
from bsam.experiments.models.resnet20_frn import FilterResponseNorm, resnet20_frn
from tests.experiments.models.test_init import examples, make


def literal_frn(x, gamma, beta, tau, eps=1e-6):
    """Singh and Krishnan (2020), one channel of one example at a time."""
    out = torch.empty_like(x)
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            nu2 = (x[i, c] ** 2).sum() / x[i, c].numel()
            y = gamma[c] * x[i, c] / torch.sqrt(nu2 + eps) + beta[c]
            out[i, c] = torch.where(y > tau[c], y, tau[c])
    return out


def test_frn_is_the_printed_formula():
    norm = FilterResponseNorm(3).double()
    assert norm.eps == 1e-6
    assert (norm.gamma == 1).all()
    assert (norm.beta == 0).all()
    assert (norm.tau == 0).all()
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
        for scale in (1.0, 1e-3, 0.0):  # eps matters in the second and decides the third
            torch.testing.assert_close(norm(scale * x), literal_frn(scale * x, norm.gamma, norm.beta, norm.tau))


def test_frn_gradient():
    parameters = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    norm = FilterResponseNorm(2).double()

    def run(x, gamma, beta, tau):
        return functional_call(norm, {"gamma": gamma, "beta": beta, "tau": tau}, (x,))

    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *parameters))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frn_in_16_bits(dtype):
    norm = FilterResponseNorm(2)
    x = (1000 * torch.randn(2, 2, 32, 32)).to(dtype)  # a square would overflow in float16
    out = norm(x)
    assert out.dtype == dtype
    assert torch.equal(out, norm(x.float()).to(dtype))


def test_resnet20_frn_layer_by_layer():
    """The whole network once more, from its parameters in the order of definition."""
    model = make("resnet20_frn").double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases, beta and tau are 0 at the start
    p = list(model.parameters())

    def conv(x, stride=1):
        weight, bias = p.pop(0), p.pop(0)
        x = F.conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2)
        return literal_frn(x, p.pop(0), p.pop(0), p.pop(0))

    inputs, _ = examples("resnet20_frn", 1)
    inputs = inputs.double()
    with torch.no_grad():
        x = conv(inputs)
        for stage in range(3):
            for block in range(3):
                first = stage > 0 and block == 0
                residual = conv(conv(x, 2 if first else 1))
                x = residual + (conv(x, 2) if first else x)
        logits = x.mean(dim=(2, 3)) @ p.pop(0).T + p.pop(0)
        assert not p
        torch.testing.assert_close(model(inputs), torch.cat([logits, torch.zeros(1, 1, dtype=torch.float64)], dim=1))


def test_tiny_imagenet_features_are_four_averages():
    model = make_model("resnet20_frn", num_classes=200, image_shape=(3, 64, 64), seed=0)
    assert model.head.in_features == 256
    x = torch.randn(1, 64, 16, 16)
    quarters = model.pool(x)
    torch.testing.assert_close(quarters[0, :, 0, 1], x[0, :, :8, 8:].mean(dim=(1, 2)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of the compiler's own
def test_the_normalisation_is_no_break_in_a_compiled_graph():
    model = resnet20_frn(10, (3, 32, 32)).eval()
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, model(x))
