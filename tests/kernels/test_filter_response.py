"""Filter response normalisation: the formulas against autograd, the operators under vmap, and the kernels on CUDA."""

import pytest
import torch
from torch.func import functional_call, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from bsam.experiments.models.resnet20_frn import FilterResponseNorm, resnet20_frn
from bsam.kernels import filter_response
from bsam.kernels.filter_response import normalise, normalise_backward

ops = torch.ops.bsam
EPS = 1e-6
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def literal(x, bias, gamma, beta, tau, skip):
    """The layer as printed, for automatic differentiation; vectors (groups, channels)."""
    groups, shape = len(gamma), x.shape
    bias, gamma, beta, tau = (t[:, None, :, None, None] for t in (bias, gamma, beta, tau))
    x, skip = (t.reshape(groups, -1, *shape[1:]) for t in (x, skip))
    x = x + bias
    nu2 = (x**2).mean((3, 4), keepdim=True)
    return (torch.maximum(gamma * x / torch.sqrt(nu2 + EPS) + beta, tau) + skip).reshape(shape)


def example(shape=(4, 6, 5, 7), groups=2, dtype=torch.float64, device="cpu"):
    """Inputs and what is added, vectors and a gradient; with the outputs and all gradients in float64."""
    generator = torch.Generator().manual_seed(0)
    x, skip, dz = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    vectors = [torch.randn(groups, shape[1], generator=generator).to(device) for _ in range(4)]
    leaves = [t.double().requires_grad_() for t in (x, *vectors)]
    z = literal(*leaves, skip.double())
    tau = vectors[3].double().repeat_interleave(len(x) // groups, 0)[:, :, None, None]
    low, nothing = torch.full_like(leaves[4], -1e9), torch.zeros_like(leaves[0])
    at_the_threshold = (literal(*leaves[:4], low, nothing) - tau).abs() < 1e-4  # rounding decides on which side
    dz = dz.masked_fill(at_the_threshold, 0)
    gradients = torch.autograd.grad(z, leaves, dz.double())
    return x, skip, vectors, dz, (z.detach(), *gradients)


def apply_ops(x, skip, vectors, dz):
    z, r = ops.filter_response(x, *vectors, skip, EPS)
    dx, sums = ops.filter_response_backward(dz, x, *vectors, r)
    return z, dx, *sums.unflatten(0, (len(vectors[0]), -1)).sum(1).unbind(1)


def error(a, b):
    return float((a.double() - b).norm() / b.norm())


def test_formulas_are_autograds():
    x, skip, vectors, dz, expected = example(groups=1)
    vectors = [t.double().flatten() for t in vectors]
    z, r = normalise(x, vectors, skip, EPS)
    dx, gradients = normalise_backward(dz, x, vectors, r)
    found = z, dx, *gradients
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.view_as(ours))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_are_the_formulas_with_groups_after_each_other(layout):
    x, skip, vectors, dz, expected = example()
    x, dz = (t.contiguous(memory_format=layout) for t in (x, dz))
    found = apply_ops(x, skip, vectors, dz)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.view_as(ours).to(ours.dtype))
    assert found[0].stride() == found[1].stride() == x.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_keep_torchs_contract(layout):
    x, skip, vectors, dz, _ = example(dtype=torch.float32)
    x, tests = x.contiguous(memory_format=layout), ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.filter_response.default, (x, *vectors, skip, EPS), test_utils=tests)
    r = ops.filter_response(x, *vectors, skip, EPS)[1]
    torch.library.opcheck(ops.filter_response_backward.default, (dz, x, *vectors, r), test_utils=tests)


def test_operators_under_vmap_twice_are_a_loop():
    generator = torch.Generator().manual_seed(1)
    x, skip, dz = (torch.randn(2, 3, 4, 6, 5, 5, generator=generator) for _ in range(3))
    vectors = [torch.randn(2, 3, 1, 6, generator=generator) for _ in range(4)]

    def both(x, skip, dz, *vectors):
        return apply_ops(x, skip, vectors, dz)

    found = torch.vmap(torch.vmap(both))(x, skip, dz, *vectors)
    for run in range(2):
        for split in range(3):
            alone = both(*(t[run, split] for t in (x, skip, dz, *vectors)))
            for ours, theirs in zip(found, alone, strict=True):
                torch.testing.assert_close(ours[run, split], theirs)
    images = [t[0, 0] for t in (x, skip, dz)]
    shared = torch.vmap(both, in_dims=(None, None, None, 0, 0, 0, 0))(*images, *(t[0] for t in vectors))
    for split in range(3):
        for ours, theirs in zip(shared, both(*images, *(t[0, split] for t in vectors)), strict=True):
            torch.testing.assert_close(ours[split], theirs)


