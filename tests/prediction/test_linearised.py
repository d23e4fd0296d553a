"""Predictions of a linearised model against closed forms, integrals and samples."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn

from bsam.posterior import DiagonalGaussian, PointMass, laplace
from bsam.prediction import predict, predict_linearised
from bsam.prediction.linearised import _integrated


def network(outputs=3, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, outputs)).double()


def linear(outputs):
    torch.manual_seed(2)
    return nn.Linear(4, outputs, dtype=torch.float64)


def points(n=9):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def gaussian(model, std=0.3):
    return DiagonalGaussian.from_model(model, {p: torch.full_like(p, std) for p in model.parameters()})


def dense(model, posterior, x):
    """f and J Sigma J^T, one example at a time."""
    model.eval()
    parameters = dict(model.named_parameters())
    covariances = []
    for i in range(len(x)):
        J = torch.func.jacrev(lambda w, i=i: torch.func.functional_call(model, w, (x[i : i + 1],))[0])(parameters)
        covariances.append(
            sum((j.flatten(1) * posterior.std[name].flatten() ** 2) @ j.flatten(1).T for name, j in J.items())
        )
    model.train()
    with torch.no_grad():
        return model.eval()(x), torch.stack(covariances).detach()


@pytest.mark.parametrize("vectorise", [True, False])
def test_regression_is_the_closed_form(vectorise):
    model, x = network(2), points()
    posterior = gaussian(model)
    f, covariance = dense(model, posterior, x)
    y = f + 0.5 * torch.randn(9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"likelihood": "gaussian", "noise_std": 0.2, "vectorise": vectorise}
    result = predict_linearised(model, posterior, (x, y), batch_size=4, **options)
    torch.testing.assert_close(result.mean, f)
    torch.testing.assert_close(result.epistemic_variance, covariance.diagonal(dim1=1, dim2=2))
    full = covariance + 0.04 * torch.eye(2, dtype=torch.float64)
    r = (y - f)[:, :, None]
    quadratic = (r.mT @ torch.linalg.solve(full, r)).flatten()
    expected = -0.5 * (quadratic + torch.logdet(full) + 2 * math.log(2 * math.pi))
    torch.testing.assert_close(result.log_density, expected)
    assert torch.equal(result.targets, y)
    marginal = torch.distributions.Normal(f, full.diagonal(dim1=1, dim2=2).sqrt())
    torch.testing.assert_close(result.cdf, marginal.cdf(y))
    assert (result.num_samples, result.computed_by, result.noise_std) == (0, "linearised", 0.2)
    assert predict_linearised(model, posterior, x, **options).log_density is None


def test_one_label_per_example():
    """Curvatures of several labels are not computed: the errors say how to take one at a time."""
    model, x = network(3), points()
    with pytest.raises(ValueError, match=r"needs one logit.*multi-label.*forward=lambda model, inputs: model"):
        predict_linearised(model, gaussian(model), x, likelihood="bernoulli")
    with pytest.raises(ValueError, match=r"\(9, 3, 1\).*needs \(n, K\)"):
        predict_linearised(model, gaussian(model), x, forward=lambda model, x: model(x)[..., None])


def test_arrays():
    model, x = network(3).float(), points()
    results = (predict_linearised(model, gaussian(model), data) for data in (x.float(), x.numpy()))
    torch.testing.assert_close(*(result.log_probs for result in results))


def test_one_output_is_a_column_of_numbers():
    model, x = linear(1), points()
    posterior = gaussian(model, 0.5)
    for y in (torch.zeros(9), torch.zeros(9, 1)):
        result = predict_linearised(model, posterior, (x, y), likelihood="gaussian", noise_std=1.0)
        torch.testing.assert_close(result.mean, model(x).flatten())
        torch.testing.assert_close(result.epistemic_variance, 0.25 * (x.square().sum(1) + 1))
        expected = torch.distributions.Normal(result.mean, result.variance.sqrt()).log_prob(torch.zeros(9))
        torch.testing.assert_close(result.log_density, expected)


def test_for_a_linear_model_it_is_what_samples_converge_to():
    model, x = linear(3), points()
    posterior = gaussian(model, 0.5)
    exact = predict_linearised(model, posterior, x, num_samples=5_000, seed=1)
    sampled = predict(model, posterior, x, num_samples=5_000)
    torch.testing.assert_close(exact.probs, sampled.probs, rtol=0, atol=4.5 * 0.5 * math.sqrt(2 / 5_000))
    torch.testing.assert_close(exact.mutual_information, sampled.mutual_information, rtol=0, atol=0.02)
    binary = linear(1)
    exact = predict_linearised(binary, gaussian(binary, 0.5), x, likelihood="bernoulli")
    sampled = predict(binary, gaussian(binary, 0.5), x, num_samples=5_000, likelihood="bernoulli")
    torch.testing.assert_close(exact.probs, sampled.probs, rtol=0, atol=4.5 * 0.5 / math.sqrt(5_000))
    torch.testing.assert_close(exact.mutual_information, sampled.mutual_information, rtol=0, atol=0.02)


@pytest.mark.parametrize("std", [0.0, 0.1, 1.0, 1.001, 5.0, 30.0, 300.0, 1e4, 1e7])
def test_the_sigmoid_is_averaged_exactly(std):
    means = np.array([-40.0, -3.0, 0.0, 0.7, 12.0, -3 - 2 * std, 6 * std, 29 * std, 31 * std])
    labels = torch.arange(9) % 2
    f, variance = torch.tensor(means), torch.full((9,), std**2, dtype=torch.float64)
    columns = _integrated(f, variance, labels)

    def average(function, m):
        density = lambda z: math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)  # noqa: E731
        bend = [min(max(-(m + logit) / std, -11.0), 11.0) for logit in (-40, 0, 40)] if std else None
        return integrate.quad(
            lambda z: density(z) * function(m + std * z), -12, 12, points=bend, epsabs=1e-13, limit=500
        )[0]

    sigmoid = lambda a: 1 / (1 + math.exp(-a)) if a > -700 else 0.0  # noqa: E731

    def entropy(p):
        return sum(-q * math.log(q) for q in (p, 1 - p) if q > 0)

    p = np.array([average(sigmoid, m) for m in means])
    np.testing.assert_allclose(columns["log_probs"][:, 1].exp(), p, rtol=0, atol=1e-9)
    np.testing.assert_allclose(columns["log_probs"].exp().sum(1), 1, rtol=1e-12)
    inner = np.array([average(lambda a: entropy(sigmoid(a)), m) for m in means])
    information = np.array([entropy(q) for q in p]) - inner
    np.testing.assert_allclose(columns["mutual_information"], np.maximum(information, 0), rtol=0, atol=1e-7)
    assert torch.equal(columns["labels"], labels)
    assert columns["log_probs"].isfinite().all()


def test_classes_against_samples_of_the_dense_gaussian():
    model, x = network(3), points()
    posterior = gaussian(model)
    f, covariance = dense(model, posterior, x)
    draws = torch.distributions.MultivariateNormal(f, covariance).sample((20_000,))
    result = predict_linearised(model, posterior, (x, torch.arange(9) % 3), num_samples=20_000)
    torch.testing.assert_close(result.probs, draws.softmax(-1).mean(0), rtol=0, atol=0.015)
    assert torch.equal(result.labels, torch.arange(9) % 3)
    assert (result.num_samples, result.seed, result.computed_by) == (20_000, 0, "linearised")


def test_a_logit_that_is_always_zero_is_no_trouble():
    """K - 1 outputs and an appended zero: the covariance is singular."""
    model, x = network(2), points()
    result = predict_linearised(
        model, gaussian(model), x, forward=lambda m, x: torch.cat([m(x), torch.zeros(len(x), 1)], 1)
    )
    torch.testing.assert_close(result.log_probs.logsumexp(1), torch.zeros(9, dtype=torch.float64))
    assert (result.mutual_information > 0).all()


def test_seed_and_batches():
    model, x = network(3), points()
    posterior = gaussian(model)
    first = predict_linearised(model, posterior, x, seed=1)
    for batch_size, vectorise in ((1, None), (4, True), (9, False)):
        again = predict_linearised(model, posterior, x, seed=1, batch_size=batch_size, vectorise=vectorise)
        torch.testing.assert_close(again.log_probs, first.log_probs, rtol=1e-9, atol=1e-9)
    assert not torch.equal(first.log_probs, predict_linearised(model, posterior, x, seed=2).log_probs)


def test_the_model_is_left_as_it_was_and_may_hold_other_weights_or_be_frozen():
    model, x = network(3), points()
    posterior = gaussian(model)
    expected = predict_linearised(model, posterior, x)
    other = network(3, seed=7).requires_grad_(False)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    state = torch.get_rng_state()
    for vectorise in (True, False):
        result = predict_linearised(other, posterior, x, vectorise=vectorise)
        torch.testing.assert_close(result.log_probs, expected.log_probs)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in other.parameters())
    assert all(layer.training for layer in other.modules())


def test_fixed_weights_have_no_part_in_it():
    model, x = network(1), points()
    head = DiagonalGaussian.from_model(model, {p: torch.full_like(p, 0.3) for p in model[3].parameters()})
    result = predict_linearised(model, head, x, likelihood="gaussian", noise_std=1.0)
    features = model.eval()[:2](x)
    torch.testing.assert_close(result.epistemic_variance, 0.09 * (features.square().sum(1) + 1))
    point = gaussian(model).temper(0)
    assert not predict_linearised(model, point, x, likelihood="gaussian", noise_std=1.0).epistemic_variance.any()


def test_far_from_the_data_it_is_uncertain():
    x = torch.cat([points(20) - 2, points(20) + 2])
    y = torch.cat([torch.zeros(20), torch.ones(20)]).double()
    model = network(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y).backward()
        optimizer.step()
    posterior = laplace(model, "bernoulli", x, prior_precision=0.4)
    near, far = predict_linearised(
        model, posterior, torch.tensor([[2.0] * 4, [-1.0, 1.0, -1.0, 1.0]]).double(), likelihood="bernoulli"
    ).entropy
    assert near < 0.3 < far


@pytest.mark.parametrize(
    ("posterior", "options", "error", "message"),
    [
        (PointMass.from_model, {}, TypeError, "posterior is a PointMass"),
        (gaussian, {"num_samples": 0}, ValueError, "num_samples=0"),
        (gaussian, {"batch_size": 0}, ValueError, "batch_size=0"),
        (gaussian, {"likelihood": "bernoulli"}, ValueError, "needs one logit"),
        (gaussian, {"likelihood": "gaussian"}, ValueError, "noise_std=None"),
    ],
)
def test_bad_arguments_are_refused(posterior, options, error, message):
    model = network(3)
    with pytest.raises(error, match=message):
        predict_linearised(model, posterior(model), points(), **options)
