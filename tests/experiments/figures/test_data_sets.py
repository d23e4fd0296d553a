"""Over- and underconfidence on many data sets."""

import numpy as np
import pytest

from bsam.experiments.figures import data_sets, logistic
from bsam.theory.losses import murphy_data


class TestDataSets:
    def test_laplace_is_underconfident_everywhere(self, sets):
        for prior_precision in sets.confidence:
            assert (sets.excess(prior_precision, "laplace") < 0).all()
        assert (sets.excess(0.01, "sam")[sets.separable] > 0).mean() > 0.8

    def test_separable(self, sets):
        """Against a search over directions."""
        angles = np.linspace(0, 2 * np.pi, 20_000)
        w = np.stack([np.cos(angles), np.sin(angles)], 1)
        for seed, separable in enumerate(sets.separable):
            x, y = murphy_data(seed)
            assert ((y * (w @ x.T)).min(1) > 0).any() == separable
        assert 0 < sets.separable.sum() < len(sets.separable)

    @pytest.mark.filterwarnings("ignore:after 20 steps")  # bSAM is not looked at
    def test_a_row_is_what_the_figure_computes(self, monkeypatch):
        """All data sets at once, an integral in polar coordinates, against one alone on a square grid."""
        settings = logistic.Settings(bsam_steps=20, sam_steps=200, weight_grid=201, map_grid=11)
        seed = 1
        monkeypatch.setattr(logistic, "murphy_data", lambda: murphy_data(seed))
        alone = logistic.compute_logistic.__wrapped__(settings)
        together = data_sets.compute_data_sets(3, (settings.prior_precision,), settings)
        for name in ("exact", "sam", "laplace"):
            found = together.confidence[settings.prior_precision][name][seed]
            np.testing.assert_allclose(found, _half_map_confidence(alone, name), atol=2e-4)


def _half_map_confidence(result, name):
    return np.abs(result.maps[name][result.x >= 0] - 0.5).mean() + 0.5
