import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from bsam.optim import bsam
from bsam.theory.derivation import (
    bsam_update,
    closed_form_gradient,
    diagonal_objective,
    learning_rule,
    mean_step,
    optimal_mean,
    optimal_precision,
    perturbation,
    precision_step,
)
from bsam.theory.fenchel import worst_case
from bsam.theory.gaussian import Diagonal

from .problems import number, two_dimensional

OMEGA = np.array([0.5, -1.0, 2.0])
S = np.array([4.0, 1.0, 0.3])
G = np.array([-3.0, 0.7, 0.1])
G_EPS = np.array([-2.0, 0.9, -0.4])


def test_the_diagonal_biconjugate_is_the_minimum_over_m_and_b():
    """Equation "exactng", minimised numerically, against the linear program for f**."""
    loss, omega, s = two_dimensional(), np.array([1.0, 0.0]), np.array([2.0, 3.0])
    worst = worst_case(loss, Diagonal(2), omega, 1 / s, tolerance=1e-6)
    b = -2 * worst.natural[1]
    m = worst.natural[0] / b  # grad f** = (b m, -b/2)
    np.testing.assert_allclose(diagonal_objective(loss, omega, s, m, b), -worst.value, atol=1e-5)
    for seed in range(10):
        step = 0.1 * np.random.default_rng(seed).normal(size=(2, 2))
        assert diagonal_objective(loss, omega, s, m + step[0], b * np.exp(step[1])) >= -worst.value - 1e-5


def test_each_closed_form_is_the_optimum_it_claims():
    b = np.array([2.0, 0.5, 1.5])
    for closed, function in [
        (perturbation(G, b), lambda eps: (b * eps**2).sum() / 2 - G @ eps),
        (optimal_mean(OMEGA, G_EPS, b), lambda m: G_EPS @ m + (b * (m - OMEGA) ** 2).sum() / 2),
        (np.log(optimal_precision(G, S)), lambda t: (G**2 / np.exp(t)).sum() / 2 + (np.exp(t) / S).sum() / 2),
    ]:
        found = minimize(function, np.zeros(3), options={"gtol": 1e-9}).x
        np.testing.assert_allclose(closed, found, atol=1e-5)
    first, second = closed_form_gradient(OMEGA, G_EPS, b)
    np.testing.assert_allclose(first, b * optimal_mean(OMEGA, G_EPS, b))
    np.testing.assert_allclose(second, -b / 2)


def test_m_and_b_together_would_give_no_precision():
    """Why step 3 keeps m = omega: with the best m for each b, the linearised problem falls all the way to b = 0."""

    def linearised(m, b):
        return G @ m + (G**2 / b).sum() / 2 + (b * (OMEGA - m) ** 2).sum() / 2 + (b / S).sum() / 2

    values = [linearised(optimal_mean(OMEGA, G, b), b) for b in (np.full(3, x) for x in (1.0, 0.1, 0.01, 1e-6))]
    assert values == sorted(values, reverse=True)
    np.testing.assert_allclose(values[-1], G @ OMEGA, atol=1e-5)


