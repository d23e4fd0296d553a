"""The max-loss and the conjugate against brute force and closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings

from bsam.theory.fenchel import (
    biconjugate,
    conjugate,
    conjugate_over_gaussians,
    max_loss,
    max_loss_in_ball,
)
from bsam.theory.losses import Majorant, quadratic, three_minima
from tests.theory.fenchel.losses import CENTER, H, theta_to_the_fourth
from tests.theory.problems import moved, number, random_losses, two_dimensional


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
