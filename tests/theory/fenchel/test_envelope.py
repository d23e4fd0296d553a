"""The biconjugate and the worst case: three ways to compute them, their properties, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from bsam.theory.fenchel import (
    biconjugate,
    conjugate,
    expected_negative_loss,
    max_loss,
    max_loss_in_ball,
    worst_case,
)
from bsam.theory.gaussian import Diagonal, Full, Isotropic, Univariate
from bsam.theory.losses import Loss, Majorant, logistic_regression, quadratic, separable_data, three_minima
from tests.theory.fenchel.losses import CENTER, NOT_A_NUMBER, SINE, H, V, theta_to_the_fourth
from tests.theory.problems import moved, number, random_losses, two_dimensional


def direct_biconjugate(loss, omega, v):
    """Equation "biconjugate_clean" as it stands: maximise over m and sigma."""
    a = loss.majorant.curvature

    def negative(x):
        m, S = x[0], a + math.exp(min(x[1], 10))
        return S / 2 * ((omega - m) ** 2 + v) + max_loss(loss, m, S).value

    starts = [(m, s) for m in (omega - 1, omega + 1) for s in (-1.0, 2.0)]
    ends = [minimize(negative, x, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9}) for x in starts]
    return -min(end.fun for end in ends)


class TestBiconjugate:
    @settings(deadline=None, max_examples=15, derandomize=True)  # a few losses are refused, as they need a finer grid
    @given(random_losses, st.randoms(use_true_random=False))
    def test_properties(self, loss, random):
        generator = np.random.default_rng(random.randrange(2**32))
        omega, v = generator.uniform(-3, 3, 40), generator.uniform(0.01, 5, 40)
        omega, v = np.concatenate([omega, omega[:10]]), np.concatenate([v, np.zeros(10)])
        mu = np.stack([omega, omega**2 + v])
        i, j = generator.integers(0, 50, (2, 30))
        middle = (mu[:, i] + mu[:, j]) / 2
        omega, v = np.append(omega, middle[0]), np.append(v, middle[1] - middle[0] ** 2)
        result = biconjugate(loss, omega, np.maximum(v, 0), tolerance=1e-4)
        value, error = result.value, result.error
        # a lower bound, and the optimal one is at most `error` higher
        f = expected_negative_loss(loss, omega, np.maximum(v, 0), tolerance=1e-9).value
        assert (value <= f + 1e-8).all()
        assert (error + 1e-12 >= 0).all()
        assert (error <= 1e-4).all()
        # equal to f, and to -loss, where the variance is zero
        np.testing.assert_allclose(value[40:50], -loss(omega[40:50]), atol=1.01e-4)
        # convex in mu
        assert (value[50:] <= (value[i] + value[j]) / 2 + 1e-4).all()
        # the gradient supports f** from below: Fenchel and Young
        l1, l2 = result.natural
        tangent = (
            value[:, None]
            + l1[:, None] * (omega - omega[:, None])
            + l2[:, None] * (omega**2 + v - (omega**2 + v)[:, None])
        )
        assert (tangent <= value + 1.01e-4).all()

    def test_quadratic_is_its_own_envelope(self):
        omega, v = np.meshgrid(np.linspace(-4, 4, 9), [0.0, 0.5, 4.0])
        loss = quadratic(1.5, 0.7, 0.3)
        result = biconjugate(loss, omega, v, tolerance=1e-7)
        np.testing.assert_allclose(result.value, -0.3 - 0.35 * ((omega - 1.5) ** 2 + v), atol=1e-7)
        np.testing.assert_allclose(result.natural[0], 0.7 * 1.5, atol=1e-6)
        np.testing.assert_allclose(result.natural[1], -0.35, atol=1e-6)

    def test_the_sine_in_closed_form(self):
        """At a peak of -sin, the worst case with variance v is two points at distance sqrt(v) until the next peaks."""
        v = np.array([0.1, 1.0, 4.0, np.pi**2])
        np.testing.assert_allclose(biconjugate(SINE, -np.pi / 2, v).value, np.cos(np.sqrt(v)), atol=1e-5)
        np.testing.assert_allclose(biconjugate(SINE, -np.pi / 2, [20.0, 100.0]).value, -1, atol=1e-5)

    @pytest.mark.parametrize(("omega", "v"), [(-4.0, 0.5), (0.0, 2.0), (1.0, 4.0), (3.6, 0.1), (2.5, 0.01)])
    def test_three_ways_agree(self, omega, v):
        loss = three_minima()
        hull = biconjugate(loss, omega, v, tolerance=1e-6)
        program = worst_case(loss, Univariate(), omega, v)
        assert hull.value - 1e-12 <= program.value + program.error
        assert program.value <= hull.value + hull.error + 1e-12
        np.testing.assert_allclose(direct_biconjugate(loss, omega, v), program.value, atol=3e-6)

    def test_the_gradient(self):
        loss, step = three_minima(), 1e-2
        for omega, v in [(-4.0, 0.5), (0.5, 2.0)]:
            mu = omega, omega**2 + v
            natural = biconjugate(loss, omega, v, tolerance=1e-6).natural
            for k in range(2):
                d = step * np.eye(2)[k]
                (a1, a2), (b1, b2) = mu + d, mu - d
                ahead, behind = biconjugate(loss, [a1, b1], [a2 - a1**2, b2 - b1**2], tolerance=1e-6).value
                np.testing.assert_allclose(natural[k], (ahead - behind) / (2 * step), rtol=0.02, atol=2e-3)

    @settings(deadline=None, max_examples=10)
    @given(random_losses, number(-2, 2), number(0.2, 3))
    def test_the_conjugate_of_f_star_star_is_f_star(self, loss, lambda_1, margin):
        natural = lambda_1, -(loss.majorant.curvature + margin) / 2
        f_star, theta = conjugate(loss, natural)
        omega, v = np.meshgrid(theta + np.linspace(-3, 3, 13), [0.0, 0.05, 0.5, 2.0])
        value = biconjugate(loss, omega, v, tolerance=1e-4).value
        third = natural[0] * omega + natural[1] * (omega**2 + v) - value
        assert third.max() <= f_star + 1.01e-4
        np.testing.assert_allclose(third[0, 6], f_star, atol=1.01e-4)  # attained at mu = T(theta)

    def test_a_surface(self):
        omega, v = np.meshgrid(np.linspace(-6, 6, 60), np.linspace(0.0, 4.0, 60))
        loss = three_minima()
        f = expected_negative_loss(loss, omega, v).value
        relaxed = biconjugate(loss, omega, v, tolerance=1e-3)
        assert relaxed.value.shape == (60, 60)
        assert (relaxed.value <= f + 1e-12).all()

        # sharp minima vanish from both, from the relaxation first
        def minima(row):
            return omega[0, 1:-1][(row[1:-1] > row[:-2]) & (row[1:-1] > row[2:])]

        assert len(minima(f[1])) == len(minima(relaxed.value[1])) == 3
        assert len(minima(f[7])) == 3 > len(minima(relaxed.value[7]))
        assert len(minima(f[-1])) == len(minima(relaxed.value[-1])) == 1

    @pytest.mark.parametrize("center", [30.0, 1e3, -1e4, 1e6])
    def test_far_from_zero(self, center):
        omega, v = np.array([-4.0, 0.5, 3.6]), np.array([0.5, 2.0, 0.0])
        near = biconjugate(three_minima(), omega, v, tolerance=1e-6)
        far = biconjugate(moved(three_minima(), center), omega + center, v, tolerance=1e-6)
        np.testing.assert_allclose(far.value, near.value, atol=2e-6)
        np.testing.assert_allclose(far.natural[1], near.natural[1], rtol=1e-2)
        # lambda' moves with the Gaussian that it belongs to
        np.testing.assert_allclose(far.natural[0], near.natural[0] - 2 * near.natural[1] * center, rtol=1e-2)

    def test_means_far_from_each_other(self):
        omega = np.array([[-1e4, 2.0], [0.0, 1e4]])
        value = biconjugate(three_minima(), omega, 1.0).value
        bowl = 3 + 0.06 * (1e8 + 1)  # nothing else is left so far out
        np.testing.assert_allclose(value[[0, 1], [0, 1]], -bowl, rtol=1e-9)
        near = [worst_case(three_minima(), Univariate(), at, 1.0).value for at in (2.0, 0.0)]
        np.testing.assert_allclose(value[[0, 1], [1, 0]], near, atol=1e-5)

    @pytest.mark.parametrize("constant", [0.0, 1.0, 100.0, 1e4])
    @pytest.mark.parametrize(("omega", "v"), [(0.0, 0.01), (0.0, 1.0), (1.0, 1.0), (0.0, 4.0), (2.0, 0.5)])
    def test_a_majorant_that_does_not_hold_is_refused(self, constant, omega, v):
        """f** of theta^4 is minus infinity, whatever its author says."""
        loss = theta_to_the_fourth(Majorant(constant, curvature=4.0))
        with pytest.raises(ValueError, match="exceeds majorant"):
            biconjugate(loss, omega, v)
        with pytest.raises(ValueError, match="exceeds majorant"):
            worst_case(loss, Univariate(), omega, v)
        with pytest.raises(ValueError, match="exceeds majorant"):
            conjugate(loss, (0.0, -1e6))

    def test_a_majorant_that_does_not_hold_nearby_is_refused(self):
        """Far out it does: a bump at 1.3 is above it, and only the grid of the hull and the atoms go there."""
        bump = lambda t: 5 * np.exp(-((t - 1.3) ** 2) / 0.02)  # noqa: E731
        loss = Loss(bump, lambda t: -(t - 1.3) / 0.01 * bump(t), bump, majorant=Majorant(1.0))
        with pytest.raises(ValueError, match="exceeds majorant"):
            biconjugate(loss, 0.0, 0.5)
        with pytest.raises(ValueError, match="exceeds majorant"):
            worst_case(loss, Univariate(), 1.0, 0.5)

    def test_a_loss_that_is_not_finite_is_an_error(self):
        for ask in (
            lambda: biconjugate(NOT_A_NUMBER, 0.0, 1.0),
            lambda: biconjugate(NOT_A_NUMBER, -30.0, 1.0),
            lambda: worst_case(NOT_A_NUMBER, Univariate(), 0.0, 1.0),
            lambda: max_loss(NOT_A_NUMBER, 0.0, 1.0),
            lambda: max_loss_in_ball(NOT_A_NUMBER, 0.0, 3.0),
        ):
            with pytest.raises(ValueError, match=r"loss=nan at theta=-?[\d.]+: a loss must be finite"):
                ask()
        plane = Loss(lambda t: np.full(t.shape[:-1], np.nan), lambda t: t, lambda t: t, dim=2)
        with pytest.raises(ValueError, match="loss=nan at theta"):
            max_loss_in_ball(plane, np.zeros(2), 1.0)

    def test_what_is_refused(self):
        with pytest.raises(ValueError, match="must not be negative"):
            biconjugate(SINE, 0.0, -1.0)
        with pytest.raises(ValueError, match="worst_case"):
            biconjugate(two_dimensional(), 0.0, 1.0)
        with pytest.raises(RuntimeError, match="Raise the tolerance"):
            biconjugate(three_minima(), -4.0, 0.5, tolerance=1e-12)


class TestWorstCase:
    @pytest.mark.parametrize(("family", "covariance"), [(Full(2), V), (Diagonal(2), np.diag(V)), (Isotropic(2), 0.55)])
    def test_the_distribution_is_what_it_says(self, family, covariance):
        """Logistic loss has no curvature at infinity and every bit of mass stays: the moments are exactly mu."""
        loss = logistic_regression(*separable_data())
        mean = np.array([1.0, 1.5])
        worst = worst_case(loss, family, mean, covariance, tolerance=1e-5)
        assert worst.error <= 1e-5
        np.testing.assert_allclose(worst.weights.sum(), 1)
        for part, moment in zip(
            family.sufficient_statistics(worst.atoms), family.expectation(mean, covariance), strict=True
        ):
            np.testing.assert_allclose(np.tensordot(worst.weights, part, 1), moment, atol=1e-6)
        np.testing.assert_allclose(worst.weights @ loss(worst.atoms), -worst.value, atol=2e-5)
        f_star = conjugate(loss, (worst.natural[0], family.matrix(worst.natural[1]))).value
        bound = family.inner(worst.natural, family.expectation(mean, covariance)) - f_star
        np.testing.assert_allclose(worst.value, bound, atol=1e-6)

    def test_bounds_that_cross_are_an_error(self):
        """The first two atoms are on spikes, over which the search for f* steps."""
        spikes = lambda t: sum(np.exp(-((t - at) ** 2) / (2 * 1e-4**2)) for at in (-0.993, 1.007))  # noqa: E731
        loss = Loss(spikes, np.zeros_like, np.zeros_like, majorant=Majorant(1.0))
        with pytest.raises(RuntimeError, match=r"lower bound on f\*\* is .* smaller resolution"):
            worst_case(loss, Univariate(), 0.007, 1.0)

    @pytest.mark.parametrize("shift", [1e3, 1e6])
    def test_far_from_zero(self, shift):
        near = worst_case(three_minima(), Univariate(), -4.0, 0.5)
        far = worst_case(moved(three_minima(), shift), Univariate(), shift - 4.0, 0.5)
        np.testing.assert_allclose(far.value, near.value, atol=1e-6)
        np.testing.assert_allclose(far.weights @ far.atoms, shift - 4.0, rtol=1e-12)
        center = np.array([shift, -2 * shift])
        near = worst_case(two_dimensional(), Full(2), np.zeros(2), V, tolerance=1e-5)
        far = worst_case(moved(two_dimensional(), center), Full(2), center, V, tolerance=1e-5)
        np.testing.assert_allclose(far.value, near.value, atol=2e-5)
        assert far.error >= 0
        np.testing.assert_allclose(far.natural[1], near.natural[1], atol=1e-2)
        np.testing.assert_allclose(far.natural[0], near.natural[0] - 2 * near.natural[1] @ center, rtol=1e-2)

    def test_more_moments_help(self):
        """The smaller the family, the larger the set of distributions with the same expected statistics."""
        loss, mean, v = two_dimensional(), np.array([1.0, 0.0]), 0.5
        value = [
            worst_case(loss, family, mean, v * family.identity, tolerance=1e-5).value
            for family in (Isotropic(2), Diagonal(2), Full(2))
        ]
        value.append(float(expected_negative_loss(loss, mean, v * np.eye(2)).value))
        assert value == sorted(value)
        assert value[0] < value[-1] - 0.01

    def test_quadratic_in_the_plane(self):
        """f** = f if the Hessian lies in the family; a diagonal family does not contain this one."""
        loss, mean = quadratic(CENTER, H), np.array([0.2, -0.3])
        f = expected_negative_loss(loss, mean, V).value
        full = worst_case(loss, Full(2), mean, V, tolerance=1e-6)
        np.testing.assert_allclose(full.value, f, atol=1e-6)
        np.testing.assert_allclose(full.natural[0], H @ CENTER, atol=1e-3)
        np.testing.assert_allclose(full.natural[1], -H / 2, atol=1e-3)
        f = expected_negative_loss(loss, mean, np.diag(np.diag(V))).value
        assert worst_case(loss, Diagonal(2), mean, np.diag(V)).value < f - 0.1

    def test_what_is_refused(self):
        with pytest.raises(ValueError, match="must agree"):
            worst_case(SINE, Full(2), np.zeros(2), np.eye(2))
        with pytest.raises(RuntimeError, match="max_rounds=1"):
            worst_case(three_minima(), Univariate(), 0.0, 1.0, max_rounds=1)
