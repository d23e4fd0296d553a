"""torch's optimizers with the interface of our methods."""

import pytest
import torch
from torch import nn

import bsam
from bsam.engine.methods import Plain, method_of
from bsam.optim.probing import Tally
from tests.engine.runs import Run, refuses
from tests.networks import make_batch


def test_optimizers_that_evaluate_the_loss_are_refused():
    run = Run("SGD")
    run.optimizer = torch.optim.LBFGS(run.model.parameters())
    refuses([run], lambda: run.engine(make_batch("mlp", 16)), ValueError, "LBFGS evaluates the loss by itself")


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def test_our_methods_are_taken_as_they_are():
    model = linear()
    optimizer = bsam.SAM(model.parameters(), torch.optim.SGD, lr=0.1, rho=0.05)
    assert method_of(optimizer, model) is optimizer
    assert isinstance(method_of(torch.optim.SGD(model.parameters(), lr=0.1), model), Plain)


def test_a_plain_step_is_that_of_torch():
    ours, plain = linear(), linear()
    x = torch.ones(4, 3)
    method = method_of(torch.optim.Adam(ours.parameters(), lr=0.1), ours)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = method.step(lambda x: ours(x).square().mean(), x)
        optimizer.zero_grad()
        expected = plain(x).square().mean()
        expected.backward()
        optimizer.step()
        assert torch.equal(loss, expected.detach())
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_plain_step_that_is_not_finite_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    method = method_of(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(FloatingPointError, match="Weights and state are unchanged"):
        method.step(lambda x: model(x).sum() * torch.nan, torch.ones(4, 3))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_plain_method_takes_one_gradient_at_the_weights():
    model = linear()
    method = method_of(torch.optim.SGD(model.parameters(), lr=0.1), model)
    slots, tally = method._slots(), Tally()
    assert all(method._noise_precision(slot) is None for slot in slots)
    assert all(torch.equal(method._theta(slot, 0), slot.parameter) for slot in slots)
    method._probe(slots, [slot.mean for slot in slots], lambda weights: [2 * w for w in weights], tally)
    torch.testing.assert_close(tally.means, {"gradient": [2 * slot.mean for slot in slots]})
