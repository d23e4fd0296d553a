"""Convolutions with one set of weights a group: torch's numbers, on the CPU, traced, and in kernels on CUDA."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from bsam.compiler.layers import OurLayers
from bsam.compiler.registry import DECOMPOSITIONS
from bsam.kernels.convolution import power_of_2, weight_tiles

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
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(groups * images, num_in, height, width, generator=generator).to(device, dtype)
    w = torch.randn(groups, num_out, num_in, size, size, generator=generator).to(device, dtype)
    options = {"stride": stride, "padding": padding_of(size)}
    each = [(x, w, F.conv2d(x, w, **options)) for x, w in zip(x.double().chunk(groups), w.double(), strict=True)]
    y = torch.cat([y for _, _, y in each])
    dy = torch.randn(y.shape, generator=generator).to(device, dtype)
    gradients = [
        torch.ops.aten.convolution_backward(
            dy, x, w, None, [stride] * 2, [padding_of(size)] * 2, [1, 1], False, [0, 0], 1, [True, True, False]
        )
        for dy, (x, w, _) in zip(dy.double().chunk(groups), each, strict=True)
    ]
    dx, dw = torch.cat([dx for dx, _, _ in gradients]), torch.stack([dw for _, dw, _ in gradients])
    return last(x), w, last(dy), (y, dx, dw)


def by_tap(w):
    return w.permute(0, 3, 4, 1, 2).contiguous()


def apply_ops(shape, x, w, dy, tf32=False):
    """The three results by our operators."""
    _, groups, _, _, height, width, size, stride = shape
    padding = padding_of(size)
    y = ops.convolution(x, by_tap(w), stride, padding, tf32)
    dx = ops.convolution_input_gradient(dy, by_tap(w), height, width, stride, padding, tf32)
    return y, dx, ops.convolution_weight_gradient(dy, x, size, groups, stride, padding, tf32)


@torch.no_grad()
def pull(loss, *arguments):
    """The gradients with respect to all arguments, as the optimizers take them."""
    value, pullback = vjp(loss, *arguments)
    return pullback(torch.ones_like(value))


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
    for operator, arguments in (
        (ops.convolution, (x, by_tap(w), stride, padding, False)),
        (ops.convolution_input_gradient, (dy, by_tap(w), height, width, stride, padding, False)),
        (ops.convolution_weight_gradient, (dy, x, size, groups, stride, padding, False)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=tests)


def targets(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@every_shape
@pytest.mark.parametrize("bias", [True, False])
def test_our_convolutions_give_torchs_numbers(shape, bias):
    """One group after the other, and together under vmap."""
    _, groups, _, num_out, _, _, size, stride = shape
    x, w, dy, (_, dx, dw) = example(shape)
    b = torch.randn(groups, num_out) if bias else None

    def gradients(x, w, b, dy):
        def loss(x, w, b):
            return (F.conv2d(x, w, b, stride=stride, padding=padding_of(size)) * dy).sum()

        return pull(loss, x, w, b) if bias else pull(lambda x, w: loss(x, w, None), x, w)

    stacks = [t.view(groups, -1, *t.shape[1:]) for t in (x, dy)]
    with OurLayers():
        together = torch.vmap(gradients, in_dims=(0, 0, 0 if bias else None, 0))(stacks[0], w, b, stacks[1])
        alone = gradients(stacks[0][0], w[0], b[0] if bias else None, stacks[1][0])
    for ours, theirs in zip(together, (dx.view_as(stacks[0]), dw, dy.view_as(stacks[1]).sum((1, 3, 4))), strict=False):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(alone, together, strict=True):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-4)


def test_vmap_over_the_weights_of_a_network_becomes_our_operators():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), torch.nn.ReLU(),
        torch.nn.Conv2d(24, 16, 1), torch.nn.Flatten(), torch.nn.Linear(16 * 16, 5),
    )  # fmt: skip
    weights = {
        name: torch.stack([torch.stack([p.detach() + 0.01 * (k + 3 * run) for k in range(3)]) for run in range(2)])
        for name, p in net.named_parameters()
    }
    x, y = torch.randn(2, 3, 4, 3, 8, 8), torch.randint(5, (2, 3, 4))

    def gradients(weights, x, y):
        def loss(weights, x, y):
            return F.cross_entropy(functional_call(net, weights, (x,)), y)

        def one(weights, x, y):
            return pull(lambda weights: loss(weights, x, y), weights)[0]

        with OurLayers():
            return torch.vmap(torch.vmap(one))(weights, x, y)

    graph = make_fx(gradients, decomposition_table=DECOMPOSITIONS, tracing_mode="fake", _allow_non_fake_inputs=True)(
        weights, x, y
    )
    names = targets(graph)
    assert names.count("bsam.convolution.default") == 3
    assert names.count("bsam.convolution_weight_gradient.default") == 3
    assert names.count("bsam.convolution_input_gradient.default") == 2  # the first layer's inputs need none
    assert not any("aten.conv" in name for name in names)
    images = [node.args[0].meta["val"] for node in graph.graph.nodes if str(node.target).startswith("bsam.conv")]
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image in images)
    for run in range(2):
        for k in range(3):
            alone = {name: w[run, k].clone().requires_grad_() for name, w in weights.items()}
            F.cross_entropy(functional_call(net, alone, (x[run, k],)), y[run, k]).backward()
            for name, w in graph(weights, x, y).items():
                torch.testing.assert_close(w[run, k], alone[name].grad, rtol=1e-4, atol=1e-5)


def test_examples_of_their_own_share_the_weights():
    """vmap over examples alone: gradients of the weights for each, as VOGN asks for."""
    x, w = torch.randn(5, 3, 8, 8), torch.randn(8, 3, 3, 3)

    def gradient(x):
        return pull(lambda w: F.conv2d(x[None], w, padding=1).square().sum(), w)[0]

    expected = torch.stack([gradient(each) for each in x])
    with OurLayers():
        graph = make_fx(torch.vmap(gradient), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        torch.testing.assert_close(torch.vmap(gradient)(x), expected, rtol=1e-4, atol=1e-3)
    (convolution,) = (node for node in graph.graph.nodes if str(node.target) == "bsam.convolution.default")
    assert len(convolution.args[1].meta["val"]) == 1


def test_second_derivatives_are_torchs():
    x, w = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3)

    def second(w):
        return grad(lambda w: grad(lambda w: F.conv2d(x, w, padding=1).pow(3).sum())(w).square().sum())(w)

    expected = second(w)
    with OurLayers():
        torch.testing.assert_close(second(w), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_second_derivatives_by_weights_of_derivatives_by_inputs_are_torchs():
    """A penalty on the gradient by the images: its derivative goes through dx to the weights."""
    x, first, last = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(5, 8, 3, 3)

    def outputs(x, weights):
        return F.conv2d(F.conv2d(x, weights[0], padding=1).tanh(), weights[1], padding=1)

    def gradients(weights):
        return grad(lambda weights: grad(lambda x: outputs(x, weights).sum())(x).square().mean())(weights)

    expected = gradients((first, last))
    with OurLayers():
        ours = gradients((first, last))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("x_shape", [(2, 3, 6, 6), (2, 4, 2, 2)], ids=["channels", "too small"])
def test_what_torch_refuses_is_left_to_it(x_shape):
    x, w = torch.randn(x_shape), torch.randn(8, 4, 3, 3)
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(x, w)
    with OurLayers(), pytest.raises(RuntimeError) as ours:
        F.conv2d(x, w)
    assert str(ours.value) == str(theirs.value)


def test_autocast_rounds_as_torchs_own():
    x, w, b = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.conv2d(x, w, b)
        with OurLayers():
            ours = F.conv2d(x, w, b)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x, w: F.conv2d(x, w, padding=(1, 0)), id="padding by side"),
        pytest.param(lambda x, w: F.conv2d(x, w, padding="same"), id="padding by name"),
        pytest.param(lambda x, w: F.conv2d(x, w, padding=(1,)), id="one padding in a tuple"),
        pytest.param(lambda x, w: F.conv2d(x, w, stride=(1, 2)), id="stride by side"),
        pytest.param(lambda x, w: F.conv2d(x, w, dilation=2), id="dilation"),
        pytest.param(lambda x, w: F.conv2d(x, w[..., :2]), id="kernels that are not square"),
        pytest.param(lambda x, w: F.conv2d(x, w[:, :4], groups=4), id="groups"),
        pytest.param(lambda x, w: F.conv2d(x[:, :1], w[:2, :1]), id="one channel and two"),
        pytest.param(lambda x, w: F.conv2d(x.double(), w.double()), id="float64"),
        pytest.param(lambda x, w: F.conv2d(x[0], w), id="no batch"),
        pytest.param(lambda x, w: F.conv_transpose2d(x, w), id="transposed"),
        pytest.param(lambda x, w: F.conv1d(x[..., 0], w[..., 0]), id="one dimension"),
    ],
)
def test_other_convolutions_are_left_alone(make):
    x, w = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3)
    with OurLayers():
        graph = make_fx(lambda x, w: make(x, w), tracing_mode="fake")(x, w)
        assert torch.equal(make(x, w), graph(x, w))
    assert any(name.startswith("aten.conv") for name in targets(graph))
    assert not any(name.startswith("bsam") for name in targets(graph))


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
    from bsam.kernels.convolution_triton import gather_convolution, sum_weight_gradient, weight_gradient

    _, groups, num_in, num_out, _, _, size, stride = shape
    options = {"stride": stride, "padding": padding_of(size), "precision": "ieee"}
    x, w, dy, expected = example(shape, torch.float32, "cuda")
    y, dx = (torch.full_like(t, torch.nan) for t in (dy, x))
    gather_convolution(x, by_tap(w), y, transposed=False, **options)
    gather_convolution(dy, by_tap(w), dx, transposed=True, **options)
    for chunks in (1, 3):
        sums = torch.full((chunks, groups, size, size, num_out, num_in), torch.nan, device="cuda")
        weight_gradient(x, dy, sums, **options)
        dw = torch.full_like(w, torch.nan)
        sum_weight_gradient(sums, dw)
        torch.testing.assert_close(dw, sums.sum(0).permute(0, 3, 4, 1, 2))
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
    for operator, arguments in (
        (ops.convolution, (x, by_tap(w), stride, padding, False)),
        (ops.convolution_input_gradient, (dy, by_tap(w), height, width, stride, padding, False)),
        (ops.convolution_weight_gradient, (dy, x, size, groups, stride, padding, False)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=tests)
