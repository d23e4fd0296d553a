"""VOGN against the transcription of its algorithm, its limits, what it refuses, and its posterior."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.optim.variational import posterior_std
from bsam.optim.vogn import unit_precision, update
from tests import reference
from tests.optim.contract import batch, cross_entropy
from tests.optim.test_bsam import STEPS, flat_noise, flat_state, run
from tests.problems import PROBLEMS, logistic, quadratic


def vogn(problem, **options):
    options = {"lr": 0.05, "num_data": len(problem.x), **options}
    return bsam.VOGN(problem.model.parameters(), module=problem.model, **options)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("statistics", ["average", "latest"])
@pytest.mark.parametrize("size", [12, 10])  # 10 = 3 + 3 + 2 + 2: ragged
def test_matches_the_transcription(name, splits, statistics, size):
    problem = PROBLEMS[name]()
    N = 2 * len(problem.x)
    optimizer = vogn(
        problem,
        augmentation_factor=2.0,
        prior_precision=1.5,
        betas=(0.8, 0.97),
        damping=0.5,
        splits=splits,
        statistics=statistics,
        seed=11,
        vectorise=True,
    )
    minibatches = problem.minibatches(STEPS, size)
    expected = reference.vogn(
        problem.gradient,
        problem.weights(),
        minibatches,
        flat_noise(problem.model, seed=11),
        alpha=0.05,
        beta1=0.8,
        beta2=0.97,
        delta=1.5 / N,
        gamma=0.5,
        N=N,
        m=splits,
        latest=statistics == "latest",
    )
    start = problem.weights()
    for (mu, s, m, loss), (weights, ours) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, mu, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(flat_state(optimizer, "curvature"), s, rtol=1e-10, atol=1e-15)
        np.testing.assert_allclose(flat_state(optimizer, "momentum"), m, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(ours, loss, rtol=1e-10)
    assert np.abs(weights - start).max() > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_matches_the_transcription_on_cuda():
    problem = logistic()
    gradient, start, minibatches = problem.gradient, problem.weights(), problem.minibatches(STEPS, 13)
    problem.model.cuda()
    problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
    optimizer = vogn(problem, splits=4, nonfinite="skip")
    options = {"alpha": 0.05, "beta1": 0.9, "beta2": 0.999, "delta": 25 / 40, "gamma": 0.01}
    expected = reference.vogn(gradient, start, minibatches, flat_noise(problem.model), N=40, m=4, **options)
    for (mu, s, _, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, mu, rtol=1e-9)
        np.testing.assert_allclose(flat_state(optimizer, "curvature"), s, rtol=1e-9)


@pytest.mark.parametrize("splits", [1, 4])
def test_two_groups_match_the_transcription(splits):
    """Every option a group may have, in the transcription a vector with one number a weight."""
    problem = logistic()
    first, second = problem.model.parameters()
    optimizer = bsam.VOGN(
        [
            {"params": [first], "lr": 0.2, "prior_precision": 5.0, "betas": (0.5, 0.9), "damping": 0.5},
            {"params": [second], "sample": False},
        ],
        lr=0.03,
        module=problem.model,
        num_data=40,
        prior_precision=0.5,
        betas=(0.9, 0.99),
        damping=0.1,
        splits=splits,
    )
    of_group = lambda a, b: np.array([a, a, a, b])  # noqa: E731
    minibatches = problem.minibatches(STEPS, 13)
    expected = reference.vogn(
        problem.gradient,
        problem.weights(),
        minibatches,
        flat_noise(problem.model),
        alpha=of_group(0.2, 0.03),
        beta1=of_group(0.5, 0.9),
        beta2=of_group(0.9, 0.99),
        delta=of_group(5.0, 0.5) / 40,
        gamma=of_group(0.5, 0.1),
        N=40,
        m=splits,
        sampled=of_group(1.0, 0.0),
    )
    for (mu, s, _, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, mu, rtol=1e-10)
        np.testing.assert_allclose(flat_state(optimizer, "curvature"), s, rtol=1e-10)


def test_the_pure_functions_are_the_lines_of_the_algorithm():
    s, g, h = torch.tensor([0.25, 4.0]), torch.tensor([-3.0, 0.5]), torch.tensor([9.0, 1.0])
    torch.testing.assert_close(
        posterior_std(unit_precision(s, 0.5, 0.25), 100.0), torch.tensor([0.1, 1 / math.sqrt(475)])
    )
    options = {"alpha": 0.5, "beta1": 0.9, "beta2": 0.99, "delta": 0.1, "gamma": 0.2}
    for started, expected in [(True, 0.99 * s + 0.01 * h), (False, h)]:
        mu, m, new_s = update(torch.ones(2), 2 * g, s, g, h, started=torch.tensor(started), **options)
        torch.testing.assert_close(m, 0.9 * 2 * g + g + 0.1)
        torch.testing.assert_close(new_s, expected)
        torch.testing.assert_close(mu, 1 - 0.5 * m / (expected + 0.3))


def test_with_much_damping_and_no_noise_it_is_sgd_with_momentum():
    """alpha / (s + delta + gamma) -> alpha / gamma: the heavy ball with weight decay delta."""
    problem, twin = logistic(), logistic()
    gamma = 1e12
    ours = bsam.VOGN(
        [{"params": problem.model.parameters(), "sample": False}],
        lr=0.3 * gamma,
        module=problem.model,
        num_data=40,
        prior_precision=2.0,
        damping=gamma,
    )
    sgd = torch.optim.SGD(twin.model.parameters(), lr=0.3, momentum=0.9, weight_decay=2.0 / 40)
    for _ in range(20):
        ours.step(problem.loss_fn, problem.x, problem.y)
        sgd.zero_grad()
        twin.loss_fn(twin.x, twin.y).backward()
        sgd.step()
    np.testing.assert_allclose(problem.weights(), twin.weights(), rtol=1e-9)


def test_the_first_step_is_not_sampled_and_the_second_is():
    problem = logistic()
    optimizer = vogn(problem, vectorise=False)
    seen = []

    def loss_fn(x, y):
        seen.append(problem.weights())
        return problem.loss_fn(x, y)

    start = problem.weights()
    optimizer.step(loss_fn, problem.x[:3], problem.y[:3])
    np.testing.assert_array_equal(seen, [start] * 3)
    mean = problem.weights()
    sigma = np.sqrt(1 / (40 * (flat_state(optimizer, "curvature") + 25 / 40 + 0.01)))
    seen.clear()
    optimizer.step(loss_fn, problem.x[:3], problem.y[:3])
    np.testing.assert_allclose(seen, [mean + sigma * flat_noise(problem.model)(1, 0)] * 3, rtol=1e-12)


def test_the_noise_precision_gives_the_posterior_from_the_second_step_on():
    problem = logistic()
    optimizer = vogn(problem, damping=0.3)
    assert all(optimizer._noise_precision(slot).isinf().all() for slot in optimizer._slots())
    optimizer.step(problem.loss_fn, problem.x, problem.y)
    for slot in optimizer._slots():
        sigma = (optimizer.effective_num_data * optimizer._noise_precision(slot)).rsqrt()
        torch.testing.assert_close(sigma, posterior_std(optimizer._unit_precision(slot), optimizer.effective_num_data))


def test_a_skipped_first_step_was_no_first_step():
    problem, twin = logistic(), logistic()
    optimizer, other = vogn(problem, nonfinite="skip"), vogn(twin)
    optimizer.step(lambda x, y: problem.loss_fn(x, y) * math.nan, problem.x, problem.y)
    for p, o in ((problem, optimizer), (twin, other)):
        for _ in range(2):
            o.step(p.loss_fn, p.x, p.y)
    np.testing.assert_array_equal(problem.weights(), twin.weights())


def test_both_statistics_agree_in_the_first_step_only():
    def curvature(statistics, steps, beta2=0.9):
        problem = logistic()
        optimizer = vogn(problem, betas=(0.9, beta2), statistics=statistics)
        for _ in range(steps):
            optimizer.step(problem.loss_fn, problem.x, problem.y)
        return flat_state(optimizer, "curvature")

    np.testing.assert_array_equal(curvature("average", 1), curvature("latest", 1))
    assert np.abs(curvature("average", 3) - curvature("latest", 3)).max() > 1e-4
    np.testing.assert_allclose(curvature("average", 3, 0.25), curvature("latest", 3, 0.75))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_layers_that_mix_examples_are_refused(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3)).double()
    optimizer = bsam.VOGN(model.parameters(), module=model, num_data=100)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"layer 1 is a BatchNorm1d.*mixes its examples.*GroupNorm"):
        optimizer.step(cross_entropy(model), *batch(10, torch.float64))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state
    if layer.track_running_stats:
        layer.eval()
        optimizer.step(cross_entropy(model), *batch(10, torch.float64))
        assert torch.equal(layer.running_mean, before["1.running_mean"])


def test_a_step_without_examples_is_refused():
    problem = logistic()
    optimizer = vogn(problem)
    for arguments in ((), ("labels",), (torch.tensor(1.0),)):
        with pytest.raises(ValueError, match="needs the examples"):
            optimizer.step(lambda *_: problem.loss_fn(problem.x, problem.y), *arguments)


def test_modules_that_are_no_modules_are_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match="module=None must be the model"):
        bsam.VOGN(model.parameters(), module=None, num_data=5)
    with pytest.raises(TypeError, match="module"):
        bsam.VOGN(model.parameters(), num_data=5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(name, bad) for name in ("lr", "prior_precision", "damping") for bad in (-0.1, math.nan, math.inf)],
        *[("betas", bad) for bad in ((1.0, 0.9), (0.9, 1.0), 0.9)],
        *[("num_data", bad) for bad in (0, math.nan)],
        *[("splits", 0), ("augmentation_factor", 0.0), ("statistics", "mean"), ("nonfinite", "ignore")],
        *[("max_grad_norm", 0.0), ("seed", 1.5), ("vectorise", "yes")],
    ],
)
def test_bad_options_are_refused(option, value):
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=option):
        bsam.VOGN(model.parameters(), module=model, **{"num_data": 10, option: value})


def test_something_must_keep_the_step_finite():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"prior_precision=0 and damping=0.*damping=0.01"):
        bsam.VOGN(model.parameters(), module=model, num_data=10, prior_precision=0.0, damping=0.0)


# ---------------------------------------------------------------- posterior and state


def test_posterior_and_sampled_have_the_law_of_line_10():
    problem = quadratic()
    optimizer = vogn(problem, augmentation_factor=4.0, betas=(0.9, 0.5), prior_precision=3.0, damping=0.2)
    for _ in range(5):
        optimizer.step(problem.loss_fn, problem.x, problem.y)
    posterior = optimizer.posterior()
    s = optimizer.state[problem.model.a]["curvature"]
    torch.testing.assert_close(posterior.std["a"], 1 / (30 * 4 * (s + 3.0 / 120 + 0.2)).sqrt())
    assert posterior.prior_precision == {"a": 3.0, "b": 3.0}
    mean = problem.model.a.detach().clone()
    draws = []
    for _ in range(2000):
        with optimizer.sampled():
            draws.append(problem.model.a.detach().clone())
    z = (torch.stack(draws) - mean) / posterior.std["a"]
    assert torch.equal(problem.model.a, mean)
    assert (z.mean(0).abs() < 4 / math.sqrt(2000)).all()
    assert ((z.var(0) - 1).abs() < 4 * math.sqrt(2 / 2000)).all()


@pytest.mark.parametrize(("statistics", "steps"), [("average", 21), ("latest", 0)])
def test_posterior_warns_while_the_precision_is_its_starting_value(statistics, steps):
    problem = logistic()
    optimizer = vogn(problem, betas=(0.9, 0.9), statistics=statistics)
    for _ in range(steps):
        optimizer.step(problem.loss_fn, problem.x, problem.y)
    with pytest.warns(UserWarning, match=f"after {steps} steps"):
        optimizer.posterior()
    optimizer.step(problem.loss_fn, problem.x, problem.y)
    if statistics == "latest":  # 0.1^1 of it is not more than a tenth
        optimizer.step(problem.loss_fn, problem.x, problem.y)
    optimizer.posterior()


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_load_refuses_curvatures_that_are_negative(bad):
    problem = logistic()
    optimizer = vogn(problem)
    optimizer.step(problem.loss_fn, problem.x, problem.y)
    state = optimizer.state_dict()
    state["state"][0]["curvature"][0, 1] = bad
    with pytest.raises(ValueError, match="curvature of parameter 0 is negative"):
        optimizer.load_state_dict(state)
    state["state"][0]["curvature"][0, 1] = 0.0
    optimizer.load_state_dict(state)
