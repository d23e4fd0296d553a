"""SAM and variational Bayes in one optimizer."""

from bsam import metrics
from bsam.batch_norm import recalibrate_batch_norm
from bsam.optim import BSAM, SAM
from bsam.posterior import DiagonalGaussian, PointMass, Posterior, load_posterior
from bsam.prediction import GaussianPredictions, Predictions, predict

__all__ = [
    "BSAM",
    "SAM",
    "DiagonalGaussian",
    "GaussianPredictions",
    "PointMass",
    "Posterior",
    "Predictions",
    "load_posterior",
    "metrics",
    "predict",
    "recalibrate_batch_norm",
]

__version__ = "0.1.0"
