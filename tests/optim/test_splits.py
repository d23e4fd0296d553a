"""The parts of a batch, evaluated by a method of a few lines that notes where it was asked to."""

import pytest
import torch
from torch import nn

from bsam.optim.base import ProbingOptimizer


class Noted(ProbingOptimizer):
    """Gradient descent whose first weights are the mean plus the number of the part."""

    rates = ("lr",)

    def __init__(self, params, *, splits=1, module=None, vectorise=None):
        defaults = {"lr": 0.1, "splits": splits, "nonfinite": "raise", "max_grad_norm": None, "batch_norm": "all"}
        self.numbers = []
        super().__init__(params, defaults, module=module, process_group=None, vectorise=vectorise)

    def _theta(self, slot, split):
        self.numbers.append(split)
        return slot.mean + split

    def _probe(self, slots, theta, grad_at, tally):
        tally.add("gradient", grad_at(theta))

    def _update(self, slot, gradient):
        return slot.mean - slot.group["lr"] * gradient, {}


def problem():
    model = nn.Linear(2, 1, bias=False).double()
    return model, torch.ones(12, 2, dtype=torch.float64), lambda x: model(x).square().mean()


def test_numbers_go_on_from_probe_to_probe_and_start_again_in_the_next_step():
    model, x, loss_fn = problem()
    optimizer = Noted(model.parameters(), splits=2)
    for _ in range(2):
        optimizer.numbers.clear()
        for part in x.split(4):
            optimizer.probe(loss_fn, part)
        assert optimizer.numbers == [0, 1, 2, 3, 4, 5]
        optimizer.step()


def test_a_small_micro_batch_leaves_numbers_out():
    """The numbers of a probe do not depend on the sizes of the others, which other ranks do not know."""
    model, x, loss_fn = problem()
    optimizer = Noted(model.parameters(), splits=2)
    with pytest.warns(UserWarning, match="a batch of 1 examples cannot be cut into 2 parts") as warned:
        optimizer.probe(loss_fn, x[:1])
    assert warned[0].filename == __file__
    optimizer.probe(loss_fn, x[1:])
    assert optimizer.numbers == [0, 2, 3]


def test_micro_batches_of_one_sub_batch_have_one_number():
    model, x, loss_fn = problem()
    optimizer = Noted(model.parameters())
    for k, part in enumerate(x.split(3)):
        optimizer.probe(loss_fn, part, last=k % 2 == 1)
    assert optimizer.numbers == [0, 0, 1, 1]


@pytest.mark.parametrize("vectorise", [True, False])
def test_each_part_is_evaluated_at_its_own_weights(vectorise):
    model, x, loss_fn = problem()
    optimizer = Noted(model.parameters(), splits=3, module=model, vectorise=vectorise)
    at = [model.weight.detach() + k for k in range(3)]
    optimizer.probe(loss_fn, x)
    expected = sum(2 * weight.sum() * torch.ones_like(weight) for weight in at) / 3
    torch.testing.assert_close(model.weight.grad, expected)
