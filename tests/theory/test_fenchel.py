import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize

from bsam.theory.fenchel import (
    biconjugate,
    conjugate,
    conjugate_over_gaussians,
    expectation,
    expected_negative_loss,
    max_loss,
    max_loss_in_ball,
    smoothed,
    worst_case,
)
from bsam.theory.gaussian import Diagonal, Full, Isotropic, Univariate
from bsam.theory.losses import Loss, Majorant, logistic_regression, quadratic, separable_data, three_minima

from .problems import moved, number, random_losses, two_dimensional, wavy

H = np.array([[2.0, 0.5], [0.5, 1.0]])
CENTER = np.array([1.0, 2.0])
V = np.array([[0.5, -0.2], [-0.2, 0.6]])
SINE = Loss(np.sin, np.cos, lambda t: -np.sin(t), majorant=Majorant(1.0))


NOT_A_NUMBER = Loss(
    lambda t: np.where(np.abs(t) > 2, np.nan, t),
    np.ones_like,
    np.zeros_like,
    majorant=Majorant(1.0, slope=1.0),
)


def theta_to_the_fourth(majorant=None):
    return Loss(lambda t: t**4, lambda t: 4 * t**3, lambda t: 12 * t**2, majorant=majorant)


class TestExpectation:
    def test_moments(self):
        omega, v = np.array([0.3, -2.0]), np.array([0.5, 4.0])
        result = expectation(lambda t: t**4, omega, v)
        np.testing.assert_allclose(result.value, omega**4 + 6 * omega**2 * v + 3 * v**2, rtol=1e-13)
        assert (result.error <= 1e-10 * (1 + result.value)).all()

    def test_a_wave_on_a_grid(self):
        omega, v = np.meshgrid(np.linspace(-3, 3, 7), [0.0, 0.1, 1.0, 9.0])
        np.testing.assert_allclose(expectation(np.sin, omega, v).value, np.exp(-v / 2) * np.sin(omega), atol=1e-12)

    def test_a_narrow_step_meets_its_tolerance(self):
        """log(1 + exp(-30 z)): singularities 0.1 from the line."""
        result = expectation(lambda z: np.logaddexp(0, -30 * z), 0.2, 1.0)
        density = lambda z: np.exp(-((z - 0.2) ** 2) / 2) / math.sqrt(2 * math.pi)  # noqa: E731
        exact = sum(
            quad(lambda z: np.logaddexp(0, -30 * z) * density(z), *ends, epsabs=1e-13)[0]
            for ends in ((-9, -0.5), (-0.5, 0), (0, 0.5), (0.5, 9))
        )
        assert abs(result.value - exact) < 1e-10

    def test_in_the_plane_and_of_arrays(self):
        mean = np.array([[0.5, -1.0], [2.0, 0.0]])
        result = expectation(lambda t: t[..., :, None] * t[..., None, :], mean, V, dim=2)
        np.testing.assert_allclose(result.value, mean[:, :, None] * mean[:, None, :] + V, rtol=1e-12)

    def test_the_reported_error_is_honest(self):
        for tolerance in (1e-2, 1e-4, 1e-6):
            result = expectation(lambda z: np.logaddexp(0, -10 * z), 0.0, 1.0, tolerance=tolerance)
            exact = expectation(lambda z: np.logaddexp(0, -10 * z), 0.0, 1.0, tolerance=1e-13).value
            assert abs(result.value - exact) <= result.error + 1e-14

    @pytest.mark.parametrize("v", [1.0, 1e2, 1e4, 1e6])
    def test_wells_between_wide_nodes_are_seen(self, v):
        """A bowl with three Gaussian wells: both have an expectation in closed form."""
        center, width, depth = np.array([[-4.0, 0.0, 3.6], [0.35, 1.5, 0.3], [3.4, 2.2, 2.9]])
        omega = np.array([-40.0, -4.0, 0.0, 3.0, 10.0, 13.0, 200.0])
        spread = width**2 + v
        wells = depth * width / np.sqrt(spread) * np.exp(-((omega[:, None] - center) ** 2) / (2 * spread))
        exact = -3 - 0.06 * (omega**2 + v) + wells.sum(1)
        for at, value in zip(omega, exact, strict=True):
            found = expected_negative_loss(three_minima(), at, v)
            assert abs(found.value - value) <= 1e-10 * (1 + abs(value))

    def test_a_wide_gaussian_in_the_plane(self):
        well = lambda t: -np.exp(-((t - CENTER) ** 2).sum(-1) / 2)  # noqa: E731
        found = expectation(well, np.array([9.0, -7.0]), 100 * np.eye(2), dim=2)
        distance = ((np.array([9.0, -7.0]) - CENTER) ** 2).sum()
        np.testing.assert_allclose(found.value, -np.exp(-distance / 202) / 101, rtol=1e-8)

    def test_the_resolution_is_the_callers(self):
        narrow = lambda t: np.exp(-((t - 10.3) ** 2) / (2 * 0.01**2))  # noqa: E731
        exact = 0.01 / np.sqrt(1 + 0.01**2 / 100**2) / 100 * np.exp(-(10.3**2) / (2 * (100**2 + 0.01**2)))
        np.testing.assert_allclose(expectation(narrow, 0.0, 1e4, resolution=0.02).value, exact, atol=1e-9)
        with pytest.raises(RuntimeError, match=r"resolution=0\.0001, raise"):
            expectation(narrow, 0.0, 1e4, resolution=1e-4)

    def test_a_function_that_is_not_finite_is_an_error(self):
        with pytest.raises(ValueError, match=r"not finite.*logaddexp"):
            expected_negative_loss(NOT_A_NUMBER, 0.0, 1.0)

    def test_an_unreachable_tolerance_is_an_error(self):
        with pytest.raises(RuntimeError, match="max_points"):
            expectation(lambda z: np.sign(z - 0.1), 0.0, 1.0)

    def test_smoothed_is_a_loss(self):
        loss = smoothed(SINE, 0.5)
        theta = np.linspace(-3, 3, 5)
        np.testing.assert_allclose(loss(theta), np.exp(-0.25) * np.sin(theta), atol=1e-12)
        np.testing.assert_allclose(loss.gradient(theta), np.exp(-0.25) * np.cos(theta), atol=1e-12)
        np.testing.assert_allclose(loss.hessian(theta), -np.exp(-0.25) * np.sin(theta), atol=1e-12)
        many = np.linspace(-50, 50, 1001)
        original = wavy(0.5, 0.2, [(0.7, 2.0, 0.1)], [(1.0, -2.0, 0.5)])
        wide = smoothed(original, 2.0)
        assert (wide(many) <= wide.majorant(many)).all()
        plane = smoothed(quadratic(CENTER, H), 0.5)
        np.testing.assert_allclose(plane(np.zeros(2)), CENTER @ H @ CENTER / 2 + 0.25 * np.trace(H))
        np.testing.assert_allclose(plane.majorant(np.zeros(2)), plane(np.zeros(2)))


