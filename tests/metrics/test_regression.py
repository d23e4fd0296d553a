"""CRPS and the calibration of quantiles; NLL, RMSE, R^2 and coverage are tested with `summary`."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torchmetrics.functional.regression import continuous_ranked_probability_score

import bsam
from bsam import metrics as M
from tests.metrics.data import random_predictions


def mixture(n=6, samples=4, outputs=1, seed=0, weights=None):
    g = torch.Generator().manual_seed(seed)
    shape = (n,) if outputs == 1 else (n, outputs)
    f = torch.randn(samples, *shape, generator=g, dtype=torch.float64)
    w = torch.full((samples,), 1 / samples, dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    mean = torch.tensordot(w, f, dims=1)
    return SimpleNamespace(
        mean=mean,
        epistemic_variance=torch.tensordot(w, (f - mean).square(), dims=1),
        noise_std=0.4,
        targets=torch.randn(*shape, generator=g, dtype=torch.float64),
        sample_means=f,
        sample_weights=None if weights is None else w,
    )


def integral(y, means, weights, std):
    """The definition, by numerical integration."""

    def squared(z):
        return (float(np.dot(weights, norm.cdf((z - means) / std))) - (z >= y)) ** 2

    ends = min(means.min() - 8 * std, y), max(means.max() + 8 * std, y)
    return quad(squared, ends[0], y, limit=200)[0] + quad(squared, y, ends[1], limit=200)[0]


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]])
@pytest.mark.parametrize("outputs", [1, 2])
def test_crps_of_a_mixture_is_the_integral(weights, outputs):
    p = mixture(outputs=outputs, weights=weights)
    f, y = p.sample_means.reshape(4, -1).numpy(), p.targets.flatten().numpy()
    w = np.full(4, 0.25) if weights is None else np.array(weights)
    wanted = np.mean([integral(y[i], f[:, i], w, 0.4) for i in range(len(y))])
    found = M.crps(p, num_bootstrap=0)
    assert found.crps == pytest.approx(wanted, abs=1e-7)
    assert found.num_examples == 6


def test_crps_of_a_gaussian():
    p = mixture(samples=1)
    z = ((p.targets - p.mean) / 0.4).numpy()
    wanted = 0.4 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert M.crps(p).crps == pytest.approx(wanted.mean())
    p.sample_means = None  # the mean predicted
    assert M.crps(p).crps == pytest.approx(wanted.mean())
    wide = mixture(samples=1)
    wide.sample_means, wide.epistemic_variance, wide.computed_by = None, torch.full((6,), 0.84), "linearised"
    z = (wide.targets - wide.mean).numpy()  # the variance is 1
    wanted = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
    assert M.crps(wide).crps == pytest.approx(wanted.mean())


def test_torchmetrics_has_the_limit_without_noise():
    p = mixture(n=30, samples=7)
    p.noise_std = 1e-9
    theirs = continuous_ranked_probability_score(p.sample_means.T, p.targets)
    assert M.crps(p, num_bootstrap=0).crps == pytest.approx(float(theirs), abs=1e-7)


def test_crps_of_predictions():
    model = torch.nn.Linear(2, 1)
    posterior = bsam.DiagonalGaussian.from_model(model, {model.weight: torch.full((1, 2), 0.3)})
    x, y = torch.randn(20, 2), torch.randn(20)
    options = {"likelihood": "gaussian", "noise_std": 0.5, "vectorise": False, "num_samples": 200}
    with pytest.raises(ValueError, match="predict with keep_samples=True"):
        M.crps(bsam.predict(model, posterior, (x, y), **options))
    sampled = bsam.predict(model, posterior, (x, y), keep_samples=True, **options)
    exact = bsam.predict_linearised(model, posterior, (x, y), likelihood="gaussian", noise_std=0.5)
    found, wanted = M.crps(sampled), M.crps(exact)  # of a linear model
    assert found.crps == pytest.approx(wanted.crps, rel=0.05)
    low, high = found.intervals["crps"]
    assert low < found.crps < high
    ensemble = bsam.Mixture([posterior, bsam.PointMass.from_model(model)], [1, 2])
    both = bsam.predict(model, ensemble, (x[:3], y[:3]), keep_samples=True, **{**options, "num_samples": 20})
    assert len(both.sample_weights) == 21
    f = both.sample_means.double()
    w = both.sample_weights.double().numpy()
    assert M.crps(both, num_bootstrap=0).crps == pytest.approx(
        np.mean([integral(float(y[i]), f[:, i].numpy(), w, 0.5) for i in range(3)]), abs=1e-4
    )


def test_bootstrap_of_the_crps():
    p = mixture(n=20, outputs=2)
    found = M.crps(p, num_bootstrap=41, level=0.9, seed=5).intervals["crps"]
    index = torch.randint(20, (41, 20), generator=torch.Generator().manual_seed(5))

    def resampled(i):
        rows = {name: getattr(p, name)[i] for name in ("mean", "epistemic_variance", "targets")}
        return SimpleNamespace(**{**vars(p), **rows, "sample_means": p.sample_means[:, i]})

    values = sorted(M.crps(resampled(i), num_bootstrap=0).crps for i in index)
    assert found == pytest.approx((values[2], values[38]), abs=1e-12)


# ---------------------------------------------------------------- quantiles


def with_cdf(u):
    return SimpleNamespace(mean=u, targets=u, log_density=u, cdf=u)


def test_quantiles_by_hand():
    table = M.quantile_calibration(with_cdf(torch.tensor([0.1, 0.2, 0.2, 0.9])), num_levels=4)
    assert table.level.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert table.observed.tolist() == [0, 0.75, 0.75, 0.75, 1]
    certain = M.quantile_calibration(with_cdf(torch.zeros(5)))
    assert certain.observed[0] == 1
    assert certain.error == pytest.approx(0.5)
    assert M.quantile_calibration(with_cdf(torch.full((4,), 0.5))).error == pytest.approx(0.25)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_the_error_is_the_area_between_curve_and_diagonal(n):
    u = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    q = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    curve = torch.searchsorted(u.sort().values, q, right=True) / n
    assert M.quantile_calibration(with_cdf(u)).error == pytest.approx(float((curve - q).abs().mean()), abs=1e-5)


def test_calibrated_predictions_have_a_small_error():
    g = torch.Generator().manual_seed(0)
    u = torch.rand(4000, 2, generator=g)
    assert M.quantile_calibration(with_cdf(u)).error < 0.01
    narrow = torch.special.ndtr(2 * torch.randn(4000, generator=g))
    assert M.quantile_calibration(with_cdf(narrow)).error > 0.05


def test_bad_input():
    p = mixture()
    for change, message in [
        ({"targets": None}, "no targets"),
        ({"targets": torch.full((6,), math.nan)}, "not finite everywhere"),
        ({"mean": torch.zeros(0)}, "at least one example"),
    ]:
        with pytest.raises(ValueError, match=message):
            M.crps(SimpleNamespace(**{**vars(p), **change}))
    for cdf, message in [
        (None, "no targets"),
        (torch.zeros(0), "at least one example"),
        (torch.tensor([math.nan]), "cdf must have probabilities"),
        (torch.tensor([1.5]), "cdf must have probabilities"),
    ]:
        with pytest.raises(ValueError, match=message):
            M.quantile_calibration(with_cdf(cdf))
    with pytest.raises(ValueError, match="num_levels must be a positive integer, got 0"):
        M.quantile_calibration(with_cdf(torch.ones(1)), 0)
    for function in (M.crps, M.quantile_calibration, M.quantile_diagram):
        with pytest.raises(TypeError, match=r"must be of real targets.*got tuple; predict with likelihood='gaussian'"):
            function(random_predictions(5, 3))
