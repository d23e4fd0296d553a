"""Distributions over the weights of a model, behind one protocol."""

from __future__ import annotations

import os

from bsam.posterior.base import Posterior, read_posterior
from bsam.posterior.gaussian import DiagonalGaussian
from bsam.posterior.point import PointMass

__all__ = ["DiagonalGaussian", "PointMass", "Posterior", "load_posterior"]


def load_posterior(path: str | os.PathLike[str]) -> Posterior:
    """Read a posterior of any kind that `save` wrote, onto the CPU.

    Raises:
        ValueError: not a posterior, a part of one, or one of a version or kind that this release does not know.
    """
    kinds: tuple[type[Posterior], ...] = (DiagonalGaussian, PointMass)
    return read_posterior(path, kinds)
