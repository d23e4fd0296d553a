"""Convolutions with one set of weights a group: torch's numbers, on the CPU, traced, and in kernels on CUDA."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx

from bsam.engine.convolution import _by_tap, decompositions, power_of_2, weight_tiles

ops = torch.ops.bsam

SHAPES = {
    # images, groups, inputs, outputs, height, width, size, stride
    "first layer": (2, 2, 3, 16, 9, 8, 3, 1),
    "stride 2": (2, 3, 16, 20, 8, 8, 3, 2),
    "odd images": (2, 2, 16, 32, 7, 5, 3, 2),
    "shortcut": (2, 2, 16, 32, 8, 8, 1, 2),
    "1 x 1": (2, 4, 32, 16, 6, 7, 1, 1),
    "one group": (1, 1, 80, 70, 6, 6, 3, 1),
    "5 x 5": (1, 2, 16, 130, 5, 6, 5, 2),
    "few channels": (2, 4, 3, 6, 8, 8, 5, 1),
    "one channel": (3, 2, 1, 16, 8, 8, 5, 1),
    "no padding": (2, 2, 16, 16, 8, 9, 4, 2),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def padding_of(size):
    return size // 2 if size % 2 else 0


def example(shape, dtype=torch.float32, device="cpu"):
    """Inputs, weights and a gradient of the outputs, with the three results in float64."""
    images, groups, num_in, num_out, height, width, size, stride = shape
    padding = padding_of(size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, groups * num_in, height, width, generator=generator).to(device, dtype)
    w = torch.randn(groups * num_out, num_in, size, size, generator=generator).to(device, dtype)
    y = F.conv2d(x.double(), w.double(), stride=stride, padding=padding, groups=groups)
    dy = torch.randn(y.shape, generator=generator).to(device, dtype)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), w.double(), None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups,
        [True, True, False],
    )  # fmt: skip
    return last(x), w, last(dy), (y, dx, dw)


def apply_ops(shape, x, w, dy, tf32=False):
    """The three results by our operators, in torch's shapes."""
    _, groups, _, _, height, width, size, stride = shape
    padding = padding_of(size)
    y = ops.convolution(x, _by_tap(w, groups), stride, padding, tf32)
    dx = ops.convolution_input_gradient(dy, _by_tap(w, groups), height, width, stride, padding, tf32)
    return y, dx, ops.convolution_weight_gradient(dy, x, size, stride, padding, groups, tf32)


def error(a, b):
    return float((a.double() - b).norm() / b.norm())


@every_shape
def test_operators_on_the_cpu_are_torchs(shape):
    x, w, dy, expected = example(shape)
    for ours, theirs in zip(apply_ops(shape, x, w, dy), expected, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < 1e-6


@every_shape
def test_images_stay_channels_last(shape):
    x, w, dy, _ = example(shape)
    y, dx, _ = apply_ops(shape, x, w, dy)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [SHAPES["stride 2"], SHAPES["odd images"], SHAPES["1 x 1"]])
def test_operators_keep_torchs_contract(shape):
    """Shapes and strides of fake tensors, no aliases, no writes: what the compiler relies on."""
    x, w, dy, _ = example(shape)
    _, groups, _, _, height, width, size, stride = shape
    padding = padding_of(size)
    tests = ("test_schema", "test_faketensor")  # there is no autograd: they are used behind it
    torch.library.opcheck(ops.convolution.default, (x, _by_tap(w, groups), stride, padding, False), test_utils=tests)
    torch.library.opcheck(
        ops.convolution_input_gradient.default,
        (dy, _by_tap(w, groups), height, width, stride, padding, False),
        test_utils=tests,
    )
    torch.library.opcheck(
        ops.convolution_weight_gradient.default, (dy, x, size, stride, padding, groups, False), test_utils=tests
    )


def targets(graph):
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


@every_shape
@pytest.mark.parametrize("bias", [True, False])
def test_traced_convolutions_are_ours_and_give_torchs_numbers(shape, bias):
    _, groups, _, num_out, _, _, size, stride = shape
    x, w, dy, _ = example(shape)
    b = [torch.randn(groups * num_out)] if bias else []

    def function(dy, x, w, *b):
        return (F.conv2d(x, w, *b, stride=stride, padding=padding_of(size), groups=groups) * dy).sum()

    arguments = (dy, x, w, *b)
    both = grad(function, argnums=tuple(range(1, len(arguments))))
    graph = make_fx(both, decomposition_table=decompositions(least_groups=1), tracing_mode="fake")(*arguments)
    assert {t for t in targets(graph) if "conv" in t} >= {
        "bsam.convolution_input_gradient.default",
        "bsam.convolution_weight_gradient.default",
    }
    assert not any("aten.conv" in t for t in targets(graph))
    for ours, theirs in zip(graph(*arguments), both(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_vmap_over_the_weights_of_a_network_becomes_our_operators():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), torch.nn.ReLU(),
        torch.nn.Conv2d(24, 16, 1), torch.nn.Flatten(), torch.nn.Linear(16 * 16, 5),
    )  # fmt: skip
    weights = {name: torch.stack([p.detach() + 0.01 * k for k in range(3)]) for name, p in net.named_parameters()}
    x, y = torch.randn(3, 4, 3, 8, 8), torch.randint(5, (3, 4))

    def gradients(weights, x, y):
        def loss(weights, x, y):
            return F.cross_entropy(functional_call(net, weights, (x,)), y)

        return torch.vmap(grad(loss))(weights, x, y)

    graph = make_fx(gradients, decomposition_table=decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)(
        weights, x, y
    )
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("bsam.convolution.default") == 3
    assert names.count("bsam.convolution_weight_gradient.default") == 3
    assert names.count("bsam.convolution_input_gradient.default") == 2  # the first layer's inputs need none
    assert not any("aten.conv" in name for name in names)
    for k in range(3):
        alone = {name: w[k].clone().requires_grad_() for name, w in weights.items()}
        F.cross_entropy(functional_call(net, alone, (x[k],)), y[k]).backward()
        for name, w in graph(weights, x, y).items():
            torch.testing.assert_close(w[k], alone[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x, w: F.conv2d(x, w, padding=(1, 0), groups=2), id="padding by side"),
        pytest.param(lambda x, w: F.conv2d(x, w, stride=(1, 2), groups=2), id="stride by side"),
        pytest.param(lambda x, w: F.conv2d(x, w, dilation=2, groups=2), id="dilation"),
        pytest.param(lambda x, w: F.conv2d(x, w[..., :2], groups=2), id="kernels that are not square"),
        pytest.param(lambda x, w: F.conv2d(x, w[:, :1], groups=32), id="one channel a group"),
        pytest.param(lambda x, w: F.conv2d(x.double(), w.double(), groups=2), id="float64"),
        pytest.param(lambda x, w: F.conv2d(x[:, :16], w), id="one group"),
        pytest.param(lambda x, w: F.conv_transpose2d(x, w, groups=2), id="transposed"),
        pytest.param(lambda x, w: F.conv1d(x[..., 0], w[..., 0], groups=2), id="one dimension"),
    ],
)
def test_other_convolutions_are_left_alone(make):
    x, w = torch.randn(2, 32, 8, 8), torch.randn(32, 16, 3, 3)
    graph = make_fx(lambda x, w: make(x, w), decomposition_table=decompositions(), tracing_mode="fake")(x, w)
    assert "aten.convolution.default" in targets(graph)
    assert torch.equal(graph(x, w), make(x, w))


