"""Small data sets that need no download: scikit-learn's digits, and two moons."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Labelled", "digits", "two_moons"]

Labelled = tuple[Tensor, Tensor]
"""Inputs, and their labels."""


def digits(num_train: int = 997) -> tuple[Labelled, Labelled]:
    """Return scikit-learn's 1,797 handwritten digits, 8 x 8 pixels in [0, 1], as a training and a test part."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:num_train], order[num_train:]
    return (x[train], y[train]), (x[test], y[test])


def two_moons(num_data: int = 100, noise: float = 0.1, seed: int = 0) -> Labelled:
    """Return two interleaved half circles, with labels 0 and 1."""
    from sklearn.datasets import make_moons

    x, y = make_moons(num_data, noise=noise, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
