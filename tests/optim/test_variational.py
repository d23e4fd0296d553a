"""What optimizers of a Gaussian share: the noise, the options, and samples in the model."""

import copy
import math

import pytest
import torch
from torch import nn

import bsam
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


class Bag(nn.Module):
    """Sums the vectors of words; word 2 is padding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4, padding_idx=2)
        self.head = nn.Linear(4, 3)

    def forward(self, words):
        return self.head(self.words(words).sum(1))


def bag(name, **options):
    torch.manual_seed(3)
    model = Bag().double()
    optimizer = make(name, model.parameters(), module=model, **options)
    words = torch.tensor([[0, 1, 3], [4, 5, 0], [3, 3, 1], [5, 4, 1]])
    loss_fn = lambda words: model(words).square().mean()  # noqa: E731
    return model, optimizer, words, loss_fn


@every_gaussian
def test_words_of_padding_have_no_noise_and_change_no_prediction(name):
    model, optimizer, words, loss_fn = bag(name, betas=(0.9, 0.1))
    seen = []
    for _ in range(2):
        optimizer.step(lambda words: (seen.append(model.words.weight.detach().clone()), loss_fn(words))[1], words)
    assert all(not weights[2].any() for weights in seen)
    with optimizer.sampled():
        seen.append(model.words.weight.detach().clone())
    assert not seen[-1][2].any()
    assert seen[-1][1].any()
    posterior = optimizer.posterior()
    std = posterior.std["words.weight"]
    assert not std[2].any()
    assert (std[[0, 1, 3, 4, 5]] > 0).all()
    assert posterior.kl().isfinite()
    longer = nn.functional.pad(words, (0, 5), value=2)
    probs = [bsam.predict(model, posterior, each, num_samples=4).probs for each in (words, longer)]
    torch.testing.assert_close(*probs)


@every_gaussian
@pytest.mark.parametrize("compile", [False, True])
def test_a_train_step_leaves_padding_alone_too(name, compile):
    ours, plain = bag(name), bag(name)
    model, optimizer, words, loss_fn = ours
    step = bsam.TrainStep(optimizer, loss_fn, (words,), compile=compile)
    for _ in range(2):
        step(words)
        plain[1].step(plain[3], plain[2])
    for a, b in zip(model.parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert not model.words.weight[2].any()
    draws = step._draws
    for i, theta in enumerate(draws.theta):  # what follows the kernel on CUDA
        theta.fill_(1.0)
        draws._without_noise(i, theta)
    assert sum(int((theta == 0).sum()) for theta in draws.theta) == 4 * draws.theta[0].shape[1]


@every_gaussian
def test_padding_of_weights_that_an_output_layer_trains_has_noise(name):
    model, _, words, _ = bag(name)
    model.tied = nn.Linear(4, 6, bias=False)
    model.tied.weight = model.words.weight
    optimizer = make(name, model.words.parameters(), module=model, betas=(0.9, 0.0))
    optimizer.step(lambda words: model.tied(model.words(words)).square().mean(), words)
    assert (optimizer.posterior().std["words.weight"] > 0).all()


@every_gaussian
def test_other_weights_of_an_embedding_have_no_padding(name):
    class Scaled(nn.Embedding):
        def __init__(self, *sizes, **options):
            super().__init__(*sizes, **options)
            self.scale = nn.Parameter(torch.ones(1, 2))

        def forward(self, words):
            return super().forward(words).sum(-1, keepdim=True) * self.scale

    model = Scaled(6, 4, padding_idx=3).double()
    optimizer = make(name, model.parameters(), module=model, betas=(0.9, 0.0))
    optimizer.step(lambda words: model(words).square().mean(), torch.tensor([0, 1, 3]))
    std = optimizer.posterior().std
    assert (std["scale"] > 0).all()
    assert not std["weight"][3].any()


@every_gaussian
def test_no_copy_is_made_of_a_sample(name):
    """A copy would take the sample for its mean."""
    model, optimizer = trained(name, betas=(0.9, 0.1))
    for block in (optimizer.sampled(), optimizer.posterior().sampled(model, torch.Generator().manual_seed(0))):
        with block, pytest.raises(RuntimeError, match="cannot copy the optimizer inside"):
            copy.deepcopy(optimizer)
    copy.deepcopy(optimizer)
