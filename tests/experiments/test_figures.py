"""The figures show what their captions say, and the page on the theory quotes what was recorded."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bsam.experiments import figures, style
from bsam.experiments.commands import app
from bsam.experiments.figures import data_sets, duality, logistic, moons, numbers, objectives, relaxed
from bsam.experiments.record import read_json
from bsam.theory.fenchel import biconjugate, max_loss
from bsam.theory.gaussian import Diagonal
from bsam.theory.losses import logistic_regression, murphy_data, quadratic, three_minima
from bsam.theory.objectives import elbo
from tools.theory import theory_markdown

ROOT = Path(__file__).parent.parent.parent
RECORD = read_json(ROOT / "results" / "figures.json")


@pytest.fixture(scope="module")
def neighbourhood():
    return objectives.compute_neighbourhood()


@pytest.fixture(scope="module")
def smoothing():
    return objectives.compute_smoothing(num_points=201)


@pytest.fixture(scope="module")
def theorem_2():
    return objectives.compute_theorem_2(num_points=281, num_radii=8)


@pytest.fixture(scope="module")
def surfaces():
    return duality.compute_surfaces(num_omega=41, num_v=9)


@pytest.fixture(scope="module")
def logistic_result():
    settings = logistic.Settings(bsam_steps=2500, bsam_betas=(0.9, 0.995), weight_grid=201, map_grid=21)
    return logistic.compute_logistic(settings)


@pytest.fixture(scope="module")
def sets():
    settings = logistic.Settings(bsam_steps=1500, bsam_betas=(0.9, 0.99), map_grid=11)
    return data_sets.compute_data_sets(20, settings=settings)


@pytest.fixture(scope="module")
def relaxed_result():
    return relaxed.compute_relaxed(num_steps=8, num_tangents=16)


@pytest.fixture(scope="module")
def moons_result():
    return moons.compute_moons(epochs=20)


class TestObjectives:
    def test_max_loss_and_worst_expected_loss_exceed_the_expected_loss(self, neighbourhood):
        n = neighbourhood
        assert n.expected_loss < n.worst_expected_loss < n.max_loss
        assert abs(n.perturbation) <= n.rho + 1e-12

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


class TestMoons:
    def test_maps(self, moons_result):
        assert list(moons_result.maps) == list(moons.TITLES)
        assert len(moons_result.forgetful) == moons.FORGETFUL_SEEDS
        for found in moons_result.maps.values():
            assert ((found.probability >= 0) & (found.probability <= 1)).all()

    def test_the_record_has_what_the_caption_says(self):
        certain, accuracy = RECORD["moons"]["certain_far_away"], RECORD["moons"]["training_accuracy"]
        assert certain["sam-sgd"] > certain["bsam"] > certain["laplace"]
        assert all(accuracy[name] == 1 for name in moons.TITLES)
        forgetful = RECORD["moons"]["training_accuracy_of_seeds"][moons.FORGETFUL]
        assert sum(found is None or found < 0.95 for found in forgetful) > len(forgetful) / 2


RESULTS = {
    "sam-vs-bayes": "neighbourhood",
    "worst-case": "neighbourhood",
    "smoothing": "smoothing",
    "theorem-2": "theorem_2",
    "biconjugate": "surfaces",
    "logistic": "logistic_result",
    "logistic-posterior": "logistic_result",
    "data-sets": "sets",
    "moons": "moons_result",
    "relaxed-bayes": "relaxed_result",
}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_draws_a_file(name, request, tmp_path):
    found = figures.picture(name)
    result = request.getfixturevalue(RESULTS[name]) if name in RESULTS else found.compute()
    assert dataclasses.is_dataclass(result)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, dataclasses.fields(result)[0].name, None)
    figure = style.new_figure(*found.size)
    found.draw(result, figure)
    for axes in figure.axes:
        assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title()
    assert style.save(figure, tmp_path / f"{name}.png").stat().st_size > 5000
    assert b"<svg" in style.save(figure, tmp_path / "folder" / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_page_shows_it(name):
    image = ROOT / "docs" / "images" / "theory" / f"{name}.png"
    assert 5000 < image.stat().st_size < 150_000
    assert f"](images/theory/{name}.png)" in (ROOT / "docs" / "theory.md").read_text()


class TestCommand:
    def test_list(self):
        result = CliRunner().invoke(app, ["figure", "list"])
        assert result.exit_code == 0
        assert all(name in result.output for name in figures.FIGURES)
        assert CliRunner().invoke(app, ["figure"]).output == result.output

    @pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
    def test_one(self, tmp_path, suffix):
        path = tmp_path / f"spaces.{suffix}"
        result = CliRunner().invoke(app, ["figure", "dual-spaces", "--out", str(path)])
        assert result.exit_code == 0, result.output
        assert path.stat().st_size > 5000

    def test_without_out(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert CliRunner().invoke(app, ["figure", "dual-spaces"]).exit_code == 0
        assert (tmp_path / "dual-spaces.png").exists()

    def test_all_and_numbers(self, tmp_path, monkeypatch):
        chosen = {name: figures.FIGURES[name] for name in ("worst-case", "dual-spaces")}
        monkeypatch.setattr(figures, "FIGURES", chosen)
        monkeypatch.setattr(numbers, "compute_numbers", lambda: {"a": 1})
        assert CliRunner().invoke(app, ["figure", "all", "--out", str(tmp_path / "new")]).exit_code == 0
        written = {path.name for path in (tmp_path / "new").iterdir()}
        assert written == {"worst-case.png", "dual-spaces.png", "figures.json"}
        path = tmp_path / "numbers.json"
        assert CliRunner().invoke(app, ["figure", "numbers", "--out", str(path)]).exit_code == 0
        assert read_json(path) == {"a": 1}

    def test_an_unknown_name(self):
        result = CliRunner().invoke(app, ["figure", "mona-lisa"])
        assert isinstance(result.exception, ValueError)
        assert "'mona-lisa'" in str(result.exception)
        assert all(name in str(result.exception) for name in figures.FIGURES)

    def test_an_unknown_ending(self, tmp_path):
        result = CliRunner().invoke(app, ["figure", "dual-spaces", "--out", str(tmp_path / "x.docx")])
        assert isinstance(result.exception, ValueError)
        assert ".svg" in str(result.exception)


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
        quoted = ", ".join("not finite" if found is None else f"{found:.0%}" for found in forgetful)
        assert f"({quoted})" in page
