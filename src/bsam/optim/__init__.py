"""Optimizers: one method a file, all on the same step."""

from bsam.optim.bsam import BSAM
from bsam.optim.sam import SAM

__all__ = ["BSAM", "SAM"]
