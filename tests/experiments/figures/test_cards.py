"""The cards of the methods show what the package computes."""

import numpy as np
import pytest

from bsam.experiments.figures import cards
from tests.experiments.figures.test_init import ROOT


@pytest.mark.parametrize("method", ["sam", "laplace"])
def test_a_card(method):
    card = cards.compute_card(method, num_steps=300)
    assert card.path.shape == (301, 2)
    assert card.path[0].tolist() == [0, 0]
    peak = np.unravel_index(card.density.argmax(), card.density.shape)
    assert np.abs(card.mean - card.weights[[peak[1], peak[0]]]).max() < 0.4  # near the mode of the exact posterior
    spread = np.sqrt(np.diag(card.covariance))
    if method == "sam":
        assert spread.max() < 1e-6  # a point
    else:
        assert (spread > 0.3).all()
        assert (spread < 0.8).all()


def test_every_method_with_a_page_has_a_card():
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} - {"index"}
    assert set(cards.CARDS) == pages
