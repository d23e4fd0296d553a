"""Max-loss, expected loss and relaxation show what their captions say."""

import numpy as np

from bsam.experiments.figures import numbers, objectives
from bsam.theory.fenchel import max_loss
from bsam.theory.losses import quadratic, three_minima


class TestObjectives:
    def test_max_loss_and_worst_expected_loss_exceed_the_expected_loss(self, neighbourhood):
        n = neighbourhood
        assert n.expected_loss < n.worst_expected_loss < n.max_loss
        assert abs(n.perturbation) <= n.rho + 1e-12

    def test_the_loss_at_omega_is_far_below_both(self, neighbourhood):
        """So that the picture shows a sharp minimum, and three heights that one can tell apart."""
        assert three_minima()(neighbourhood.omega) < neighbourhood.expected_loss - 0.8

    def test_sams_minimiser_is_the_relaxations(self, smoothing):
        """The star of the picture, with rho = sigma, lies at the lowest point of the relaxation."""
        lowest = smoothing.omega[smoothing.relaxed.argmin(1)]
        np.testing.assert_allclose(smoothing.sam_minimisers, lowest, atol=0.06)
        assert smoothing.sam_minimisers[0] < -3.5  # at A
        assert abs(smoothing.sam_minimisers[-1]) < 0.1  # at B

    def test_the_worst_distribution_has_the_moments(self, neighbourhood):
        n = neighbourhood
        np.testing.assert_allclose(n.weights.sum(), 1)
        np.testing.assert_allclose(n.weights @ n.atoms, n.omega, atol=0.02)  # the atoms are rounded
        np.testing.assert_allclose(n.weights @ (n.atoms - n.omega) ** 2, n.sigma**2, atol=0.05)
        np.testing.assert_allclose(n.weights @ three_minima()(n.atoms), n.worst_expected_loss, atol=0.02)

    def test_a_quadratic_above_the_loss_has_this_mean(self, neighbourhood):
        n = neighbourhood
        assert (n.majorant >= n.loss - 1e-3).all()
        coefficients = np.polyfit(n.theta, n.majorant, 2)
        mean = np.polyval(coefficients, n.omega) + coefficients[0] * n.sigma**2
        np.testing.assert_allclose(mean, n.worst_expected_loss, atol=1e-3)

    def test_the_relaxation_is_above_and_sharp_minima_vanish(self, smoothing):
        assert (smoothing.relaxed >= smoothing.expected - 1e-9).all()
        found = numbers.of_smoothing(smoothing)
        expected, worst = found["minima_of_expected_loss"], found["minima_of_relaxation"]
        assert expected[0] == worst[0] == 3
        assert expected[-1] == worst[-1] == 1
        assert sorted(expected, reverse=True) == expected
        assert sorted(worst, reverse=True) == worst
        assert all(w <= e for w, e in zip(worst, expected, strict=True))
        left = smoothing.omega[smoothing.relaxed[-1].argmin()]
        assert abs(left - objectives.MINIMA["B"]) < 0.1

    def test_counting_minima(self):
        x = np.linspace(-10, 10, 401)
        assert objectives.count_minima(np.cos(x)) == 3 + 1  # -3 pi is one
        assert objectives.count_minima(x) == objectives.count_minima(-x) == 0
        assert objectives.count_minima(x**2 + 1e-4 * np.cos(40 * x), threshold=0.01) == 1

    def test_sam_and_the_relaxation_share_their_minimiser(self, theorem_2):
        t = theorem_2
        assert abs(t.sam_minimiser - t.relaxed_minimiser) < 1e-8
        assert abs(t.sam_minimiser - t.theta[t.sam.argmin()]) < 0.05  # global: no lower point on the grids
        assert abs(t.relaxed_minimiser - t.theta[t.relaxed.argmin()]) < 0.05
        assert abs(t.theta[t.regularised.argmin()] - objectives.MINIMA["A"]) < 0.1  # the loss itself prefers A
        smooth = ~t.is_kink
        np.testing.assert_allclose(t.sam_minimisers[smooth], t.relaxed_minimisers[smooth], atol=1e-8)
        assert smooth.any()
        assert t.is_kink.any()
        assert np.isnan(t.relaxed_minimisers[t.is_kink]).all()
        assert t.radii[smooth].max() < t.radii[t.is_kink].min()

    def test_beyond_the_theorem_two_kinks_coincide_because_b_is_symmetric(self, theorem_2):
        t = theorem_2
        loss, near = objectives.recentred(three_minima(), t.centre), np.linspace(-1, 1, 801) - t.centre
        relaxed = max_loss(loss, near, 1 / 1.5).value + t.delta / 2 * near**2
        place = near[relaxed.argmin()]
        np.testing.assert_allclose(place + t.centre, t.sam_minimisers[t.is_kink], atol=0.005)
        sides = max_loss(loss, place + np.array([-0.01, 0.01]), 1 / 1.5).perturbation
        assert sides[0] < -1 < 1 < sides[1]  # it jumps from one side to the other

    def test_recentring_moves_loss_and_bound(self):
        moved, x = objectives.recentred(quadratic(1.0, 2.0), 3.0), np.linspace(-4, 4, 9)
        np.testing.assert_allclose(moved(x), (x + 2) ** 2)
        np.testing.assert_allclose(moved.majorant(x), moved(x))
        np.testing.assert_allclose(moved.gradient(x), 2 * (x + 2))
        np.testing.assert_allclose(moved.hessian(x), 2)
