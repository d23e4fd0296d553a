"""Distributions over the weights of a model, with one protocol."""

from __future__ import annotations

import os

from bsam.posterior.base import Posterior, read_posterior
from bsam.posterior.diagonal import DiagonalGaussian
from bsam.posterior.laplace import laplace
from bsam.posterior.point import PointMass
from bsam.posterior.swag import LowRankGaussian

__all__ = ["DiagonalGaussian", "LowRankGaussian", "PointMass", "Posterior", "laplace", "load_posterior"]


def load_posterior(path: str | os.PathLike[str]) -> Posterior:
    """Read a posterior of any kind from a file that `save` wrote, onto the CPU.

    Raises:
        ValueError: The file is not a posterior, is incomplete, or has a version or kind that this release cannot read.
    """
    kinds: tuple[type[Posterior], ...] = (DiagonalGaussian, LowRankGaussian, PointMass)
    return read_posterior(path, kinds)
