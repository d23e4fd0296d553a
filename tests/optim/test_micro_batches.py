"""A sub-batch in micro-batches, `probe(..., last=False)`: one noise and one perturbation for all of them."""

import copy

import pytest
import torch
from torch import nn

from bsam.optim.micro_batches import GradAtJoined, Kept, MicroBatch
from bsam.optim.probing import GradAt, Slot
from tests.networks import assert_close
from tests.optim.contract import assert_same, batch, cross_entropy, snapshot
from tests.optim.test_pending import everything, made
from tests.optimizers import METHODS

every_method = pytest.mark.parametrize("name", METHODS)


def probe_in_micro_batches(optimizer, loss_fn, x, y, sizes):
    """Probe a batch that arrives in pieces; return the losses."""
    pieces = list(zip(x.split(sizes), y.split(sizes), strict=True))
    return [optimizer.probe(loss_fn, *piece, last=k + 1 == len(pieces)) for k, piece in enumerate(pieces)]


@every_method
@pytest.mark.parametrize("sizes", [(6, 6), (3, 8, 1)])
def test_kept_micro_batches_are_the_joined_batch(name, sizes):
    model, optimizer = made(name, steps=0)
    twin, whole = made(name, steps=0)
    for seed in range(3):
        x, y = batch(12, torch.float64, seed)
        losses = probe_in_micro_batches(optimizer, cross_entropy(model), x, y, sizes)
        mean, expected = optimizer.step(), whole.step(cross_entropy(twin), x, y)
        assert_close(mean, expected, tolerance=1e-12)
        assert_close(sum(n * each for n, each in zip(sizes, losses, strict=True)) / 12, mean, tolerance=1e-12)
        assert_close(everything(model, optimizer), everything(twin, whole), tolerance=1e-12)


@every_method
def test_joined_sub_batches_are_splits_of_a_step(name):
    model, optimizer = made(name, steps=0)
    twin, whole = made(name, steps=0, splits=2)
    for seed in range(2):
        x, y = batch(12, torch.float64, seed)
        for half in (slice(0, 6), slice(6, 12)):
            probe_in_micro_batches(optimizer, cross_entropy(model), x[half], y[half], (2, 4))
        optimizer.step()
        whole.step(cross_entropy(twin), x, y)
        assert_close(everything(model, optimizer), everything(twin, whole), tolerance=1e-12)


@every_method
def test_a_step_with_a_closure_ends_the_sub_batch(name):
    model, optimizer = made(name)
    twin, whole = made(name)
    x, y = batch(12, torch.float64)
    optimizer.probe(cross_entropy(model), x[:4], y[:4], last=False)
    optimizer.step(cross_entropy(model), x[4:], y[4:])
    whole.step(cross_entropy(twin), x, y)
    assert_close(everything(model, optimizer), everything(twin, whole), tolerance=1e-12)


@every_method
def test_grad_does_not_change_before_the_last_micro_batch(name):
    model, optimizer = made(name)
    x, y = batch(12, torch.float64)
    optimizer.probe(cross_entropy(model), x, y)
    model[3].bias.grad = torch.ones_like(model[3].bias)  # replaced from outside
    kept = [(p.grad, p.grad.clone()) for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    optimizer.probe(cross_entropy(model), x, y, last=False)
    for parameter, (grad, value) in zip(model.parameters(), kept, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, value)
    assert_same(model.state_dict(), before)


@every_method
def test_every_pass_after_the_first_waits_for_the_last_micro_batch(name):
    model, optimizer = made(name, vectorise=False)
    sizes = []

    def loss_fn(x, y):
        sizes.append(len(x))
        return cross_entropy(model)(x, y)

    x, y = batch(6, torch.float64)
    optimizer.probe(loss_fn, x[:2], y[:2], last=False)
    examples = METHODS[name].per_example
    assert sizes == ([1] * 2 if examples else [2])
    sizes.clear()
    optimizer.probe(loss_fn, x[2:], y[2:])
    assert sizes == ([1] * 4 if examples else [4, *[2, 4] * (METHODS[name].passes - 1)])


@every_method
def test_a_step_before_the_last_micro_batch_is_refused(name):
    model, optimizer = made(name)
    optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64), last=False)
    with pytest.raises(RuntimeError, match=r"had last=False.*with last=True before step\(\), or call .*discard\(\)"):
        optimizer.step()
    optimizer.discard()
    optimizer.step(cross_entropy(model), *batch(dtype=torch.float64))


@every_method
def test_several_splits_cannot_be_joined(name):
    model, optimizer = made(name, splits=2)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"last=False joins micro-batches into one sub-batch, .*splits=2"):
        optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64), last=False)
    assert_same(snapshot(model, optimizer), before)


@every_method
def test_a_micro_batch_that_is_not_finite_is_not_kept(name):
    model, optimizer = made(name)
    twin, other = made(name)
    x, y = batch(12, torch.float64)
    with pytest.raises(FloatingPointError, match="loss of pass 1 is nan"):
        optimizer.probe(lambda x, y: cross_entropy(model)(x, y) * torch.nan, x, y, last=False)
    for m, o in ((model, optimizer), (twin, other)):
        o.step(cross_entropy(m), x, y)
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


@torch.no_grad()
def test_gradients_of_joined_micro_batches():
    model = nn.Linear(3, 2).double()
    slots = [Slot(i, p, {}, p.detach().clone(), {}) for i, p in enumerate(model.parameters())]
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_fn(x):
        return model(x).square().mean()

    def grad_at(part, losses=()):
        made = GradAt(slots, loss_fn, (part,), lambda number: [])
        made.losses += losses
        return made

    first, second = ([slot.mean + offset for slot in slots] for offset in (0.5, -1.0))
    early = grad_at(x[:2])
    micro_batch = MicroBatch(loss_fn, (x[:2],), 2.0)
    results = (early(first),)
    kept = Kept().plus(micro_batch.after(early.losses), results, slots)
    assert kept.weight == 2.0
    assert_close(kept.sums, ([2 * gradient for gradient in results[0]],))
    joined = GradAtJoined(slots, kept, [grad_at(x[:2], early.losses), grad_at(x[2:])], 3.0)
    whole = grad_at(x)
    gradients, at = joined.with_weights(iter(first))
    assert all(a is slot.parameter for a, slot in zip(at, slots, strict=True))
    assert_close(at, first)
    assert_close(gradients, whole(first))
    assert_close(joined(iter(second)), whole(second))
    assert_close(joined.losses, whole.losses)
