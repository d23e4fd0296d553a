"""The Gaussian's formulas, its sampling law, and what its constructor refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from bsam.posterior import DiagonalGaussian
from tests.posterior.kinds import gaussian, generator, same


def random_gaussian(seed=0, prior_precision=3.0, fixed=True):
    g = generator(seed)
    shapes = {"a": (3, 4), "b": (5,), "c": ()}
    mean = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    std = {name: torch.rand(shape, generator=g, dtype=torch.float64) + 0.1 for name, shape in shapes.items()}
    if fixed:
        std["a"][0] = 0
    return DiagonalGaussian(mean, std, prior_precision=prior_precision)


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("fixed", [False, True])
def test_closed_forms_are_those_of_torch_distributions(fixed):
    q = random_gaussian(fixed=fixed)
    sample = q.sample(generator(1))
    log_prob = entropy = kl = 0.0
    for name, mean in q.mean.items():
        sampled = q.std[name] > 0
        normal = Normal(mean[sampled], q.std[name][sampled])
        prior = Normal(torch.zeros_like(normal.mean), 1 / math.sqrt(3.0))
        log_prob += normal.log_prob(sample[name][sampled]).sum()
        entropy += normal.entropy().sum()
        kl += kl_divergence(normal, prior).sum()
    torch.testing.assert_close(q.log_prob(sample), log_prob, rtol=1e-12, atol=0)
    torch.testing.assert_close(q.entropy(), entropy, rtol=1e-12, atol=0)
    torch.testing.assert_close(q.kl(), kl, rtol=1e-12, atol=0)


def test_sums_are_float64_for_float32_weights():
    n = 1_000_000
    q = DiagonalGaussian({"w": torch.zeros(n)}, {"w": torch.full((n,), 0.1)}, prior_precision=1.0)
    one = Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.1).double())
    torch.testing.assert_close(q.entropy(), n * one.entropy(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        q.kl(), n * kl_divergence(one, Normal(torch.zeros_like(one.mean), 1.0)), rtol=1e-12, atol=0
    )
    assert q.kl().dtype == q.log_prob(q.mean).dtype == torch.float64


def test_log_prob_of_a_fixed_element_off_its_mean():
    q = random_gaussian()
    sample = q.sample(generator())
    assert q.log_prob(sample).isfinite()
    sample["a"][0, 0] += 1e-9
    assert q.log_prob(sample) == -math.inf


def test_a_gaussian_without_width_behaves_as_a_point():
    q = random_gaussian().temper(0)
    assert same(q.sample(generator()), q.mean)
    assert q.log_prob(q.mean) == 0
    assert q.entropy() == -math.inf
    with pytest.raises(ValueError, match="infinite"):
        q.kl()


@pytest.mark.parametrize("precision", [None, 0.0, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}])
def test_kl_needs_a_prior(precision):
    with pytest.raises(ValueError, match=r"prior precision of .*c.* is 0 or not given"):
        random_gaussian(prior_precision=precision).kl()


def test_kl_needs_no_prior_for_fixed_parameters():
    mean = {"a": torch.ones(2), "b": torch.ones(2)}
    q = DiagonalGaussian(mean, {"a": torch.ones(2), "b": torch.zeros(2)}, prior_precision={"a": 1.0})
    assert q.kl() == 1.0  # of two: (1 + 1 - 1 - 0) / 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_kl_is_not_negative_and_zero_at_the_prior(seed, precision):
    q = random_gaussian(seed, precision)
    assert q.kl() >= 0
    prior = {name: torch.full_like(m, precision**-0.5) for name, m in q.mean.items()}
    same_as_prior = DiagonalGaussian(
        {n: torch.zeros_like(m) for n, m in q.mean.items()}, prior, prior_precision=precision
    )
    assert abs(same_as_prior.kl()) < 1e-12


# ---------------------------------------------------------------- samples


def test_law_of_samples():
    q = random_gaussian()
    g = generator(3)
    draws = [q.sample(g) for _ in range(4000)]
    for name, mean in q.mean.items():
        values = torch.stack([draw[name] for draw in draws])
        std = q.std[name]
        assert ((values.mean(0) - mean).abs() <= 4.5 * std / 4000**0.5 + 1e-15).all()
        assert ((values.std(0) - std).abs() <= 4.5 * std / 8000**0.5 + 1e-15).all()
        z = ((values - mean) / std)[..., std > 0]
        for width, mass in ((1, 0.6827), (2, 0.9545)):  # of the normal law
            assert ((z.abs() < width).double().mean() - mass).abs() < 4.5 * (mass * (1 - mass) / z.numel()) ** 0.5


def test_randomness_is_that_of_the_generator():
    q = random_gaussian()
    state = torch.get_rng_state()
    g = generator(7)
    first, second = q.sample(g), q.sample(g)
    assert torch.equal(state, torch.get_rng_state())
    assert same(first, q.sample(generator(7)))
    assert not same(first, second)
    for wrong in (None, 0):
        with pytest.raises(TypeError, match=r"torch\.Generator\(\)\.manual_seed"):
            q.sample(wrong)


def test_fixed_parameters_take_no_random_numbers():
    q = random_gaussian()
    more = DiagonalGaussian(
        {"0": torch.zeros(9), **q.mean}, {"0": torch.zeros(9), **q.std}
    )  # "0" comes first in any order
    drawn = more.sample(generator())
    del drawn["0"]
    assert same(drawn, q.sample(generator()))


def test_sixteen_bit_weights():
    mean = {"w": torch.linspace(1, 2, 1000).bfloat16()}
    q = DiagonalGaussian(mean, {"w": torch.full((1000,), 0.01, dtype=torch.bfloat16)})
    assert (q.mean["w"].dtype, q.std["w"].dtype) == (torch.bfloat16, torch.float32)
    sample = q.sample(generator())["w"]
    assert sample.dtype == torch.bfloat16
    noise = torch.randn(1000, generator=generator())
    assert torch.equal(sample, (mean["w"].float() + q.std["w"] * noise).bfloat16())  # rounded once


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_generator_on_another_device():
    q = random_gaussian()
    here = q.sample(generator())
    there = q.to("cuda").sample(generator())
    assert all(t.is_cuda for t in there.values())
    assert all(torch.allclose(here[name], there[name].cpu(), rtol=1e-15) for name in here)


def test_temper():
    q = random_gaussian()
    cold = q.temper(0.25)
    assert all(torch.equal(cold.std[name], q.std[name] / 2) for name in q.std)
    assert same(cold.mean, q.mean)
    assert cold.prior_precision == q.prior_precision
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature="):
            q.temper(wrong)


# ---------------------------------------------------------------- construction


def one(value, **options):
    return {"w": torch.tensor(value, **options)}


@pytest.mark.parametrize(
    ("mean", "std", "precision", "error", "message"),
    [
        (one([1.0, math.nan]), one([1.0, 1.0]), None, ValueError, "mean of w is not finite"),
        (one([1.0, 1.0]), one([1.0, math.inf]), None, ValueError, "std of w must be finite and >= 0"),
        (one([1.0, 1.0]), one([1.0, -1e-9]), None, ValueError, "std of w must be finite and >= 0"),
        (one([1.0]), one([1e300], dtype=torch.float64), None, ValueError, "std of w must be finite"),
        (one([1.0, 1.0]), one([1.0]), None, ValueError, r"w \(1,\) instead of \(2,\)"),
        (one([1.0]), {}, None, ValueError, "missing: w"),
        (one([1.0]), {**one([1.0]), "v": torch.ones(1)}, None, ValueError, "unexpected: v"),
        (one([1]), one([1.0]), None, TypeError, "int64"),
        ({"w": [1.0]}, one([1.0]), None, TypeError, r"mean\['w'\] is of type list"),
        (one([1.0]), one([1.0]), -1.0, ValueError, "prior_precision=-1.0 of w must be a finite number >= 0"),
        (one([1.0]), one([1.0]), math.inf, ValueError, "prior_precision=inf"),
        (one([1.0]), one([1.0]), {"w": "1"}, ValueError, "prior_precision='1'"),
        (one([1.0]), one([1.0]), {"v": 1.0}, ValueError, "prior_precision has v, which is not in the mean"),
    ],
)
def test_constructor_refuses(mean, std, precision, error, message):
    with pytest.raises(error, match=message):
        DiagonalGaussian(mean, std, prior_precision=precision)


def test_tensors_are_detached_copies(net):
    q = gaussian(net)
    before = q.mean["scale"].clone()
    with torch.no_grad():
        net.scale.add_(1)
    assert torch.equal(q.mean["scale"], before)
    assert not any(t.requires_grad for t in (*q.mean.values(), *q.std.values()))


def test_from_model(net):
    q = gaussian(net, prior_precision={net.scale: 4.0})
    assert list(q.mean) == [name for name, _ in net.named_parameters()]
    assert "head.weight" not in q.mean  # tied to embed.weight
    assert (q.std["frozen.weight"] == 0).all()
    assert (q.std["embed.weight"] == 0.1).all()
    assert set(q.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "offset"}
    assert q.prior_precision == {"scale": 4.0}
    assert q.num_parameters == sum(p.numel() for p in net.parameters())
    with pytest.raises(ValueError, match=r"a parameter of shape \(7,\) that is not in the model"):
        DiagonalGaussian.from_model(net, {torch.ones(7): torch.ones(7)})


def test_repr():
    assert repr(random_gaussian().temper(0)) == ("DiagonalGaussian(18 parameters in 3 tensors, 0 sampled, std 0 to 0)")


# ---------------------------------------------------------------- pruning


def test_signal_to_noise():
    q = random_gaussian()
    ratio = q.signal_to_noise()
    assert (ratio["a"][0] == torch.inf).all()
    assert torch.equal(ratio["b"], q.mean["b"].abs() / q.std["b"])
    zero = DiagonalGaussian({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 1.0])})
    assert zero.signal_to_noise()["w"].tolist() == [torch.inf, 0.0]


@pytest.mark.parametrize("by", ["signal_to_noise", "magnitude"])
def test_pruned_keeps_the_largest(by):
    q = random_gaussian()  # 14 sampled elements, and 4 fixed ones
    ratio = q.signal_to_noise() if by == "signal_to_noise" else {name: mean.abs() for name, mean in q.mean.items()}
    free = torch.cat([ratio[name][q.std[name] > 0] for name in q.mean])
    pruned = q.pruned(0.5, by=by)
    least = free.sort(descending=True).values[6]
    for name in q.mean:
        stays = (ratio[name] >= least) | (q.std[name] == 0)
        assert torch.equal(pruned.mean[name], torch.where(stays, q.mean[name], 0.0))
        assert torch.equal(pruned.std[name], torch.where(stays, q.std[name], 0.0))
    assert pruned.prior_precision == q.prior_precision
    assert same(q.pruned(1.0).mean, q.mean)
    assert q.pruned(0.0).sampled_names == []


def test_pruned_refuses():
    q = random_gaussian()
    for keep in (1.5, -0.1, True, "all", math.nan):
        with pytest.raises(ValueError, match="must be a share from 0 to 1"):
            q.pruned(keep)
    with pytest.raises(ValueError, match="by='size' must be"):
        q.pruned(0.5, by="size")
    with pytest.raises(ValueError, match="no weight is sampled"):
        q.temper(0).pruned(0.5)
