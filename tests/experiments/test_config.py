"""Configurations and presets: the paper's settings as data, typed, and no key that nobody reads."""

import dataclasses
import math
import tomllib

import pytest

from bsam.experiments.config import Config, from_mapping, override, to_toml
from bsam.experiments.paper.presets import preset, preset_names, settings

SMALL = {
    "dataset": "digits",
    "model": "mlp",
    "method": "bsam",
    "epochs": 10,
    "batch_size": 8,
    "lr": 0.1,
    "beta1": 0.9,
    "prior_precision": 1.0,
}


def test_the_paper_has_45_rows_of_settings():
    blocks = settings()
    assert sum(len(block["methods"]) for block in blocks.values()) == 45
    without = [name for name, block in blocks.items() if not block.get("augment")]
    assert sum(len(blocks[name]["methods"]) for name in without) == 24
    assert sum(len(block["methods"]) for name, block in blocks.items() if "resnet18" in name) == 6


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # read in the paper's tables by eye
        (
            "table6/mnist/bsam",
            {"lr": 0.1, "beta1": 0.8, "prior_precision": 15.0, "rho": 0.01, "splits": 8, "epochs": 75},
        ),
        ("table6/fashionmnist/vogn", {"lr": 0.0001, "beta2": 0.99, "damping": 0.05, "splits": 16, "epochs": 120}),
        ("table1/cifar10/sam-adam", {"lr": 0.0003, "rho": 0.1, "beta1": 0.9, "milestones": (100, 120)}),
        ("table1/cifar100/adam", {"lr": 0.001, "prior_precision": 250.0, "schedule": "steps"}),
        ("table2/cifar10/bsam", {"lr": 1.0, "beta1": 0.95, "prior_precision": 2.0, "augmentation_factor": 4.0}),
        ("table2/cifar10/sgd", {"lr": 0.1, "augmentation_factor": 1.0, "warmup_epochs": 5, "schedule": "cosine"}),
        ("table2/tinyimagenet/bsam", {"lr": 0.1, "rho": 0.00005, "prior_precision": 25.0}),
        ("table2/cifar100-resnet18/bsam", {"lr": 0.5, "batch_size": 200, "prior_precision": 10.0, "splits": 8}),
        ("table1/cifar10/swag", {"epochs": 165, "swag_epochs": 15, "swag_lr": 0.0001, "swag_momentum": 0.9}),
        ("table3/cifar100/bsam-no-noise", {"sample_noise": False, "lr": 0.1}),
        ("table5/cifar100/sam-sgd-16", {"splits": 16, "method": "sam-sgd", "rho": 0.05}),
    ],
)
def test_presets_say_what_the_paper_says(name, expected):
    config = preset(name)
    assert {key: getattr(config, key) for key in expected} == expected


def test_every_preset_is_valid_and_survives_toml():
    assert len(preset_names()) >= 45 + 4 + 4
    for name in preset_names():
        config = preset(name)
        assert from_mapping(tomllib.loads(to_toml(config))) == config
        assert override(config, []) == config


def test_unknown_presets_are_refused_with_near_ones():
    with pytest.raises(ValueError, match=r"no preset 'table1/cifar10/bsma'.*table1/cifar10"):
        preset("table1/cifar10/bsma")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lrr=1", "unknown setting 'lrr'.*dataset, model, method"),
        ("lr=fast", "lr='fast' must be of type float"),
        ("epochs=1.5", "epochs=1.5 must be of type int"),
        ("epochs=true", "must be of type int"),
        ("epochs=0", "epochs=0 must be at least 1"),
        ("validation=-1", "must not be negative"),
        ("method=sgdd", "must be one of sgd, sam-sgd"),
        ("milestones=3", "must be a list"),
        ("milestones=[1.5]", "must be of type int"),
        ("schedule=steps", "needs milestones"),
        ("swag_epochs=3", "does not go with method='bsam'"),
        ("lr", "not of the form key=value"),
        ("lr=NaN", "must be a finite number"),
    ],
)
def test_bad_changes_stop_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        override(from_mapping(SMALL), [change])


def test_good_changes():
    config = override(from_mapping(SMALL), ["lr=1", "milestones=[3, 5]", "max_grad_norm=null", "augment=true"])
    assert dataclasses.replace(from_mapping(SMALL), lr=1.0, milestones=(3, 5), augment=True) == config
    assert isinstance(config.lr, float)
    assert override(config, ["lr=.25"]).lr == 0.25
    assert override(config, ["dataset='mnist'"]).dataset == "mnist"


def test_missing_settings_are_named():
    with pytest.raises(ValueError, match="'lr' is missing"):
        from_mapping({key: value for key, value in SMALL.items() if key != "lr"})


def test_schedules_by_epoch():
    make = lambda **options: Config(**{**SMALL, "lr": 1.0, **options})  # noqa: E731
    cosine = make(epochs=10)
    assert [cosine.learning_rate(e) for e in (0, 5)] == pytest.approx([1.0, 0.5])
    assert cosine.learning_rate(9) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    steps = make(schedule="steps", milestones=(3, 5), epochs=8)
    assert [steps.learning_rate(e) for e in (2, 3, 4, 5)] == pytest.approx([1.0, 0.1, 0.1, 0.01])
    warm = make(warmup_epochs=5, epochs=15)
    assert [warm.learning_rate(e) for e in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    swag = make(method="swag", swag_epochs=2, swag_lr=0.03)
    assert swag.learning_rate(10) == swag.learning_rate(11) == 0.03
    assert swag.total_epochs == 12
