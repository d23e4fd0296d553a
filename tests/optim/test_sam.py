"""SAM against the transcription of Algorithm 1's blue boxes, its limits, and its link to the base optimizer."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from tests import reference
from tests.optim.test_bsam import STEPS, run
from tests.problems import PROBLEMS, logistic


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("size", [12, 10])
def test_sam_sgd_matches_the_transcription(name, splits, size):
    problem = PROBLEMS[name]()
    optimizer = bsam.SAM(
        problem.model.parameters(), torch.optim.SGD, rho=0.1, lr=0.05, momentum=0.8, weight_decay=0.03, splits=splits
    )
    minibatches = problem.minibatches(STEPS, size)
    expected = reference.sam_sgd(
        problem.gradient, problem.weights(), minibatches, alpha=0.05, beta1=0.8, rho=0.1, delta=0.03, m=splits
    )
    for (omega, loss), (weights, ours) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(ours, loss, rtol=1e-10)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("splits", [1, 4])
def test_sam_adam_matches_the_transcription(name, splits):
    problem = PROBLEMS[name]()
    optimizer = bsam.SAM(
        problem.model.parameters(),
        torch.optim.Adam,
        rho=0.1,
        lr=0.01,
        betas=(0.8, 0.97),
        weight_decay=0.03,
        splits=splits,
    )
    minibatches = problem.minibatches(STEPS, 10)
    options = {"alpha": 0.01, "beta1": 0.8, "beta2": 0.97, "rho": 0.1, "delta": 0.03, "m": splits}
    expected = reference.sam_adam(problem.gradient, problem.weights(), minibatches, bias_correction=True, **options)
    for (omega, loss), (weights, ours) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(ours, loss, rtol=1e-9)


def test_what_bias_correction_changes():
    """Algorithm 1 as printed has none: its first step is (1 - beta1) / sqrt(1 - beta2) = 3.16 times Adam's."""
    problem = logistic()
    options = {"alpha": 0.01, "beta1": 0.9, "beta2": 0.999, "rho": 0.1, "delta": 0.0}
    start = problem.weights()

    def first(correct):
        runs = reference.sam_adam(
            problem.gradient, start, problem.minibatches(1, 10), bias_correction=correct, **options
        )
        return next(runs)[0] - start

    np.testing.assert_allclose(first(False) / first(True), 0.1 / math.sqrt(0.001), rtol=1e-4)


def test_two_groups_match_the_transcription():
    """rho by group, one norm over both; a group that is not perturbed is not part of the norm."""
    problem = logistic()
    first, second = problem.model.parameters()
    optimizer = bsam.SAM(
        [{"params": [first], "rho": 0.5, "lr": 0.2}, {"params": [second]}], torch.optim.SGD, rho=0.1, lr=0.05
    )
    minibatches = problem.minibatches(STEPS, 13)
    expected = reference.sam_sgd(
        problem.gradient,
        problem.weights(),
        minibatches,
        alpha=np.array([0.2, 0.2, 0.2, 0.05]),
        beta1=0.0,
        rho=np.array([0.5, 0.5, 0.5, 0.1]),
        delta=0.0,
    )
    for (omega, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-10)


def test_perturbation_has_length_rho_over_the_perturbed_groups():
    a, b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))
    optimizer = bsam.SAM([{"params": [a]}, {"params": [b], "perturb": False}], torch.optim.SGD, rho=0.7, lr=0.0)
    seen = []

    def closure():
        seen.append((a.detach().clone(), b.detach().clone()))
        return (a**2).sum() + (b**3).sum()

    optimizer.step(closure)
    (a0, b0), (a1, b1) = seen
    torch.testing.assert_close((a1 - a0).norm(), torch.tensor(0.7))
    torch.testing.assert_close((a1 - a0) / 0.7, a0 / a0.norm())
    assert torch.equal(b0, b1)


def test_a_zero_gradient_is_not_perturbed():
    w = nn.Parameter(torch.zeros(3))
    optimizer = bsam.SAM([w], torch.optim.SGD, rho=0.5, lr=0.1)
    optimizer.step(lambda: (w**2).sum())
    assert torch.equal(w, torch.zeros(3))


BASES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "factory": (functools.partial(torch.optim.SGD, lr=0.1), {}),
}


@pytest.mark.parametrize("base", BASES)
def test_rho_zero_is_the_base_optimizer_bit_for_bit(base):
    make, kwargs = BASES[base]

    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    ours, plain = model(), model()
    sam = bsam.SAM(ours.parameters(), make, rho=0.0, **kwargs)
    optimizer = make(plain.parameters(), **kwargs)
    for step in range(20):
        x, y = torch.randn(6, 4), torch.randint(2, (6,))
        loss = sam.step(lambda x, y: nn.functional.cross_entropy(ours(x), y), x, y)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(plain(x), y)
        expected.backward()
        optimizer.step()
        assert torch.equal(loss, expected.detach()), step
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q), step


def test_the_base_optimizer_shares_state_and_groups_after_everything():
    import copy
    import pickle

    w = nn.Parameter(torch.ones(3))
    optimizer = bsam.SAM([w], torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    optimizer.step(lambda: (w**2).sum())
    other = bsam.SAM([nn.Parameter(torch.ones(3))], torch.optim.SGD, rho=0.9, lr=0.7, momentum=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["momentum"] == 0.9
    for each in (optimizer, other, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert each.base_optimizer.state is each.state
        assert each.base_optimizer.param_groups is each.param_groups
        (p,) = each.param_groups[0]["params"]
        assert each.state[p]["momentum_buffer"].abs().sum() > 0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "momentum": 0.5})
    assert [g["momentum"] for g in optimizer.base_optimizer.param_groups] == [0.9, 0.5]
    assert [g["rho"] for g in optimizer.param_groups] == [0.05, 0.05]
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("name", ["rho", "lr"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_bad_options_are_refused(name, value):
    w = nn.Parameter(torch.ones(2))
    good = {"rho": 0.05, "lr": 0.1}
    with pytest.raises(ValueError, match=name):
        bsam.SAM([w], torch.optim.SGD, **{**good, name: value})
    with pytest.raises(ValueError, match=name):
        bsam.SAM([{"params": [w], name: value}], torch.optim.SGD, **good)
    optimizer = bsam.SAM([w], torch.optim.SGD, **good)
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], name: value})
    assert len(optimizer.param_groups) == 1


