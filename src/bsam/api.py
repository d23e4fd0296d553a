"""The public names of `bsam`, which `bsam/__init__.py` loads at their first use."""

from bsam import metrics
from bsam.batch_norm import recalibrate_batch_norm
from bsam.engine import TrainStep
from bsam.likelihood import LearnedNoise
from bsam.optim import ASAM, BSAM, IVON, SAM, SWAG, VOGN, Suggestion, suggest
from bsam.posterior import DiagonalGaussian, LowRankGaussian, Mixture, PointMass, Posterior, laplace, load_posterior
from bsam.prediction import (
    Calibration,
    GaussianPredictions,
    Predictions,
    Predictor,
    Sensitivities,
    calibrate,
    predict,
    predict_linearised,
    sensitivity,
)

__all__ = [
    "ASAM",
    "BSAM",
    "IVON",
    "SAM",
    "SWAG",
    "VOGN",
    "Calibration",
    "DiagonalGaussian",
    "GaussianPredictions",
    "LearnedNoise",
    "LowRankGaussian",
    "Mixture",
    "PointMass",
    "Posterior",
    "Predictions",
    "Predictor",
    "Sensitivities",
    "Suggestion",
    "TrainStep",
    "calibrate",
    "laplace",
    "load_posterior",
    "metrics",
    "predict",
    "predict_linearised",
    "recalibrate_batch_norm",
    "sensitivity",
    "suggest",
]
