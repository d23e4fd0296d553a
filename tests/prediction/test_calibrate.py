"""The width of a posterior, chosen after training."""

import dataclasses
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam import metrics
from bsam.posterior import DiagonalGaussian, LowRankGaussian, Mixture, PointMass
from tests.prediction.models import WITH_STATISTICS_OF_THE_MEAN

pytestmark = WITH_STATISTICS_OF_THE_MEAN

NOISE = 0.5


class OneWeightPerInput(nn.Module):
    """Gives weight[i] for input i: a linear model whose outputs are independent under a diagonal posterior."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, dtype=torch.float64))

    def forward(self, index):
        return self.weight[index]


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagonal(variance, n):
    zeros = torch.zeros(n, dtype=torch.float64)
    return DiagonalGaussian({"weight": zeros}, {"weight": torch.full_like(zeros, math.sqrt(variance))})


def low_rank(variance, n, rank=5):
    """Every weight has the given variance, 1 / 4 of it from the deviations."""
    zeros = torch.zeros(n, dtype=torch.float64)
    deviations = normal(rank, n, seed=5).sign() * math.sqrt(variance / 2 * (rank - 1) / rank)
    q = LowRankGaussian({"weight": zeros}, {"weight": torch.full_like(zeros, 1.5 * variance)}, {"weight": deviations})
    torch.testing.assert_close(q.std["weight"].square(), torch.full_like(zeros, variance))
    return q


def linear_gaussian(n):
    """Data for which weights are N(0, 1): outputs are N(0, 1 + NOISE^2)."""
    return OneWeightPerInput(n), (torch.arange(n), normal(n, seed=1) + NOISE * normal(n, seed=2))


def classification(std=0.5, n=300, dtype=torch.float64):
    """A linear classifier whose mean is a little off, and validation data."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(normal(3, 4, seed=1))
        model[0].bias.zero_()
    x = normal(n, 4, seed=2).to(dtype)
    y = (x @ normal(3, 4, seed=1).to(dtype).T + normal(n, 3, seed=3).to(dtype)).argmax(1)
    return model, DiagonalGaussian.from_model(model, {p: torch.full_like(p, std) for p in model.parameters()}), (x, y)


def state_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().clone() for name, t in tensors.items()}, [m.training for m in model.modules()]


def assert_unchanged(before, model):
    after = state_of(model)
    assert before[1] == after[1]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


# ---------------------------------------------------------------- the answer


@pytest.mark.parametrize("make", [diagonal, low_rank])
@pytest.mark.parametrize("factor", [16.0, 4.0, 1.0, 0.25])
def test_a_linear_gaussian_problem_gets_its_own_width_back(make, factor):
    """With outputs N(0, T * variance), the NLL of Gaussian targets is lowest where the moments agree."""
    model, data = linear_gaussian(1000)
    q, (_, y) = make(factor, len(data[1])), data
    options = {"likelihood": "gaussian", "noise_std": NOISE, "num_samples": 256, "batch_size": len(y)}
    calibration = bsam.calibrate(model, q, data, vectorise=True, **options)
    best = (float(y.square().mean()) - NOISE**2) / factor
    assert 0.85 / factor < best < 1.15 / factor
    assert abs(math.log(calibration.temperature / best)) < math.log(1.15)
    exact = 0.5 * float((y.square() / y.square().mean() + (2 * math.pi * y.square().mean()).log()).mean())
    assert calibration.nll == pytest.approx(exact, abs=0.02)
    assert calibration.nll <= min(calibration.nll_before, calibration.nll_at_mean)
    wanted = make(factor * calibration.temperature, len(y))
    torch.testing.assert_close(calibration.posterior.std["weight"], wanted.std["weight"])