def test_examples_by_themselves_share_the_vectors_of_their_group():
    """As VOGN asks for them: vmap over examples inside of vmap over sets of weights."""
    generator = torch.Generator().manual_seed(2)
    x, skip, dz = (torch.randn(3, 4, 1, 6, 5, 5, generator=generator) for _ in range(3))
    vectors = [torch.randn(3, 1, 6, generator=generator) for _ in range(4)]

    def both(x, skip, dz, *vectors):
        return apply_ops(x, skip, vectors, dz)

    examples = torch.vmap(both, in_dims=(0, 0, 0, None, None, None, None))
    found = torch.vmap(examples)(x, skip, dz, *vectors)
    for group in range(3):
        for example in range(4):
            alone = both(*(t[group, example] for t in (x, skip, dz)), *(t[group] for t in vectors))
            for ours, theirs in zip(found, alone, strict=True):
                torch.testing.assert_close(ours[group, example], theirs)
    graph = make_fx(torch.vmap(examples))(x, skip, dz, *vectors)
    copies = [node for node in graph.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert not copies  # a set is read where it lies


def test_a_traced_network_has_one_operator_a_layer(monkeypatch):
    """What happens on CUDA, with the operators' formulas of the CPU."""
    monkeypatch.setattr(filter_response, "_has_kernels", lambda x: True)
    net = resnet20_frn(10, (3, 32, 32))
    weights = {name: torch.stack([p.detach()] * 2) for name, p in net.named_parameters()}
    x = torch.randn(2, 1, 3, 32, 32)

    @torch.no_grad()
    def gradients(weights, x):
        def one(weights, x):
            loss, pullback = vjp(lambda w: functional_call(net, w, (x,)).square().sum(), weights)
            return pullback(torch.ones_like(loss))[0]

        return torch.vmap(one)(weights, x)

    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(weights, x)
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("bsam.filter_response.default") == 21
    assert names.count("bsam.filter_response_backward.default") == 21
    monkeypatch.undo()
    for ours, theirs in zip(graph(weights, x).values(), gradients(weights, x).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_second_derivatives_go_through_the_formulas(monkeypatch):
    monkeypatch.setattr(filter_response, "_has_kernels", lambda x: True)
    norm = FilterResponseNorm(2).double()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    assert dx.requires_grad


# ---------------------------------------------------------------------- kernels

SHAPES = [
    # examples of all groups, channels, height, width; groups
    ((128, 16, 32, 32), 8),
    ((128, 32, 16, 16), 8),
    ((32, 64, 8, 8), 8),
    ((2, 16, 64, 64), 1),
    ((15, 3, 7, 9), 5),
    ((5, 1, 2, 3), 1),
    ((6, 33, 29, 31), 3),
]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_kernels_are_the_formulas(shape, groups, dtype, tolerance, layout):
    x, skip, vectors, dz, expected = example(shape, groups, dtype, "cuda")
    x, dz = (t.contiguous(memory_format=layout) for t in (x, dz))
    strided = [torch.cat([t, t], 1)[:, : t.shape[1]] for t in vectors]
    for ours, theirs in zip(apply_ops(x, skip, strided, dz), expected, strict=True):
        assert error(ours, theirs.view_as(ours)) < tolerance
    other = next(each for each in LAYOUTS if each != layout)
    for ours, theirs in zip(apply_ops(x, skip, vectors, dz.contiguous(memory_format=other)), expected, strict=True):
        assert error(ours, theirs.view_as(ours)) < tolerance


@pytest.mark.gpu
@on_cuda
def test_kernels_hand_on_what_is_not_a_number():
    x, skip, vectors, dz, _ = example((2, 6, 5, 5), 2, torch.float32, "cuda")
    x[1, 3, 2, 2] = torch.nan
    z, dx, *_ = apply_ops(x, skip, vectors, dz)
    for t in (z, dx):
        assert t[1, 3].isnan().all()
        assert not t[0].isnan().any()


@pytest.mark.gpu
@on_cuda
def test_operators_keep_torchs_contract_on_cuda():
    x, skip, vectors, dz, _ = example(dtype=torch.float32, device="cuda")
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.filter_response.default, (x, *vectors, skip, EPS), test_utils=tests)
    r = ops.filter_response(x, *vectors, skip, EPS)[1]
    torch.library.opcheck(ops.filter_response_backward.default, (dz, x, *vectors, r), test_utils=tests)
