"""Every rule hears of a small run that is broken by a factor of 100, and none speaks in the settings that work."""

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import bsam
from bsam.experiments.data import load
from bsam.experiments.data.embedded import digits
from bsam.experiments.data.table import DATASETS
from bsam.experiments.demo import load_demo
from bsam.experiments.methods import make_optimizer
from bsam.experiments.models import make_model
from bsam.experiments.paper.presets import preset, preset_names
from bsam.experiments.trainer import Trainer
from bsam.optim import diagnosis

DEMO = load_demo()
DIGITS = {"bsam": DEMO.digits["bsam"], "vogn": DEMO.digits["vogn"], "ivon": preset("digits/ivon")}


def trained(config, steps, *, num_data_times=1.0):
    """A run after some steps, and the warnings that it gave."""
    trainer = Trainer(config, load(config.dataset, validation=config.validation), seed=0)
    for group in trainer.optimizer.param_groups:
        group["num_data"] *= num_data_times
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _, _ in zip(range(steps), trainer.steps(), strict=False):
            pass
    return trainer, [str(each.message) for each in given]


def names(found):
    return [finding.name for finding in found]


def problems(trainer, **options):
    return names(trainer.optimizer.diagnose(**options).problems)


# ------------------------------------------------------------------ settings that work


@pytest.mark.parametrize("method", DIGITS)
def test_nothing_is_said_of_the_demo(method):
    config = replace(DIGITS[method], epochs=12)
    trainer = Trainer(config, load(config.dataset, validation=config.validation), seed=0)
    train = trainer.dataset.train
    heard = set()
    for _ in trainer.steps():  # warnings are errors here
        heard |= set(problems(trainer, train_set=train[0])) - {"start"}  # of which there is much at first
    diagnosed = trainer.optimizer.diagnose(train[0], trainer.loss, (trainer.dataset.normalise(train[0]), train[1]))
    assert not heard
    assert not diagnosed.problems, diagnosed
    assert {"growth", "step", "noise", "weight decay", "start", "prior share", "num_data", "loss"} <= set(
        names(diagnosed)
    )
    assert ("perturbation" in names(diagnosed)) == (method == "bsam")


def test_nothing_is_said_of_the_moons():
    config = replace(DEMO.moons["bsam"], epochs=200)
    trainer, given = trained(config, 1000)
    assert not given
    assert not problems(trainer)


GAUSSIAN_PRESETS = [name for name in preset_names() if preset(name).method in DIGITS]


@pytest.mark.parametrize("name", GAUSSIAN_PRESETS)
def test_no_rule_speaks_at_the_end_of_a_preset(name):
    """The rules that settings and length of a run decide."""
    config = preset(name)
    num_data = DATASETS[config.dataset].num_train - config.validation
    steps = config.epochs * num_data // config.batch_size
    kept = 1 - config.beta2 if config.statistics == "latest" else config.beta2
    decay = diagnosis.weight_decay(config.prior_precision, num_data * config.augmentation_factor)
    assert not decay.is_bad, decay
    assert not diagnosis.start_left(kept**steps, steps).is_bad


@pytest.mark.parametrize(
    ("name", "model"), [("table1/cifar10/bsam", "resnet20_frn"), ("table6/fashionmnist/bsam", "lenet5")]
)
def test_nothing_is_said_in_the_first_steps_of_a_preset(name, model):
    """The paper's settings and networks, on noise with its number of examples: ten steps, when it first looks."""
    config = preset(name)
    assert config.model == model
    info = DATASETS[config.dataset]
    network = make_model(model, num_classes=info.num_classes, image_shape=info.image_shape, seed=0)
    optimizer = make_optimizer(config, network, info.num_train, seed=0)
    for _ in range(10):
        x, y = torch.randn(16, *info.image_shape), torch.randint(info.num_classes, (16,))
        optimizer.step(lambda x, y: nn.functional.cross_entropy(network(x), y), x, y)
    assert names(optimizer.diagnose(range(info.num_train)).problems) == ["start"]


# ------------------------------------------------------------------ settings that are 100 times off


@pytest.mark.parametrize("method", DIGITS)
def test_a_learning_rate_100_times_too_large_is_heard(method):
    config = DIGITS[method]
    trainer, given = trained(replace(config, lr=100 * config.lr), 12)
    assert len(given) == 1
    assert "after 10 steps" in given[0]
    assert "lower lr" in given[0]
    assert "growth" in problems(trainer)


