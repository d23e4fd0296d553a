"""SAM and variational Bayes in one optimizer."""

from bsam.batch_norm import recalibrate_batch_norm
from bsam.optim import BSAM, SAM

__all__ = ["BSAM", "SAM", "recalibrate_batch_norm"]

__version__ = "0.1.0"
