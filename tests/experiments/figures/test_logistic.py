"""Logistic regression: the results of all methods, and what predicts their variances."""

import numpy as np

from bsam.theory.gaussian import Diagonal
from bsam.theory.losses import logistic_regression
from bsam.theory.objectives import elbo


class TestLogistic:
    def test_predictions_are_probabilities(self, logistic_result):
        for p in logistic_result.maps.values():
            assert ((p >= 0) & (p <= 1)).all()
        cell = (logistic_result.weights[1] - logistic_result.weights[0]) ** 2
        np.testing.assert_allclose(logistic_result.density.sum() * cell, 1)

    def test_sam_is_overconfident_and_laplace_underconfident(self, logistic_result):
        """The caption of the paper's Figure 3."""
        confidence = {name: logistic_result.confidence(name) for name in logistic_result.maps}
        assert confidence["sam"] > confidence["exact"] + 0.004
        assert confidence["laplace"] < confidence["exact"] - 0.04
        assert abs(confidence["bsam"] - confidence["exact"]) < 0.01  # after a quarter of the steps

    def test_who_is_close_to_exact_bayes(self, logistic_result):
        distance = {name: logistic_result.distance(name) for name in logistic_result.maps}
        assert distance["exact"] == 0
        for gaussian in ("mean_field", "bsam", "bsam_sqrt_n", "bsam_undamped"):
            assert distance[gaussian] < distance["sam"] < distance["laplace"]

    def test_laplace_puts_its_mass_where_the_data_cannot_be(self, logistic_result):
        share = logistic_result.separating
        assert share["sam"] == 1
        assert share["exact"] > 0.9
        assert share["bsam"] > 0.85
        assert share["laplace"] < 0.6

    def test_who_is_wide(self, logistic_result):
        v = {name: q.variances for name, q in logistic_result.gaussians.items()}
        assert (v["bsam"] < v["laplace"]).all()
        assert (v["laplace"] < v["mean_field"]).all()
        assert (v["mean_field"] < v["exact"]).all()

    def test_the_derivations_own_precision_comes_close_to_the_best_diagonal_gaussian(self, logistic_result):
        """With sqrt(N) and without damping; the second gradient is at the sample, so the mean sees the width."""
        found, best = (logistic_result.gaussians[name] for name in ("bsam_sqrt_n", "mean_field"))
        np.testing.assert_allclose(found.mean, best.mean, rtol=0.2)
        np.testing.assert_allclose(found.variances, best.variances, rtol=0.2)
        laplace = logistic_result.gaussians["laplace"]
        assert (np.abs(found.mean - best.mean) < 0.25 * np.abs(laplace.mean - best.mean)).all()

    def test_s_star_explains_the_variances(self, logistic_result):
        r = logistic_result
        np.testing.assert_allclose(r.gaussians["bsam"].variances, r.fixed_point["bsam"], rtol=0.08)  # s fluctuates
        np.testing.assert_allclose(r.gaussians["bsam"].variances, r.stationary["bsam"], rtol=0.15)

    def test_the_mean_field_solution_is_stationary(self, logistic_result):
        loss = logistic_regression(logistic_result.features, logistic_result.labels)
        q = logistic_result.gaussians["mean_field"]
        prior_precision = logistic_result.settings.prior_precision
        best = elbo(loss, q.mean, q.variances, prior_precision, family=Diagonal(2))
        for change in (0.95, 1.05):
            assert elbo(loss, q.mean, change * q.variances, prior_precision, family=Diagonal(2)) < best
            assert elbo(loss, change * q.mean, q.variances, prior_precision, family=Diagonal(2)) < best
