"""The table of data sets, what `load` makes of it, and the real data where there is some."""

import os
import re
from pathlib import Path

import pytest
import torch

from bsam.experiments.data import DATASETS, load, plain_batches
from bsam.experiments.data.download import data_folder
from bsam.experiments.data.embedded import digits, two_moons

REAL = os.environ.get("BSAM_DATA")


@pytest.mark.parametrize("info", DATASETS.values(), ids=DATASETS)
def test_the_table_is_complete(info):
    assert set(info.urls) <= set(info.md5)
    assert all(url.startswith("https://") for url in info.urls.values())
    assert {*info.train_files, *info.test_files} <= set(info.md5)
    assert all(re.fullmatch(r"[0-9a-f]{32}", md5) for md5 in info.md5.values())
    assert len(set(info.md5.values())) == len(info.md5)
    assert len(info.mean) == len(info.std) == info.image_shape[0]


def test_normalisation_is_the_authors():
    """Numbers of facts: the released code's."""
    table = {name: (info.mean, info.std) for name, info in DATASETS.items()}
    assert table["cifar10"] == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert table["cifar100"] == ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))
    assert table["tinyimagenet"] == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert table["mnist"] == table["fashionmnist"] == ((0.0,), (1.0,))


def test_digits_are_those_of_the_demo():
    dataset, (train, test) = load("digits"), digits()
    x, y = next(plain_batches(dataset, "train", 997))
    assert torch.equal(x.flatten(1), train[0])
    assert torch.equal(y, train[1])
    x, y = next(plain_batches(dataset, "test", 800))
    assert torch.equal(x.flatten(1), test[0])
    assert torch.equal(y, test[1])
    assert dataset.train[0].dtype == torch.uint8
    assert (dataset.num_classes, dataset.image_shape, dataset.num_train) == (10, (1, 8, 8), 997)


def test_moons_are_those_of_the_demo():
    dataset, (points, labels) = load("moons"), two_moons()
    x, y = next(plain_batches(dataset, "train"))
    assert torch.equal(x, points)
    assert torch.equal(y, labels.long())
    assert len(dataset.test[0]) == 1000
    assert dataset.test[1].dtype == torch.int64


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_types_and_normalisation(name, synthetic, tmp_path):
    made = synthetic(name)
    dataset = load(name, tmp_path, validation=7)
    for x, y in (dataset.train, dataset.validation, dataset.test):
        assert (x.dtype, y.dtype, x.shape[1:], x.device.type) == (
            torch.uint8,
            torch.int64,
            made.info.image_shape,
            "cpu",
        )
    assert dataset.num_train == 23
    assert dataset.device == torch.device("cpu")
    raw = torch.from_numpy(made.test[0]).double()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (made.info.mean, made.info.std))
    x = dataset.normalise(dataset.test[0])
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), (raw / 255 - mean) / std, rtol=1e-6, atol=1e-6)
    if name == "mnist":
        assert torch.equal(x, dataset.test[0] / 255)
    assert torch.equal(dataset.test[0], torch.from_numpy(made.test[0]))  # untouched


def test_normalising_floats_leaves_them_alone():
    dataset = load("moons")
    before = dataset.train[0].clone()
    dataset.normalise(dataset.train[0]).add_(1)
    assert torch.equal(dataset.train[0], before)


def test_the_tensors_go_to_the_device(synthetic, tmp_path):
    synthetic("cifar10")
    dataset = load("cifar10", tmp_path, device="meta", validation=3)
    tensors = (*dataset.train, *dataset.validation, *dataset.test, dataset.mean, dataset.std)
    assert {t.device.type for t in tensors} == {"meta"}


def test_validation_is_held_out_and_always_the_same(synthetic, tmp_path):
    made = synthetic("cifar10")
    whole = load("cifar10", tmp_path)
    assert len(whole.validation[0]) == 0
    cut = load("cifar10", tmp_path, validation=11)
    torch.manual_seed(1)
    again = load("cifar10", tmp_path, validation=11)
    for part in ("train", "validation", "test"):
        for a, b in zip(getattr(cut, part), getattr(again, part), strict=True):
            assert torch.equal(a, b)

    def rows(x, y):
        return {(image.numpy().tobytes(), int(label)) for image, label in zip(x, y, strict=True)}

    assert (len(cut.train[0]), len(cut.validation[0])) == (19, 11)
    assert rows(*cut.train) & rows(*cut.validation) == set()
    assert rows(*cut.train) | rows(*cut.validation) == rows(*whole.train)
    assert rows(*cut.test) == rows(*map(torch.from_numpy, made.test))
    assert rows(*cut.validation) < rows(*load("cifar10", tmp_path, validation=12).validation)


@pytest.mark.parametrize("validation", [-1, 997])
def test_validation_must_leave_something(validation):
    with pytest.raises(ValueError, match=f"validation={validation} must be from 0 to 996"):
        load("digits", validation=validation)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"no data set 'imagenet'. There are: mnist, fashionmnist, cifar10"):
        load("imagenet")


def test_the_global_generator_is_not_touched(synthetic, tmp_path):
    synthetic("mnist")
    before = torch.get_rng_state()
    load("mnist", tmp_path, validation=5)
    load("digits", validation=5)
    load("moons")
    assert torch.equal(torch.get_rng_state(), before)


def test_where_the_data_is(monkeypatch, tmp_path):
    monkeypatch.setenv("BSAM_DATA", "/elsewhere")
    assert data_folder("~/data") == Path.home() / "data"
    assert data_folder() == Path("/elsewhere")
    monkeypatch.delenv("BSAM_DATA")
    assert data_folder().name == "bsam"


def test_the_environment_says_where(synthetic, monkeypatch, tmp_path):
    synthetic("mnist")
    monkeypatch.setenv("BSAM_DATA", str(tmp_path))
    assert load("mnist", download=False).num_train == 30


FIRST_LABELS = {
    "mnist": [5, 0, 4, 1, 9],
    "fashionmnist": [9, 0, 0, 3, 0],
    "mnist-standardised": [5, 0, 4, 1, 9],
    "fashionmnist-standardised": [9, 0, 0, 3, 0],
    "cifar10": [6, 9, 9, 4, 1],
    "cifar100": [19, 29, 0, 11, 1],
    "tinyimagenet": [0, 0, 0, 0, 0],
}


@pytest.mark.skipif(not REAL, reason="BSAM_DATA names no folder with the real data sets")
@pytest.mark.parametrize("name", FIRST_LABELS)
def test_the_real_data(name):
    info = DATASETS[name]
    if not (data_folder(REAL) / info.folder).exists():
        pytest.skip(f"{REAL} has no {info.folder}")
    dataset = load(name, REAL, download=False)
    assert dataset.train[0].shape == (info.num_train, *info.image_shape)
    assert dataset.test[0].shape == (info.num_test, *info.image_shape)
    assert dataset.train[1][:5].tolist() == FIRST_LABELS[name]
    counts = dataset.test[1].bincount()
    assert len(counts) == info.num_classes
    if not name.startswith("mnist"):
        assert (counts == info.num_test // info.num_classes).all()
    if name.startswith("cifar") or name.endswith("-standardised"):
        mean = dataset.train[0].double().mean((0, 2, 3)) / 255
        torch.testing.assert_close(mean, torch.tensor(info.mean, dtype=torch.float64), rtol=0, atol=2e-4)
