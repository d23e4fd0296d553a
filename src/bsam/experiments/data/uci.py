"""UCI's regression sets, with the splits that are published with them.

The layout is that of Gal and Ghahramani (2016), "Dropout as a Bayesian Approximation", ICML, whose splits follow
Hernández-Lobato and Adams (2015), "Probabilistic Backpropagation", ICML. A folder `uci/NAME` has

- `data.txt`: one row of numbers per example,
- `index_features.txt` and `index_target.txt`: which columns are the inputs, and which is the target,
- `index_train_k.txt` and `index_test_k.txt`: the rows of split k, 20 splits of 90% and 10% (5 of the protein set).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["UCI_SETS", "RegressionSet", "Split", "read_uci"]

UCI_SETS: dict[str, str] = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
"""The folders of the nine sets, by short name."""


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of one split."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class RegressionSet:
    """Inputs (n, features) and targets (n,) in their own units, in float64, and the splits."""

    name: str
    x: Tensor
    y: Tensor
    splits: list[Split]
    sha256: str
    """Of the numbers in `data.txt`."""


def read_uci(name: str, folder: Path, *, num_splits: int | None = None) -> RegressionSet:
    """Read a set with its published splits.

    Args:
        name: One of `UCI_SETS`.
        folder: The data folder, with `uci` in it.
        num_splits: How many of the splits, from the first; all by default.
    """
    if name not in UCI_SETS:
        raise ValueError(f"there is no UCI set {name!r}. There are: {', '.join(UCI_SETS)}.")
    here = folder / "uci" / UCI_SETS[name]
    if not (here / "data.txt").exists():
        raise FileNotFoundError(
            f"{here / 'data.txt'} is missing. The folder {folder} must have the UCI sets with their splits, as "
            "uci/NAME/data.txt, index_features.txt, index_target.txt, index_train_0.txt, index_test_0.txt and so on."
        )
    rows = np.loadtxt(here / "data.txt", ndmin=2)
    features, target = (_numbers(here / f"index_{what}.txt", rows.shape[1]) for what in ("features", "target"))
    if len(target) != 1:
        raise ValueError(f"{here / 'index_target.txt'} has {len(target)} numbers: it must have the one target column.")
    if not np.isfinite(rows).all():
        raise ValueError(f"{here / 'data.txt'} has numbers that are not finite.")
    there = sum(1 for _ in here.glob("index_train_*.txt"))
    wanted = there if num_splits is None else num_splits
    if not 1 <= wanted <= there:
        raise ValueError(f"num_splits={num_splits} must be from 1 to {there}, the number of splits of {name}.")
    splits = []
    for k in range(wanted):
        train, test = (_numbers(here / f"index_{part}_{k}.txt", len(rows)) for part in ("train", "test"))
        if set(train) & set(test):
            raise ValueError(f"split {k} of {here} has rows that are in both parts.")
        splits.append(Split(torch.from_numpy(train), torch.from_numpy(test)))
    x, y = torch.from_numpy(rows[:, features]), torch.from_numpy(rows[:, target[0]])
    digest = hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()
    return RegressionSet(name, x, y, splits, digest)


def _numbers(path: Path, limit: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Read row or column numbers, which must be below `limit` and differ from each other."""
    found = np.loadtxt(path, ndmin=1).astype(np.int64)
    if found.min(initial=0) < 0 or found.max(initial=0) >= limit or len(np.unique(found)) != len(found):
        raise ValueError(f"{path} must have different numbers from 0 to {limit - 1}.")
    return found
