"""Two moons: maps of certainty."""

from bsam.experiments.demo import CERTAIN
from bsam.experiments.figures import moons
from tests.experiments.figures.test_init import RECORD, ROOT


class TestMoons:
    def test_maps(self, moons_result):
        assert list(moons_result.maps) == list(moons.TITLES)
        assert len(moons_result.forgetful) == moons.FORGETFUL_SEEDS
        for found in moons_result.maps.values():
            assert ((found.probability >= 0) & (found.probability <= 1)).all()

    def test_the_record_has_what_the_caption_says(self):
        certain, accuracy = RECORD["moons"]["certain_far_away"], RECORD["moons"]["training_accuracy"]
        assert certain["sam-sgd"] > certain["bsam"] > certain["laplace"]
        page = " ".join((ROOT / "docs" / "when_not.md").read_text().split())
        assert f"bSAM is still more than {CERTAIN:.0%} certain on {certain['bsam']:.0%} of the area far away" in page
        assert all(accuracy[name] == 1 for name in moons.TITLES)
        forgetful = RECORD["moons"]["training_accuracy_of_seeds"][moons.FORGETFUL]
        assert sum(found is None or found < 0.95 for found in forgetful) > len(forgetful) / 2
