"""Trained runs on digits, and tiny copies of the colour data sets with a run on them."""

import numpy as np
import pytest

from bsam.experiments.config import override
from bsam.experiments.data import DATASETS, load
from bsam.experiments.paper.presets import preset
from bsam.experiments.runs import Run
from bsam.experiments.stacks import Stack
from tests.experiments.data.synthetic import make
from tests.experiments.test_runs import short


@pytest.fixture(scope="session")
def digit_runs(tmp_path_factory):
    """Two runs of SGD and one of bSAM."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method, seed in (("sgd0", "sgd", 0), ("sgd1", "sgd", 1), ("bsam0", "bsam", 0)):
        Stack.start([Run(folder / name, short(method), seed, f"digits/{method}")], device="cpu").train()
    return folder


@pytest.fixture
def colour_data(tmp_path, monkeypatch):
    """A folder with 20 test images of each data set, and people's answers."""
    for name in ("cifar10", "cifar100", "tinyimagenet", "mnist", "fashionmnist"):
        monkeypatch.setitem(DATASETS, name, make(name, tmp_path / "data").info)
    labels = load("cifar10", tmp_path / "data", download=False).test[1].numpy()
    counts = np.eye(10)[labels] * 45 + 0.5
    np.save(tmp_path / "data" / "cifar10h-counts.npy", counts)
    return tmp_path / "data"


@pytest.fixture
def colour_run(tmp_path, colour_data):
    changes = ["model=mlp", "epochs=1", "batch_size=10", "beta2=0.1", "splits=1", "lr=0.01"]
    config = override(preset("table1/cifar10/bsam"), changes)
    stack = Stack.start([Run(tmp_path / "run", config, 0, "table1/cifar10/bsam")], device="cpu", data=colour_data)
    stack.train()
    return tmp_path / "run"