@pytest.mark.parametrize("std", [2.0, 0.5, 0.01])
def test_numbers_are_those_of_predict_and_metrics(std):
    model, q, data = classification(std)
    calibration = bsam.calibrate(model, q, data, num_samples=8, seed=3)
    for temperature, nll in {
        calibration.temperature: calibration.nll,
        1: calibration.nll_before,
        0: calibration.nll_at_mean,
    }.items():
        predictions = bsam.predict(model, q.temper(temperature), data, num_samples=8, seed=3)
        assert nll == metrics.nll(predictions.log_probs, predictions.labels)
    again = bsam.predict(model, calibration.posterior, data, num_samples=8, seed=3)
    assert calibration.nll == metrics.nll(again.log_probs, again.labels)
    assert calibration.nll <= min(calibration.nll_before, calibration.nll_at_mean)
    assert all(torch.equal(calibration.posterior.mean[name], q.mean[name]) for name in q.mean)

    temperatures = [row["temperature"] for row in calibration.table]
    assert temperatures == sorted(set(temperatures))
    assert {0.0, 2.0**-10, 1.0, 2.0**10} <= set(temperatures)
    assert min(calibration.table, key=lambda row: row["nll"])["temperature"] == calibration.temperature
    accuracy = {row["temperature"]: row["accuracy"] for row in calibration.table}
    assert accuracy[calibration.temperature] == metrics.accuracy(again.log_probs, again.labels)


def test_the_standard_error_is_that_of_the_change():
    model, (index, y) = linear_gaussian(400)
    options = {"likelihood": "gaussian", "noise_std": NOISE}
    q = diagonal(4.0, 400)
    calibration = bsam.calibrate(model, q, (index, y), **options)
    before, after = (bsam.predict(model, p, (index, y), **options).log_density for p in (q, calibration.posterior))
    change = (before - after).numpy()
    assert calibration.nll - calibration.nll_before == pytest.approx(change.mean())
    assert calibration.standard_error == pytest.approx(change.std(ddof=1) / 20)
    one = bsam.calibrate(model, q, (index[:1], y[:1]), **options)
    assert math.isnan(one.standard_error)


