"""Noise: Gaussian noise, shot noise and impulse noise."""

from __future__ import annotations

import torch
from torch import Tensor

from bsam.experiments.corruptions.draw import Draw

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise"]


def gaussian_noise(x: Tensor, draw: Draw, scale: float) -> Tensor:
    """Add normal noise, as in a dark room."""
    return x + scale * draw.normal(*x.shape)


def shot_noise(x: Tensor, draw: Draw, photons: float) -> Tensor:
    """Replace a brightness by a count of photons; `photons` is the mean count of white.

    The count is the quantile of a uniform number. There are 256 brightnesses, so one table has all distributions.
    """
    levels = torch.arange(256, dtype=torch.float64)
    most = int(photons + 10 * photons**0.5)
    counts = torch.arange(most, dtype=torch.float64)
    below = torch.special.gammaincc(counts + 1, levels[:, None] * photons / 255)  # P(count <= k)
    table = (levels[:, None] + below.clamp(max=1)).flatten().to(x.device)  # increasing: level + P
    level = (x * 255).round().double()
    place = torch.searchsorted(table, level + draw.uniform(0, 1, *x.shape))
    return (place - level * most).to(x) / photons


def impulse_noise(x: Tensor, draw: Draw, amount: float) -> Tensor:
    """Set a share of all values to black or to white: salt and pepper in each colour."""
    hit, white = draw.uniform(0, 1, *x.shape) <= amount, draw.uniform(0, 1, *x.shape) <= 0.5
    return torch.where(hit, white.to(x), x)