@pytest.mark.parametrize("method", DIGITS)
def test_a_learning_rate_1000_times_too_small_is_heard(method):
    config = DIGITS[method]
    trainer, given = trained(replace(config, lr=config.lr / 1000), 12)
    assert len(given) == 1
    assert "after 10 steps" in given[0]
    assert "raise lr" in given[0]
    assert problems(trainer) == ["pace", "start"]


def test_warming_up_is_not_a_small_learning_rate():
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    optimizer = bsam.BSAM(model.parameters(), num_data=1000)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-6, total_iters=10_000)
    x, y = torch.randn(50, 20), torch.randint(3, (50,))
    for _ in range(12):  # a warning would be an error
        optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        schedule.step()
    assert not optimizer.diagnose()["pace"].is_bad
    assert optimizer.diagnose()["step"].value > 1e-3  # at the full rate


def test_steps_as_large_as_the_weights_are_heard():
    config = DIGITS["vogn"]
    trainer, _ = trained(replace(config, lr=100 * config.lr), 2)
    finding = trainer.optimizer.diagnose()["step"]
    assert finding.is_bad
    assert "lower lr" in finding.sentence


@pytest.mark.parametrize("method", DIGITS)
def test_num_data_100_times_too_small_is_heard(method):
    trainer, given = trained(DIGITS[method], 120, num_data_times=0.01)
    assert len(given) == 1
    assert given[0].startswith("after 10 steps")
    assert "num_data=6, and a step has seen 50 examples" in given[0]
    train = trainer.dataset.train
    heard = problems(
        trainer, train_set=train[0], loss_fn=trainer.loss, batch=(trainer.dataset.normalise(train[0]), train[1])
    )
    assert {"noise", "num_data", "batch"} <= set(heard)


def test_num_data_100_times_too_large_is_heard():
    trainer, given = trained(DIGITS["bsam"], 12, num_data_times=100)
    assert not given  # the state alone does not tell
    loader = torch.utils.data.DataLoader(range(600), batch_size=50)
    for train_set in (range(600), loader):
        finding = trainer.optimizer.diagnose(train_set)["num_data"]
        assert finding.is_bad
        assert finding.value == 100
        assert "600 examples" in finding.sentence


def test_rho_100_times_too_large_is_heard():
    config = DEMO.moons["bsam"]
    trainer, given = trained(replace(config, rho=100 * config.rho), 14)
    assert len(given) == 1
    assert "after 10 steps" in given[0]
    assert "lower rho" in given[0]
    assert "perturbation" in problems(trainer)


def trained_by_default(steps, *, scale=1.0, reduction="mean", **settings):
    """README's problem with bSAM's defaults but for some settings: the problems that are found, and the warnings."""
    torch.manual_seed(0)
    (x, y), _ = digits(600)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = bsam.BSAM(model.parameters(), num_data=len(x), module=model, **settings)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        cross_entropy = functools.partial(nn.functional.cross_entropy, reduction=reduction)
        for _ in range(steps):
            part = torch.randint(len(x), (50,))
            optimizer.step(lambda x, y: cross_entropy(model(scale * x), y), x[part], y[part])
    return names(optimizer.diagnose().problems), [str(each.message) for each in given]


def test_nothing_is_said_of_the_defaults():
    assert trained_by_default(100) == ([], [])


@pytest.mark.parametrize(
    ("broken", "advice"),
    [
        ({"lr": 100.0}, "lower lr"),
        ({"lr": 0.01}, "raise lr"),
        ({"rho": 5.0}, "lower rho"),
        ({"init_precision": 0.01}, "lower lr"),
        ({"scale": 255.0}, "are the inputs standardised"),
        ({"reduction": "sum"}, "return a mean"),
    ],
    ids=str,
)
def test_what_is_100_times_off_the_defaults_is_heard_after_ten_steps(broken, advice):
    _, given = trained_by_default(12, **broken)
    assert len(given) == 1
    assert given[0].startswith("after 10 steps")
    assert advice in given[0]