def test_after_training():
    """A posterior of bSAM that is too wide gets narrower, and better on data that had no say."""
    torch.manual_seed(0)
    x = torch.randn(900, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = bsam.BSAM(model.parameters(), lr=0.3, num_data=100, damping=0.3, betas=(0.9, 0.99))
    for _ in range(300):
        optimizer.step(lambda a, b: F.cross_entropy(model(a), b), x[:100], y[:100])
    posterior = optimizer.posterior(model).temper(16)
    calibration = bsam.calibrate(model, posterior, (x[100:500], y[100:500]))
    assert 0 < calibration.temperature < 1
    before, after = (
        metrics.nll(p.log_probs, p.labels)
        for p in (bsam.predict(model, q, (x[500:], y[500:])) for q in (posterior, calibration.posterior))
    )
    assert after < before


def test_bernoulli():
    _, _, (x, y) = classification()
    one = nn.Linear(4, 1, dtype=torch.float64)
    q = DiagonalGaussian.from_model(one, {p: torch.full_like(p, 3.0) for p in one.parameters()})
    calibration = bsam.calibrate(one, q, (x, (y == 1).double()), likelihood="bernoulli")
    assert calibration.nll < calibration.nll_before
    assert "accuracy" in calibration.table[0]
    two = bsam.predict(one, calibration.posterior, (x, (y == 1).double()), likelihood="bernoulli")
    assert calibration.nll == metrics.nll(two.log_probs, two.labels)


def test_statistics_of_the_mean_are_warned_of_once():
    model, q, data = classification()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = bsam.calibrate(model, q, data, num_samples=2)
    assert ["BatchNorm" in str(warning.message) for warning in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bsam.calibrate(model, q, data, num_samples=2, recalibrate=False).table == found.table


def test_the_same_call_gives_the_same_answer():
    model, q, data = classification()
    torch.manual_seed(1)
    first = bsam.calibrate(model, q, data, num_samples=4)
    torch.manual_seed(2)
    second = bsam.calibrate(model, q, data, num_samples=4)
    assert first.table == second.table
    assert first.temperature == second.temperature
    assert first.table != bsam.calibrate(model, q, data, num_samples=4, seed=1).table


def test_data_in_batches_and_vmap_give_the_same_answer():
    model, q, (x, y) = classification()
    loader = DataLoader(TensorDataset(x, y), batch_size=70, shuffle=True)
    nlls = [
        [row["nll"] for row in bsam.calibrate(model, q, data, num_samples=4, vectorise=vectorise).table]
        for data, vectorise in (((x, y), False), ((x, y), True), (loader, None))
    ]
    torch.testing.assert_close(*map(torch.tensor, nlls[:2]))
    torch.testing.assert_close(*map(torch.tensor, nlls[1:]))


def test_options_of_predict_are_handed_on():
    model, q, (x, y) = classification()
    options = {"recalibrate": [x], "forward": lambda model, inputs: 2 * model(inputs), "num_samples": 3, "chunk": 2}
    calibration = bsam.calibrate(model, q, (x, y), **options, batch_size=100, progress=False)
    predictions = bsam.predict(model, q, (x, y), **options)
    assert calibration.nll_before == pytest.approx(metrics.nll(predictions.log_probs, predictions.labels), abs=1e-12)


def test_tokens_count_if_they_have_a_label():
    """Examples of one token with a label each are the problem without tokens; the others change nothing."""
    model, q, (x, y) = classification()
    tokens, labels = x[:, None].repeat(1, 3, 1), torch.full((len(y), 3), -1)
    labels[:, 1] = y
    forward = {"forward": lambda model, inputs: model(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])}
    plain = bsam.calibrate(model, q, (x, y), num_samples=4)
    found = bsam.calibrate(model, q, (tokens, labels), num_samples=4, ignore_index=-1, **forward)
    assert found.nll == pytest.approx(plain.nll, abs=1e-12)
    assert found.standard_error == pytest.approx(plain.standard_error, abs=1e-9)
    assert found.table[0]["accuracy"] == plain.table[0]["accuracy"]
    # Three equal labels in each example say no more than one: the error of the mean is not smaller.
    thrice = bsam.calibrate(model, q, (tokens, y[:, None].repeat(1, 3)), num_samples=4, **forward)
    assert thrice.nll == pytest.approx(plain.nll, abs=1e-12)
    assert thrice.standard_error == pytest.approx(plain.standard_error, abs=1e-9)


def test_classes_in_dimension_1():
    model, q, (x, y) = classification()
    data, labels = x[:, None].repeat(1, 2, 1), y[:, None].repeat(1, 2)

    def forward(model, inputs):
        return model(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2]).movedim(2, 1)

    found = bsam.calibrate(model, q, (data, labels), num_samples=4, class_dim=1, forward=forward)
    assert found.nll == pytest.approx(bsam.calibrate(model, q, (x, y), num_samples=4).nll, abs=1e-12)


# ---------------------------------------------------------------- the search


def test_the_range_is_searched_and_holds_1():
    model, (index, y) = linear_gaussian(200)
    options = {"likelihood": "gaussian", "noise_std": NOISE, "num_samples": 16}

    def tried(**more):
        calibration = bsam.calibrate(model, diagonal(1.0, 200), (index, y), **options, **more)
        return [row["temperature"] for row in calibration.table]

    for given, (low, high) in {(0.3, 5): (0.3, 5), (2, 7): (1, 7), (0.1, 0.5): (0.1, 1)}.items():
        temperatures = tried(temperatures=given)
        assert temperatures[0] == 0
        assert 1 in temperatures
        assert (temperatures[1], temperatures[-1]) == (low, high)
    assert len(tried()) <= 21


