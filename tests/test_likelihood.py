"""Likelihoods against torch.distributions and automatic differentiation."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from bsam.likelihood import (
    LearnedNoise,
    check_likelihood,
    check_outputs,
    class_dimension,
    hessian_root,
    negative_log_likelihood,
)

NOISE = 0.3
CASES = {"categorical": (3, None), "bernoulli": (1, None), "gaussian": (2, NOISE)}
"""Number of outputs, and noise_std."""


def outputs_and_labels(likelihood, n=5):
    generator = torch.Generator().manual_seed(0)
    count, _ = CASES[likelihood]
    f = torch.randn(n, count, generator=generator, dtype=torch.float64)
    if likelihood == "gaussian":
        return f, torch.randn(n, count, generator=generator, dtype=torch.float64)
    return f, torch.randint(max(2, count), (n,), generator=generator)


def log_prob(likelihood, f, y):
    if likelihood == "categorical":
        return Categorical(logits=f).log_prob(y)
    if likelihood == "bernoulli":
        return Bernoulli(logits=f[:, 0]).log_prob(y.to(f.dtype))
    return Normal(f, NOISE).log_prob(y).sum(1)


@pytest.mark.parametrize("likelihood", CASES)
def test_negative_log_likelihood_is_that_of_torch_distributions(likelihood):
    """Up to a constant, which the outputs do not change."""
    f, y = outputs_and_labels(likelihood)
    noise = CASES[likelihood][1]
    found = [negative_log_likelihood(likelihood, each, y, noise) for each in (f, 2 * f)]
    expected = [-log_prob(likelihood, each, y).sum() for each in (f, 2 * f)]
    torch.testing.assert_close(found[1] - found[0], expected[1] - expected[0])
    constant = len(f) * f.shape[1] * (math.log(NOISE) + 0.5 * math.log(2 * math.pi)) if noise else 0.0
    torch.testing.assert_close(found[0] + constant, expected[0])


@pytest.mark.parametrize("likelihood", CASES)
def test_the_root_of_the_hessian(likelihood):
    f, y = outputs_and_labels(likelihood)
    noise = CASES[likelihood][1]
    root = hessian_root(likelihood, f, noise)
    for row, label, vectors in zip(f, y, root, strict=True):

        def loss(row, label=label):
            return negative_log_likelihood(likelihood, row[None], label[None], noise)

        torch.testing.assert_close(vectors.T @ vectors, torch.autograd.functional.hessian(loss, row))


@pytest.mark.parametrize("likelihood", CASES)
def test_labels_of_another_number_are_refused(likelihood):
    f, y = outputs_and_labels(likelihood)
    with pytest.raises(ValueError, match="came with outputs of shape"):
        negative_log_likelihood(likelihood, f, y[:-1], CASES[likelihood][1])


def test_what_is_checked():
    for likelihood, (_, noise) in CASES.items():
        check_likelihood(likelihood, noise)
    for noise in (None, 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"noise_std={noise} must be a finite number > 0"):
            check_likelihood("gaussian", noise)
    with pytest.raises(ValueError, match=r"noise_std=1\.0 is only for"):
        check_likelihood("bernoulli", 1.0)
    with pytest.raises(ValueError, match="likelihood='poisson' must be one of 'categorical', 'bernoulli', 'gaussian'"):
        check_likelihood("poisson", None)


@pytest.mark.parametrize(
    ("likelihood", "good", "bad"),
    [
        ("categorical", [(4, 2)], [(4,), (4, 1), (4, 2, 2)]),
        ("bernoulli", [(4,), (4, 1)], [(4, 2), (4, 1, 1)]),
        ("gaussian", [(4,), (4, 3)], [(), (4, 3, 2)]),
    ],
)
def test_shapes_of_outputs(likelihood, good, bad):
    for shape in good:
        check_outputs(likelihood, shape)
    for shape in bad:
        with pytest.raises(ValueError, match="the model gives"):
            check_outputs(likelihood, shape)


def test_the_dimension_of_the_classes():
    by_default = {(4, 2): 1, (4, 7, 3): 2, (4, 3, 5, 6): 1, (4, 3, 5, 6, 7): 1}
    for shape, dim in by_default.items():
        assert class_dimension(shape) == dim
    assert [class_dimension((4, 3, 5, 6), dim) for dim in (1, 2, 3, -1, -3)] == [1, 2, 3, 3, 1]
    for dim in (0, -4, 4, -5, 1.0, "1"):
        with pytest.raises(ValueError, match=r"must be the dimension of the classes.*an integer from 1 to 3"):
            class_dimension((4, 3, 5, 6), dim)
    for shape in ((4,), (4, 1)):
        with pytest.raises(ValueError, match="one number per example"):
            class_dimension(shape)
    with pytest.raises(ValueError, match="with 1 classes in dimension 2"):
        class_dimension((4, 3, 1))


def test_learned_noise_is_the_root_mean_square_of_the_residuals():
    f, y = outputs_and_labels("gaussian")
    model = LearnedNoise(nn.Identity().double(), noise_std=0.7).double()
    expected = -Normal(f, 0.7).log_prob(y).sum(dim=1).mean()
    torch.testing.assert_close(model.loss(model(f), y), expected)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = model.loss(f, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert model.noise_std == pytest.approx(float((y - f).square().mean().sqrt()), rel=1e-4)


def test_learned_noise_refuses():
    with pytest.raises(ValueError, match=r"noise_std=0.0 must be a finite number > 0"):
        LearnedNoise(nn.Linear(3, 1), noise_std=0.0)
    with pytest.raises(ValueError, match=r"targets of shape \(5,\) came with outputs of shape \(5, 1\)"):
        LearnedNoise(nn.Linear(3, 1)).loss(torch.zeros(5, 1), torch.zeros(5))
