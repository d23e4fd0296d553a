"""The record of the figures' numbers is up to date, and the page on the theory quotes it."""

import dataclasses
import json
import re

import numpy as np

from bsam.experiments.figures import logistic, moons, numbers
from tests.experiments.figures.test_init import RECORD, ROOT
from tools.theory import theory_markdown


def shape(value):
    """What a record looks like without its numbers."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value]
    return "number" if value is None or isinstance(value, int | float) else type(value).__name__  # None: not finite


class TestRecord:
    def test_the_record_is_what_the_code_computes(
        self, neighbourhood, smoothing, theorem_2, logistic_result, sets, relaxed_result, moons_result
    ):
        """In shape everywhere, and in number where that is quick."""
        fresh = {
            "neighbourhood": numbers.of_neighbourhood(neighbourhood),
            "smoothing": numbers.of_smoothing(smoothing),
            "theorem_2": numbers.of_theorem_2(theorem_2),
            "logistic": numbers.of_logistic(logistic_result),
            "data_sets": numbers.of_data_sets(sets),
            "relaxed_bayes": numbers.of_relaxed(relaxed_result),
            "moons": numbers.of_moons(moons_result),
        }
        assert [*fresh, "seconds", "environment"] == list(RECORD)
        assert shape(json.loads(json.dumps(fresh))) == {key: shape(RECORD[key]) for key in fresh}
        assert fresh["smoothing"] == RECORD["smoothing"]
        for part, rtol in (("neighbourhood", 1e-4), ("theorem_2", 1e-3)):
            for key, value in RECORD[part].items():
                if key not in ("largest_difference_without_kink", "smallest_rho_with_kink"):
                    np.testing.assert_allclose(fresh[part][key], value, rtol=rtol)

    def test_the_recorded_settings_are_the_present_ones(self):
        settings = json.loads(json.dumps(dataclasses.asdict(logistic.Settings())))
        assert RECORD["logistic"]["settings"] == settings

    def test_the_numbers_are_sane(self):
        assert RECORD["theorem_2"]["largest_difference_without_kink"] < 1e-8
        fixed = RECORD["logistic"]["variances_by_fixed_point"]
        np.testing.assert_allclose(
            RECORD["logistic"]["variances"]["bsam"], fixed["bsam"], rtol=0.01
        )  # as the page says
        confidence = RECORD["logistic"]["mean_confidence"]
        assert confidence["laplace"] < confidence["exact"] < confidence["bsam"] < confidence["sam"]
        assert confidence["bsam"] - confidence["exact"] < 0.6 * (confidence["sam"] - confidence["exact"])
        for row in RECORD["data_sets"]:
            assert row["overconfident"]["laplace"] == 0  # underconfident on all 200 data sets, with both priors
            assert row["overconfident"]["sam"] > 0.85 * row["num_sets"]
        assert sum(row["num_sets"] for row in RECORD["data_sets"]) == 2 * 200
        v = {name: np.array(value) for name, value in RECORD["relaxed_bayes"]["variances"].items()}
        np.testing.assert_allclose(v["relaxed"], [0.0597, 0.0547], atol=5e-5)
        assert max(RECORD["relaxed_bayes"]["relative_change"][name] for name in ("bayes", "relaxed")) < 1e-3
        assert (v["relaxed"] < 0.4 * v["bayes"]).all()
        assert (v["sampled"] > 0.6 * v["bayes"]).all()
        assert "torch" in RECORD["environment"]["packages"]

    def test_the_page_quotes_it(self):
        page = (ROOT / "docs" / "theory.md").read_text()
        for part, table in theory_markdown(RECORD).items():
            shown = re.search(rf"<!-- results/figures.json: {part} -->\n\n(.*?)\n\n<!-- end -->", page, re.DOTALL)
            assert shown is not None
            assert shown.group(1) == table
        forgetful = RECORD["moons"]["training_accuracy_of_seeds"][moons.FORGETFUL]
        *quoted, last = ["not finite" if found is None else f"{found:.0%}" for found in forgetful]
        assert f"{', '.join(quoted)} and {last}" in " ".join(page.split())