def test_refined_to_a_tenth():
    model, (index, y) = linear_gaussian(500)
    calibration = bsam.calibrate(model, diagonal(3.0, 500), (index, y), likelihood="gaussian", noise_std=NOISE)
    temperatures = [row["temperature"] for row in calibration.table]
    at = temperatures.index(calibration.temperature)
    assert temperatures[at + 1] / temperatures[at - 1] == pytest.approx(2**0.25)
    nlls = [row["nll"] for row in calibration.table]
    assert nlls[:at] == sorted(nlls[:at], reverse=True)  # one set of noise: a smooth curve
    assert nlls[at:] == sorted(nlls[at:])


# ---------------------------------------------------------------- the sentence


def test_what_it_says():
    model, (index, y) = linear_gaussian(500)
    options = {"likelihood": "gaussian", "noise_std": NOISE}
    calibration = bsam.calibrate(model, diagonal(4.0, 500), (index, y), **options)
    assert str(calibration) == (
        f"temperature {calibration.temperature:.3g}: validation NLL {calibration.nll_before:.4f} -> "
        f"{calibration.nll:.4f} ({calibration.nll - calibration.nll_before:+.4f}, standard error "
        f"{calibration.standard_error:.4f}); the mean alone has {calibration.nll_at_mean:.4f}."
    )
    assert repr(calibration) == str(calibration)

    unchanged = dataclasses.replace(calibration, temperature=1.0, nll=calibration.nll_before)
    assert f"temperature 1: validation NLL stays {unchanged.nll:.4f}" in str(unchanged)


def test_no_width_helps():
    model, _ = linear_gaussian(200)
    calibration = bsam.calibrate(
        model, diagonal(1.0, 200), (torch.arange(200), torch.zeros(200)), likelihood="gaussian", noise_std=NOISE
    )
    assert calibration.temperature == 0
    assert calibration.nll == calibration.nll_at_mean
    assert "The mean alone is best" in str(calibration)
    assert "more damping" in str(calibration)
    assert not calibration.posterior.sampled_names


@pytest.mark.parametrize(
    ("variance", "temperatures", "said"),
    [
        (1e-3, (0.1, 10), ["largest", "temperatures=(10, 640)", "too narrow", "less damping"]),
        (1e3, (0.1, 10), ["smallest", "temperatures=(0.0015625, 0.1)", "too wide", "more damping"]),
        (1e-3, (0.1, 1), ["largest", "temperatures=(1, 64)"]),
        (1e3, (1, 10), ["smallest", "temperatures=(0.015625, 1)"]),
    ],
)
def test_the_best_is_at_an_end_of_the_range(variance, temperatures, said):
    model, (index, y) = linear_gaussian(500)
    y = 3 * y
    calibration = bsam.calibrate(
        model, diagonal(variance, 500), (index, y), likelihood="gaussian", noise_std=NOISE, temperatures=temperatures
    )
    assert calibration.temperature == (temperatures[0] if "smallest" in said else temperatures[1])
    assert all(words in str(calibration) for words in said)
    if calibration.temperature == 1:
        assert "too" not in str(calibration)


# ---------------------------------------------------------------- what cannot be right


def two_points(model):
    first = PointMass.from_model(model)
    doubled = {name: 2 * mean for name, mean in first.mean.items()}
    return Mixture([first, PointMass(doubled, buffers=first.buffers)])


def test_the_parts_of_a_mixture_get_one_temperature():
    model, posterior, data = classification()
    mixture = Mixture([posterior, two_points(model)])
    calibration = bsam.calibrate(model, mixture, data, num_samples=4)
    assert calibration.nll <= min(calibration.nll_before, calibration.nll_at_mean)
    predictions = bsam.predict(model, mixture.temper(calibration.temperature), data, num_samples=4)
    assert calibration.nll == metrics.nll(predictions.log_probs, predictions.labels)


