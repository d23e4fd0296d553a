"""The low-rank Gaussian's law and formulas; model and file are tested for all kinds in test_gaussian.py."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from bsam.posterior import DiagonalGaussian, LowRankGaussian

SHAPES = {"a": (2, 3), "b": (4,), "c": ()}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def make(rank=3, fixed=True, dtype=torch.float64, **options):
    mean = {name: draw(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    variance = {name: draw(*shape, seed=i + 10).square() + 0.1 for i, (name, shape) in enumerate(SHAPES.items())}
    deviations = {name: draw(rank, *shape, seed=i + 20) for i, (name, shape) in enumerate(SHAPES.items())}
    if fixed:
        mean["frozen"] = torch.ones(2, dtype=dtype)
        variance["a"][0, 1] = 0
        deviations["a"][:, 0, 1] = 0
    return LowRankGaussian(mean, variance, deviations, **{"prior_precision": 3.0, **options})


def flat(tensors, names=SHAPES):
    return torch.cat([tensors[name].double().reshape(-1) for name in names])


def covariance(q):
    """The definition, as a whole matrix over the sampled parameters."""
    v = flat(q.variance)
    D = torch.cat([d.double().reshape(q.rank, -1) for d in q.deviations.values()], dim=1).T
    return q.scale * (torch.diag(v) / 2 + D @ D.T / (2 * (q.rank - 1)))


def dense(q):
    """The same Gaussian over the elements that are sampled, as torch has it."""
    free = flat(q.variance) > 0
    return MultivariateNormal(flat(q.mean)[free], covariance(q)[free][:, free]), free


@pytest.mark.parametrize(("rank", "scale"), [(2, 1.0), (8, 0.5)])
def test_samples_have_the_covariance_of_the_definition(rank, scale):
    q = make(rank=rank, scale=scale)
    g = generator(5)
    samples = [q.sample(g) for _ in range(8_000)]
    z = torch.stack([flat(sample) for sample in samples])
    expected = covariance(q)
    error = torch.cov(z.T) - expected
    spread = (torch.outer(expected.diagonal(), expected.diagonal()) + expected.square()).sqrt() / math.sqrt(8_000)
    assert (error.abs() <= 4.5 * spread + 1e-15).all()
    assert ((z.mean(0) - flat(q.mean)).abs() <= 4.5 * (expected.diagonal() / 8_000).sqrt() + 1e-15).all()
    assert all(torch.equal(sample["frozen"], torch.ones(2)) for sample in samples[:3])
    torch.testing.assert_close(flat(q.std), expected.diagonal().sqrt())


def test_a_sample_is_the_formula():
    q = make(scale=0.7)
    g = generator(3)
    z_2 = torch.randn(3, generator=g, dtype=torch.float64)
    for name, value in q.sample(generator(3)).items():
        if name == "frozen":
            continue
        z_1 = torch.randn(SHAPES[name], generator=g, dtype=torch.float64)
        low_rank = sum(z * d for z, d in zip(z_2, q.deviations[name], strict=True)) / math.sqrt(2 * (3 - 1))
        expected = q.mean[name] + math.sqrt(0.7) * ((q.variance[name] / 2).sqrt() * z_1 + low_rank)
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_closed_forms_are_those_of_the_dense_matrix(fixed, scale):
    q = make(fixed=fixed, scale=scale)
    normal, free = dense(q)
    sample = q.sample(generator(1))
    torch.testing.assert_close(q.log_prob(sample), normal.log_prob(flat(sample)[free]))
    torch.testing.assert_close(q.entropy(), normal.entropy())
    prior = MultivariateNormal(torch.zeros_like(normal.mean), torch.eye(len(normal.mean), dtype=torch.float64) / 3.0)
    torch.testing.assert_close(q.kl(), kl_divergence(normal, prior))
    sample["a"][0, 0] += 1.0  # an element that is sampled in both
    torch.testing.assert_close(q.log_prob(sample), normal.log_prob(flat(sample)[free]))


def test_log_prob_of_a_fixed_element_off_its_mean():
    q = make()
    sample = q.sample(generator())
    for name, index in (("frozen", (0,)), ("a", (0, 1))):
        moved = {**sample, name: sample[name].clone()}
        moved[name][index] += 1e-9
        assert q.log_prob(moved) == -math.inf


def test_the_least_variance_of_swag_is_no_trouble():
    """Weights that never moved: v = 1e-30, no deviation, in float32."""
    v, d = torch.tensor([1.0, 1e-30]), torch.zeros(3, 2)
    d[:, 0] = torch.tensor([1.0, 2.0, -1.0])
    q = LowRankGaussian({"w": torch.ones(2)}, {"w": v}, {"w": d})
    assert torch.equal(q.sample(generator())["w"][1], torch.ones(()))
    expected = MultivariateNormal(
        torch.ones(2, dtype=torch.float64), torch.diag(torch.tensor([0.5 + 6 / 4, 0.5e-30], dtype=torch.float64))
    )
    torch.testing.assert_close(q.entropy(), expected.entropy(), rtol=1e-6, atol=0)
    torch.testing.assert_close(q.log_prob(q.mean), expected.log_prob(expected.mean), rtol=1e-6, atol=0)


@pytest.mark.parametrize("v", [1.0, 1e-6, 1e-12, 1e-20, 1e-30])
@pytest.mark.parametrize(("num_small", "num_others", "rank"), [(2, 0, 5), (1, 0, 2), (5, 0, 5), (3, 40, 6), (7, 5, 20)])
def test_variances_that_are_tiny_beside_the_deviations(num_small, num_others, rank, v):
    """No more of them than deviations, so that the dense covariance is far from singular."""
    P = num_small + num_others
    variance = torch.cat([torch.full((num_small,), v, dtype=torch.float64), draw(num_others, seed=1).square() + 0.1])
    mean, deviations = {"a": draw(P, seed=2)}, {"a": draw(rank, P, seed=3)}
    q = LowRankGaussian(mean, {"a": variance}, deviations, prior_precision=3.0)
    D = deviations["a"].T
    normal = MultivariateNormal(mean["a"], torch.diag(variance) / 2 + D @ D.T / (2 * (rank - 1)))
    torch.testing.assert_close(q.entropy(), normal.entropy(), rtol=0, atol=1e-9)
    for seed in range(3):
        sample = q.sample(generator(seed))
        torch.testing.assert_close(q.log_prob(sample), normal.log_prob(sample["a"]), rtol=0, atol=1e-5)
    prior = MultivariateNormal(torch.zeros_like(mean["a"]), torch.eye(P, dtype=torch.float64) / 3.0)
    torch.testing.assert_close(q.kl(), kl_divergence(normal, prior), rtol=1e-9, atol=0)


def test_more_tiny_variances_than_deviations():
    """A block of two deviations and fifty weights that hardly have a variance of their own."""
    v, rank, P = 1e-30, 2, 50
    D = draw(rank, P, seed=3)
    q = LowRankGaussian({"a": torch.zeros(P)}, {"a": torch.full((P,), v)}, {"a": D})
    D = q.deviations["a"].double()
    # log det(v/2 I + D^T D / 2) = (P - 2) log(v/2) + log det(v/2 I + D D^T / 2)
    small = torch.logdet(v / 2 * torch.eye(rank, dtype=torch.float64) + D @ D.T / 2)
    log_det = (P - rank) * math.log(float(torch.tensor(v)) / 2) + small
    torch.testing.assert_close(q.entropy(), 0.5 * (log_det + P * math.log(2 * math.pi * math.e)), rtol=1e-12, atol=0)


def test_without_deviations_it_is_a_diagonal_gaussian_of_half_the_variance():
    q = make(fixed=False)
    bare = LowRankGaussian(q.mean, q.variance, {n: torch.zeros_like(d) for n, d in q.deviations.items()})
    diagonal = DiagonalGaussian(q.mean, {n: (v / 2).sqrt() for n, v in q.variance.items()})
    torch.testing.assert_close(bare.std, diagonal.std)
    sample = q.sample(generator())
    torch.testing.assert_close(bare.log_prob(sample), diagonal.log_prob(sample))
    torch.testing.assert_close(bare.entropy(), diagonal.entropy())


def test_temper_multiplies_the_scale():
    q = make(scale=0.5)
    warm = q.temper(3.0)
    assert warm.scale == 1.5
    torch.testing.assert_close(covariance(warm), 3 * covariance(q))
    assert warm.prior_precision == q.prior_precision
    point = q.temper(0)
    assert all(torch.equal(value, q.mean[name]) for name, value in point.sample(generator()).items())
    assert point.log_prob(q.mean) == 0
    assert point.entropy() == -math.inf
    with pytest.raises(ValueError, match="infinite"):
        point.kl()
    with pytest.raises(ValueError, match="temperature=-1"):
        q.temper(-1.0)


def test_kl_needs_a_prior():
    with pytest.raises(ValueError, match="prior precision of a, b, c is 0 or not given"):
        make(prior_precision=None).kl()


def test_randomness_is_that_of_the_generator():
    q = make()
    state = torch.get_rng_state()
    one, other = q.sample(generator(7)), q.sample(generator(7))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(TypeError, match="manual_seed"):
        q.sample(0)


def test_types():
    q = make(dtype=torch.bfloat16)
    assert q.sample(generator())["a"].dtype == torch.bfloat16
    assert {t.dtype for t in (*q.variance.values(), *q.deviations.values())} == {torch.float32}


def one(value, **options):
    return {"w": torch.tensor(value, **options)}


TWO = {"w": torch.tensor([[1.0], [2.0]])}


@pytest.mark.parametrize(
    ("mean", "variance", "deviations", "options", "error", "message"),
    [
        (one([math.nan]), one([1.0]), TWO, {}, ValueError, "mean of w is not finite"),
        (one([1.0]), one([-1.0]), TWO, {}, ValueError, r"variance \(>= 0\) and deviations of w must be finite"),
        (one([1.0]), one([math.inf]), TWO, {}, ValueError, "deviations of w must be finite"),
        (one([1.0]), one([1.0]), one([[1.0], [math.nan]]), {}, ValueError, "deviations of w must be finite"),
        (one([1.0]), one([1.0, 2.0]), TWO, {}, ValueError, r"variance must .* w \(2,\) instead of \(1,\)"),
        (one([1.0]), {"v": torch.ones(1)}, TWO, {}, ValueError, "variance has v, which is not in the mean"),
        (one([1.0]), one([1.0]), {}, {}, ValueError, "a deviation must .* missing: w"),
        (one([1.0]), one([1.0]), one([[1.0, 2.0]] * 2), {}, ValueError, r"w \(2,\) instead of \(1,\)"),
        (one([1.0]), one([1.0]), one([[1.0]]), {}, ValueError, r"deviations has \[1\] columns"),
        (one([1.0]), one([1.0]), one([]), {}, ValueError, "a deviation must|columns"),
        (one([1.0]), one([0.0]), TWO, {}, ValueError, "w has deviations where its variance is 0"),
        (one([1]), one([1.0]), TWO, {}, TypeError, "int64"),
        (one([1.0]), one([1.0]), TWO, {"scale": -1.0}, ValueError, "scale=-1.0"),
        (one([1.0]), one([1.0]), TWO, {"scale": math.nan}, ValueError, "scale=nan"),
        (one([1.0]), one([1.0]), TWO, {"scale": "1"}, ValueError, "scale='1'"),
        (one([1.0]), one([1.0]), TWO, {"prior_precision": -1.0}, ValueError, "prior_precision=-1.0"),
    ],
)
def test_constructor_refuses(mean, variance, deviations, options, error, message):
    with pytest.raises(error, match=message):
        LowRankGaussian(mean, variance, deviations, **options)


def test_different_numbers_of_deviations_are_refused():
    mean = {"v": torch.ones(1), "w": torch.ones(1)}
    deviations = {"v": torch.ones(2, 1), "w": torch.ones(3, 1)}
    with pytest.raises(ValueError, match=r"\[2, 3\] columns"):
        LowRankGaussian(mean, mean, deviations)
