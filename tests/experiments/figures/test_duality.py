"""Dual spaces and the biconjugate show what their captions say."""

import numpy as np

from bsam.experiments.figures import duality
from bsam.theory.fenchel import biconjugate
from bsam.theory.losses import three_minima


class TestDuality:
    def test_the_spaces(self):
        s = duality.compute_spaces()
        assert (s.mu[1] > s.mu[0] ** 2).all()
        assert (s.natural[1] < 0).all()
        np.testing.assert_allclose(s.natural[0], s.omega / s.variance)

    def test_f_is_above_and_both_end_in_the_loss(self, surfaces):
        r = surfaces
        loss = three_minima()
        along = [line[2:] for line in r.lines.values()]
        for f, lower in ((r.f_mu, r.biconjugate_mu), (r.slice_f, r.slice_biconjugate), *along):
            assert (lower <= f + 1e-9).all()
        np.testing.assert_allclose(r.f_mu[0], -loss(r.mu_1[0]), atol=1e-9)
        np.testing.assert_allclose(r.biconjugate_mu[0], -loss(r.mu_1[0]), atol=2e-3)
        assert (r.mu_2 >= r.mu_1**2 - 1e-12).all()
        assert r.slices.tolist() == [0.5, 2.0, 4.0]

    def test_the_biconjugate_is_convex_in_mu_only(self, surfaces):
        r = surfaces
        mu = np.stack([r.mu_1.ravel(), r.mu_2.ravel()], 1)
        pairs = np.random.default_rng(0).integers(len(mu), size=(300, 2))
        middle = mu[pairs].mean(1)
        between = biconjugate(three_minima(), middle[:, 0], middle[:, 1] - middle[:, 0] ** 2, tolerance=2e-3).value
        assert (between <= r.biconjugate_mu.ravel()[pairs].mean(1) + 4e-3).all()
        assert (np.diff(r.slice_biconjugate, 2) < -1e-4).any()
        for mu_1, mu_2, f, lower in r.lines.values():  # of which the picture says so
            t = (mu_1 - mu_1[0]) / (mu_1[-1] - mu_1[0])
            np.testing.assert_allclose(mu_2, mu_2[0] + t * (mu_2[-1] - mu_2[0]), atol=1e-9)  # straight
            slopes = np.diff(lower) / np.diff(t)
            assert (np.diff(slopes) >= -4e-3 / np.diff(t).min()).all()
            assert (lower <= (1 - t) * lower[0] + t * lower[-1] + 4e-3).all()
            np.testing.assert_allclose(f[[0, -1]], lower[[0, -1]], atol=4e-3)
