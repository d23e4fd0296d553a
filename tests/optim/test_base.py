"""The step that all methods share: a method of a few lines shows what the base class does, and nothing else."""

import pytest
import torch
from torch import nn

from bsam.optim.base import ProbingOptimizer


class Recorder(ProbingOptimizer):
    """Gradient descent that keeps what its probe and its update were given."""

    rates = ("lr",)

    def __init__(self, params, *, lr=0.1, splits=1, module=None, vectorise=None, **options):
        defaults = {"lr": lr, "splits": splits, "nonfinite": "raise", "max_grad_norm": None, "batch_norm": "none"}
        self.probed, self.updated = [], []
        super().__init__(params, {**defaults, **options}, module=module, process_group=None, vectorise=vectorise)

    def _fresh_state(self, parameter, group):
        return {"step": torch.zeros((), dtype=torch.int64)}

    def _probe(self, slots, theta, grad_at, tally):
        gradients = grad_at(theta)
        self.probed.append([gradient.clone() for gradient in gradients])
        tally.add("gradient", gradients)
        tally.add("square", [gradient.square() for gradient in gradients])

    def _update(self, slot, gradient, square):
        self.updated.append((gradient.clone(), square.clone()))
        return slot.mean - slot.group["lr"] * gradient, {}


def problem():
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model, x, lambda x: model(x).square().mean()


def test_each_part_is_probed_and_averages_count_by_size():
    model, x, loss_fn = problem()
    optimizer = Recorder(model.parameters(), splits=2)
    before = model.weight.detach().clone()
    expected = []
    for part in x.tensor_split(2):
        (gradient,) = torch.autograd.grad(loss_fn(part), [model.weight])
        expected.append((gradient, len(part) / len(x)))
    loss = optimizer.step(loss_fn, x)
    torch.testing.assert_close([each[0] for each in optimizer.probed], [gradient for gradient, _ in expected])
    ((gradient, square),) = optimizer.updated
    torch.testing.assert_close(gradient, sum(share * g for g, share in expected))
    torch.testing.assert_close(square, sum(share * g.square() for g, share in expected))
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)
    torch.testing.assert_close(model.weight.grad, gradient)
    torch.testing.assert_close(loss, (x @ before.T).square().mean())
    assert optimizer.state[model.weight]["step"] == 1


def test_gradients_are_clipped_before_the_update():
    model, x, loss_fn = problem()
    optimizer = Recorder(model.parameters(), max_grad_norm=1e-3)
    optimizer.step(loss_fn, x)
    torch.testing.assert_close(optimizer.updated[0][0].norm().item(), 1e-3, rtol=2e-3, atol=0)


def test_rates_and_what_is_compiled_in():
    model, _, _ = problem()
    optimizer = Recorder(model.parameters(), splits=3)
    fixed = optimizer._fixed(optimizer.param_groups[0])
    assert "lr" not in fixed
    assert fixed["splits"] == 3


def test_the_posterior_of_a_method_without_a_gaussian_is_a_point():
    model, x, loss_fn = problem()
    optimizer = Recorder(model.parameters())
    optimizer.step(loss_fn, x)
    posterior = optimizer.posterior(model)
    assert torch.equal(posterior.mean["weight"], model.weight)
    assert not posterior.std["weight"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": 0}, "splits=0"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore'"),
        ({"batch_norm": "last"}, "batch_norm='last'"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0.*Write None"),
        ({"vectorise": "yes"}, "vectorise='yes'"),
    ],
)
def test_options_of_every_method(options, message):
    model, _, _ = problem()
    with pytest.raises(ValueError, match=message):
        Recorder(model.parameters(), **options)


def test_skipped_steps_are_counted():
    model, x, loss_fn = problem()
    optimizer = Recorder(model.parameters(), nonfinite="skip")
    for factor in (1.0, torch.nan, torch.inf, 1.0):
        optimizer.step(lambda x, factor=factor: factor * loss_fn(x), x)
    assert optimizer.skipped_steps == 2
    assert optimizer.state[model.weight]["step"] == 2
