"""The networks of the experiments: sizes, outputs, initial weights, and all the ways in which they are run."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import bsam
from bsam.experiments.models import MODELS, make_model
from bsam.experiments.models.resnet20_frn import FilterResponseNorm, resnet20_frn

SETTINGS = [
    ("mlp_small", 10, (1, 8, 8), 17_509),
    ("mlp", 10, (1, 28, 28), 545_509),
    ("mlp_elu", 10, (1, 28, 28), 545_810),
    ("lenet5", 10, (1, 28, 28), 82_061),
    ("resnet20_frn", 10, (3, 32, 32), 273_977),
    ("resnet20_frn", 100, (3, 32, 32), 279_827),
    ("resnet20_frn", 200, (3, 64, 64), 324_535),
    ("resnet18", 10, (3, 32, 32), 11_173_449),
    ("moons_mlp", 2, (2,), 541),
]
NAMES = ["mlp", "mlp_elu", "mlp_small", "lenet5", "resnet20_frn", "resnet18", "moons_mlp"]
STATELESS = [name for name in NAMES if name != "resnet18"]  # no BatchNorm
CUT = 0.87962566103423978  # standard deviation of a standard normal cut at 2


def setting(name):
    return next((num_classes, shape) for other, num_classes, shape, _ in SETTINGS if other == name)


def make(name, seed=0):
    num_classes, shape = setting(name)
    return make_model(name, num_classes=num_classes, image_shape=shape, seed=seed)


def examples(name, number=4):
    num_classes, shape = setting(name)
    return torch.randn(number, *shape), torch.arange(number) % num_classes


def convs_and_linears(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


# ------------------------------------------------------------------ shape


@pytest.mark.parametrize(("name", "num_classes", "shape", "size"), SETTINGS)
def test_size_and_output(name, num_classes, shape, size):
    model = make_model(name, num_classes=num_classes, image_shape=shape)
    assert sum(p.numel() for p in model.parameters()) == size
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, num_classes)
    assert (logits[:, -1] == 0).all() == (name != "mlp_elu")
    assert name == "resnet18" or (logits[:, :-1] != 0).all()


def test_all_models_are_tested():
    assert set(NAMES) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (64,)),
        ("lenet5", (3, 15, 17)),
        ("resnet20_frn", (1, 29, 33)),
        ("resnet20_frn", (2, 61, 40)),
        ("resnet18", (1, 7, 9)),
    ],
)
def test_other_image_shapes(name, shape):
    assert make_model(name, num_classes=3, image_shape=shape, seed=0)(torch.randn(2, *shape)).shape == (2, 3)


def test_errors_say_what_to_write():
    with pytest.raises(ValueError, match="name='resnet' must be one of mlp, mlp_elu, mlp_small, lenet5, resnet20_frn"):
        make_model("resnet", num_classes=10, image_shape=(3, 32, 32))
    with pytest.raises(ValueError, match="num_classes=1 must be at least 2"):
        make_model("mlp", num_classes=1, image_shape=(2,))
    for name, shape in [("lenet5", (1, 14, 28)), ("resnet20_frn", (1, 28, 28)), ("resnet18", (3072,))]:
        with pytest.raises(ValueError, match=f"{name} needs \\(channels, height, width\\) of at least"):
            make_model(name, num_classes=10, image_shape=shape)


# ------------------------------------------------------------------ architecture, written a second time


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


def test_mlp_elu_layer_by_layer():
    assert [type(layer).__name__ for layer in make("mlp_elu")] == [
        "Flatten",
        "Linear",
        "ELU",
        "Linear",
        "ELU",
        "Linear",
    ]


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


def test_tiny_imagenet_features_are_four_averages():
    model = make_model("resnet20_frn", num_classes=200, image_shape=(3, 64, 64), seed=0)
    assert model.head.in_features == 256
    x = torch.randn(1, 64, 16, 16)
    quarters = model.pool(x)
    torch.testing.assert_close(quarters[0, :, 0, 1], x[0, :, :8, 8:].mean(dim=(1, 2)))


def test_resnet18_batch_norm():
    layers = [layer for layer in make("resnet18").modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(layers) == 20
    assert {(layer.eps, layer.momentum) for layer in layers} == {(1e-5, 0.1)}


# ------------------------------------------------------------------ initial weights


@pytest.mark.parametrize("name", NAMES)
def test_initial_weights(name):
    """Standard deviation, and cut at 2 sigma; biases 0, or 0.05 in the authors' network for MNIST."""
    model = make(name)
    for layer in convs_and_linears(model):
        fan_in = layer.weight[0].numel()
        std = math.sqrt(2 / fan_in) if name == "resnet20_frn" else CUT / math.sqrt(fan_in)
        assert layer.bias is None or (layer.bias == (0.05 if name == "mlp_elu" else 0.0)).all()
        if name == "resnet18" and layer is model.head:
            assert (layer.weight == 0).all()
            continue
        bound, count = 2 * std / CUT, layer.weight.numel()
        assert layer.weight.abs().max() <= bound * (1 + 1e-6)
        if count > 400:
            assert layer.weight.abs().max() > 0.9 * bound
        # The kurtosis of a normal cut at 2 is 2.37: an estimate of its std from n numbers is off by .59 / sqrt(n).
        assert abs(layer.weight.std().item() / std - 1) < 5 * 0.59 / math.sqrt(count)
        assert abs(layer.weight.mean().item()) < 5 * std / math.sqrt(count)


