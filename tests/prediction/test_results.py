"""The results of `predict`, and their files."""

import json
import math
import os

import pytest
import torch
from safetensors import safe_open

from bsam import metrics
from bsam.files import write_file
from bsam.prediction import GaussianPredictions, Predictions, predict
from tests.prediction.models import K, classes, gaussian, mlp, seeded, vectors

pytestmark = pytest.mark.usefixtures("_try_vmap")


def some_predictions(kind, labelled, **more):
    model, x = seeded(lambda: mlp(K if kind is Predictions else 1)), vectors(6)
    data = (x, classes(6)) if labelled else x
    options = {} if kind is Predictions else {"likelihood": "gaussian", "noise_std": 0.1}
    return predict(model, gaussian(model), data, num_samples=3, seed=4, **options, **more)


@pytest.mark.parametrize("kind", [Predictions, GaussianPredictions])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("more", [{}, {"keep_samples": True}])
def test_save_and_load(kind, labelled, more, tmp_path):
    result = some_predictions(kind, labelled, **more)
    result.save(tmp_path / "p.safetensors")
    loaded = kind.load(tmp_path / "p.safetensors")
    assert os.listdir(tmp_path) == ["p.safetensors"]
    assert repr(loaded) == repr(result)
    for name, value in vars(result).items():
        other = getattr(loaded, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_positions_and_what_is_ignored_are_saved(tmp_path):
    shape = {"log_probs": torch.zeros(2, 3, 4, 5), "mutual_information": torch.zeros(2, 3, 4)}
    result = Predictions(**shape, labels=torch.zeros(2, 3, 4), num_samples=1, seed=0, ignore_index=255)
    result.save(tmp_path / "p")
    loaded = Predictions.load(tmp_path / "p")
    assert loaded.ignore_index == 255
    assert loaded.log_probs.shape == (2, 3, 4, 5)
    assert repr(loaded).startswith("Predictions(2 examples of 3 x 4 positions, 5 classes, with labels")


def test_files_of_earlier_versions_are_read(tmp_path):
    tensors = {"log_probs": torch.zeros(3, 2), "mutual_information": torch.zeros(3)}
    settings = {"labels": None, "num_samples": 1, "seed": 0, "computed_by": "mean"}
    write_file(tmp_path / "p", tensors, format="bsam.predictions", kind="classes", settings=settings)
    assert Predictions.load(tmp_path / "p").ignore_index == -100
    some_predictions(Predictions, True).save(tmp_path / "new")  # and an earlier version reads ours
    with safe_open(tmp_path / "new", "pt") as file:
        assert set(json.loads(file.metadata()["settings"])) == {"num_samples", "seed", "computed_by"}
    tensors = {name: torch.zeros(3) for name in ("mean", "epistemic_variance", "targets", "log_density")}
    settings = {"noise_std": 1.0, "num_samples": 1, "seed": 0, "computed_by": "mean"}
    write_file(tmp_path / "p", tensors, format="bsam.predictions", kind="gaussian", settings=settings)
    assert math.isnan(metrics.summary(GaussianPredictions.load(tmp_path / "p")).coverage_95)


def test_load_refuses(tmp_path):
    path = tmp_path / "p"
    some_predictions(Predictions, True).save(path)
    with pytest.raises(ValueError, match="kind='classes': expected 'gaussian'"):
        GaussianPredictions.load(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="not a complete one"):
        Predictions.load(path)
    path.write_bytes(whole.replace(b"num_samples", b"num_sbmples"))
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        Predictions.load(path)
    settings = {"num_sbmples": 3, "seed": 0}  # of a file that is whole
    write_file(path, {"log_probs": torch.zeros(3, 2)}, format="bsam.predictions", kind="classes", settings=settings)
    with pytest.raises(ValueError, match="num_sbmples") as caught:
        Predictions.load(path)
    assert str(path) in str(caught.value)
    model = seeded(mlp)
    gaussian(model).save(path)
    with pytest.raises(ValueError, match=r"format='bsam\.posterior': expected 'bsam\.predictions'"):
        Predictions.load(path)


def test_shapes_of_results_are_checked():
    good = {"log_probs": torch.zeros(3, 2), "mutual_information": torch.zeros(3), "labels": torch.zeros(3)}
    Predictions(**good, num_samples=1, seed=0)
    for name, bad in (
        ("log_probs", torch.zeros(3)),
        ("log_probs", 3),
        ("mutual_information", torch.zeros(2)),
        ("labels", 3),
        ("sample_log_probs", torch.zeros(3, 2)),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            Predictions(**{**good, name: bad}, num_samples=1, seed=0)
    real = {"mean": torch.zeros(3), "epistemic_variance": torch.zeros(3), "targets": None, "log_density": None}
    GaussianPredictions(**real, noise_std=1.0, num_samples=1, seed=0)
    for name, bad in (
        ("mean", None),
        ("epistemic_variance", torch.zeros(3, 1)),
        ("log_density", torch.zeros(2)),
        ("cdf", torch.zeros(2)),
        ("sample_means", torch.zeros(3)),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            GaussianPredictions(**{**real, name: bad}, noise_std=1.0, num_samples=1, seed=0)


def test_repr():
    assert repr(some_predictions(Predictions, True)) == (
        "Predictions(6 examples, 3 classes, with labels, num_samples=3, seed=4, computed_by='vmap')"
    )
    assert repr(some_predictions(GaussianPredictions, False)) == (
        "GaussianPredictions(6 examples, no targets, noise_std=0.1, num_samples=3, seed=4, computed_by='vmap')"
    )


def test_metrics_take_predictions():
    assert metrics.summary(some_predictions(Predictions, True), num_bootstrap=0).num_examples == 6
    assert metrics.summary(some_predictions(GaussianPredictions, True), num_bootstrap=0).num_examples == 6
    with pytest.raises(ValueError, match="no targets"):
        metrics.summary(some_predictions(GaussianPredictions, False))


def test_intervals_hold_what_they_say():
    """Exactly for one Gaussian; by the distribution function of the mixture if its samples are kept."""
    torch.manual_seed(0)
    mean, spread, noise = torch.randn(7, dtype=torch.float64), 0.5, 0.3
    alone = GaussianPredictions(mean, torch.full_like(mean, spread**2), noise, None, None, 3, 0)
    torch.testing.assert_close(alone.std, torch.full_like(mean, math.hypot(spread, noise)))
    low, high = alone.interval(0.9)
    normal = torch.distributions.Normal(alone.mean, alone.std)
    torch.testing.assert_close(normal.cdf(low), torch.full_like(mean, 0.05))
    torch.testing.assert_close(normal.cdf(high), torch.full_like(mean, 0.95))

    samples, weights = torch.randn(3, 7, 2, dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for given, shares in ((weights, weights), (None, torch.full((3,), 1 / 3, dtype=torch.float64))):
        centre = torch.einsum("s,s...->...", shares, samples)
        spread = torch.einsum("s,s...->...", shares, (samples - centre).square())
        mixture = GaussianPredictions(
            centre, spread, noise, None, None, 3, 0, sample_means=samples, sample_weights=given
        )
        for level in (0.5, 0.95):
            for end, tail in zip(mixture.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
                below = torch.einsum("s,s...->...", shares, torch.distributions.Normal(samples, noise).cdf(end))
                torch.testing.assert_close(below, torch.full_like(centre, tail), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="level=95 must lie between 0 and 1"):
        alone.interval(95)