def test_sizes_of_tiles():
    assert [power_of_2(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    for num_in, num_out, size in ((3, 16, 3), (64, 64, 3), (200, 130, 3), (16, 32, 1), (1, 6, 5)):
        taps, block_in, block_out, tiles = weight_tiles(num_in, num_out, size)
        assert size * size % taps == 0
        assert tiles * taps * block_in * block_out >= size * size * num_in * num_out


# ---------------------------------------------------------------------- kernels

MORE_SHAPES = [
    (4, 8, 3, 16, 32, 32, 3, 1),
    (4, 8, 16, 16, 32, 32, 3, 1),
    (4, 8, 16, 32, 32, 32, 3, 2),
    (4, 8, 16, 32, 32, 32, 1, 2),
    (4, 8, 32, 64, 16, 16, 3, 2),
    (4, 2, 64, 64, 8, 8, 3, 1),
    (2, 2, 64, 128, 9, 7, 3, 2),
    (2, 2, 128, 256, 4, 4, 3, 1),
    (1, 2, 200, 130, 5, 5, 3, 1),
    (3, 8, 1, 16, 28, 28, 5, 1),
    (16, 1, 17, 33, 11, 13, 3, 2),
]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("shape", [*SHAPES.values(), *MORE_SHAPES], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tf32", "tolerance"),
    [(torch.float32, False, 2e-6), (torch.float32, True, 2e-3), (torch.bfloat16, False, 1e-2)],
    ids=["ieee", "tf32", "bfloat16"],
)
def test_kernels_give_torchs_numbers(shape, dtype, tf32, tolerance):
    x, w, dy, expected = example(shape, dtype, "cuda")
    for ours, theirs in zip(apply_ops(shape, x, w, dy, tf32), expected, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < tolerance


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("shape", [*SHAPES.values(), *MORE_SHAPES], ids=str)
def test_kernels_write_every_element(shape):
    from bsam.engine.convolution_triton import gather_convolution, sum_weight_gradient, weight_gradient

    _, groups, num_in, num_out, _, _, size, stride = shape
    options = {"stride": stride, "padding": padding_of(size), "precision": "ieee"}
    x, w, dy, expected = example(shape, torch.float32, "cuda")
    y, dx = (torch.full_like(t, torch.nan) for t in (dy, x))
    gather_convolution(x, _by_tap(w, groups), y, transposed=False, **options)
    gather_convolution(dy, _by_tap(w, groups), dx, transposed=True, **options)
    for chunks in (1, 3):
        sums = torch.full((chunks, groups, size, size, num_out, num_in), torch.nan, device="cuda")
        weight_gradient(x, dy, sums, **options)
        dw = torch.full_like(w, torch.nan)
        sum_weight_gradient(sums, dw)
        torch.testing.assert_close(dw, sums.sum(0).permute(0, 3, 4, 1, 2).reshape(w.shape))
        for ours, theirs in zip((y, dx, dw), expected, strict=True):
            assert error(ours, theirs) < 1e-5


@pytest.mark.gpu
@on_cuda
def test_kernels_give_the_same_numbers_every_time():
    shape = (16, 8, 16, 16, 32, 32, 3, 1)
    x, w, dy, _ = example(shape, torch.float32, "cuda")
    first = apply_ops(shape, x, w, dy)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, apply_ops(shape, x, w, dy), strict=True))


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("shape", [SHAPES["stride 2"], MORE_SHAPES[1]], ids=str)
def test_operators_keep_torchs_contract_on_cuda(shape):
    x, w, dy, _ = example(shape, torch.float32, "cuda")
    _, groups, _, _, height, width, size, stride = shape
    padding, tests = padding_of(size), ("test_schema", "test_faketensor")
    by_tap = _by_tap(w, groups)
    for operator, arguments in (
        (ops.convolution, (x, by_tap, stride, padding, False)),
        (ops.convolution_input_gradient, (dy, by_tap, height, width, stride, padding, False)),
        (ops.convolution_weight_gradient, (dy, x, size, stride, padding, groups, False)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=tests)
