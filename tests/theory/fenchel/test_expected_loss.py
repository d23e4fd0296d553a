"""Expectations under Gaussians against closed forms and integrals."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from bsam.theory.fenchel import (
    expectation,
    expected_negative_loss,
    smoothed,
)
from bsam.theory.losses import quadratic, three_minima
from tests.theory.fenchel.losses import CENTER, NOT_A_NUMBER, SINE, H, V
from tests.theory.problems import wavy


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
