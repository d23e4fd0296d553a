"""What the methods of the UCI study learn, and how they predict."""

import pytest
import torch

import bsam
from bsam.experiments.regression.methods import METHODS, make_noise_optimizer, take_step, trained_runs
from bsam.experiments.regression.stack import RunStack


@pytest.mark.filterwarnings("ignore:after .* steps .* of the precision")
@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_and_predicts(name):
    method = METHODS[name]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=generator), torch.randn(40, generator=generator)
    settings = list(method.grid[:2])
    stack = RunStack([2, 1], 3, 5, seeds=[0, 1, 2])
    optimizer = method.make(stack, settings, 40)
    noise = make_noise_optimizer(stack)
    for _ in range(3):
        take_step(optimizer, noise, stack, x[:, None].expand(-1, 3, -1), y[:, None].expand(-1, 3))
    runs = trained_runs(method, stack, optimizer, settings)
    assert [run.settings for run in runs] == [settings[0], settings[0], settings[1]]
    assert all(run.posterior.std["log_noise_std"] == 0 for run in runs)
    assert all(run.posterior.mean["log_noise_std"] != 0 for run in runs)
    chosen = runs if method.num_runs > 1 else runs[:1]
    found = method.predict(chosen, (x, y), (x, y))
    assert bsam.metrics.crps(found, num_bootstrap=0).crps > 0
    assert bool((found.epistemic_variance > 0).all()) == (name != "adam")


def test_a_loss_that_is_not_finite_is_an_error():
    stack = RunStack([1], 3, 5, seeds=[0])
    optimizer = METHODS["adam"].make(stack, [METHODS["adam"].grid[0]], 40)
    with pytest.raises(FloatingPointError):
        take_step(optimizer, make_noise_optimizer(stack), stack, torch.full((2, 1, 3), torch.inf), torch.zeros(2, 1))
