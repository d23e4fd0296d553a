"""Gradients in `.grad` before a step, for every optimizer."""

import gc

import pytest
import torch
from torch import nn

from bsam.optim import leftover
from bsam.optim.leftover import not_left, note_as_left
from tests.optim.contract import assert_same, batch, cross_entropy, network, snapshot, weights
from tests.optimizers import METHODS, make

every_method = pytest.mark.parametrize("name", METHODS)


@every_method
@pytest.mark.parametrize("how", ["accumulated", "changed", "replaced"])
def test_gradients_that_a_step_would_drop_are_refused(name, how):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model)
    x, y = batch()
    optimizer.step(cross_entropy(model), x, y)
    if how == "accumulated":
        optimizer.zero_grad()
        cross_entropy(model)(x, y).backward()
    elif how == "changed":
        cross_entropy(model)(x, y).backward()  # on top of what the step left
    else:
        model[3].bias.grad = torch.ones(3)
    before, grads = snapshot(model, optimizer), [p.grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"(0.weight and 5 more|3.bias) has a gradient .* together, .*zero_grad\(\)"):
        optimizer.step(cross_entropy(model), x, y)
    assert_same(snapshot(model, optimizer), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    optimizer.zero_grad()
    optimizer.step(cross_entropy(model), x, y)


@every_method
def test_gradients_that_may_be_there(name):
    """None, zeros, and what a step left, of this optimizer or another; all give the same step."""
    results = []
    for way in ("none", "zeros", "left", "left by another", "left before a failure"):
        model = network(name)
        optimizer = make(name, model.parameters(), module=model)
        if way == "left by another":
            make(name, model.parameters(), lr=0.0, module=model).step(cross_entropy(model), *batch())
            model.load_state_dict(network(name).state_dict())
        optimizer.step(cross_entropy(model), *batch())
        if way in ("none", "zeros"):
            optimizer.zero_grad(set_to_none=way == "none")
        if way == "left before a failure":
            with pytest.raises(FloatingPointError):
                optimizer.step(lambda x, y, m=model: cross_entropy(m)(x, y) * float("nan"), *batch())
        optimizer.step(cross_entropy(model), *batch())
        results.append(weights(model))
    for other in results[1:]:
        assert_same(results[0], other)


def with_gradients(*grads):
    parameters = [nn.Parameter(torch.zeros(2)) for _ in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return parameters


def test_which_gradients_no_step_left():
    left, changed, foreign, zero = torch.ones(2), torch.ones(2), torch.ones(2), torch.zeros(2)
    parameters = with_gradients(None, left, changed, foreign, zero)
    note_as_left([None, left, changed])
    assert not_left(parameters) == [3]
    changed.add_(1)
    assert not_left(parameters) == [2, 3]
    parameters[1].grad = left.clone()  # equal, and another tensor
    assert not_left(parameters) == [1, 2, 3]
    assert not_left([]) == []


def test_gradients_that_are_gone_are_forgotten():
    before = len(leftover._left)
    note_as_left([torch.ones(1) for _ in range(50)])
    gc.collect()
    note_as_left([])
    assert len(leftover._left) <= before