def test_the_perturbation_is_estimated_well():
    """Against the one of a step that is taken without noise: rho |g| / s."""
    config = replace(DIGITS["bsam"], splits=1, sample_noise=False)
    trainer, _ = trained(config, 1)
    estimated = trainer.optimizer.diagnose()["perturbation"].value
    trainer = Trainer(config, load("digits", validation=config.validation), seed=0)
    weights = [p for p in trainer.model.parameters() if p.dim() > 1]
    norm = torch.stack([w.norm() for w in weights]).norm()
    seen = []

    def loss_fn(x, y):
        loss = trainer.loss(x, y)
        seen.append(torch.stack([g.norm() for g in torch.autograd.grad(loss, weights, retain_graph=True)]).norm())
        return loss

    trainer.method = replace(trainer.method, step=lambda o, _, x, y: o.step(loss_fn, x, y))
    next(trainer.steps())
    torch.testing.assert_close(estimated, float(config.rho * seen[0] / norm.detach()), rtol=0.02, atol=0)


def test_a_damping_100_times_too_large_is_heard():
    config = DIGITS["vogn"]
    trainer, _ = trained(replace(config, damping=100 * config.damping), 50)
    assert problems(trainer) == ["pace", "start", "prior share"]


def test_a_prior_100_times_too_strong_is_heard():
    config = DIGITS["vogn"]
    trainer, _ = trained(replace(config, prior_precision=100 * config.prior_precision), 5)
    assert "weight decay" in problems(trainer)


def test_a_memory_100_times_too_long_is_heard():
    config = DIGITS["bsam"]
    trainer, given = trained(replace(config, beta2=1 - (1 - config.beta2) / 100), 200)
    assert not given
    assert problems(trainer) == ["start"]


def test_a_posterior_that_forgets_what_the_mean_knows_is_heard():
    config = replace(DIGITS["bsam"], epochs=12)
    trainer, _ = trained(config, 1000)
    train = trainer.dataset.train
    data = trainer.loss, (trainer.dataset.normalise(train[0]), train[1])
    assert not trainer.optimizer.diagnose(None, *data)["loss"].is_bad
    for group in trainer.optimizer.param_groups:
        group["num_data"] /= 100
    assert trainer.optimizer.diagnose(None, *data)["loss"].is_bad


def test_numbers_that_are_none_are_bad():
    assert diagnosis.growth(float("nan"), 100).is_bad
    assert diagnosis.ratio({}) is None
    assert diagnosis.ratio({"a": (1.0, 0.0)}) is None
    found = diagnosis.ratio({"a": (3.0, 1.0), "b": (4.0, 0.0)})
    assert found == diagnosis.Ratio(5.0, 3.0, 3.0, "a")


@pytest.mark.parametrize("as_set", [lambda x, y: (x, y), lambda x, y: {"x": x, "y": y}, lambda x, y: x])
def test_tensors_count_by_their_rows(as_set):
    model, x, y = nn.Linear(20, 3), torch.randn(60, 20), torch.randint(3, (60,))
    optimizer = bsam.BSAM(model.parameters(), num_data=60)
    finding = optimizer.diagnose(as_set(x, y))["num_data"]
    assert not finding.is_bad, finding
    assert "60 examples" in finding.sentence


def test_a_step_with_more_examples_than_num_data_is_heard():
    """The classic: the number of batches in the place of the number of examples."""
    model, x, y = nn.Linear(20, 3), torch.randn(60, 20), torch.randint(3, (60,))
    optimizer = bsam.BSAM(model.parameters(), num_data=12)
    for part in torch.arange(60).split(30):
        optimizer.probe(lambda x, y: nn.functional.cross_entropy(model(x), y), x[part], y[part])
    optimizer.step()
    finding = optimizer.diagnose()["batch"]
    assert finding.value == 5
    assert "num_data=12, and a step has seen 60 examples" in finding.sentence


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(600)


def test_a_loader_counts_what_it_draws_from():
    optimizer = bsam.BSAM(nn.Linear(20, 3).parameters(), num_data=100)
    data = torch.utils.data
    part = data.DataLoader(range(6000), sampler=data.SubsetRandomSampler(range(100)))
    two_ranks = data.DataLoader(range(100), sampler=data.DistributedSampler(range(100), num_replicas=2, rank=0))
    for loader in (part, two_ranks, data.DataLoader(range(100), batch_size=7, drop_last=True)):
        assert optimizer.diagnose(loader)["num_data"].value == 1
    for unknown, text in (
        (data.DataLoader(Stream()), "a Stream and has no length: write range"),
        ([torch.zeros(100, 2), torch.zeros(100)], "a list of tensors: write a tuple"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.diagnose(unknown)
