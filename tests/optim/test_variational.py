"""What optimizers of a Gaussian share: the noise, the options, and samples in the model."""

import math

import pytest
import torch
from torch import nn

from bsam.noise import standard_normal
from bsam.optim.variational import posterior_std
from tests.optimizers import METHODS, make

GAUSSIAN = [name for name, method in METHODS.items() if method.gaussian]
every_gaussian = pytest.mark.parametrize("name", GAUSSIAN)


def trained(name, steps=2, **options):
    torch.manual_seed(1)
    model = nn.Linear(3, 2).double()
    optimizer = make(name, model.parameters(), module=model, seed=5, **options)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for _ in range(steps):
        optimizer.step(lambda x: model(x).square().mean(), x)
    return model, optimizer


def test_the_standard_deviation_of_the_posterior():
    s = torch.tensor([0.25, 4.0])
    torch.testing.assert_close(posterior_std(s, 100.0), torch.tensor([1 / math.sqrt(25), 1 / math.sqrt(400)]))


@every_gaussian
def test_weights_of_a_pass_are_the_mean_and_noise_of_the_posteriors_width(name):
    _, optimizer = trained(name, augmentation_factor=2.0)
    assert optimizer.effective_num_data == 200.0
    for slot in optimizer._slots():
        noise = standard_normal(5, slot.state["step"], 3, slot.index, slot.parameter.shape, dtype=torch.float64)
        s = optimizer._noise_precision(slot)
        sigma = 0 if s is None else (200.0 * s).rsqrt()
        assert (s is None) == (name == "BSAM" and slot.parameter.dim() == 1)
        torch.testing.assert_close(optimizer._theta(slot, 3), slot.mean + sigma * noise)


@every_gaussian
def test_a_group_without_noise(name):
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "sample": False}, {"params": [model.bias]}]
    optimizer = make(name, groups, module=model, betas=(0.9, 0.0))
    optimizer.step(lambda x: model(x).square().mean(), torch.ones(4, 3))
    weight, bias = optimizer._slots()
    assert optimizer._noise_precision(weight) is None
    assert optimizer._theta(weight, 0) is weight.mean
    assert not torch.equal(optimizer._theta(bias, 0), bias.mean)
    posterior = optimizer.posterior()
    assert not posterior.std["weight"].any()
    assert (posterior.std["bias"] > 0).all()


@every_gaussian
def test_samples_in_the_model_have_numbers(name):
    model, optimizer = trained(name)
    mean = model.weight.detach().clone()
    seen = []
    for draw in (None, None, 0, 7):
        with optimizer.sampled(draw):
            seen.append(model.weight.detach().clone())
        assert torch.equal(model.weight, mean)
    assert torch.equal(seen[0], seen[2])  # the first draw is number 0
    assert not any(torch.equal(a, b) for a, b in ((seen[0], seen[1]), (seen[1], seen[3]), (seen[0], mean)))
    with pytest.raises(ValueError, match="draw=-1 must be >= 0"), optimizer.sampled(-1):
        pass


@every_gaussian
def test_letters_are_the_options(name):
    _, optimizer = trained(name, lr=0.02, prior_precision=3.0)
    letters = optimizer._letters(optimizer.param_groups[0])
    assert letters["alpha"] == 0.02
    assert letters["delta"] == 3.0 / 100
    assert letters["beta1"] == optimizer.param_groups[0]["betas"][0]


@every_gaussian
@pytest.mark.parametrize(
    ("option", "value"), [("sample", "yes"), ("seed", 0.5), ("num_data", 0), ("augmentation_factor", -1.0)]
)
def test_options_that_they_share_are_checked(name, option, value):
    with pytest.raises(ValueError, match=option):
        make(name, [{"params": [nn.Parameter(torch.ones(2))], option: value}])