def test_bad_base_optimizers_are_refused():
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="must be a class or a function"):
        bsam.SAM([w], torch.optim.SGD([w], lr=0.1), rho=0.05)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss by itself"):
        bsam.SAM([w], torch.optim.LBFGS, rho=0.05)
    with pytest.raises(TypeError, match="nesterovv"):
        bsam.SAM([w], torch.optim.SGD, rho=0.05, nesterovv=True)


def test_hooks_of_the_whole_process_run_once():
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    w = nn.Parameter(torch.ones(2))
    optimizer = bsam.SAM([w], torch.optim.SGD, rho=0.05, lr=0.1)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(("pre", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append(("post", opt))),
    ]
    try:
        optimizer.step(lambda: (w**2).sum())
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("pre", optimizer), ("post", optimizer)]


def test_agrees_with_another_package():
    """pytorch_optimizer's SAM, an independent implementation of the same algorithm (no splits there)."""
    import pytorch_optimizer

    ours, theirs = logistic(), logistic()
    sam = bsam.SAM(ours.model.parameters(), torch.optim.SGD, rho=0.3, lr=0.2, momentum=0.9)
    other = pytorch_optimizer.SAM(theirs.model.parameters(), torch.optim.SGD, rho=0.3, lr=0.2, momentum=0.9)
    for _ in range(20):
        sam.step(ours.loss_fn, ours.x, ours.y)
        theirs.loss_fn(theirs.x, theirs.y).backward()
        other.first_step(zero_grad=True)
        theirs.loss_fn(theirs.x, theirs.y).backward()
        other.second_step(zero_grad=True)
    np.testing.assert_allclose(ours.weights(), theirs.weights(), rtol=1e-6)  # it adds 1e-12 to the norm


def test_the_state_of_another_base_is_refused_and_nothing_changes():
    w = nn.Parameter(torch.ones(3))
    sgd = bsam.SAM([w], torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    adam = bsam.SAM([w], torch.optim.Adam, rho=0.05, lr=0.1)
    for optimizer in (sgd, adam):
        optimizer.step(lambda: (w**2).sum())
    state, groups = adam.state, adam.param_groups
    with pytest.raises(KeyError):
        adam.load_state_dict(sgd.state_dict())
    assert adam.state is adam.base_optimizer.state is state
    assert adam.param_groups is adam.base_optimizer.param_groups is groups
    adam.step(lambda: (w**2).sum())


ALL_BASES = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip


@pytest.mark.parametrize("base", ALL_BASES)
def test_every_base_optimizer_loads_its_own_state(base):
    """Adafactor keeps means over rows and over columns, which are not of the parameter's shape."""
    make = getattr(torch.optim, base)
    model, fresh = nn.Linear(5, 3), nn.Linear(5, 3)
    optimizer = bsam.SAM(model.parameters(), make, rho=0.05, lr=0.1)
    optimizer.step(lambda x: model(x).square().mean(), torch.randn(4, 5))
    fresh.load_state_dict(model.state_dict())
    other = bsam.SAM(fresh.parameters(), make, rho=0.05, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    x = torch.randn(4, 5)
    optimizer.step(lambda x: model(x).square().mean(), x)
    other.step(lambda x: fresh(x).square().mean(), x)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)


def test_adafactor_refuses_means_of_another_shape():
    model = nn.Linear(5, 3)
    optimizer = bsam.SAM(model.parameters(), torch.optim.Adafactor, rho=0.05)
    optimizer.step(lambda x: model(x).square().mean(), torch.randn(4, 5))
    state = optimizer.state_dict()
    state["state"][0]["row_var"] = torch.ones(4, 1)
    with pytest.raises(ValueError, match="another model"):
        bsam.SAM(nn.Linear(5, 3).parameters(), torch.optim.Adafactor, rho=0.05).load_state_dict(state)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_state_that_is_not_finite_is_refused(value):
    w = nn.Parameter(torch.ones(3))
    optimizer = bsam.SAM([w], torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    optimizer.step(lambda: (w**2).sum())
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"][1] = value
    before = optimizer.state[w]["momentum_buffer"].clone()
    with pytest.raises(ValueError, match="the loaded 'momentum_buffer' of parameter 0 is not finite everywhere"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[w]["momentum_buffer"], before)


def test_options_of_the_base_optimizer_may_be_in_a_group_and_no_others():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    bsam.SAM([{"params": [a], "weight_decay": 0.1}], torch.optim.SGD, rho=0.05, lr=0.1)
    with pytest.raises(ValueError, match="'amsgrad' is not an option of a parameter group of SAM"):
        bsam.SAM([{"params": [b], "amsgrad": True}], torch.optim.SGD, rho=0.05, lr=0.1)


def test_maximize_is_refused():
    with pytest.raises(ValueError, match="maximize=True does not go with SAM"):
        bsam.SAM([nn.Parameter(torch.ones(2))], torch.optim.SGD, rho=0.05, lr=0.1, maximize=True)
