"""The networks of the experiments: sizes, outputs, initial weights, and all the ways in which they are run."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import bsam
from bsam.experiments.models import MODELS, make_model

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
    model, (x, y) = make(name).double(), examples(name)  # in float32 BatchNorm of few examples makes rounding large
    x = x.double()
    if name == "resnet18":
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    F.cross_entropy(expected, y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.to(memory_format=torch.channels_last)
    actual = model(x.to(memory_format=torch.channels_last))
    F.cross_entropy(actual, y).backward()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-8, atol=1e-8 * gradient.abs().max().item())


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
