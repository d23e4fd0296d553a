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
        for f, lower in ((r.f_mu, r.biconjugate_mu), (r.f, r.biconjugate), (r.slice_f, r.slice_biconjugate)):
            assert (lower <= f + 1e-9).all()
        for x, f, lower in ((r.mu_1, r.f_mu, r.biconjugate_mu), (r.omega, r.f, r.biconjugate)):
            np.testing.assert_allclose(f[0], -loss(x[0]), atol=1e-9)
            np.testing.assert_allclose(lower[0], -loss(x[0]), atol=2e-3)
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
