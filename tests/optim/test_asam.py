"""ASAM against the transcription of its paper's Algorithm 1, another package, and the limits in which it is SAM."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.optim.asam import axes
from tests import reference
from tests.networks import assert_close, make_batch, make_network, mean_loss
from tests.optim.test_bsam import STEPS, run
from tests.problems import PROBLEMS, logistic


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("size", [12, 10])  # 10 = 3 + 3 + 2 + 2: ragged
def test_matches_the_transcription(name, splits, size):
    problem = PROBLEMS[name]()
    optimizer = bsam.ASAM(
        problem.model.parameters(),
        torch.optim.SGD,
        rho=0.7,
        eta=0.02,
        lr=0.05,
        momentum=0.8,
        weight_decay=0.03,
        splits=splits,
    )
    minibatches = problem.minibatches(STEPS, size)
    options = {"alpha": 0.05, "beta1": 0.8, "rho": 0.7, "eta": 0.02, "delta": 0.03, "m": splits}
    expected = reference.asam_sgd(problem.gradient, problem.weights(), minibatches, **options)
    for (omega, loss), (weights, ours) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(ours, loss, rtol=1e-10)


@pytest.mark.parametrize("perturb", [True, False])
@pytest.mark.parametrize("vectorise", [False, True])
def test_two_groups_match_the_transcription(perturb, vectorise):
    """rho and eta by group, one norm over both; a group that is not perturbed is not part of the norm."""
    problem = logistic()
    first, second = problem.model.parameters()
    optimizer = bsam.ASAM(
        [{"params": [first], "rho": 0.9, "eta": 0.1, "lr": 0.2}, {"params": [second], "perturb": perturb}],
        torch.optim.SGD,
        lr=0.05,
        splits=3,
        module=problem.model,
        vectorise=vectorise,
    )
    of_group = lambda a, b: np.array([a, a, a, b])  # noqa: E731
    minibatches = problem.minibatches(STEPS, 12)
    expected = reference.asam_sgd(
        problem.gradient,
        problem.weights(),
        minibatches,
        alpha=of_group(0.2, 0.05),
        beta1=0.0,
        rho=of_group(0.9, 0.5),
        eta=of_group(0.1, 0.01),
        delta=0.0,
        m=3,
        perturbed=of_group(1.0, float(perturb)),
    )
    for (omega, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-10, atol=1e-13)


def test_the_axes_are_those_of_the_paper():
    torch.testing.assert_close(axes(torch.tensor([-2.0, 0.0, 0.5]), 0.01), torch.tensor([2.01, 0.01, 0.51]))


def test_the_perturbation_has_length_rho_in_units_of_the_axes():
    a, b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))
    optimizer = bsam.ASAM([a, b], torch.optim.SGD, rho=0.7, eta=0.3, lr=0.0)
    seen = []

    def closure():
        seen.append(torch.cat([a.detach().flatten(), b.detach()]))
        return (a**2).sum() + (b**3).sum()

    optimizer.step(closure)
    T = seen[0].abs() + 0.3
    torch.testing.assert_close(((seen[1] - seen[0]) / T).norm(), torch.tensor(0.7))


def test_with_axes_of_one_it_is_sam():
    """|omega| = 1 and eta = 0; a learning rate of 0 keeps omega there."""
    applied = []
    for make, options in ((bsam.ASAM, {"eta": 0.0}), (bsam.SAM, {})):
        problem = logistic()
        with torch.no_grad():
            for p in problem.model.parameters():
                p.sign_()
        optimizer = make(problem.model.parameters(), torch.optim.SGD, rho=0.5, lr=0.0, **options)
        optimizer.step(problem.loss_fn, problem.x, problem.y)
        applied.append(torch.cat([p.grad.flatten() for p in problem.model.parameters()]))
    assert torch.equal(*applied)


def test_with_a_large_eta_it_is_sam_with_rho_times_eta():
    eta, found = 1e9, []
    for make, options in ((bsam.ASAM, {"rho": 0.5 / eta, "eta": eta}), (bsam.SAM, {"rho": 0.5})):
        problem = logistic()
        optimizer = make(problem.model.parameters(), torch.optim.SGD, lr=0.3, **options)
        for _ in range(20):
            optimizer.step(problem.loss_fn, problem.x, problem.y)
        found.append(problem.weights())
    np.testing.assert_allclose(*found, rtol=1e-7)


def test_rho_zero_is_the_base_optimizer_bit_for_bit():
    problem, twin = logistic(), logistic()
    ours = bsam.ASAM(problem.model.parameters(), torch.optim.SGD, rho=0.0, lr=0.3, momentum=0.9)
    sgd = torch.optim.SGD(twin.model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(20):
        ours.step(problem.loss_fn, problem.x, problem.y)
        sgd.zero_grad()
        twin.loss_fn(twin.x, twin.y).backward()
        sgd.step()
    np.testing.assert_array_equal(problem.weights(), twin.weights())


def test_rescaled_weights_have_the_same_neighbourhood():
    """A layer times 4 and the next one times 1/4 are the same network: with eta = 0 the perturbed losses agree."""

    def perturbed_loss(factor, make, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False)).double()
        with torch.no_grad():
            model[0].weight.mul_(factor)
            model[2].weight.div_(factor)
        losses = []

        def closure():
            losses.append(model(torch.ones(5, 4, dtype=torch.float64).cumsum(0)).square().mean())
            return losses[-1]

        make(model.parameters(), torch.optim.SGD, rho=0.3, lr=0.1, **options).step(closure)
        return [loss.item() for loss in losses]

    assert perturbed_loss(4.0, bsam.ASAM, eta=0.0) == pytest.approx(perturbed_loss(1.0, bsam.ASAM, eta=0.0), rel=1e-12)
    assert perturbed_loss(4.0, bsam.SAM)[1] != pytest.approx(perturbed_loss(1.0, bsam.SAM)[1], rel=0.1)


def test_a_zero_gradient_is_not_perturbed():
    w = nn.Parameter(torch.zeros(3))
    optimizer = bsam.ASAM([w], torch.optim.SGD, lr=0.1)
    optimizer.step(lambda: (w**2).sum())
    assert torch.equal(w, torch.zeros(3))


def test_agrees_with_another_package():
    """pytorch_optimizer's SAM with adaptive=True has T = |omega|, without an eta."""
    import pytorch_optimizer

    ours, theirs = logistic(), logistic()
    asam = bsam.ASAM(ours.model.parameters(), torch.optim.SGD, rho=0.9, eta=0.0, lr=0.2, momentum=0.9)
    other = pytorch_optimizer.SAM(
        theirs.model.parameters(), torch.optim.SGD, rho=0.9, adaptive=True, lr=0.2, momentum=0.9
    )
    for _ in range(20):
        asam.step(ours.loss_fn, ours.x, ours.y)
        theirs.loss_fn(theirs.x, theirs.y).backward()
        other.first_step(zero_grad=True)
        theirs.loss_fn(theirs.x, theirs.y).backward()
        other.second_step(zero_grad=True)
    np.testing.assert_allclose(ours.weights(), theirs.weights(), rtol=1e-6)  # it adds 1e-12 to the norm


