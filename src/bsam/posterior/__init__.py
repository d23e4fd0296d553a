"""Distributions over the weights of a model, with one protocol."""

from __future__ import annotations

import os

from torch import nn

from bsam.posterior.base import Posterior, read_posterior
from bsam.posterior.base_model import Rename
from bsam.posterior.diagonal import DiagonalGaussian
from bsam.posterior.laplace import laplace
from bsam.posterior.mixture import PART_KINDS, Mixture
from bsam.posterior.point import PointMass
from bsam.posterior.swag import LowRankGaussian

__all__ = ["DiagonalGaussian", "LowRankGaussian", "Mixture", "PointMass", "Posterior", "laplace", "load_posterior"]


def load_posterior(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, rename: Rename | None = None
) -> Posterior:
    """Read a posterior of any kind from a file that `save` wrote, onto the CPU.

    Args:
        path: The file.
        model: The model that the posterior is for, to check that it fits. Give it if the file was written with
            `frozen=False`: names, shapes and values of the frozen parameters are compared with those of training.
        rename: New names for the parameters, if the model is wrapped otherwise than in training, see
            `Posterior.renamed`.

    Raises:
        ValueError: The file is not a posterior, is incomplete, has a version or kind that this release cannot read, or
            does not fit the model.
    """
    kinds: tuple[type[Posterior], ...] = (*PART_KINDS, Mixture)
    return read_posterior(path, kinds, model, rename)