class TestMaxLoss:
    @settings(deadline=None, max_examples=40)
    @given(random_losses, number(-3, 3), number(0.05, 3))
    def test_on_the_line_against_brute_force(self, loss, m, margin):
        S = loss.majorant.curvature + margin
        value, eps = max_loss(loss, m, S)
        radius = float(loss.majorant.radius(np.asarray(m), margin, loss(m)))
        grid = np.linspace(-radius, radius, 400_001)
        J = loss(m + grid) - S * grid**2 / 2
        assert J.max() - 1e-10 * (1 + abs(J.max())) <= value <= J.max() + 40 * (radius / 200_000) ** 2 + 1e-9
        np.testing.assert_allclose(loss(m + eps) - S * eps**2 / 2, value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(loss.gradient(m + eps), S * eps, rtol=1e-6, atol=1e-6)  # eps = sigma^2 g

    def test_on_grids_and_infinite(self):
        loss = three_minima()
        m, S = np.meshgrid(np.linspace(-5, 5, 11), [0.05, 0.12, 0.2, 1.0, 30.0])
        value, eps = max_loss(loss, m, S)
        assert value.shape == eps.shape == m.shape
        assert np.isinf(value[:2]).all()  # 1/sigma^2 at most the curvature of the bowl
        assert np.isfinite(value[2:]).all()
        assert value[3, 4] == max_loss(loss, m[3, 4], S[3, 4]).value
        assert (np.diff(value[2:], axis=0) <= 0).all()  # the price of eps rises with S

    def test_in_the_plane_against_brute_force(self):
        loss = two_dimensional()
        S = loss.majorant.curvature + np.array([[1.0, 0.2], [0.2, 0.6]])
        for m in np.array([[0.0, 0.0], [3.0, -2.0], [-1.0, 2.0]]):
            value, eps = max_loss(loss, m, S)
            axis = np.linspace(-6, 6, 601)
            grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
            J = loss(m + grid) - ((grid @ S) * grid).sum(1) / 2
            assert J.max() <= value <= J.max() + 1e-3
            np.testing.assert_allclose(loss.gradient(m + eps), S @ eps, atol=1e-5)

    def test_far_from_zero(self):
        for center in (50.0, 1e4, 1e6):
            m = np.linspace(-5.1, 4.9, 11)
            value, eps = max_loss(moved(three_minima(), center), center + m, 1.0)
            near = max_loss(three_minima(), m, 1.0)
            np.testing.assert_allclose(value, near.value, rtol=1e-8)
            np.testing.assert_allclose(eps, near.perturbation, atol=1e-6)
        both = max_loss(three_minima(), [-1e3, 0.3, 1e3], 1.0).value
        np.testing.assert_array_equal(both, [max_loss(three_minima(), m, 1.0).value for m in (-1e3, 0.3, 1e3)])

    def test_a_precision_given_as_a_number(self):
        loss = two_dimensional()
        np.testing.assert_allclose(
            max_loss(loss, np.zeros(2), 3.0).value, max_loss(loss, np.zeros(2), 3.0 * np.eye(2)).value
        )
        assert max_loss(loss, np.zeros(2), 0.5).value == np.inf

    def test_in_a_ball(self):
        loss, theta = three_minima(), np.linspace(-6, 6, 25).reshape(5, 5)
        value, eps = max_loss_in_ball(loss, theta, 0.7)
        brute = loss(theta[..., None] + np.linspace(-0.7, 0.7, 20_001)).max(-1)
        np.testing.assert_allclose(value, brute, atol=1e-6)
        assert (value >= brute - 1e-12).all()
        assert (np.abs(eps) <= 0.7 + 1e-12).all()
        assert (np.abs(eps) < 0.69).any()  # some have a maximum inside
        plane = two_dimensional()
        value, eps = max_loss_in_ball(plane, np.array([2.0, -1.0]), 0.8)
        angle = np.linspace(0, 2 * np.pi, 100_001)
        circle = 0.8 * np.stack([np.cos(angle), np.sin(angle)], 1)
        np.testing.assert_allclose(value, plane(np.array([2.0, -1.0]) + circle).max(), rtol=1e-8)
        assert np.linalg.norm(eps) <= 0.8 * (1 + 1e-12)
        np.testing.assert_allclose(max_loss_in_ball(plane, CENTER, 0.0).value, plane(CENTER))


class TestConjugate:
    def test_quadratic_in_closed_form(self):
        a, c, constant = 0.7, 1.5, 0.3
        loss = quadratic(c, a, constant)
        l1, l2 = np.meshgrid([-2.0, 0.0, 3.0], [-0.4, -1.0, -5.0])
        expected = (l1 - a * c) ** 2 / (4 * (-l2 - a / 2)) + constant + a * c**2 / 2
        np.testing.assert_allclose(conjugate(loss, (l1, l2)).value, expected, rtol=1e-12)
        assert conjugate(loss, (0.0, -0.35)).value == np.inf
        assert conjugate(loss, (0.0, 1.0)).value == np.inf

    def test_quadratic_in_the_plane(self):
        loss = quadratic(CENTER, H, 0.3)
        l1, l2 = np.array([0.3, -1.0]), -np.array([[2.0, 0.1], [0.1, 1.0]])
        d = l1 - H @ CENTER
        expected = d @ np.linalg.solve(-l2 - H / 2, d) / 4 + 0.3 + CENTER @ H @ CENTER / 2
        f_star = conjugate(loss, (l1, l2))
        np.testing.assert_allclose(f_star.value, expected, rtol=1e-10)
        np.testing.assert_allclose(loss(f_star.theta) + l1 @ f_star.theta + f_star.theta @ l2 @ f_star.theta, expected)
        assert conjugate(loss, (l1, -H / 2)).value == np.inf

    @settings(deadline=None, max_examples=15)
    @given(random_losses, number(-2, 2), number(0.2, 3))
    def test_theorem_1_over_gaussians(self, loss, lambda_1, margin):
        """The supremum over mu grows to the supremum over theta when the variance shrinks."""
        natural = lambda_1, -(loss.majorant.curvature + margin) / 2
        f_star = conjugate(loss, natural).value
        over_mu = [conjugate_over_gaussians(loss, natural, v) for v in (1.0, 0.1, 0.01, 0.001)]
        assert all(a <= b + 1e-9 for a, b in zip(over_mu, [*over_mu[1:], f_star], strict=True))
        assert f_star - over_mu[-1] <= 0.001 / 2 * 60  # v / 2 times the curvature at the maximum

    def test_theorem_1_in_the_plane(self):
        loss = two_dimensional()
        natural = np.array([-1.0, 0.5]), -(loss.majorant.curvature + np.eye(2)) / 2
        over_mu = [conjugate_over_gaussians(loss, natural, v) for v in (0.1, 0.001)]
        f_star = conjugate(loss, natural).value
        assert over_mu[0] < over_mu[1] < f_star < over_mu[1] + 0.005

    def test_no_majorant_is_an_error(self):
        with pytest.raises(ValueError, match="infinite everywhere"):
            conjugate(theta_to_the_fourth(), (0.0, -1.0))
        with pytest.raises(ValueError, match="declares no majorant"):
            biconjugate(theta_to_the_fourth(), 0.0, 1.0)
        with pytest.raises(ValueError, match="exceeds majorant"):
            conjugate(theta_to_the_fourth(Majorant(100.0, curvature=1.0)), (0.0, -1.0))

    def test_a_search_too_long_is_an_error(self):
        with pytest.raises(ValueError, match="Raise the resolution"):
            conjugate(quadratic(0.0, 1.0), (1.0, -0.5 - 1e-7))


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
    @settings(deadline=None, max_examples=15)
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