@pytest.mark.parametrize(
    "make", [PointMass.from_model, lambda model: DiagonalGaussian.from_model(model, {}), two_points]
)
def test_a_point_has_no_width(make):
    model, _, data = classification()
    with pytest.raises(ValueError, match="has no width"):
        bsam.calibrate(model, make(model), data)


def test_labels_are_needed():
    model, q, (x, _) = classification()
    with pytest.raises(ValueError, match="no labels to choose the width by"):
        bsam.calibrate(model, q, x)
    with pytest.raises(ValueError, match="no labels to choose the width by"):
        bsam.calibrate(model, q, [x], likelihood="gaussian", noise_std=1.0)


def test_labels_must_be_classes_of_the_model():
    model, q, (x, y) = classification()
    with pytest.raises(ValueError, match="class numbers 0 to 2, not 3"):
        bsam.calibrate(model, q, (x, y + 1))
    with pytest.raises(ValueError, match="class numbers 0 to 2, not -100"):
        bsam.calibrate(model, q, (x, torch.full_like(y, -100)))


def test_a_generator_is_refused():
    model, q, data = classification()
    with pytest.raises(TypeError, match="is a generator, but is read once for each temperature"):
        bsam.calibrate(model, q, (batch for batch in [data]))


@pytest.mark.parametrize("temperatures", [(0, 1), (-1, 1), (2, 1), (1, 1), (1, math.inf), (math.nan, 1), (1,), 3, "ab"])
def test_a_range_that_is_none(temperatures):
    model, q, data = classification()
    with pytest.raises(ValueError, match="must be two finite numbers"):
        bsam.calibrate(model, q, data, temperatures=temperatures)


def test_no_samples():
    model, q, data = classification()
    with pytest.raises(ValueError, match="num_samples=0 must be an integer >= 1"):
        bsam.calibrate(model, q, data, num_samples=0)


def test_what_is_not_finite_is_not_chosen():
    """Here the NLL falls until the outputs overflow."""
    model, _ = linear_gaussian(50)
    data = torch.arange(50), torch.full((50,), 100.0)

    def forward(model, index):
        output = model(index)
        return torch.where(output.abs() > 20, math.nan, output)

    options = {"likelihood": "gaussian", "noise_std": NOISE}
    calibration = bsam.calibrate(model, diagonal(1.0, 50), data, forward=forward, **options)
    nlls = {row["temperature"]: row["nll"] for row in calibration.table}
    assert math.isnan(nlls[1024.0])
    assert math.isfinite(calibration.nll)
    assert calibration.nll == min(nll for nll in nlls.values() if math.isfinite(nll))
    with pytest.raises(ValueError, match="not finite at any of"):
        bsam.calibrate(model, diagonal(1.0, 50), data, forward=lambda model, i: model(i) * math.nan, **options)


# ---------------------------------------------------------------- the model


def test_the_model_is_unchanged():
    model, q, data = classification()
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)  # not the posterior's weights
    before, mean = state_of(model), {name: t.clone() for name, t in q.mean.items()}
    std = {name: t.clone() for name, t in q.std.items()}
    state = torch.random.get_rng_state()
    bsam.calibrate(model, q, data, num_samples=3)
    assert_unchanged(before, model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(mean[name], q.mean[name]) and torch.equal(std[name], q.std[name]) for name in mean)

    calls = []

    def forward(model, inputs):
        calls.append(None)
        if len(calls) == 10:
            raise RuntimeError("ten")
        return model(inputs)

    with pytest.raises(RuntimeError, match="ten"):
        bsam.calibrate(model, q, data, num_samples=3, forward=forward, vectorise=False)
    assert_unchanged(before, model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    model, q, data = classification()
    model.cuda()
    eager, compiled = (bsam.calibrate(model, q, data, num_samples=4, compile=compile) for compile in (False, True))
    torch.testing.assert_close(*(torch.tensor([row["nll"] for row in c.table]) for c in (eager, compiled)))
    assert eager.posterior.mean["0.weight"].device.type == "cpu"  # where the posterior was