@pytest.mark.parametrize("network", ["normalised", "tied", "partly frozen"])
@pytest.mark.parametrize("way", ["vectorised", "TrainStep"])
def test_splits_together_and_a_train_step_are_those_of_the_loop(network, way):
    made = []
    for vectorise in (True, False):
        model = make_network(network)
        options = {"splits": 4, "module": model, "vectorise": vectorise}
        made.append((model, bsam.ASAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **options)))
    (a, ours), (b, loop) = made
    batches = [make_batch(network, 16, seed) for seed in range(4)]
    step = bsam.TrainStep(ours, mean_loss(a), batches[0], compile=False) if way == "TrainStep" else None
    for i, batch in enumerate(batches):
        for optimizer in (ours, loop):
            optimizer.param_groups[0]["rho"] = 0.5 + 0.1 * i
        loss = ours.step(mean_loss(a), *batch) if step is None else step(*batch)
        assert_close(loss, loop.step(mean_loss(b), *batch))
        assert_close(a.state_dict(), b.state_dict())
        assert_close(ours.state_dict()["state"], loop.state_dict()["state"])


@pytest.mark.parametrize("name", ["rho", "eta", "lr"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_bad_options_are_refused(name, value):
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=name):
        bsam.ASAM([w], torch.optim.SGD, **{"lr": 0.1, name: value})
    with pytest.raises(ValueError, match=name):
        bsam.ASAM([{"params": [w], name: value}], torch.optim.SGD, lr=0.1)


def test_a_base_optimizer_that_is_made_already_is_refused():
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"must be a class or a function .* ASAM\(params, torch\.optim\.SGD, rho=0\.5"):
        bsam.ASAM([w], torch.optim.SGD([w], lr=0.1))


def test_sam_has_no_eta():
    with pytest.raises(TypeError, match="eta"):
        bsam.SAM([nn.Parameter(torch.ones(2))], torch.optim.SGD, rho=0.05, eta=0.1)
