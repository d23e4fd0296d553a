"""Relaxed Bayes beside Bayes."""

import numpy as np


class TestRelaxed:
    def test_the_relaxed_posterior_is_narrower(self, relaxed_result):
        v = {name: np.diag(trace.covariance[-1]) for name, trace in relaxed_result.traces.items()}
        assert (v["relaxed"] < 0.5 * v["bayes"]).all()
        assert (v["relaxed"] < v["sampled"]).all()

    def test_the_gap(self, relaxed_result):
        r = relaxed_result
        for gap in r.gaps.values():
            assert (gap > 0).all()
        assert r.gaps["relaxed"][-1] < r.gaps["sampled"][-1]
        assert (r.apparent_gap < r.gaps["sampled"]).all()
        assert (np.diff(r.traces["relaxed"].relaxed_elbo) >= -1e-4).all()
