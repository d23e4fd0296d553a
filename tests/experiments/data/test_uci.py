"""UCI's sets: a small folder in their layout, and the real ones where there are some."""

import os
from pathlib import Path

import numpy as np
import pytest

from bsam.experiments.data.uci import UCI_SETS, read_uci

REAL = os.environ.get("BSAM_DATA")


def write_set(folder, rows=12, splits=2, name="yacht"):
    """Write a set in the published layout; column 1 is the target."""
    here = folder / "uci" / UCI_SETS[name]
    here.mkdir(parents=True)
    generator = np.random.default_rng(0)
    np.savetxt(here / "data.txt", generator.normal(size=(rows, 3)))
    np.savetxt(here / "index_features.txt", [0, 2])
    np.savetxt(here / "index_target.txt", [1])
    for k in range(splits):
        order = generator.permutation(rows)
        np.savetxt(here / f"index_train_{k}.txt", order[: rows - 3])
        np.savetxt(here / f"index_test_{k}.txt", order[rows - 3 :])
    return here


def test_columns_and_splits(tmp_path):
    here = write_set(tmp_path)
    data = read_uci("yacht", tmp_path)
    rows = np.loadtxt(here / "data.txt")
    assert np.array_equal(data.x.numpy(), rows[:, [0, 2]])
    assert np.array_equal(data.y.numpy(), rows[:, 1])
    assert [(len(split.train), len(split.test)) for split in data.splits] == [(9, 3), (9, 3)]
    assert np.array_equal(data.splits[1].test.numpy(), np.loadtxt(here / "index_test_1.txt"))
    assert len(read_uci("yacht", tmp_path, num_splits=1).splits) == 1


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"no UCI set 'cars'. There are: boston"):
        read_uci("cars", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"data.txt is missing. The folder .* must have the UCI sets"):
        read_uci("yacht", tmp_path)
    here = write_set(tmp_path)
    with pytest.raises(ValueError, match="num_splits=3 must be from 1 to 2"):
        read_uci("yacht", tmp_path, num_splits=3)
    np.savetxt(here / "index_test_1.txt", [12])
    with pytest.raises(ValueError, match=r"index_test_1.txt must have different numbers from 0 to 11"):
        read_uci("yacht", tmp_path)
    np.savetxt(here / "index_test_1.txt", np.loadtxt(here / "index_train_1.txt")[:2])
    with pytest.raises(ValueError, match=r"split 1 of .* has rows that are in both parts"):
        read_uci("yacht", tmp_path)
    np.savetxt(here / "index_target.txt", [0, 1])
    with pytest.raises(ValueError, match="must have the one target column"):
        read_uci("yacht", tmp_path)


@pytest.mark.skipif(not REAL or not (Path(REAL) / "uci").exists(), reason="needs UCI's sets")
@pytest.mark.parametrize("name", ["boston", "yacht"])
def test_the_real_sets(name):
    data = read_uci(name, Path(REAL))
    assert len(data.splits) == 20
    for split in data.splits:
        assert sorted([*split.train.tolist(), *split.test.tolist()]) == list(range(len(data.x)))
