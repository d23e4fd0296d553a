"""What a method gets in a step: slots, gradients at given weights, and averages over sub-batches."""

import pytest
import torch
from torch import nn

from bsam.gradients import PerExample
from bsam.optim.probing import GradAt, MeanSnapshot, Slot, Tally, emptied
from bsam.optim.together import StackTally


def parts(count=4, n=6):
    """Results of sub-batches of one size: for each of two slots, one row per sub-batch."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, *shape, generator=generator, dtype=torch.float64) for shape in ((n,), (2, 3))]


@pytest.mark.parametrize("absolute", [True, False])
def test_loop_and_stack_average_alike(absolute):
    stacks = parts()
    kept = [stack.clone() for stack in stacks]
    loop, together = Tally(), StackTally()
    add = Tally.add_abs if absolute else Tally.add
    loop.weight = 1 / len(stacks[0])
    for k in range(len(stacks[0])):
        add(loop, "h", [stack[k] for stack in stacks])
    (together.add_abs if absolute else together.add)("h", stacks)
    expected = [(stack.abs() if absolute else stack).mean(0) for stack in kept]
    torch.testing.assert_close(loop.means["h"], expected)
    torch.testing.assert_close(together.means["h"], expected)
    if absolute:
        torch.testing.assert_close(stacks, kept, rtol=0, atol=0)  # only read


def test_sub_batches_count_by_their_size():
    tally, total = Tally(), torch.zeros(2)
    for size, value in ((3, 1.0), (1, 5.0)):
        tally.weight = size / 4
        tally.add("gradient", [torch.full((2,), value)])
        total += size * value / 4
    torch.testing.assert_close(tally.means, {"gradient": [total]})


def test_a_single_sub_batch_is_not_copied():
    tally, gradient = Tally(), torch.ones(2)
    tally.add("gradient", [gradient])
    assert tally.means["gradient"][0] is gradient


def test_emptied_frees_what_it_gives():
    tensors = [torch.ones(1), torch.zeros(1)]
    given = emptied(tensors)
    assert next(given) == 1
    assert len(tensors) == 1
    assert [t.item() for t in given] == [0.0]
    assert tensors == []


def slots_of(model):
    return [Slot(i, p, {}, p.detach().clone(), {}) for i, p in enumerate(model.parameters())]


def problem():
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, (x,), lambda x: model(x).square().mean()


@torch.no_grad()
def test_gradients_at_other_weights():
    model, batch, loss_fn = problem()
    slots = slots_of(model)
    weights = [slot.mean + 0.5 for slot in slots]
    grad_at = GradAt(slots, loss_fn, batch, lambda number: [])
    gradients, at = grad_at.with_weights(weights)
    assert all(a is p for a, p in zip(at, model.parameters(), strict=True))
    torch.testing.assert_close([p.detach() for p in at], weights)
    with torch.enable_grad():
        loss = loss_fn(*batch)
        expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(gradients, list(expected))
    torch.testing.assert_close(grad_at.losses, [loss.detach()])
    assert all(slot.seen for slot in slots)
    MeanSnapshot(slots).restore()
    assert all(torch.equal(slot.parameter, slot.mean) for slot in slots)


@torch.no_grad()
def test_moments_of_the_examples():
    model, (x,), loss_fn = problem()
    slots = slots_of(model)
    grad_at = GradAt(slots, loss_fn, (x,), lambda number: [], PerExample(model))
    mean, mean_square = grad_at.moments([slot.mean for slot in slots])
    with torch.enable_grad():
        rows = [torch.autograd.grad(loss_fn(row[None]), list(model.parameters())) for row in x]
    stacks = [torch.stack(column) for column in zip(*rows, strict=True)]
    torch.testing.assert_close(mean, [stack.mean(0) for stack in stacks])
    torch.testing.assert_close(mean_square, [stack.square().mean(0) for stack in stacks])
    torch.testing.assert_close(grad_at.losses, [loss_fn(x)])


@torch.no_grad()
def test_a_parameter_without_a_gradient_has_zeros_and_is_not_seen():
    model, batch, _ = problem()
    slots = slots_of(model)
    gradients = GradAt(slots, lambda x: (x @ model.weight.T).sum(), batch, lambda number: [])(s.mean for s in slots)
    assert [slot.seen for slot in slots] == [True, False]
    assert torch.equal(gradients[1], torch.zeros_like(model.bias))


@torch.no_grad()
def test_statistics_that_a_pass_must_not_move():
    model = nn.BatchNorm1d(3).double()
    frozen = [(model, "running_mean")]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad_at = GradAt(slots_of(model), lambda x: model(x).sum(), (x,), lambda number: frozen if number == 0 else [])
    moved = []
    for _ in range(2):
        grad_at(p.detach().clone() for p in model.parameters())
        moved.append(bool(model.running_mean.any()))
    assert moved == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_averages_have_at_least_32_bits(dtype):
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    slot = Slot(0, parameter, {}, parameter.detach().clone(), {})
    assert slot.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    value = torch.tensor(3)
    assert slot.per_element(value) is value