@pytest.mark.parametrize("training", [True, False])
def test_resnet18_starts_uniform(training):
    x, _ = examples("resnet18")
    probabilities = make("resnet18").train(training)(x).softmax(dim=1)
    assert torch.equal(probabilities, torch.full((4, 10), 0.1))


@pytest.mark.parametrize("name", NAMES)
def test_seed(name):
    """The same weights for the same seed, others for another, nothing taken from the global generator."""
    before = torch.get_rng_state()
    first, again, other = make(name, 1), make(name, 1), make(name, 2)
    assert torch.equal(torch.get_rng_state(), before)
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    for key, layer in first.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and not (name == "resnet18" and key == "head"):
            assert (states[0][f"{key}.weight"] != states[2][f"{key}.weight"]).float().mean() > 0.99


def test_without_seed_the_global_generator_decides():
    torch.manual_seed(5)
    first, second = make("lenet5", None), make("lenet5", None)
    torch.manual_seed(5)
    again = make("lenet5", None)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first[0].weight, second[0].weight)


def test_seed_does_not_depend_on_the_default_device():
    with torch.device("meta"):
        model = make("lenet5")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), make("lenet5").parameters(), strict=True))


# ------------------------------------------------------------------ ways to run them


def without_gradient(model):
    return [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", NAMES)
def test_gradient_reaches_every_parameter(name):
    model, (x, y) = make(name), examples(name, 8)
    F.cross_entropy(model(x), y).backward()
    if name == "resnet18":
        # Its last layer is 0 at the start, so that nothing passes below it; one step of that layer opens the way.
        below = [key for key, _ in model.named_parameters() if not key.startswith("head.")]
        assert without_gradient(model) == below
        torch.optim.SGD(model.head.parameters(), lr=0.1).step()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    assert without_gradient(model) == []


@pytest.mark.parametrize("name", STATELESS)
def test_vmap_over_weights_is_a_loop(name):
    """Outputs and gradients, each set of weights with a batch of its own, as a step with splits has them."""
    models = [make(name, seed).double() for seed in range(3)]
    weights, _ = stack_module_state(models)
    num_classes, shape = setting(name)
    x = torch.randn(3, 2, *shape, dtype=torch.float64)
    y = torch.randint(num_classes, (3, 2))

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(models[0], weights, (x,)), y)

    outputs = vmap(lambda w, x: functional_call(models[0], w, (x,)))(weights, x)
    gradients = vmap(grad(loss))(weights, x, y)
    for i, model in enumerate(models):
        torch.testing.assert_close(outputs[i], model(x[i]), rtol=1e-10, atol=1e-10)
        F.cross_entropy(model(x[i]), y[i]).backward()
        for key, p in model.named_parameters():
            torch.testing.assert_close(gradients[key][i], p.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["lenet5", "resnet20_frn", "resnet18"])
def test_channels_last(name):
    model, (x, y) = make(name), examples(name)
    if name == "resnet18":
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    F.cross_entropy(expected, y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.to(memory_format=torch.channels_last)
    actual = model(x.to(memory_format=torch.channels_last))
    F.cross_entropy(actual, y).backward()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast(name):
    model, (x, y) = make(name), examples(name)
    if name == "resnet18":
        nn.init.normal_(model.head.weight, std=0.04, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.03 * expected.abs().max().item())
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own doing
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_graph_breaks(name):
    model, (x, _) = make(name).eval(), examples(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_bsam(name):
    model, (x, y) = make(name), examples(name)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = bsam.BSAM(model.parameters(), lr=0.1, num_data=4, splits=2, module=model)
    loss = optimizer.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert loss.isfinite()
    assert all(not torch.equal(p, q) and p.isfinite().all() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of the compiler's own
def test_the_normalisation_is_no_break_in_a_compiled_graph():
    model = resnet20_frn(10, (3, 32, 32)).eval()
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, model(x))