@given(alpha=number(0.01, 1.0), delta_0=number(0.01, 5.0))
def test_the_learning_rule_in_two_coordinates(alpha, delta_0):
    """Equation "blr" on lambda equals "preexactblr1", then "preexactblr2" with the new s."""
    b = optimal_precision(G, S)
    gradient = closed_form_gradient(OMEGA, G_EPS, b)
    first, second = learning_rule((S * OMEGA, -S / 2), gradient, (np.zeros(3), -delta_0 / 2 * np.ones(3)), alpha)
    s = precision_step(S, b, delta_0, alpha)
    np.testing.assert_allclose(-2 * second, s)
    np.testing.assert_allclose(first / s, mean_step(OMEGA, s, gradient, delta_0, alpha), rtol=1e-9, atol=1e-12)
    # and equations "exactblr1", "exactblr2"
    np.testing.assert_allclose(s, (1 - alpha) * S + alpha * (np.abs(G) * np.sqrt(S) + delta_0))
    np.testing.assert_allclose(first / s, OMEGA - alpha / s * (G_EPS + delta_0 * OMEGA), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(
    num_data=number(1, 1000),
    delta=number(0.0, 1.0),
    alpha=number(0.01, 1.0),
    beta2=number(0.0, 0.999),
    gamma=number(0.01, 0.5),
    s=st.tuples(number(0.1, 5.0), number(0.1, 5.0), number(0.1, 5.0)),
    g=st.tuples(number(-3.0, 3.0), number(-3.0, 3.0), number(-3.0, 3.0)),
)
def test_the_composition_is_algorithm_1(num_data, delta, alpha, beta2, gamma, s, g):
    """Lines 7 to 9 with beta1 = 0, as the optimizer computes them."""
    s, g = np.array(s), np.array(g)
    ours = bsam_update(
        OMEGA, s, g, G_EPS, num_data=num_data, delta=delta, learning_rate=alpha, beta2=beta2, damping=gamma
    )
    omega_t, s_t, g_t, g_eps_t = map(torch.from_numpy, (OMEGA, s, g, G_EPS))
    omega, _, s_new = bsam.update(
        omega_t,
        torch.zeros(3, dtype=torch.float64),
        s_t,
        g_eps_t,
        bsam.curvature(g_t.abs(), s_t),
        alpha=alpha,
        beta1=0.0,
        beta2=beta2,
        delta=delta,
        gamma=gamma,
    )
    np.testing.assert_allclose(ours[1], s_new.numpy(), rtol=1e-12)
    np.testing.assert_allclose(ours[0], omega.numpy(), rtol=1e-9, atol=1e-12)


def test_the_square_root_of_n():
    """Equation "blrN1": with it, s_hat <- beta2 s_hat + (1 - beta2) (sqrt(N s_hat) |g| + delta + gamma)."""
    options = {"num_data": 100.0, "delta": 0.1, "learning_rate": 0.5, "beta2": 0.9, "damping": 0.2}
    for keep, factor in ((False, 1.0), (True, 10.0)):
        _, s = bsam_update(OMEGA, S, G, G_EPS, **options, sqrt_num_data=keep)
        np.testing.assert_allclose(s, 0.9 * S + 0.1 * (factor * np.sqrt(S) * np.abs(G) + 0.3))


def test_the_perturbation_of_all_data_has_rho_1():
    N, s_hat = 50.0, S
    np.testing.assert_allclose(perturbation(N * G, N * s_hat), 1.0 * G / s_hat)
    np.testing.assert_allclose(perturbation(G, N * s_hat), 1 / N * G / s_hat)  # of one minibatch's mean loss


@pytest.mark.parametrize("sqrt_num_data", [True, False])
def test_the_stationary_precision_on_a_quadratic(sqrt_num_data):
    """With sqrt(N) the mean of b* over theta ~ q is h sqrt(2/pi) whatever s is; without, sqrt(N) times smaller."""
    h, N = 3.0, 400.0
    s_hat = np.full(200_000, 0.7)
    g = h * np.random.default_rng(0).normal(size=s_hat.shape) / np.sqrt(N * s_hat)
    _, s = bsam_update(
        0 * g,
        s_hat,
        g,
        g,
        num_data=N,
        delta=0.0,
        learning_rate=0.0,
        beta2=0.0,
        damping=0.0,
        sqrt_num_data=sqrt_num_data,
    )
    expected = h * np.sqrt(2 / np.pi) / (1 if sqrt_num_data else np.sqrt(N))
    np.testing.assert_allclose(s.mean(), expected, rtol=0.01)


@pytest.mark.parametrize(
    ("N", "batch_size", "splits", "h", "v", "form"),
    [
        (50_000, 128, 8, 1.0, 1.0, "mean_abs"),
        (50_000, 128, 1, 1.0, 1.0, "mean_abs"),
        (50_000, 128, 8, 1.0, 1.0, "abs_mean"),
        (100, 64, 8, 3.0, 0.2, "mean_abs"),
    ],
)
def test_the_stationary_precision_of_the_optimizer_with_minibatches(N, batch_size, splits, h, v, form):
    """Many linear regressions with one weight each, near their solution.

    With features x = +- sqrt(h) and residuals r ~ N(0, v / h) the gradient of an example at theta = omega + e is
    h e - x r: curvature h, variance v. A split of B' = B / m examples sees g ~ N(0, h^2 / (N s) + v / B'), so

        sqrt(s) E|g| = sqrt(2 / pi) sqrt(h^2 / N + s v / B')

    and s* - c equals this at s = s*, c = delta + gamma: a quadratic equation. The mean of m splits, of which
    `"abs_mean"` takes the absolute value, has a variance m times smaller: N and B' are N m and B.
    """
    delta, gamma, num_weights = 0.0005, 0.1, 300
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.zeros(num_weights, dtype=torch.float64))
    optimizer = bsam.BSAM(
        [w],
        lr=0.01,
        num_data=N,
        prior_precision=delta * N,
        damping=gamma,
        betas=(0.9, 0.98),
        init_precision=0.2,
        splits=splits,
        curvature=form,
        rho=0.01,
        sqrt_num_data=False,
        max_grad_norm=None,
    )
    mean_s = 0.0
    for step in range(400):
        shape = (batch_size, num_weights)
        x = h**0.5 * (2.0 * torch.randint(2, shape, generator=generator).double() - 1)
        y = (v / h) ** 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step(lambda x, y: (w * x - y).square().sum(1).mean() / 2, x, y)
        if step >= 200:
            mean_s += float(optimizer.state[w]["unit_precision"].mean()) / 200
    parts = splits if form == "mean_abs" else 1
    c, p, q = delta + gamma, 2 * h**2 / (np.pi * N * splits / parts), 2 * v / (np.pi * batch_size / parts)
    expected = c + q / 2 + np.sqrt(p + c * q + q**2 / 4)
    np.testing.assert_allclose(expected - c, np.sqrt(p + expected * q))  # it solves the equation
    np.testing.assert_allclose(mean_s, expected, rtol=0.01)
    assert mean_s > 1.02 * (c + np.sqrt(p))  # what exact gradients would give
