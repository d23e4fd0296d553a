"""The presets: they say what the paper says, and each one says which row it is."""

import tomllib

import pytest

from bsam.experiments.config import from_mapping, override, to_toml
from bsam.experiments.paper.presets import preset, preset_names, preset_title


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


def test_each_preset_says_which_row_it_is():
    assert preset_title("table1/cifar10/bsam") == (
        "The paper's table 1, CIFAR-10, row bSAM; settings: table 7, same row."
    )
    titles = [preset_title(name) for name in preset_names()]
    assert len(set(titles)) == len(titles)
    for name, title in zip(preset_names(), titles, strict=True):
        assert title.startswith(f"The paper's table {name[5]}" if name.startswith("table") else "Not in the paper")


def test_names_are_sorted_by_number():
    names = [name for name in preset_names() if name.startswith("table5/cifar100/bsam")]
    assert names == [f"table5/cifar100/bsam-{splits}" for splits in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("table1/cifar10/bsma", "Near it: table1/cifar10/bsam"),
        ("table1", "Near it: table1/cifar10/adam"),
        ("../../demo", "There are digits, here/cifar10, here/cifar10-augmented, here/cifar10-resnet18, here/cifar100"),
    ],
)
def test_unknown_presets_are_refused_with_near_ones(name, near):
    with pytest.raises(ValueError, match=f"no preset '{name}'. {near}"):
        preset(name)
