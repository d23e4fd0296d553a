"""Small data sets that need no download: scikit-learn's digits, and two moons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Labelled", "Split", "digits", "two_moons"]

Labelled = tuple[Tensor, Tensor]
"""Inputs, and their labels."""


@dataclass(frozen=True)
class Split:
    """Inputs and labels to train on, to choose settings by, and to report on."""

    train: Labelled
    validation: Labelled
    test: Labelled


def digits(num_train: int = 600, num_validation: int = 397) -> Split:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels in [0, 1], cut once and for all: 600, 397, 800."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.data / 16, dtype=torch.float32)
    y = torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    ends = num_train, num_train + num_validation
    parts = [(x[i], y[i]) for i in (order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :])]
    return Split(*parts)


def two_moons(num_data: int = 100, noise: float = 0.1, seed: int = 0) -> Labelled:
    """Two interleaved half circles, labels 0 and 1."""
    from sklearn.datasets import make_moons

    x, y = make_moons(num_data, noise=noise, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
